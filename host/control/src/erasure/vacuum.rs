//! The vacuum after an erasure: PostgreSQL keeps the version of a row that an update replaced until
//! a vacuum removes it.

use std::time::Duration;

use oncebox_model::{
    error::{InboxError, plain},
    hooks,
};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};

use super::inbox::InboxErasure;
use crate::{database::tenant_database::open::answered_within, retention::partitions::is_gone};

/// Longest wait of a vacuum for the lock of its table.
const LOCK_TIMEOUT: &str = "5s";
/// Longest wait for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

impl InboxErasure {
    /// Vacuums the next table with dead versions of erased rows. Returns false where there is none.
    /// A table that cannot be vacuumed is noted with the error.
    pub(super) async fn vacuum_next(&self) -> Result<bool, InboxError> {
        const NEXT: &str = "SELECT to_vacuum[1] FROM oncebox.erasure WHERE erasure_id = $1";
        const NOTE: &str = "UPDATE oncebox.erasure SET to_vacuum = array_remove(to_vacuum, $2), \
            vacuumed = vacuumed || $3::text[], not_vacuumed = not_vacuumed || $4::text[], \
            worked_at = now() WHERE erasure_id = $1";
        let next = sqlx::query_scalar(NEXT).bind(self.erasure_id);
        let next: Option<Option<String>> = next.fetch_optional(&self.database.pool).await?;
        let Some(table) = next.ok_or_else(|| self.ended())? else { return Ok(false) };
        let (mut vacuumed, mut not_vacuumed) = (Vec::new(), Vec::new());
        match self.vacuum(&table).await {
            Ok(()) => vacuumed.push(table.clone()),
            // Another vacuum is at work on the table; this one is tried again.
            Err(InboxError::InFlightElsewhere) => return Ok(true),
            Err(error) if is_gone(&error) => {}
            Err(InboxError::Refused(error)) => {
                not_vacuumed.push(format!("{table}: {}", plain(&error)));
            }
            Err(error) => return Err(error),
        }
        let note = sqlx::query(NOTE).bind(self.erasure_id).bind(&table);
        note.bind(vacuumed).bind(not_vacuumed).execute(&self.database.pool).await?;
        hooks::point("erase:vacuum:after");
        Ok(true)
    }

    /// Vacuums a table by a connection of its own, whose statements may take any time.
    async fn vacuum(&self, table: &str) -> Result<(), InboxError> {
        let options = self
            .database
            .options
            .clone()
            .application_name("oncebox erase")
            .options([("lock_timeout", LOCK_TIMEOUT), ("statement_timeout", "0")]);
        let options = options.answer_timeout(Duration::MAX);
        let connecting = PgConnection::connect_with(&options);
        let mut connection = answered_within(CONNECT_TIMEOUT, connecting).await??;
        let vacuum = format!("VACUUM {table}");
        let vacuumed = connection.execute(sqlx::raw_sql(AssertSqlSafe(vacuum))).await;
        let _ = connection.close().await; // its work is done
        Ok(vacuumed.map(drop)?)
    }
}
