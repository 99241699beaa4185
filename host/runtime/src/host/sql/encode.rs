//! Encoder of parameters, in the binary form of the type that the statement gives them.
//!
//! The driver caches prepared statements by their text alone. A type guessed from the guest's value
//! would stay with a text and break the next call, so only the described type counts.

use sqlx::{
    Encode, Postgres, Type,
    encode::IsNull,
    error::BoxDynError,
    postgres::{PgArgumentBuffer, PgArguments, PgTypeInfo},
};

use super::{
    numeric,
    types::{Scalar, Shape, name},
};
use crate::bindings::oncebox::handler::sql::{Element, Interval, Value};

/// Days from 1970-01-01 to PostgreSQL's own epoch, 2000-01-01.
pub(super) const EPOCH_DAYS: i32 = 10_957;
/// Microseconds from 1970-01-01 to PostgreSQL's own epoch.
pub(super) const EPOCH_MICROSECONDS: i64 = 946_684_800_000_000;

/// A parameter in wire form, under its described type.
struct Bound {
    bytes: Option<Vec<u8>>,
    info: PgTypeInfo,
}

impl Encode<'_, Postgres> for Bound {
    fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        Ok(match &self.bytes {
            None => IsNull::Yes,
            Some(bytes) => {
                buffer.extend_from_slice(bytes);
                IsNull::No
            }
        })
    }

    fn produces(&self) -> Option<PgTypeInfo> {
        Some(self.info.clone())
    }
}

impl Type<Postgres> for Bound {
    fn type_info() -> PgTypeInfo {
        <str as Type<Postgres>>::type_info()
    }

    fn compatible(_info: &PgTypeInfo) -> bool {
        true
    }
}

/// Encodes all parameters of a statement. The error names the parameter that does not fit.
pub(super) fn arguments(types: &[PgTypeInfo], params: &[Value]) -> Result<PgArguments, String> {
    if types.len() != params.len() {
        return Err(format!(
            "the statement has {} parameters, {} were given",
            types.len(),
            params.len()
        ));
    }
    let mut arguments = PgArguments::default();
    for (at, (info, value)) in types.iter().zip(params).enumerate() {
        let bytes = parameter(at + 1, info, value)?;
        let bound = Bound { bytes, info: info.clone() };
        sqlx::Arguments::add(&mut arguments, bound)
            .map_err(|error| format!("parameter `${}`: {error}", at + 1))?;
    }
    Ok(arguments)
}

fn parameter(number: usize, info: &PgTypeInfo, value: &Value) -> Result<Option<Vec<u8>>, String> {
    let type_name = name(info);
    let Some(shape) = Shape::of(info) else {
        return Err(format!(
            "parameter `${number}` is of type `{type_name}`, which cannot be carried; give it as \
                text and cast it: `${number}::text::{}`",
            type_name.to_lowercase()
        ));
    };
    encode(shape, value).map_err(|problem| match problem {
        ParamProblem::Mismatch("a text") => format!(
            "parameter `${number}` is of type `{type_name}` and does not take a text as it is; \
                write `${number}::text::{}` and \
             PostgreSQL reads it, or give a value of that type",
            type_name.to_lowercase()
        ),
        ParamProblem::Mismatch(given) => format!(
            "parameter `${number}` is of type `{type_name}` and does not take {given}; give it as \
                text and cast it: `${number}::text::{}`",
            type_name.to_lowercase()
        ),
        ParamProblem::Value(reason) => format!(
            "parameter `${number}` is of type `{type_name}`: \
            {reason}"
        ),
    })
}

