//! Which PostgreSQL types can be carried, and how: the host's rules.

use postgres::types::{Kind, Type};

/// A type of one value. Enums are text.
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

/// How a value of a type travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    Scalar(Scalar),
    /// One dimension, of elements with this type's oid.
    Array(Scalar, u32),
}

impl Shape {
    /// How this type travels; none when it cannot.
    pub(super) fn of(described: &Type) -> Option<Self> {
        match base(described).kind() {
            Kind::Array(element) => match Scalar::of(element)? {
                Scalar::Void => None,
                scalar => Some(Self::Array(scalar, element.oid())),
            },
            _ => Scalar::of(described).map(Self::Scalar),
        }
    }
}

impl Scalar {
    /// By the fixed oids of `pg_type.dat`; a type of a schema may have any name.
    fn of(described: &Type) -> Option<Self> {
        let base = base(described);
        if matches!(base.kind(), Kind::Enum(_)) {
            return Some(Self::Enum);
        }
        Some(match base.oid() {
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

/// The type below any domains.
fn base(described: &Type) -> &Type {
    match described.kind() {
        Kind::Domain(below) => base(below),
        _ => described,
    }
}

/// The least oid of a type that a schema made, and not PostgreSQL itself.
const FIRST_OWN_OID: u32 = 16_384;

/// The type's name as the host tells it: PostgreSQL's own in capitals.
pub(super) fn name(described: &Type) -> String {
    match (described.kind(), described.oid()) {
        (Kind::Array(element), _) => format!("{}[]", name(element)),
        (_, 18) => "\"CHAR\"".to_owned(),
        (_, 1042) => "CHAR".to_owned(),
        (_, oid) if oid < FIRST_OWN_OID => described.name().to_uppercase(),
        _ => described.name().to_owned(),
    }
}
