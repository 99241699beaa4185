//! The work of hosts for a consumer: run it, stop, finish open messages, or delete it. A change is
//! one transaction that raises the consumer's revision. A host compares that with the revision it
//! runs, and acts.

use std::time::Duration;

use oncebox_model::{
    error::InboxError,
    hooks,
    status::{ConsumerState, TenantState},
};
use serde_json::json;
use sqlx::PgConnection;

use crate::{
    audit::Subject,
    consumers::{
        Consumer, lock_consumer,
        start::{QUARANTINE, Quarantine},
    },
    database::tenant_database::open::answered_within,
    handles::{Consumers, Reconciliation},
    hosts::HEARTBEAT_TIMEOUT,
};

/// A consumer's rows without its policy. Hosts read those of all consumers twice a second.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct DesiredState {
    /// Key of the consumer.
    pub consumer_id: i32,
    /// Key of its tenant.
    pub tenant_id: i32,
    /// Name of its tenant.
    pub tenant: String,
    /// Name of the consumer.
    pub name: String,
    /// State.
    pub state: ConsumerState,
    /// Number of the latest change of policy or state.
    pub revision: i64,
    /// Generation of its deployments.
    pub generation: i64,
    /// Whether its group's offsets are to be set.
    pub is_sought: bool,
    /// Whether a replay of its messages is to run, by the host's database. A paused consumer is
    /// started for it. A replay in a tenant's own database is not in it:
    /// [`Reconciliation::replayed_in_own`] finds that.
    pub is_replayed: bool,
    /// Whether its inbox is in a database of its tenant's own.
    pub has_own_database: bool,
    /// State of its tenant.
    pub tenant_state: TenantState,
    /// Number of the latest change of the tenant that hosts must observe.
    pub tenant_revision: i64,
    /// Quarantine that keeps hosts from starting it, if any. A consumer that runs goes on.
    #[sqlx(json(nullable))]
    pub quarantine: Option<Quarantine>,
}

/// The work of a host for a consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunMode {
    /// Reading its topics, and running messages that are due.
    Consume,
    /// Running messages that are due, without reading.
    RetryOnly,
    /// Running the messages of a replay, and no others: the consumer is paused.
    ReplayOnly,
    /// None.
    Stopped,
}

impl DesiredState {
    /// Returns the work that hosts do for the consumer.
    pub fn run_mode(&self) -> RunMode {
        match self.state {
            _ if !self.tenant_state.is_active() || self.is_sought => RunMode::Stopped,
            // Without a deployment no handler takes messages.
            _ if self.generation == 0 => RunMode::Stopped,
            ConsumerState::Running => RunMode::Consume,
            ConsumerState::Draining => RunMode::RetryOnly,
            ConsumerState::Paused if self.is_replayed => RunMode::ReplayOnly,
            ConsumerState::Paused | ConsumerState::Deleting => RunMode::Stopped,
        }
    }

    /// Returns the revisions on which a host's work depends. While they do not change, running work
    /// goes on.
    pub fn version(&self) -> (i64, i64, i64) {
        (self.revision, self.generation, self.tenant_revision)
    }
}

/// Longest look into a tenant's own database.
const LOOK_MAX: Duration = Duration::from_secs(15);
/// Most open messages that are counted: a caller that waits for zero needs no exact number.
const OPEN_MAX: i64 = 10_000;

impl Reconciliation<'_> {
    /// Lists the desired work for each consumer.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn desired_states(&self) -> Result<Vec<DesiredState>, InboxError> {
        let list = format!(
            "SELECT c.consumer_id, c.tenant_id, t.name AS tenant, c.name, c.state, c.revision, \
                c.generation, \
                c.seek IS NOT NULL AS is_sought, EXISTS (SELECT FROM oncebox.replay r WHERE \
                r.consumer_id = c.consumer_id AND r.state = 'running') AS is_replayed, \
                t.database_url IS NOT NULL AS has_own_database, t.state AS tenant_state, \
                t.revision AS tenant_revision, {QUARANTINE} \
             FROM oncebox.consumer c JOIN oncebox.tenant t USING (tenant_id) LEFT JOIN \
             oncebox.consumer_start s USING (consumer_id) \
             ORDER BY c.consumer_id"
        );
        Ok(sqlx::query_as(sqlx::AssertSqlSafe(list)).fetch_all(&self.0.pool).await?)
    }

    /// Lists those of a tenant's consumers that have a replay that is to run, by the database of
    /// the tenant's inbox.
    ///
    /// # Errors
    /// `NotFound` where there is no such tenant, an error of a database, or the silence of the
    /// tenant's for too long.
    pub async fn replayed_in_own(
        &self,
        tenant: &str,
        consumer_ids: &[i32],
    ) -> Result<Vec<i32>, InboxError> {
        const REPLAYED: &str = "SELECT consumer_id FROM oncebox.replay \
            WHERE consumer_id = ANY ($1) AND state = 'running'";
        let database = self.0.tenant_databases().get(&self.0.tenants().get(tenant).await?)?;
        let query = sqlx::query_scalar(REPLAYED).bind(consumer_ids);
        Ok(answered_within(LOOK_MAX, query.fetch_all(&database.pool)).await??)
    }
}

