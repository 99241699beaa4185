//! One statement, from its text to its rows.

use std::{error::Error, rc::Rc};

use postgres::{
    Client, Statement,
    types::{FromSql, IsNull, ToSql, Type, private::BytesMut},
};

use super::{decode, encode, statement};
use crate::{DatabaseError, Row, SqlError, Value};

/// Runs a statement for its effect.
pub(super) fn execute(client: &mut Client, text: &str, params: &[Value]) -> Result<u64, SqlError> {
    let prepared = describe(client, text)?;
    let params = encode::params(prepared.params(), params).map_err(SqlError::Unsupported)?;
    client
        .execute(&prepared, &references(&params))
        .map_err(failed)
}

/// Runs a statement and reads its rows.
pub(super) fn query(
    client: &mut Client,
    text: &str,
    params: &[Value],
) -> Result<Vec<Row>, SqlError> {
    let prepared = describe(client, text)?;
    let params = encode::params(prepared.params(), params).map_err(SqlError::Unsupported)?;
    // What cannot be carried is reported while nothing has happened yet.
    let shapes = decode::shapes(prepared.columns()).map_err(SqlError::Unsupported)?;
    let answer = client
        .query(&prepared, &references(&params))
        .map_err(failed)?;
    let columns: Rc<[String]> = prepared
        .columns()
        .iter()
        .map(|column| column.name().to_owned())
        .collect();
    let values = answer
        .iter()
        .map(|row| decode::row(&shapes, row))
        .collect::<Result<_, _>>();
    Ok(Row::all(columns, values.map_err(SqlError::Unsupported)?))
}

/// Runs fixed text of the harness, such as a savepoint's.
pub(super) fn control(client: &mut Client, text: &str) -> Result<(), SqlError> {
    client.batch_execute(text).map_err(failed)
}

/// Checks the statement's kind, and asks PostgreSQL for its types.
fn describe(client: &mut Client, text: &str) -> Result<Statement, SqlError> {
    statement::check(text).map_err(SqlError::Refused)?;
    client.prepare(text).map_err(failed)
}

fn failed(error: postgres::Error) -> SqlError {
    match error.as_db_error() {
        Some(error) => SqlError::Database(DatabaseError {
            sqlstate: error.code().code().to_owned(),
            message: error.message().to_owned(),
            detail: error.detail().map(str::to_owned),
            constraint: error.constraint().map(str::to_owned),
        }),
        None => SqlError::Unsupported(format!("the statement cannot be sent: {error}")),
    }
}

/// A parameter in the binary form of its described type.
#[derive(Debug)]
pub(super) struct Encoded(pub(super) Option<Vec<u8>>);

fn references(params: &[Encoded]) -> Vec<&(dyn ToSql + Sync)> {
    params
        .iter()
        .map(|param| param as &(dyn ToSql + Sync))
        .collect()
}

impl ToSql for Encoded {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        Ok(match &self.0 {
            None => IsNull::Yes,
            Some(bytes) => {
                out.extend_from_slice(bytes);
                IsNull::No
            }
        })
    }

    fn accepts(_: &Type) -> bool {
        true
    }

    postgres::types::to_sql_checked!();
}

/// A column's value in the binary form of its type.
pub(super) struct Received<'a>(pub(super) Option<&'a [u8]>);

impl<'a> FromSql<'a> for Received<'a> {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(Self(Some(raw)))
    }

    fn from_sql_null(_: &Type) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(Self(None))
    }

    fn accepts(_: &Type) -> bool {
        true
    }
}
