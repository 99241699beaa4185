//! Columns and rows, from PostgreSQL's binary form to the contract's values.

use postgres::{Column, Row};

use super::{
    encode::{EPOCH_DAYS, EPOCH_MICROSECONDS},
    engine::Received,
    numeric,
    types::{Scalar, Shape, name},
};
use crate::{Element, Interval, Value, sql::value as widened};

/// How each column travels.
pub(super) fn shapes(columns: &[Column]) -> Result<Vec<Shape>, String> {
    let shape = |column: &Column| {
        Shape::of(column.type_()).ok_or_else(|| unsupported(column, "which cannot be carried"))
    };
    columns.iter().map(shape).collect()
}

pub(super) fn row(shapes: &[Shape], row: &Row) -> Result<Vec<Value>, String> {
    let read = |(at, shape): (usize, &Shape)| {
        let Received(bytes) = row.try_get(at).map_err(|error| error.to_string())?;
        let Some(bytes) = bytes else {
            return Ok(Value::Null);
        };
        value(*shape, bytes).map_err(|reason| unsupported(&row.columns()[at], reason))
    };
    shapes.iter().enumerate().map(read).collect()
}

fn unsupported(column: &Column, reason: &str) -> String {
    let (column, type_name) = (column.name(), name(column.type_()));
    format!(
        "column `{column}` is of type `{type_name}`, {reason}; cast it to text: `{column}::text`"
    )
}

const DAMAGED: &str = "whose value has an unknown form";

fn value(shape: Shape, bytes: &[u8]) -> Result<Value, &'static str> {
    match shape {
        Shape::Scalar(Scalar::Void) => Ok(Value::Null),
        Shape::Scalar(scalar) => element(scalar, bytes).map(widened),
        Shape::Array(scalar, _) => array(scalar, bytes).map(Value::Array),
    }
}

/// Dimensions, a flag and the element type; for each dimension its length and lower bound;
/// then the elements, each with its length.
fn array(scalar: Scalar, bytes: &[u8]) -> Result<Vec<Element>, &'static str> {
    let mut reader = Reader(bytes);
    let dimensions = reader.int4()?;
    let (_flags, _element_type) = (reader.int4()?, reader.int4()?);
    match dimensions {
        0 => return Ok(Vec::new()),
        1 => {}
        _ => return Err("which has more than one dimension"),
    }
    let count = reader.int4()?;
    if reader.int4()? != 1 {
        return Err("which does not begin at index 1");
    }
    (0..count).map(|_| reader.element(scalar)).collect()
}

/// Reads what an array is made of.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], &'static str> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(DAMAGED)?;
        self.0 = rest;
        Ok(taken)
    }

    fn int4(&mut self) -> Result<i32, &'static str> {
        self.take(4)
            .and_then(|bytes| Ok(i32::from_be_bytes(fixed(bytes)?)))
    }

    fn element(&mut self, scalar: Scalar) -> Result<Element, &'static str> {
        match self.int4()? {
            -1 => Ok(Element::Null),
            length => {
                let length = usize::try_from(length).map_err(|_| DAMAGED)?;
                element(scalar, self.take(length)?)
            }
        }
    }
}

fn fixed<const N: usize>(bytes: &[u8]) -> Result<[u8; N], &'static str> {
    bytes.try_into().map_err(|_| DAMAGED)
}

fn element(scalar: Scalar, bytes: &[u8]) -> Result<Element, &'static str> {
    Ok(match scalar {
        Scalar::Void => Element::Null,
        Scalar::Boolean => Element::Boolean(fixed::<1>(bytes)? != [0]),
        Scalar::Int2 => Element::Int2(i16::from_be_bytes(fixed(bytes)?)),
        Scalar::Int4 => Element::Int4(i32::from_be_bytes(fixed(bytes)?)),
        Scalar::Int8 => Element::Int8(i64::from_be_bytes(fixed(bytes)?)),
        Scalar::Float4 => Element::Float4(f32::from_be_bytes(fixed(bytes)?)),
        Scalar::Float8 => Element::Float8(f64::from_be_bytes(fixed(bytes)?)),
        Scalar::Numeric => Element::Numeric(numeric::decode(bytes).ok_or(DAMAGED)?),
        Scalar::Text | Scalar::Enum => Element::Text(text(bytes)?),
        Scalar::Char => Element::Text(if bytes == [0] {
            String::new()
        } else {
            text(bytes)?
        }),
        Scalar::Bytea => Element::Bytea(bytes.to_vec()),
        Scalar::Uuid => Element::Uuid(uuid(fixed(bytes)?)),
        Scalar::Json => Element::Json(text(bytes)?),
        Scalar::Jsonb => Element::Json(text(bytes.strip_prefix(&[1]).ok_or(DAMAGED)?)?),
        Scalar::Date => Element::Date(date(i32::from_be_bytes(fixed(bytes)?))?),
        Scalar::Time => Element::Time(i64::from_be_bytes(fixed(bytes)?)),
        Scalar::Timestamp => Element::Timestamp(timestamp(i64::from_be_bytes(fixed(bytes)?))?),
        Scalar::Timestamptz => Element::Timestamptz(timestamp(i64::from_be_bytes(fixed(bytes)?))?),
        Scalar::Interval => Element::Interval(interval(fixed(bytes)?)),
    })
}

fn text(bytes: &[u8]) -> Result<String, &'static str> {
    String::from_utf8(bytes.to_vec()).map_err(|_| "whose value is not UTF-8")
}

fn uuid(bytes: [u8; 16]) -> String {
    let digits = format!("{:032x}", u128::from_be_bytes(bytes));
    [
        &digits[..8],
        &digits[8..12],
        &digits[12..16],
        &digits[16..20],
        &digits[20..],
    ]
    .join("-")
}

const TOO_FAR: &str = "whose value lies too far from 1970";

fn date(days: i32) -> Result<i32, &'static str> {
    match days {
        i32::MIN | i32::MAX => Ok(days),
        days => days.checked_add(EPOCH_DAYS).ok_or(TOO_FAR),
    }
}

/// PostgreSQL's range ends some thirty years behind what microseconds since 1970 can say.
fn timestamp(microseconds: i64) -> Result<i64, &'static str> {
    match microseconds {
        i64::MIN | i64::MAX => Ok(microseconds),
        value => value
            .checked_add(EPOCH_MICROSECONDS)
            .filter(|value| *value != i64::MAX)
            .ok_or(TOO_FAR),
    }
}

fn interval(bytes: [u8; 16]) -> Interval {
    let [
        m0,
        m1,
        m2,
        m3,
        m4,
        m5,
        m6,
        m7,
        d0,
        d1,
        d2,
        d3,
        n0,
        n1,
        n2,
        n3,
    ] = bytes;
    Interval {
        microseconds: i64::from_be_bytes([m0, m1, m2, m3, m4, m5, m6, m7]),
        days: i32::from_be_bytes([d0, d1, d2, d3]),
        months: i32::from_be_bytes([n0, n1, n2, n3]),
    }
}
