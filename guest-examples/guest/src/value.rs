//! PostgreSQL values from Rust types, and back.

use crate::Value;

macro_rules! into_value {
    ($($rust:ty => $case:ident),* $(,)?) => {$(
        impl From<$rust> for Value {
            fn from(value: $rust) -> Self {
                Self::$case(value.into())
            }
        }
    )*};
}

into_value! {
    bool => Boolean,
    i16 => Int2,
    i32 => Int4,
    i64 => Int8,
    f64 => Float8,
    &str => Text,
    &String => Text,
    String => Text,
    &[u8] => Bytea,
    Vec<u8> => Bytea,
}

impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
}

/// A Rust type that a column can be read as.
pub trait FromValue: Sized {
    /// None when the value is of another type, or null where null is not expected.
    fn from_value(value: &Value) -> Option<Self>;
}

impl FromValue for bool {
    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Boolean(it) => Some(*it),
            _ => None,
        }
    }
}

impl FromValue for i64 {
    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Int2(it) => Some((*it).into()),
            Value::Int4(it) => Some((*it).into()),
            Value::Int8(it) => Some(*it),
            _ => None,
        }
    }
}

/// Text, and what travels as text: numeric, uuid, json.
impl FromValue for String {
    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Text(it) | Value::Numeric(it) | Value::Uuid(it) | Value::Json(it) => {
                Some(it.clone())
            }
            _ => None,
        }
    }
}

impl<T: FromValue> FromValue for Option<T> {
    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::Null => Some(None),
            other => T::from_value(other).map(Some),
        }
    }
}