impl Consumers<'_> {
    /// Pauses a consumer: hosts finish the batches that they run, leave the group, and stop
    /// retries. Returns the consumer.
    ///
    /// # Errors
    /// `NotFound` where there is no such consumer. `Conflict` where it is being deleted.
    pub async fn pause(&self, tenant: &str, name: &str) -> Result<Consumer, InboxError> {
        self.change_state(tenant, name, ConsumerState::Paused, "consumer.pause").await
    }

    /// Resumes a consumer: hosts run it again. Returns the consumer.
    ///
    /// # Errors
    /// `NotFound` where there is no such consumer. `Conflict` where it is being deleted.
    pub async fn resume(&self, tenant: &str, name: &str) -> Result<Consumer, InboxError> {
        self.change_state(tenant, name, ConsumerState::Running, "consumer.resume").await
    }

    /// Drains a consumer: hosts read no further records and finish the messages in the inbox. Then
    /// its state is `paused`. Returns the consumer.
    ///
    /// # Errors
    /// `NotFound` where there is no such consumer. `Conflict` where it is being deleted or sought,
    /// or has no deployment.
    pub async fn drain(&self, tenant: &str, name: &str) -> Result<Consumer, InboxError> {
        self.change_state(tenant, name, ConsumerState::Draining, "consumer.drain").await
    }

    /// Begins to delete a consumer. From the commit on, no host claims or completes a message for
    /// it, wherever the host is. Its rows are removed step by step. Returns the consumer.
    ///
    /// # Errors
    /// `NotFound` where there is no such consumer, or an error of the host's database.
    pub async fn delete(&self, tenant: &str, name: &str) -> Result<Consumer, InboxError> {
        self.change_state(tenant, name, ConsumerState::Deleting, "consumer.delete").await
    }

    /// Sets the state of a consumer. Setting the present state changes nothing and writes no audit
    /// row.
    async fn change_state(
        &self,
        tenant: &str,
        name: &str,
        to: ConsumerState,
        action: &str,
    ) -> Result<Consumer, InboxError> {
        let consumer = self.get(tenant, name).await?;
        let mut tx = self.0.pool.begin().await?;
        let (from, generation, sought) = lock(&mut tx, &consumer).await?;
        if from == to {
            return lock_consumer(&mut tx, &consumer).await;
        }
        if from.is_deleting() {
            return Err(InboxError::conflict(format!(
                "consumer `{tenant}/{name}` is being deleted"
            )));
        }
        if to == ConsumerState::Draining && sought {
            return Err(InboxError::conflict(format!(
                "consumer `{tenant}/{name}` is being sought; wait for that, or take the seek back"
            )));
        }
        if to == ConsumerState::Draining && generation == 0 {
            return Err(InboxError::conflict(format!(
                "consumer `{tenant}/{name}` has no deployment, so nothing of it can be finished; \
                    pause it"
            )));
        }
        // A consumer that is deleted needs no seek.
        const SET: &str = "UPDATE oncebox.consumer SET state = $2, revision = revision + 1, \
            seek = CASE WHEN $2 <> 'deleting' THEN seek END WHERE consumer_id = $1";
        sqlx::query(SET).bind(consumer.consumer_id).bind(to.as_str()).execute(&mut *tx).await?;
        self.0
            .audit()
            .record(&mut tx, action, Subject::of(tenant, name), json!({ "from": from }))
            .await?;
        tx.commit().await?;
        self.0.deployments().announce(&consumer).await;
        self.get(tenant, name).await
    }
}

