//! The rows of a tenant in the host's tables, and their way from one database to another.

use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use futures::TryStreamExt;
use oncebox_model::error::InboxError;
use sqlx::PgConnection;

use super::carry::Mover;

/// Whose rows of a table go with a tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    /// Those of its consumers, by `consumer_id`.
    Consumer,
    /// Its own, by `tenant_id`.
    Tenant,
    /// Those of deployments of its consumers, by `deployment_id`.
    Deployment,
    /// Those of its replays, by `replay_id`.
    Replay,
}

/// A table of the schema `oncebox` with rows that go with a tenant.
pub(super) struct OwnedTable {
    pub(super) name: &'static str,
    pub(super) owner: Owner,
    /// A key that each database gives by itself: the rows get new ones, in the order of the old.
    pub(super) given: Option<&'static str>,
}

const fn owned(name: &'static str, owner: Owner, given: Option<&'static str>) -> OwnedTable {
    OwnedTable { name, owner, given }
}

/// Those tables, each after the ones that it refers to.
pub(super) const OWNED: &[OwnedTable] = &[
    owned("inbox", Owner::Consumer, None),
    owned("inbox_history", Owner::Consumer, Some("history_id")),
    owned("inbox_edit", Owner::Consumer, None),
    owned("outgoing", Owner::Consumer, Some("position")),
    owned("sequence_position", Owner::Consumer, None),
    owned("partition_position", Owner::Consumer, None),
    owned("probation", Owner::Consumer, None),
    owned("forgotten", Owner::Consumer, None),
    owned("job", Owner::Tenant, Some("job_id")),
    owned("replay", Owner::Consumer, None),
    owned("replay_failure", Owner::Replay, None),
    owned("shadow_total", Owner::Deployment, None),
    owned("shadow_sum", Owner::Deployment, None),
    owned("shadow_difference", Owner::Deployment, Some("difference_id")),
    owned("archive_file", Owner::Tenant, None),
    owned("archive_attempt", Owner::Tenant, None),
    owned("tenant_migration", Owner::Tenant, None),
];

/// Returns the tables of the schema `oncebox` with rows that go with a tenant.
pub fn moved_tables() -> impl Iterator<Item = &'static str> {
    OWNED.iter().map(|table| table.name)
}

/// Keys of a tenant, by which its rows are found.
pub(super) struct OwnedKeys {
    pub(super) tenant_id: i32,
    pub(super) consumers: Vec<i32>,
    pub(super) deployments: Vec<i64>,
}

impl OwnedKeys {
    /// Reads the keys from the host's database.
    pub(super) async fn of(mover: &Mover<'_>) -> Result<Self, InboxError> {
        const SHADOWS: &str = "SELECT d.deployment_id FROM oncebox.deployment d WHERE \
            d.consumer_id = ANY ($1) AND d.role = 'shadow' ORDER BY 1";
        let consumers = mover.consumers().await?;
        let deployments =
            sqlx::query_scalar(SHADOWS).bind(&consumers).fetch_all(&mover.control.pool).await?;
        Ok(Self { tenant_id: mover.tenant.tenant_id, consumers, deployments })
    }

    /// Returns the condition on the rows `r` of a table. Keys are numbers of the database.
    pub(super) fn condition(&self, owner: Owner) -> String {
        let consumers = format!("consumer_id = ANY ('{{{}}}'::int[])", joined(&self.consumers));
        match owner {
            Owner::Consumer => format!("r.{consumers}"),
            Owner::Tenant => format!("r.tenant_id = {}", self.tenant_id),
            Owner::Deployment => {
                format!("r.deployment_id = ANY ('{{{}}}'::bigint[])", joined(&self.deployments))
            }
            Owner::Replay => {
                format!("r.replay_id IN (SELECT replay_id FROM oncebox.replay WHERE {consumers})")
            }
        }
    }
}

pub(super) fn joined<T: ToString>(numbers: &[T]) -> String {
    numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

/// The stream of rows from one database to another.
pub(super) struct CopyProgress<'m> {
    mover: &'m Mover<'m>,
    bytes: u64,
    noted: Instant,
}

/// Bytes that are sent at once.
const CHUNK: usize = 256 << 10;
/// Interval between two notes for readers.
const NOTED: Duration = Duration::from_secs(1);

impl<'m> CopyProgress<'m> {
    pub(super) fn new(mover: &'m Mover<'m>) -> Self {
        Self { mover, bytes: 0, noted: Instant::now() }
    }

    /// Copies the rows of a query into a table, given with its columns.
    pub(super) async fn copy(
        &mut self,
        from: &mut PgConnection,
        query: &str,
        to: &mut PgConnection,
        table: &str,
    ) -> Result<(), InboxError> {
        let mut rows = from.copy_out_raw(&format!("COPY ({query}) TO STDOUT")).await?;
        let mut into = to.copy_in_raw(&format!("COPY {table} FROM STDIN")).await?;
        let mut chunk = BytesMut::with_capacity(CHUNK);
        loop {
            let row: Option<Bytes> = match rows.try_next().await {
                Ok(row) => row,
                Err(error) => {
                    let _ = into.abort("the rows cannot be read").await;
                    return Err(error.into());
                }
            };
            let is_last = row.is_none();
            chunk.extend_from_slice(&row.unwrap_or_default());
            if is_last || chunk.len() >= CHUNK {
                self.bytes += chunk.len() as u64;
                into.send(&*chunk).await?;
                chunk.clear();
                if self.noted.elapsed() >= NOTED
                    && let Err(error) = self.note().await
                {
                    let _ = into.abort("the move is not this host's any more").await;
                    return Err(error);
                }
            }
            if is_last {
                break;
            }
        }
        into.finish().await?;
        Ok(())
    }

    /// Notes how much was read. Fails where this host does not have the move any more.
    pub(super) async fn note(&mut self) -> Result<(), InboxError> {
        self.noted = Instant::now();
        self.mover.note_copied(self.bytes).await
    }

    /// Returns the bytes that were read.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}
