//! Parameters, in the binary form of the type the statement gives them: the host's rules.

use postgres::types::Type;

use super::{
    engine::Encoded,
    numeric,
    types::{Scalar, Shape, name},
};
use crate::{Element, Value, sql::element};

/// Days from 1970-01-01 to PostgreSQL's own epoch, 2000-01-01.
pub(super) const EPOCH_DAYS: i32 = 10_957;
/// The same in microseconds.
pub(super) const EPOCH_MICROSECONDS: i64 = 946_684_800_000_000;

/// All parameters of a statement, or what is wrong with one of them.
pub(super) fn params(types: &[Type], params: &[Value]) -> Result<Vec<Encoded>, String> {
    if types.len() != params.len() {
        return Err(format!(
            "the statement has {} parameters, {} were given",
            types.len(),
            params.len()
        ));
    }
    types
        .iter()
        .zip(params)
        .enumerate()
        .map(|(at, (described, value))| param(at + 1, described, value))
        .collect()
}

fn param(number: usize, described: &Type, value: &Value) -> Result<Encoded, String> {
    let name = name(described);
    let cast = format!(
        "give it as text and cast it: `${number}::text::{}`",
        name.to_lowercase()
    );
    let Some(shape) = Shape::of(described) else {
        return Err(format!(
            "parameter `${number}` is of type `{name}`, which cannot be carried; {cast}"
        ));
    };
    encode(shape, value)
        .map(Encoded)
        .map_err(|problem| match problem {
            Problem::Mismatch("a text") => format!(
                "parameter `${number}` is of type `{name}` and does not take a text as it is; \
                 write `${number}::text::{}` and PostgreSQL reads it, or give a value of that type",
                name.to_lowercase()
            ),
            Problem::Mismatch(given) => format!(
                "parameter `${number}` is of type `{name}` and does not take {given}; {cast}"
            ),
            Problem::Value(reason) => {
                format!("parameter `${number}` is of type `{name}`: {reason}")
            }
        })
}

