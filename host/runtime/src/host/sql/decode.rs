//! Decoder of columns and rows, from PostgreSQL's binary form to the contract's values.

use sqlx::{
    Column as _, Row as _, ValueRef as _,
    postgres::{PgColumn, PgRow},
};

use super::{
    encode::{EPOCH_DAYS, EPOCH_MICROSECONDS},
    numeric,
    types::{Scalar, Shape, name},
};
use crate::bindings::oncebox::handler::sql::{Column, Element, Interval, Value};

/// The columns of a result, and the form in which each is read.
pub(super) struct Layout {
    pub(super) columns: Vec<Column>,
    shapes: Vec<Shape>,
}

impl Layout {
    /// Makes a layout of the described columns. This happens before the statement runs, so an
    /// unsupported column is reported before the statement has an effect.
    pub(super) fn of(columns: &[PgColumn]) -> Result<Self, String> {
        let mut layout = Self { columns: Vec::new(), shapes: Vec::new() };
        for column in columns {
            let type_name = name(column.type_info());
            let shape = Shape::of(column.type_info())
                .ok_or_else(|| unsupported(column.name(), &type_name, "which cannot be carried"))?;
            layout.shapes.push(shape);
            layout.columns.push(Column { name: column.name().to_owned(), type_name });
        }
        Ok(layout)
    }

    /// Decodes a row and returns it with its approximate size in bytes. Returns none if the size is
    /// above `room`, and then copies no value beyond it.
    pub(super) fn row(
        &self,
        row: &PgRow,
        room: usize,
    ) -> Result<Option<(Vec<Value>, usize)>, String> {
        let mut values = Vec::with_capacity(self.shapes.len());
        let mut size = 0;
        for (at, shape) in self.shapes.iter().enumerate() {
            let raw = row.try_get_raw(at).map_err(|error| error.to_string())?;
            size += std::mem::size_of::<Value>();
            if raw.is_null() {
                values.push(Value::Null);
                continue;
            }
            let bytes = raw.as_bytes().map_err(|error| error.to_string())?;
            size += heap(*shape, bytes);
            if size > room {
                return Ok(None);
            }
            let value = value(*shape, bytes).map_err(|reason| {
                let column = &self.columns[at];
                unsupported(&column.name, &column.type_name, reason)
            })?;
            values.push(value);
        }
        Ok((size <= room).then_some((values, size)))
    }
}

fn unsupported(column: &str, type_name: &str, reason: &str) -> String {
    format!(
        "column `{column}` is of type `{type_name}`, {reason}; cast it to text: `{column}::text`"
    )
}

/// Returns the approximate bytes of a decoded value on the heap. A number of ten bytes can have a
/// hundred thousand digits.
fn heap(shape: Shape, bytes: &[u8]) -> usize {
    match shape {
        Shape::Scalar(scalar) => text_bytes(scalar, bytes),
        // The decoder refuses an unsupported array later, before it keeps any of it.
        Shape::Array(scalar, _) => ArrayReader(bytes).array_heap(scalar).unwrap_or(bytes.len()),
    }
}

fn text_bytes(scalar: Scalar, bytes: &[u8]) -> usize {
    match scalar {
        Scalar::Numeric => digits_max(bytes),
        _ => bytes.len(),
    }
}

/// Returns an upper bound of the length of a number's decimal text, from its binary form.
fn digits_max(bytes: &[u8]) -> usize {
    let &[_, _, w0, w1, _, _, s0, s1, ..] = bytes else { return 0 };
    let (weight, scale) = (i16::from_be_bytes([w0, w1]), u16::from_be_bytes([s0, s1]));
    let integer = 4 * (usize::try_from(weight).unwrap_or(0) + 1);
    "-Infinity".len() + integer + usize::from(scale)
}

const DAMAGED: &str = "whose value has an unknown form";

fn value(shape: Shape, bytes: &[u8]) -> Result<Value, &'static str> {
    match shape {
        Shape::Scalar(Scalar::Void) => Ok(Value::Null),
        Shape::Scalar(scalar) => element(scalar, bytes).map(widen),
        Shape::Array(scalar, _) => array(scalar, bytes).map(Value::Array),
    }
}

/// Decodes an array. Its binary form has the number of dimensions, a flag and the element type; for
/// each dimension its length and lower bound; then the elements, each with its length.
fn array(scalar: Scalar, bytes: &[u8]) -> Result<Vec<Element>, &'static str> {
    let mut reader = ArrayReader(bytes);
    let count = reader.count()?;
    (0..count).map(|_| reader.element(scalar)).collect()
}

