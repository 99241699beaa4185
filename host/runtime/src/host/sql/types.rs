//! PostgreSQL types that the contract supports, and the form of their values.

use sqlx::{
    TypeInfo,
    postgres::{PgTypeInfo, PgTypeKind},
};

/// Deepest nesting of domains or attributes. A type beyond it counts as an attack.
const DEPTH_MAX: usize = 32;
/// Most types that a measurement of depth visits.
const TYPES_MAX: usize = 512;

/// The type of a single value. Enums travel as text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scalar {
    Void,
    Boolean,
    Int2,
    Int4,
    Int8,
    Float4,
    Float8,
    Numeric,
    Text,
    /// `"char"`, one byte.
    Char,
    Enum,
    Bytea,
    Uuid,
    Json,
    Jsonb,
    Date,
    Time,
    Timestamp,
    Timestamptz,
    Interval,
}

/// The form in which values of a type travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    Scalar(Scalar),
    /// An array of one dimension, with the type and the oid of its elements.
    Array(Scalar, u32),
}

impl Shape {
    /// Returns the shape of a type; none for a type that is not supported.
    pub(super) fn of(info: &PgTypeInfo) -> Option<Self> {
        let base = base(info)?;
        match base.kind() {
            PgTypeKind::Array(element) => match Shape::of_element(element)? {
                Scalar::Void => None,
                scalar => Some(Self::Array(scalar, element.oid()?.0)),
            },
            PgTypeKind::Enum(_) => Some(Self::Scalar(Scalar::Enum)),
            PgTypeKind::Simple | PgTypeKind::Pseudo => Scalar::of(base).map(Self::Scalar),
            _ => None,
        }
    }

    fn of_element(info: &PgTypeInfo) -> Option<Scalar> {
        let base = base(info)?;
        match base.kind() {
            PgTypeKind::Enum(_) => Some(Scalar::Enum),
            PgTypeKind::Simple => Scalar::of(base),
            _ => None,
        }
    }
}

impl Scalar {
    /// Finds a type by the fixed oids of `pg_type.dat`. A tenant's own type may have any name.
    fn of(info: &PgTypeInfo) -> Option<Self> {
        Some(match info.oid()?.0 {
            16 => Self::Boolean,
            17 => Self::Bytea,
            18 => Self::Char,
            19 | 25 | 705 | 1042 | 1043 => Self::Text,
            20 => Self::Int8,
            21 => Self::Int2,
            23 => Self::Int4,
            114 => Self::Json,
            700 => Self::Float4,
            701 => Self::Float8,
            1082 => Self::Date,
            1083 => Self::Time,
            1114 => Self::Timestamp,
            1184 => Self::Timestamptz,
            1186 => Self::Interval,
            1700 => Self::Numeric,
            2278 => Self::Void,
            2950 => Self::Uuid,
            3802 => Self::Jsonb,
            _ => return None,
        })
    }
}

/// Returns the type below all domains.
fn base(info: &PgTypeInfo) -> Option<&PgTypeInfo> {
    let mut info = info;
    for _ in 0..DEPTH_MAX {
        match info.kind() {
            PgTypeKind::Domain(below) => info = below,
            _ => return Some(info),
        }
    }
    None
}

/// Returns whether the driver knows nothing of a type. The host must not query it further.
pub(super) fn is_unknown(info: &PgTypeInfo) -> bool {
    info.name() == "?"
}

/// Returns whether a type is nested too deeply. The driver frees types recursively, and deeper ones
/// could overflow its stack.
pub(super) fn is_too_deep(info: &PgTypeInfo) -> bool {
    let mut open = vec![(info, 0)];
    let mut seen = 0;
    while let Some((info, depth)) = open.pop() {
        seen += 1;
        if depth > DEPTH_MAX || seen > TYPES_MAX {
            return true;
        }
        match info.kind() {
            PgTypeKind::Domain(below) | PgTypeKind::Array(below) | PgTypeKind::Range(below) => {
                open.push((below, depth + 1))
            }
            PgTypeKind::Composite(attributes) => {
                open.extend(attributes.iter().map(|(_, below)| (below, depth + 1)))
            }
            PgTypeKind::Simple | PgTypeKind::Pseudo | PgTypeKind::Enum(_) => {}
        }
    }
    false
}

/// Returns the name of a type, as guests see it.
pub(super) fn name(info: &PgTypeInfo) -> String {
    info.name().to_owned()
}
