//! Elements of arrays: the same cases as values, but for arrays themselves.

use crate::{Element, Value};

macro_rules! cases {
    ($($case:ident),+) => {
        /// None for an array, which cannot stand in one.
        pub(crate) fn element(value: Value) -> Option<Element> {
            Some(match value {
                Value::Null => Element::Null,
                $(Value::$case(value) => Element::$case(value),)+
                Value::Array(_) => return None,
            })
        }

        pub(crate) fn value(element: Element) -> Value {
            match element {
                Element::Null => Value::Null,
                $(Element::$case(value) => Value::$case(value),)+
            }
        }
    };
}

cases!(
    Boolean,
    Int2,
    Int4,
    Int8,
    Float4,
    Float8,
    Numeric,
    Text,
    Bytea,
    Uuid,
    Json,
    Date,
    Time,
    Timestamp,
    Timestamptz,
    Interval,
    Other
);