/// The reason for which a value cannot be encoded as a type.
enum ParamProblem {
    /// A case that the type does not take, by its name.
    Mismatch(&'static str),
    /// A value that the type does not take, by the reason.
    Value(&'static str),
}

fn encode(shape: Shape, value: &Value) -> Result<Option<Vec<u8>>, ParamProblem> {
    let mut out = Vec::new();
    match (shape, value) {
        (_, Value::Null) => return Ok(None),
        (Shape::Array(scalar, oid), Value::Array(elements)) => {
            array(scalar, oid, elements, &mut out)?
        }
        (Shape::Scalar(scalar), value) => {
            one(scalar, Item::of(value).ok_or(ParamProblem::Mismatch("an array"))?, &mut out)?
        }
        (Shape::Array(..), _) => return Err(ParamProblem::Mismatch("a single value")),
    }
    Ok(Some(out))
}

/// Encodes an array as one dimension that begins at 1. An empty array has no dimension.
fn array(
    scalar: Scalar,
    oid: u32,
    elements: &[Element],
    out: &mut Vec<u8>,
) -> Result<(), ParamProblem> {
    let has_null = elements.iter().any(|element| matches!(element, Element::Null));
    let dimensions: u32 = if elements.is_empty() { 0 } else { 1 };
    for field in [dimensions, u32::from(has_null), oid] {
        out.extend_from_slice(&field.to_be_bytes());
    }
    if dimensions == 1 {
        let count = i32::try_from(elements.len())
            .map_err(|_| ParamProblem::Value("the array is too long"))?;
        out.extend_from_slice(&count.to_be_bytes());
        out.extend_from_slice(&1_i32.to_be_bytes());
    }
    for element in elements {
        let Some(item) = Item::of_element(element) else {
            out.extend_from_slice(&(-1_i32).to_be_bytes());
            continue;
        };
        let start = out.len();
        out.extend_from_slice(&[0; 4]);
        one(scalar, item, out)?;
        let length = i32::try_from(out.len() - start - 4)
            .map_err(|_| ParamProblem::Value("an element is too long"))?;
        out[start..start + 4].copy_from_slice(&length.to_be_bytes());
    }
    Ok(())
}

/// A value that is neither null nor an array, from a [`Value`] or an [`Element`].
#[derive(Clone, Copy)]
enum Item<'a> {
    Boolean(bool),
    Integer(i64),
    Float4(f32),
    Float8(f64),
    Numeric(&'a str),
    Text(&'a str),
    Bytea(&'a [u8]),
    Uuid(&'a str),
    Json(&'a str),
    Date(i32),
    Time(i64),
    Timestamp(i64),
    Timestamptz(i64),
    Interval(Interval),
    Other,
}

/// Converts the cases that `value` and `element` share. The caller adds `null` and arrays.
macro_rules! item {
    ($list:ident, $value:expr, $($rest:pat => $answer:expr),+) => {
        match $value {
            $list::Boolean(value) => Some(Item::Boolean(*value)),
            $list::Int2(value) => Some(Item::Integer((*value).into())),
            $list::Int4(value) => Some(Item::Integer((*value).into())),
            $list::Int8(value) => Some(Item::Integer(*value)),
            $list::Float4(value) => Some(Item::Float4(*value)),
            $list::Float8(value) => Some(Item::Float8(*value)),
            $list::Numeric(value) => Some(Item::Numeric(value)),
            $list::Text(value) => Some(Item::Text(value)),
            $list::Bytea(value) => Some(Item::Bytea(value)),
            $list::Uuid(value) => Some(Item::Uuid(value)),
            $list::Json(value) => Some(Item::Json(value)),
            $list::Date(value) => Some(Item::Date(*value)),
            $list::Time(value) => Some(Item::Time(*value)),
            $list::Timestamp(value) => Some(Item::Timestamp(*value)),
            $list::Timestamptz(value) => Some(Item::Timestamptz(*value)),
            $list::Interval(value) => Some(Item::Interval(*value)),
            $list::Other(_) => Some(Item::Other),
            $($rest => $answer),+
        }
    };
}

impl<'a> Item<'a> {
    fn of(value: &'a Value) -> Option<Self> {
        item!(Value, value, Value::Null | Value::Array(_) => None)
    }

    fn of_element(element: &'a Element) -> Option<Self> {
        item!(Element, element, Element::Null => None)
    }

    fn case(self) -> &'static str {
        match self {
            Self::Boolean(_) => "a boolean",
            Self::Integer(_) => "an integer",
            Self::Float4(_) | Self::Float8(_) => "a float",
            Self::Numeric(_) => "a numeric",
            Self::Text(_) => "a text",
            Self::Bytea(_) => "a bytea",
            Self::Uuid(_) => "a uuid",
            Self::Json(_) => "a json",
            Self::Date(_) => "a date",
            Self::Time(_) => "a time",
            Self::Timestamp(_) => "a timestamp",
            Self::Timestamptz(_) => "a timestamptz",
            Self::Interval(_) => "an interval",
            Self::Other => "an `other` value",
        }
    }
}

/// Encodes a value in the binary form of a type. An integer goes into every integer type that holds
/// it. A text goes into types whose text form in PostgreSQL has one spelling.
fn one(scalar: Scalar, item: Item<'_>, out: &mut Vec<u8>) -> Result<(), ParamProblem> {
    use Scalar as S;
    match (scalar, item) {
        (S::Boolean, Item::Boolean(value)) => out.push(value.into()),
        (S::Int2, Item::Integer(value)) => {
            out.extend_from_slice(&i16::try_from(value).map_err(|_| OUT_OF_RANGE)?.to_be_bytes())
        }
        (S::Int4, Item::Integer(value)) => {
            out.extend_from_slice(&i32::try_from(value).map_err(|_| OUT_OF_RANGE)?.to_be_bytes())
        }
        (S::Int8, Item::Integer(value)) => out.extend_from_slice(&value.to_be_bytes()),
        (S::Float4, Item::Float4(value)) => out.extend_from_slice(&value.to_be_bytes()),
        (S::Float4, Item::Float8(value)) => out.extend_from_slice(&narrowed(value)?.to_be_bytes()),
        (S::Float8, Item::Float4(value)) => out.extend_from_slice(&f64::from(value).to_be_bytes()),
        (S::Float8, Item::Float8(value)) => out.extend_from_slice(&value.to_be_bytes()),
        (S::Numeric, Item::Numeric(text) | Item::Text(text)) => {
            numeric::encode(text, out).map_err(ParamProblem::Value)?
        }
        (S::Numeric, Item::Integer(value)) => {
            numeric::encode(&value.to_string(), out).map_err(ParamProblem::Value)?
        }
        (S::Text | S::Enum, Item::Text(value)) => out.extend_from_slice(text(value)?),
        (S::Char, Item::Text(value)) => char_byte(value, out)?,
        (S::Bytea, Item::Bytea(value)) => out.extend_from_slice(value),
        (S::Uuid, Item::Uuid(value) | Item::Text(value)) => out.extend_from_slice(&uuid(value)?),
        (S::Json, Item::Json(value) | Item::Text(value)) => out.extend_from_slice(text(value)?),
        (S::Jsonb, Item::Json(value) | Item::Text(value)) => {
            out.push(1);
            out.extend_from_slice(text(value)?);
        }
        (S::Date, Item::Date(days)) => out.extend_from_slice(&date(days)?.to_be_bytes()),
        (S::Time, Item::Time(value)) => out.extend_from_slice(&value.to_be_bytes()),
        (S::Timestamp, Item::Timestamp(value)) => {
            out.extend_from_slice(&timestamp(value)?.to_be_bytes())
        }
        (S::Timestamptz, Item::Timestamptz(value)) => {
            out.extend_from_slice(&timestamp(value)?.to_be_bytes())
        }
        (S::Interval, Item::Interval(value)) => {
            out.extend_from_slice(&value.microseconds.to_be_bytes());
            out.extend_from_slice(&value.days.to_be_bytes());
            out.extend_from_slice(&value.months.to_be_bytes());
        }
        (_, item) => return Err(ParamProblem::Mismatch(item.case())),
    }
    Ok(())
}

const OUT_OF_RANGE: ParamProblem = ParamProblem::Value("the value is out of range");

fn text(value: &str) -> Result<&[u8], ParamProblem> {
    match value.contains('\0') {
        true => Err(ParamProblem::Value(
            "the text contains a NUL character, which PostgreSQL cannot store",
        )),
        false => Ok(value.as_bytes()),
    }
}

fn char_byte(value: &str, out: &mut Vec<u8>) -> Result<(), ParamProblem> {
    match value.as_bytes() {
        [] => out.push(0),
        [byte] if byte.is_ascii() => out.push(*byte),
        _ => return Err(ParamProblem::Value("it takes one ASCII character")),
    }
    Ok(())
}

/// Returns the nearest `real`. A finite value must stay finite.
fn narrowed(value: f64) -> Result<f32, ParamProblem> {
    let narrow = value as f32;
    match value.is_finite() && !narrow.is_finite() {
        true => Err(OUT_OF_RANGE),
        false => Ok(narrow),
    }
}

fn uuid(value: &str) -> Result<[u8; 16], ParamProblem> {
    let malformed = || ParamProblem::Value("it takes 8-4-4-4-12 hexadecimal digits");
    let bytes = value.as_bytes();
    if bytes.len() != 36 || [8, 13, 18, 23].iter().any(|at| bytes[*at] != b'-') {
        return Err(malformed());
    }
    let digits: Vec<u8> = bytes
        .iter()
        .enumerate()
        .filter(|(at, _)| ![8, 13, 18, 23].contains(at))
        .map(|(_, byte)| *byte)
        .collect();
    let mut uuid = [0; 16];
    hex::decode_to_slice(digits, &mut uuid).map_err(|_| malformed())?;
    Ok(uuid)
}

fn date(days: i32) -> Result<i32, ParamProblem> {
    match days {
        i32::MIN | i32::MAX => Ok(days),
        days => days.checked_sub(EPOCH_DAYS).filter(|days| *days != i32::MIN).ok_or(OUT_OF_RANGE),
    }
}

fn timestamp(microseconds: i64) -> Result<i64, ParamProblem> {
    match microseconds {
        i64::MIN | i64::MAX => Ok(microseconds),
        value => value
            .checked_sub(EPOCH_MICROSECONDS)
            .filter(|value| *value != i64::MIN)
            .ok_or(OUT_OF_RANGE),
    }
}