/// A reader of an array's binary form.
struct ArrayReader<'a>(&'a [u8]);

impl<'a> ArrayReader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], &'static str> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(DAMAGED)?;
        self.0 = rest;
        Ok(taken)
    }

    fn int4(&mut self) -> Result<i32, &'static str> {
        self.take(4).and_then(|bytes| Ok(i32::from_be_bytes(fixed(bytes)?)))
    }

    /// Reads the header of an array and returns the number of elements.
    fn count(&mut self) -> Result<i32, &'static str> {
        let dimensions = self.int4()?;
        let (_flags, _element_type) = (self.int4()?, self.int4()?);
        match dimensions {
            0 => return Ok(0),
            1 => {}
            _ => return Err("which has more than one dimension"),
        }
        let count = self.int4()?;
        if self.int4()? != 1 {
            return Err("which does not begin at index 1");
        }
        Ok(count)
    }

    /// Reads the bytes of an element; none for null.
    fn bytes(&mut self) -> Result<Option<&'a [u8]>, &'static str> {
        match self.int4()? {
            -1 => Ok(None),
            length => self.take(usize::try_from(length).map_err(|_| DAMAGED)?).map(Some),
        }
    }

    fn element(&mut self, scalar: Scalar) -> Result<Element, &'static str> {
        self.bytes()?.map_or(Ok(Element::Null), |bytes| element(scalar, bytes))
    }

    /// Returns the approximate bytes of the decoded elements.
    fn array_heap(mut self, scalar: Scalar) -> Result<usize, &'static str> {
        let mut heap = 0;
        for _ in 0..self.count()? {
            heap += std::mem::size_of::<Element>()
                + self.bytes()?.map_or(0, |bytes| text_bytes(scalar, bytes));
        }
        Ok(heap)
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
        Scalar::Char => Element::Text(if bytes == [0] { String::new() } else { text(bytes)? }),
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
    let digits = hex::encode(bytes);
    [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]].join("-")
}

const TOO_FAR: &str = "whose value lies too far from 1970";

fn date(days: i32) -> Result<i32, &'static str> {
    match days {
        i32::MIN | i32::MAX => Ok(days),
        days => days.checked_add(EPOCH_DAYS).ok_or(TOO_FAR),
    }
}

/// Converts from PostgreSQL's epoch to 1970. PostgreSQL's range ends some thirty years after that
/// of microseconds since 1970.
fn timestamp(microseconds: i64) -> Result<i64, &'static str> {
    match microseconds {
        i64::MIN | i64::MAX => Ok(microseconds),
        value => {
            value.checked_add(EPOCH_MICROSECONDS).filter(|value| *value != i64::MAX).ok_or(TOO_FAR)
        }
    }
}

fn interval(bytes: [u8; 16]) -> Interval {
    let [m0, m1, m2, m3, m4, m5, m6, m7, d0, d1, d2, d3, n0, n1, n2, n3] = bytes;
    Interval {
        microseconds: i64::from_be_bytes([m0, m1, m2, m3, m4, m5, m6, m7]),
        days: i32::from_be_bytes([d0, d1, d2, d3]),
        months: i32::from_be_bytes([n0, n1, n2, n3]),
    }
}

fn widen(element: Element) -> Value {
    match element {
        Element::Null => Value::Null,
        Element::Boolean(value) => Value::Boolean(value),
        Element::Int2(value) => Value::Int2(value),
        Element::Int4(value) => Value::Int4(value),
        Element::Int8(value) => Value::Int8(value),
        Element::Float4(value) => Value::Float4(value),
        Element::Float8(value) => Value::Float8(value),
        Element::Numeric(value) => Value::Numeric(value),
        Element::Text(value) => Value::Text(value),
        Element::Bytea(value) => Value::Bytea(value),
        Element::Uuid(value) => Value::Uuid(value),
        Element::Json(value) => Value::Json(value),
        Element::Date(value) => Value::Date(value),
        Element::Time(value) => Value::Time(value),
        Element::Timestamp(value) => Value::Timestamp(value),
        Element::Timestamptz(value) => Value::Timestamptz(value),
        Element::Interval(value) => Value::Interval(value),
        Element::Other(value) => Value::Other(value),
    }
}
