//! Rows of an answer, and how they become Rust types.

use std::rc::Rc;

use serde::{
    Deserializer,
    de::{
        DeserializeOwned, DeserializeSeed, Error as _, IntoDeserializer, MapAccess, SeqAccess,
        Visitor,
        value::{Error, StrDeserializer},
    },
    forward_to_deserialize_any,
};

use super::{SqlError, deserialize::Plain, value::Json};
use crate::Value;

/// One row of an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    columns: Rc<[String]>,
    values: Vec<Value>,
}

impl Row {
    /// The rows of an answer.
    #[allow(
        dead_code,
        reason = "a native build without the harness has no answers"
    )]
    pub(crate) fn all(columns: Rc<[String]>, rows: Vec<Vec<Value>>) -> Vec<Self> {
        let row = |values| Self {
            columns: columns.clone(),
            values,
        };
        rows.into_iter().map(row).collect()
    }

    /// The names of the columns.
    pub fn columns(&self) -> &[String] {
        &self.columns
    }

    /// The values, in the order of the columns.
    pub fn values(&self) -> &[Value] {
        &self.values
    }

    /// The column at `index`, from 0, as a Rust type.
    pub fn get<T: DeserializeOwned>(&self, index: usize) -> Result<T, SqlError> {
        let count = self.values.len();
        let value = self.values.get(index).cloned().ok_or_else(|| {
            SqlError::Row(format!(
                "the row has {count} columns, none at index {index}"
            ))
        })?;
        T::deserialize(Plain(value)).map_err(|error| self.wrong(index, error))
    }

    /// The whole row as a Rust type; see [`crate::query_as`].
    pub fn into<T: DeserializeOwned>(self) -> Result<T, SqlError> {
        T::deserialize(self).map_err(|error| SqlError::Row(error.to_string()))
    }

    fn wrong(&self, index: usize, error: Error) -> SqlError {
        SqlError::Row(in_column(&self.columns[index], error).to_string())
    }

    /// The value of a row that has one column.
    fn only(mut self) -> Result<Named, Error> {
        match (self.values.pop(), self.values.len()) {
            (Some(value), 0) => Ok(Named {
                name: self.columns[0].clone(),
                value: Plain(value),
            }),
            (_, rest) => Err(Error::custom(format!(
                "the row has {} columns, and is read as a single value; read it as a tuple or a struct",
                rest + 1
            ))),
        }
    }
}

fn in_column(name: &str, error: Error) -> Error {
    Error::custom(format!("column `{name}`: {error}"))
}

/// A value with the name of its column, for errors.
struct Named {
    name: String,
    value: Plain,
}

/// Types of one value take the only column.
macro_rules! from_the_only_column {
    ($($method:ident),+ $(,)?) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            let Named { name, value } = self.only()?;
            value.$method(visitor).map_err(|error| in_column(&name, error))
        }
    )+};
}

impl<'de> Deserializer<'de> for Row {
    type Error = Error;

    from_the_only_column! {
        deserialize_bool, deserialize_i8, deserialize_i16, deserialize_i32, deserialize_i64,
        deserialize_i128, deserialize_u8, deserialize_u16, deserialize_u32, deserialize_u64,
        deserialize_u128, deserialize_f32, deserialize_f64, deserialize_char, deserialize_str,
        deserialize_string, deserialize_bytes, deserialize_byte_buf, deserialize_option,
        deserialize_seq,
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        self.deserialize_map(visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_map(Columns::of(self))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.deserialize_map(visitor)
    }

    fn deserialize_tuple<V: Visitor<'de>>(
        self,
        length: usize,
        visitor: V,
    ) -> Result<V::Value, Error> {
        if self.values.len() != length {
            let count = self.values.len();
            return Err(Error::custom(format!(
                "the row has {count} columns, and is read as a tuple of {length}"
            )));
        }
        visitor.visit_seq(Columns::of(self))
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        length: usize,
        visitor: V,
    ) -> Result<V::Value, Error> {
        self.deserialize_tuple(length, visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        // What stands in `Json` is in the only column, also when it is a struct.
        match name == Json::<()>::NAME {
            true => {
                let Named { name, value } = self.only()?;
                visitor
                    .visit_newtype_struct(value)
                    .map_err(|error| in_column(&name, error))
            }
            false => visitor.visit_newtype_struct(self),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        let Named {
            name: column,
            value,
        } = self.only()?;
        let read = value.deserialize_enum(name, variants, visitor);
        read.map_err(|error| in_column(&column, error))
    }

    fn deserialize_unit<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_unit()
    }

    forward_to_deserialize_any! { unit_struct identifier ignored_any }
}

/// The columns one after the other, with their names or without.
struct Columns {
    names: Rc<[String]>,
    values: std::vec::IntoIter<Value>,
    at: usize,
}

impl Columns {
    fn of(row: Row) -> Self {
        Self {
            names: row.columns,
            values: row.values.into_iter(),
            at: 0,
        }
    }

    fn value<'de, T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
        value: Value,
    ) -> Result<T::Value, Error> {
        let read = seed.deserialize(Plain(value));
        self.at += 1;
        read.map_err(|error| in_column(&self.names[self.at - 1], error))
    }
}

impl<'de> SeqAccess<'de> for Columns {
    type Error = Error;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Error> {
        match self.values.next() {
            Some(value) => self.value(seed, value).map(Some),
            None => Ok(None),
        }
    }
}

impl<'de> MapAccess<'de> for Columns {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Error> {
        let names = self.names.clone();
        let Some(name) = names.get(self.at) else {
            return Ok(None);
        };
        let name: StrDeserializer<'_, Error> = name.as_str().into_deserializer();
        seed.deserialize(name).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Error> {
        let value = self.values.next().unwrap_or(Value::Null);
        self.value(seed, value)
    }
}
