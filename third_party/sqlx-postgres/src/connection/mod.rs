use std::collections::BTreeMap;
use std::fmt::{self, Debug, Formatter};
use std::future::Future;
use std::sync::Arc;

use crate::HashMap;

use crate::common::StatementCache;
use crate::error::Error;
use crate::ext::ustr::UStr;
use crate::io::StatementId;
use crate::message::{
    BackendMessageFormat, Close, CommandComplete, Query, ReadyForQuery, ReceivedMessage, Terminate,
    TransactionStatus,
};
use crate::statement::PgStatementMetadata;
use crate::transaction::Transaction;
use crate::types::Oid;
use crate::{PgConnectOptions, PgDatabaseError, PgSeverity, PgTypeInfo, Postgres};

pub(crate) use sqlx_core::connection::*;
use sqlx_core::sql_str::SqlSafeStr;

pub use self::stream::PgStream;

#[cfg(feature = "offline")]
mod describe;
mod establish;
mod executor;
mod resolve;
mod sasl;
mod stream;
mod tls;

/// A connection to a PostgreSQL database.
///
/// See [`PgConnectOptions`] for connection URL reference.
pub struct PgConnection {
    pub(crate) inner: Box<PgConnectionInner>,
}

pub struct PgConnectionInner {
    // underlying TCP or UDS stream,
    // wrapped in a potentially TLS stream,
    // wrapped in a buffered stream
    pub(crate) stream: PgStream,

    // process id of this backend
    // used to send cancel requests
    #[allow(dead_code)]
    process_id: u32,

    // secret key of this backend
    // used to send cancel requests
    #[allow(dead_code)]
    secret_key: u32,

    // sequence of statement IDs for use in preparing statements
    // in PostgreSQL, the statement is prepared to a user-supplied identifier
    next_statement_id: StatementId,

    // cache statement by query string to the id and columns
    cache_statement: StatementCache<(StatementId, Arc<PgStatementMetadata>)>,

    // cache user-defined types by id <-> info
    cache_type_info: HashMap<Oid, PgTypeInfo>,
    cache_type_oid: HashMap<UStr, Oid>,
    cache_elem_type_to_array: HashMap<Oid, Oid>,
    cache_table_data: HashMap<Oid, TableData>,

    // number of ReadyForQuery messages that we are currently expecting
    pub(crate) pending_ready_for_query_count: usize,

    // how many of them, the last ones, are of queries that were enqueued
    enqueued: usize,

    // how many of these were answered since there were none
    enqueued_done: usize,

    // the first error among the answers with its place, until the query that follows takes it
    enqueued_error: Option<(usize, Error)>,

    // the place of the enqueued query whose error was that of the last query
    failed_enqueued: Option<usize>,

    // how many rows each enqueued query touched whose answer was not taken; none for one that failed
    enqueued_answers: Vec<Option<u64>>,

    // current transaction status
    transaction_status: TransactionStatus,
    pub(crate) transaction_depth: usize,

    log_settings: LogSettings,
}

pub(crate) struct TableData {
    table_name: Arc<str>,
    /// Attribute number -> name.
    columns: BTreeMap<i16, Arc<str>>,
}

impl PgConnection {
    /// the version number of the server in `libpq` format
    pub fn server_version_num(&self) -> Option<u32> {
        self.inner.stream.server_version_num
    }

    /// Pass over rows that take more than `bytes` in the server's message, instead of keeping them
    /// in memory. They are counted; see [`Self::take_rows_passed_over`]. There is no bound at first.
    pub fn set_row_bytes_max(&mut self, bytes: usize) {
        self.inner.stream.row_bytes_max = bytes;
    }

    /// How many rows were passed over since the last call.
    pub fn take_rows_passed_over(&mut self) -> u64 {
        std::mem::take(&mut self.inner.stream.rows_passed_over)
    }

    /// Whether the server has said nothing since its last answer, and has not closed the connection
    /// as far as is known. Does not wait.
    pub fn is_quiet(&mut self) -> bool {
        use futures_util::FutureExt;

        self.inner.pending_ready_for_query_count == 0
            && self.inner.stream.has_input().now_or_never().is_none()
    }

    /// Send what is enqueued, without waiting for the answers.
    pub async fn send_enqueued(&mut self) -> Result<(), Error> {
        Ok(self.inner.stream.flush().await?)
    }

