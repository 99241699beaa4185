//! Parameters from Rust types, and types of PostgreSQL that Rust has no own for.

use std::{borrow::Cow, fmt};

use serde::{Deserialize, Serialize};

use super::array;
use crate::{Interval, Value, bindings::handler::oncebox::handler::sql::OtherValue};

/// A Rust type that can be a statement's parameter.
///
/// It must fit the type the statement gives the parameter; integers are accepted for wider
/// integers, and text for numeric, uuid, json and enums.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be a parameter of a statement",
    note = "there is `Json(…)` for what implements `Serialize`, `Timestamptz`, `Timestamp`, `Date` and `Time` for times, `Numeric` for decimals; `u64` and `usize` do not fit PostgreSQL's integers"
)]
pub trait ToValue {
    /// The value as the contract carries it.
    fn to_value(&self) -> Value;
}

/// A Rust type that can be an element of an array parameter.
pub trait ToElement: ToValue {}

macro_rules! to_value {
    ($($rust:ty: $it:ident => $value:expr),* $(,)?) => {$(
        impl ToValue for $rust {
            fn to_value(&self) -> Value {
                let $it = self;
                $value
            }
        }

        impl ToElement for $rust {}
    )*};
}

to_value! {
    bool: it => Value::Boolean(*it),
    i8: it => Value::Int2((*it).into()),
    i16: it => Value::Int2(*it),
    i32: it => Value::Int4(*it),
    i64: it => Value::Int8(*it),
    u16: it => Value::Int4((*it).into()),
    u32: it => Value::Int8((*it).into()),
    f32: it => Value::Float4(*it),
    f64: it => Value::Float8(*it),
    str: it => Value::Text(it.to_owned()),
    String: it => Value::Text(it.clone()),
    Cow<'_, str>: it => Value::Text(it.to_string()),
    char: it => Value::Text(it.to_string()),
    serde_json::Value: it => Value::Json(it.to_string()),
    Interval: it => Value::Interval(*it),
    Numeric: it => Value::Numeric(it.0.clone()),
    Date: it => Value::Date(it.0),
    Time: it => Value::Time(it.0),
    Timestamp: it => Value::Timestamp(it.0),
    Timestamptz: it => Value::Timestamptz(it.0),
}

impl ToValue for Value {
    fn to_value(&self) -> Value {
        self.clone()
    }
}

impl<T: ToValue + ?Sized> ToValue for &T {
    fn to_value(&self) -> Value {
        (**self).to_value()
    }
}

impl<T: ToElement + ?Sized> ToElement for &T {}

impl<T: ToValue> ToValue for Option<T> {
    fn to_value(&self) -> Value {
        self.as_ref().map_or(Value::Null, ToValue::to_value)
    }
}

impl<T: ToElement> ToElement for Option<T> {}

impl ToValue for [u8] {
    fn to_value(&self) -> Value {
        Value::Bytea(self.to_vec())
    }
}

impl ToValue for Vec<u8> {
    fn to_value(&self) -> Value {
        Value::Bytea(self.clone())
    }
}

impl<const N: usize> ToValue for [u8; N] {
    fn to_value(&self) -> Value {
        Value::Bytea(self.to_vec())
    }
}

impl<T: ToElement> ToValue for [T] {
    fn to_value(&self) -> Value {
        let element = |it: &T| array::element(it.to_value());
        // No `ToElement` is an array, so none is left out.
        Value::Array(self.iter().filter_map(element).collect())
    }
}

impl<T: ToElement> ToValue for Vec<T> {
    fn to_value(&self) -> Value {
        self.as_slice().to_value()
    }
}

impl<T: ToElement, const N: usize> ToValue for [T; N] {
    fn to_value(&self) -> Value {
        self.as_slice().to_value()
    }
}

/// A json or jsonb value: anything that can be written as JSON, or read from it.
///
/// A parameter that cannot be written as JSON, such as a map whose keys are no text, fails its
/// statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename = "oncebox_guest::Json")]
pub struct Json<T>(pub T);

impl<T> Json<T> {
    /// What serde calls this type, to know it again.
    pub(crate) const NAME: &str = "oncebox_guest::Json";
}

impl<T: Serialize> ToValue for Json<T> {
    fn to_value(&self) -> Value {
        serde_json::to_string(&self.0).map_or_else(
            |error| {
                Value::Other(OtherValue {
                    type_name: "json".into(),
                    text: error.to_string(),
                })
            },
            Value::Json,
        )
    }
}

impl<T: Serialize> ToElement for Json<T> {}

/// A decimal of any size, as text: `12.50`, `NaN`, `Infinity` or `-Infinity`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Numeric(pub String);

impl fmt::Display for Numeric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

macro_rules! times {
    ($($(#[$doc:meta])+ $name:ident($inner:ty)),+ $(,)?) => {$(
        $(#[$doc])+
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        pub struct $name(pub $inner);
    )+};
}

times! {
    /// Days since 1970-01-01; the least and the greatest value are -infinity and infinity.
    Date(i32),
    /// Microseconds since midnight.
    Time(i64),
    /// Microseconds since 1970-01-01 00:00, without a zone; infinities as for [`Date`].
    Timestamp(i64),
    /// Microseconds since the Unix epoch; infinities as for [`Date`].
    Timestamptz(i64),
}

impl Timestamptz {
    /// From milliseconds since the Unix epoch, as a message's `timestamp` has them.
    pub const fn from_millis(milliseconds: i64) -> Self {
        Self(milliseconds.saturating_mul(1_000))
    }
}