impl Reconciliation<'_> {
    /// Counts the messages of a consumer that are still to be run; 10,001 stands for more than
    /// 10,000.
    ///
    /// # Errors
    /// An error of the tenant's database, or its silence for too long.
    pub async fn open_messages(&self, consumer: &Consumer) -> Result<i64, InboxError> {
        self.0.consumers().open_of(&consumer.tenant, consumer.consumer_id).await
    }
}

impl Consumers<'_> {
    pub(crate) async fn open_of(&self, tenant: &str, consumer_id: i32) -> Result<i64, InboxError> {
        const OPEN: &str = "SELECT count(*) FROM (SELECT FROM oncebox.inbox WHERE consumer_id = $1 \
            AND status IN ('received', 'in_progress', 'failed_retryable') LIMIT $2) o";
        let database = self.0.tenant_databases().get(&self.0.tenants().get(tenant).await?)?;
        Ok(sqlx::query_scalar(OPEN)
            .bind(consumer_id)
            .bind(OPEN_MAX + 1)
            .fetch_one(&database.pool)
            .await?)
    }
}

impl Reconciliation<'_> {
    /// Sets a drained consumer to `paused`, once all its messages are settled. Returns true where
    /// that is done, by this host or by another.
    ///
    /// # Errors
    /// An error of the host's database or of the tenant's.
    pub async fn finish_drain(&self, desired: &DesiredState) -> Result<bool, InboxError> {
        let DesiredState { consumer_id, tenant, name, revision, .. } = desired;
        let mut tx = self.0.pool.begin().await?;
        // Once every host has seen the revision, only retry workers change the inbox, and they add
        // nothing.
        if !late_hosts(&mut tx, *consumer_id, *revision, false).await?.is_empty()
            || self.0.consumers().open_of(tenant, *consumer_id).await? > 0
        {
            return Ok(false);
        }
        hooks::point("consumer:drained:before");
        const PAUSE: &str = "UPDATE oncebox.consumer SET state = 'paused', revision = revision + 1 \
            WHERE consumer_id = $1 AND revision = $2 AND state = 'draining'";
        let paused = sqlx::query(PAUSE).bind(consumer_id).bind(revision).execute(&mut *tx).await?;
        if paused.rows_affected() > 0 {
            self.0
                .audit()
                .record(&mut tx, "consumer.drained", Subject::of(tenant, name), json!({}))
                .await?;
        }
        tx.commit().await?;
        Ok(true)
    }
}

/// Locks a consumer's row against other changes. Returns its state, its generation, and whether it
/// has a seek.
pub(crate) async fn lock(
    connection: &mut PgConnection,
    consumer: &Consumer,
) -> Result<(ConsumerState, i64, bool), InboxError> {
    const LOCK: &str = "SELECT state, generation, seek IS NOT NULL FROM oncebox.consumer WHERE \
        consumer_id = $1 FOR NO KEY UPDATE";
    let locked = sqlx::query_as(LOCK).bind(consumer.consumer_id).fetch_optional(connection).await?;
    locked.ok_or_else(|| {
        InboxError::NotFound(format!(
            "consumer `{}/{}` was deleted",
            consumer.tenant, consumer.name
        ))
    })
}

/// Lists live hosts that have not reached a revision; with `stopped`, also those that still run
/// anything of the consumer.
pub(crate) async fn late_hosts(
    connection: &mut PgConnection,
    consumer_id: i32,
    revision: i64,
    stopped: bool,
) -> Result<Vec<String>, InboxError> {
    let list = format!(
        "SELECT h.name FROM oncebox.host h LEFT JOIN oncebox.host_consumer r ON r.host_id = \
            h.host_id AND r.consumer_id = $1 \
         WHERE h.seen_at > now() - {HEARTBEAT_TIMEOUT} AND (r.status_revision IS NULL OR r.status_revision < $2 \
         OR ($3 AND r.status <> 'stopped')) \
         ORDER BY h.host_id"
    );
    let late = sqlx::query_scalar(sqlx::AssertSqlSafe(list))
        .bind(consumer_id)
        .bind(revision)
        .bind(stopped);
    Ok(late.fetch_all(connection).await?)
}