/// Why a value does not go into a type.
enum Problem {
    /// The type does not take this case; holds the case's name.
    Mismatch(&'static str),
    /// It takes the case, but not this value.
    Value(&'static str),
}

const OUT_OF_RANGE: Problem = Problem::Value("the value is out of range");

fn encode(shape: Shape, value: &Value) -> Result<Option<Vec<u8>>, Problem> {
    let mut out = Vec::new();
    match (shape, value) {
        (_, Value::Null) => return Ok(None),
        (Shape::Array(scalar, oid), Value::Array(elements)) => {
            array(scalar, oid, elements, &mut out)?
        }
        (Shape::Array(..), _) => return Err(Problem::Mismatch("a single value")),
        (Shape::Scalar(scalar), value) => match element(value.clone()) {
            Some(item) => one(scalar, &item, &mut out)?,
            None => return Err(Problem::Mismatch("an array")),
        },
    }
    Ok(Some(out))
}

/// One dimension that begins at 1; an empty array has none.
fn array(scalar: Scalar, oid: u32, elements: &[Element], out: &mut Vec<u8>) -> Result<(), Problem> {
    let has_null = elements.contains(&Element::Null);
    let dimensions = u32::from(!elements.is_empty());
    for field in [dimensions, has_null.into(), oid] {
        out.extend_from_slice(&field.to_be_bytes());
    }
    if dimensions == 1 {
        let count =
            i32::try_from(elements.len()).map_err(|_| Problem::Value("the array is too long"))?;
        out.extend_from_slice(&count.to_be_bytes());
        out.extend_from_slice(&1_i32.to_be_bytes());
    }
    for element in elements {
        let start = out.len();
        out.extend_from_slice(&(-1_i32).to_be_bytes());
        if *element != Element::Null {
            one(scalar, element, out)?;
            let length = i32::try_from(out.len() - start - 4)
                .map_err(|_| Problem::Value("an element is too long"))?;
            out[start..start + 4].copy_from_slice(&length.to_be_bytes());
        }
    }
    Ok(())
}

/// A value in the binary form of its type. Integers go into every integer they fit; text
/// goes where PostgreSQL's own text form has one spelling to parse.
fn one(scalar: Scalar, item: &Element, out: &mut Vec<u8>) -> Result<(), Problem> {
    use Element as E;
    use Scalar as S;
    if let Some(value) = integer(item) {
        return whole(scalar, value, out);
    }
    match (scalar, item) {
        (S::Boolean, E::Boolean(value)) => out.push((*value).into()),
        (S::Float4, E::Float4(value)) => out.extend_from_slice(&value.to_be_bytes()),
        (S::Float4, E::Float8(value)) => out.extend_from_slice(&narrowed(*value)?.to_be_bytes()),
        (S::Float8, E::Float4(value)) => out.extend_from_slice(&f64::from(*value).to_be_bytes()),
        (S::Float8, E::Float8(value)) => out.extend_from_slice(&value.to_be_bytes()),
        (S::Numeric, E::Numeric(value) | E::Text(value)) => {
            numeric::encode(value, out).map_err(Problem::Value)?
        }
        (S::Text | S::Enum, E::Text(value)) => out.extend_from_slice(text(value)?),
        (S::Char, E::Text(value)) => char_byte(value, out)?,
        (S::Bytea, E::Bytea(value)) => out.extend_from_slice(value),
        (S::Uuid, E::Uuid(value) | E::Text(value)) => out.extend_from_slice(&uuid(value)?),
        (S::Json, E::Json(value) | E::Text(value)) => out.extend_from_slice(text(value)?),
        (S::Jsonb, E::Json(value) | E::Text(value)) => {
            out.push(1);
            out.extend_from_slice(text(value)?);
        }
        (S::Date, E::Date(days)) => out.extend_from_slice(&date(*days)?.to_be_bytes()),
        (S::Time, E::Time(value)) => out.extend_from_slice(&value.to_be_bytes()),
        (S::Timestamp, E::Timestamp(value)) | (S::Timestamptz, E::Timestamptz(value)) => {
            out.extend_from_slice(&timestamp(*value)?.to_be_bytes());
        }
        (S::Interval, E::Interval(value)) => {
            out.extend_from_slice(&value.microseconds.to_be_bytes());
            out.extend_from_slice(&value.days.to_be_bytes());
            out.extend_from_slice(&value.months.to_be_bytes());
        }
        (_, item) => return Err(Problem::Mismatch(case(item))),
    }
    Ok(())
}

fn integer(item: &Element) -> Option<i64> {
    match item {
        Element::Int2(value) => Some((*value).into()),
        Element::Int4(value) => Some((*value).into()),
        Element::Int8(value) => Some(*value),
        _ => None,
    }
}

fn whole(scalar: Scalar, value: i64, out: &mut Vec<u8>) -> Result<(), Problem> {
    match scalar {
        Scalar::Int2 => out.extend_from_slice(
            &i16::try_from(value)
                .map_err(|_| OUT_OF_RANGE)?
                .to_be_bytes(),
        ),
        Scalar::Int4 => out.extend_from_slice(
            &i32::try_from(value)
                .map_err(|_| OUT_OF_RANGE)?
                .to_be_bytes(),
        ),
        Scalar::Int8 => out.extend_from_slice(&value.to_be_bytes()),
        Scalar::Numeric => numeric::encode(&value.to_string(), out).map_err(Problem::Value)?,
        _ => return Err(Problem::Mismatch("an integer")),
    }
    Ok(())
}

fn case(item: &Element) -> &'static str {
    match item {
        Element::Null => "a null",
        Element::Boolean(_) => "a boolean",
        Element::Int2(_) | Element::Int4(_) | Element::Int8(_) => "an integer",
        Element::Float4(_) | Element::Float8(_) => "a float",
        Element::Numeric(_) => "a numeric",
        Element::Text(_) => "a text",
        Element::Bytea(_) => "a bytea",
        Element::Uuid(_) => "a uuid",
        Element::Json(_) => "a json",
        Element::Date(_) => "a date",
        Element::Time(_) => "a time",
        Element::Timestamp(_) => "a timestamp",
        Element::Timestamptz(_) => "a timestamptz",
        Element::Interval(_) => "an interval",
        Element::Other(_) => "an `other` value",
    }
}

fn text(value: &str) -> Result<&[u8], Problem> {
    match value.contains('\0') {
        true => Err(Problem::Value(
            "the text contains a NUL character, which PostgreSQL cannot store",
        )),
        false => Ok(value.as_bytes()),
    }
}

fn char_byte(value: &str, out: &mut Vec<u8>) -> Result<(), Problem> {
    match value.as_bytes() {
        [] => out.push(0),
        [byte] if byte.is_ascii() => out.push(*byte),
        _ => return Err(Problem::Value("it takes one ASCII character")),
    }
    Ok(())
}

/// The nearest `real`; a finite value must stay finite.
fn narrowed(value: f64) -> Result<f32, Problem> {
    let narrow = value as f32;
    match value.is_finite() && !narrow.is_finite() {
        true => Err(OUT_OF_RANGE),
        false => Ok(narrow),
    }
}

fn uuid(value: &str) -> Result<[u8; 16], Problem> {
    let malformed = || Problem::Value("it takes 8-4-4-4-12 hexadecimal digits");
    let is_placed = |(at, byte)| {
        if matches!(at, 8 | 13 | 18 | 23) {
            byte == b'-'
        } else {
            u8::is_ascii_hexdigit(&byte)
        }
    };
    if value.len() != 36 || !value.bytes().enumerate().all(is_placed) {
        return Err(malformed());
    }
    let digits = u128::from_str_radix(&value.replace('-', ""), 16).map_err(|_| malformed())?;
    Ok(digits.to_be_bytes())
}

fn date(days: i32) -> Result<i32, Problem> {
    match days {
        i32::MIN | i32::MAX => Ok(days),
        days => days
            .checked_sub(EPOCH_DAYS)
            .filter(|days| *days != i32::MIN)
            .ok_or(OUT_OF_RANGE),
    }
}

fn timestamp(microseconds: i64) -> Result<i64, Problem> {
    match microseconds {
        i64::MIN | i64::MAX => Ok(microseconds),
        value => value
            .checked_sub(EPOCH_MICROSECONDS)
            .filter(|value| *value != i64::MIN)
            .ok_or(OUT_OF_RANGE),
    }
}