    /// How many queries are enqueued that were not answered.
    pub fn enqueued(&self) -> usize {
        self.inner.enqueued
    }

    /// Send what is enqueued and wait for the answers. Returns the first error among them.
    pub async fn wait_for_enqueued(&mut self) -> Result<(), Error> {
        self.inner.stream.flush().await?;
        self.finish_enqueued().await
    }

    /// Where the error of the last query was that of a query enqueued before it: the place of that
    /// one among those that were enqueued together, from 0.
    pub fn take_failed_enqueued(&mut self) -> Option<usize> {
        self.inner.failed_enqueued.take()
    }

    /// Whether [`Self::take_failed_enqueued`] would name a query.
    pub fn has_failed_enqueued(&self) -> bool {
        self.inner.failed_enqueued.is_some()
    }

    /// How many rows each enqueued query touched whose answer came since the last call, in order;
    /// none for one that failed. Nothing while the error among them was not returned by a query.
    pub fn take_enqueued_answers(&mut self) -> Vec<Option<u64>> {
        match self.inner.enqueued_error {
            Some(_) => Vec::new(),
            None => std::mem::take(&mut self.inner.enqueued_answers),
        }
    }

    // read the answers of the queries that were enqueued, which come before any other, and keep the
    // first error; an error that ends the connection is returned
    async fn recv_enqueued(&mut self) -> Result<(), Error> {
        let mut rows = Some(0);
        while self.inner.enqueued > 0 {
            match self.inner.stream.recv().await {
                Ok(message) => match message.format {
                    BackendMessageFormat::CommandComplete => {
                        let done: CommandComplete = message.decode()?;
                        rows = rows.map(|rows| rows + done.rows_affected());
                    }

                    BackendMessageFormat::ReadyForQuery => {
                        self.handle_ready_for_query(message)?;
                        self.inner.enqueued -= 1;
                        self.inner.enqueued_done += 1;
                        self.inner.enqueued_answers.push(rows);
                        rows = Some(0);
                    }

                    _ => {}
                },

                Err(error) if lives_on(&error) => {
                    let place = self.inner.enqueued_done;
                    self.inner.enqueued_error.get_or_insert((place, error));
                    rows = None;
                }

                Err(error) => return Err(error),
            }
        }

        Ok(())
    }

    // read the answers of the queries that were enqueued; where one of them is an error, pass over
    // the answers to the query that was sent with them, and return that error
    pub(crate) async fn finish_enqueued(&mut self) -> Result<(), Error> {
        self.recv_enqueued().await?;

        let Some((place, error)) = self.inner.enqueued_error.take() else {
            return Ok(());
        };

        self.inner.failed_enqueued = Some(place);

        while self.inner.pending_ready_for_query_count > 0 {
            match self.inner.stream.recv().await {
                Ok(message) => {
                    if let BackendMessageFormat::ReadyForQuery = message.format {
                        self.handle_ready_for_query(message)?;
                    }
                }

                Err(error) if lives_on(&error) => {}

                Err(error) => return Err(error),
            }
        }

        Err(error)
    }

    // wait until nothing is expected but the answers to what is enqueued
    pub(crate) async fn wait_until_enqueued(&mut self) -> Result<(), Error> {
        if self.inner.pending_ready_for_query_count > self.inner.enqueued {
            self.wait_until_ready().await?;
        }

        Ok(())
    }

    // will return when the connection is ready for another query
    pub(crate) async fn wait_until_ready(&mut self) -> Result<(), Error> {
        if !self.inner.stream.write_buffer_mut().is_empty() {
            self.inner.stream.flush().await?;
        }

        self.recv_enqueued().await?;

        while self.inner.pending_ready_for_query_count > 0 {
            let message = self.inner.stream.recv().await?;

            if let BackendMessageFormat::ReadyForQuery = message.format {
                self.handle_ready_for_query(message)?;
            }
        }

        Ok(())
    }

    async fn recv_ready_for_query(&mut self) -> Result<(), Error> {
        let r: ReadyForQuery = self.inner.stream.recv_expect().await?;

        self.inner.pending_ready_for_query_count -= 1;
        self.inner.transaction_status = r.transaction_status;

        Ok(())
    }

