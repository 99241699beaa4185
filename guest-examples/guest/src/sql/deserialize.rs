//! One value of a row as a Rust type.

use serde::{
    Deserializer,
    de::{
        Error as _, IntoDeserializer, Visitor,
        value::{Error, SeqDeserializer},
    },
};
use serde_json::Value as JsonValue;

use super::array;
use crate::Value;

/// A value that a type is read from.
pub(super) struct Plain(pub(super) Value);

impl IntoDeserializer<'_, Error> for Plain {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

/// `sum` of a bigint is a numeric: what fits is read as the number that is asked for. Narrower
/// integers check their own range.
macro_rules! numbers {
    ($($method:ident: $rust:ident $visit:ident),+ $(,)?) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            match self.0 {
                Value::Numeric(text) => match text.parse::<$rust>() {
                    Ok(number) => visitor.$visit(number),
                    Err(_) => Err(Error::custom(format!(
                        "the numeric {text} is no {}; read it as `Numeric`", stringify!($rust)
                    ))),
                },
                other => Self(other).deserialize_any(visitor),
            }
        }
    )+};
}

/// Types that a json column can hold too, other than as text.
macro_rules! or_json {
    ($($method:ident($($argument:ident: $kind:ty),*)),+ $(,)?) => {$(
        fn $method<V: Visitor<'de>>(self, $($argument: $kind,)* visitor: V) -> Result<V::Value, Error> {
            match self.0 {
                Value::Json(text) => {
                    json(&text)?.$method($($argument,)* visitor).map_err(Error::custom)
                }
                Value::Bytea(bytes) => visitor.visit_seq(SeqDeserializer::new(bytes.into_iter())),
                other => Self(other).deserialize_any(visitor),
            }
        }
    )+};
}

/// Types that no other column can hold.
macro_rules! plain {
    ($($method:ident),+ $(,)?) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            self.deserialize_any(visitor)
        }
    )+};
}

impl<'de> Deserializer<'de> for Plain {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Null => visitor.visit_unit(),
            Value::Boolean(it) => visitor.visit_bool(it),
            Value::Int2(it) => visitor.visit_i16(it),
            Value::Int4(it) | Value::Date(it) => visitor.visit_i32(it),
            Value::Int8(it) | Value::Time(it) | Value::Timestamp(it) | Value::Timestamptz(it) => {
                visitor.visit_i64(it)
            }
            Value::Float4(it) => visitor.visit_f32(it),
            Value::Float8(it) => visitor.visit_f64(it),
            Value::Numeric(it) | Value::Text(it) | Value::Uuid(it) => visitor.visit_string(it),
            Value::Bytea(it) => visitor.visit_byte_buf(it),
            Value::Json(it) => json(&it)?.deserialize_any(visitor).map_err(Error::custom),
            Value::Array(elements) => {
                let values = elements.into_iter().map(|it| Self(array::value(it)));
                visitor.visit_seq(SeqDeserializer::new(values))
            }
            Value::Interval(_) | Value::Other(_) => {
                Err(Error::custom("the value has no Rust type; cast it to text"))
            }
        }
    }

    numbers! {
        deserialize_i8: i64 visit_i64, deserialize_i16: i64 visit_i64,
        deserialize_i32: i64 visit_i64, deserialize_i64: i64 visit_i64,
        deserialize_u8: i64 visit_i64, deserialize_u16: i64 visit_i64,
        deserialize_u32: i64 visit_i64, deserialize_u64: i64 visit_i64,
        deserialize_f32: f64 visit_f64, deserialize_f64: f64 visit_f64,
    }

    or_json! {
        deserialize_seq(),
        deserialize_tuple(length: usize),
        deserialize_tuple_struct(name: &'static str, length: usize),
    }

    plain! {
        deserialize_bool, deserialize_char, deserialize_bytes, deserialize_byte_buf,
        deserialize_unit, deserialize_map, deserialize_identifier,
    }

    /// What travels as text: text, numeric, uuid, and json as it is written.
    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Json(text) => visitor.visit_string(text),
            Value::Date(_) | Value::Time(_) | Value::Timestamp(_) | Value::Timestamptz(_) => {
                Err(Error::custom(
                    "a time is no text; read it as `Timestamptz` or the like, or cast it to text",
                ))
            }
            other => Self(other).deserialize_any(visitor),
        }
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.deserialize_string(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.0 {
            Value::Null => visitor.visit_none(),
            other => visitor.visit_some(Self(other)),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.deserialize_any(visitor)
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.deserialize_any(visitor)
    }

    /// A text, such as that of PostgreSQL's own enums, names a variant.
    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self.0 {
            Value::Text(text) => visitor.visit_enum(text.into_deserializer()),
            Value::Json(text) => json(&text)?
                .deserialize_enum(name, variants, visitor)
                .map_err(Error::custom),
            other => Self(other).deserialize_any(visitor),
        }
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_unit()
    }
}

fn json(text: &str) -> Result<JsonValue, Error> {
    serde_json::from_str(text).map_err(Error::custom)
}