    #[inline(always)]
    fn handle_ready_for_query(&mut self, message: ReceivedMessage) -> Result<(), Error> {
        self.inner.pending_ready_for_query_count = self
            .inner
            .pending_ready_for_query_count
            .checked_sub(1)
            .ok_or_else(|| err_protocol!("received more ReadyForQuery messages than expected"))?;

        self.inner.transaction_status = message.decode::<ReadyForQuery>()?.transaction_status;

        Ok(())
    }

    /// Queue a simple query (not prepared) to execute the next time this connection is used.
    ///
    /// Used for rolling back transactions and releasing advisory locks.
    #[inline(always)]
    pub(crate) fn queue_simple_query(&mut self, query: &str) -> Result<(), Error> {
        self.inner.stream.write_msg(Query(query))?;
        self.inner.pending_ready_for_query_count += 1;

        Ok(())
    }

    pub(crate) fn in_transaction(&self) -> bool {
        match self.inner.transaction_status {
            TransactionStatus::Transaction => true,
            TransactionStatus::Error | TransactionStatus::Idle => false,
        }
    }
}

// whether the connection is usable after an error that the server answered
fn lives_on(error: &Error) -> bool {
    let Error::Database(error) = error else {
        return false;
    };

    error
        .try_downcast_ref::<PgDatabaseError>()
        .is_some_and(|error| !matches!(error.severity(), PgSeverity::Fatal | PgSeverity::Panic))
}

impl Debug for PgConnection {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("PgConnection").finish()
    }
}

impl Connection for PgConnection {
    type Database = Postgres;

    type Options = PgConnectOptions;

    async fn close(mut self) -> Result<(), Error> {
        // The normal, graceful termination procedure is that the frontend sends a Terminate
        // message and immediately closes the connection.

        // On receipt of this message, the backend closes the
        // connection and terminates.
        self.inner.stream.send(Terminate).await?;
        self.inner.stream.shutdown().await?;

        Ok(())
    }

    async fn close_hard(mut self) -> Result<(), Error> {
        self.inner.stream.shutdown().await?;

        Ok(())
    }

    async fn ping(&mut self) -> Result<(), Error> {
        // Users were complaining about this showing up in query statistics on the server.
        // By sending a comment we avoid an error if the connection was in the middle of a rowset
        // self.execute("/* SQLx ping */").map_ok(|_| ()).boxed()

        // The simplest call-and-response that's possible.
        self.write_sync();
        self.wait_until_ready().await
    }

    fn begin(
        &mut self,
    ) -> impl Future<Output = Result<Transaction<'_, Self::Database>, Error>> + Send + '_ {
        Transaction::begin(self, None)
    }

    fn begin_with(
        &mut self,
        statement: impl SqlSafeStr,
    ) -> impl Future<Output = Result<Transaction<'_, Self::Database>, Error>> + Send + '_
    where
        Self: Sized,
    {
        Transaction::begin(self, Some(statement.into_sql_str()))
    }

    fn cached_statements_size(&self) -> usize {
        self.inner.cache_statement.len()
    }

    async fn clear_cached_statements(&mut self) -> Result<(), Error> {
        self.inner.cache_type_oid.clear();

        let mut cleared = 0_usize;

        self.wait_until_ready().await?;

        while let Some((id, _)) = self.inner.cache_statement.remove_lru() {
            self.inner.stream.write_msg(Close::Statement(id))?;
            cleared += 1;
        }

        if cleared > 0 {
            self.write_sync();
            self.inner.stream.flush().await?;

            self.wait_for_close_complete(cleared).await?;
            self.recv_ready_for_query().await?;
        }

        Ok(())
    }

    fn shrink_buffers(&mut self) {
        self.inner.stream.shrink_buffers();
    }

    #[doc(hidden)]
    fn flush(&mut self) -> impl Future<Output = Result<(), Error>> + Send + '_ {
        self.wait_until_ready()
    }

    #[doc(hidden)]
    fn should_flush(&self) -> bool {
        !self.inner.stream.write_buffer().is_empty()
    }
}

// Implement `AsMut<Self>` so that `PgConnection` can be wrapped in
// a `PgAdvisoryLockGuard`.
//
// See: https://github.com/launchbadge/sqlx/issues/2520
impl AsMut<PgConnection> for PgConnection {
    fn as_mut(&mut self) -> &mut PgConnection {
        self
    }
}
