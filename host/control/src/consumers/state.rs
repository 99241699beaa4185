//! What hosts are to do with a consumer: run it, rest, finish what is open, or forget it. A change
//! is one transaction that raises the consumer's revision; a host compares that with what it does,
//! and acts.

use oncebox_model::{error::InboxError, hooks};
use serde_json::json;
use sqlx::PgConnection;

use crate::{
    audit::Subject,
    consumers::{
        Consumer, consumer_in,
        start::{QUARANTINE, Quarantine},
    },
    control::Admin,
    hosts::GONE,
};

/// What the rows say of a consumer, without its policy: hosts ask for all of them twice a second.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct Standing {
    /// The consumer.
    pub consumer_id: i32,
    /// Its tenant.
    pub tenant_id: i32,
    /// Name of its tenant.
    pub tenant: String,
    /// Its name.
    pub name: String,
    /// `running`, `paused`, `draining` or `deleting`.
    pub state: String,
    /// Grows with every change of policy or state.
    pub revision: i64,
    /// Generation of its deployments.
    pub generation: i64,
    /// Whether its group's offsets are to be set.
    pub is_sought: bool,
    /// `active`, `suspended` or `deleting`.
    pub tenant_state: String,
    /// Grows with every change of the tenant that hosts have to hear of.
    pub tenant_revision: i64,
    /// Why no host starts it, where that is so. What runs goes on.
    #[sqlx(json(nullable))]
    pub quarantine: Option<Quarantine>,
}

/// What a host does with a consumer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Reads its topics and runs what is due.
    Read,
    /// Runs what is due, and reads nothing.
    Retry,
    /// Nothing.
    Rest,
}

impl Standing {
    /// What hosts are to do.
    pub fn work(&self) -> Work {
        match self.state.as_str() {
            _ if self.tenant_state != "active" || self.is_sought => Work::Rest,
            // Without a deployment there is nothing to hand messages to.
            _ if self.generation == 0 => Work::Rest,
            "running" => Work::Read,
            "draining" => Work::Retry,
            _ => Work::Rest,
        }
    }

    /// What a host's work with it depends on; while this is the same, what runs may go on.
    pub fn version(&self) -> (i64, i64, i64) {
        (self.revision, self.generation, self.tenant_revision)
    }
}

/// Open messages are counted up to here: whoever waits for none need not know how many there are.
const OPEN_MAX: i64 = 10_000;

impl Admin {
    /// What hosts are to do with each consumer.
    pub async fn standings(&self) -> Result<Vec<Standing>, InboxError> {
        let list = format!(
            "SELECT c.consumer_id, c.tenant_id, t.name AS tenant, c.name, c.state, c.revision, \
                c.generation, \
                c.seek IS NOT NULL AS is_sought, t.state AS tenant_state, t.revision AS \
                tenant_revision, {QUARANTINE} \
             FROM oncebox.consumer c JOIN oncebox.tenant t USING (tenant_id) LEFT JOIN \
             oncebox.consumer_start s USING (consumer_id) \
             ORDER BY c.consumer_id"
        );
        Ok(sqlx::query_as(sqlx::AssertSqlSafe(list)).fetch_all(&self.pool).await?)
    }

    /// Hosts finish the batches that they run, leave the group, and let retries rest.
    pub async fn pause_consumer(&self, tenant: &str, name: &str) -> Result<Consumer, InboxError> {
        self.change_state(tenant, name, "paused", "consumer.pause").await
    }

    /// Hosts run it again.
    pub async fn resume_consumer(&self, tenant: &str, name: &str) -> Result<Consumer, InboxError> {
        self.change_state(tenant, name, "running", "consumer.resume").await
    }

    /// Hosts read no further records and finish what is in the inbox; then the consumer is
    /// `paused`.
    pub async fn drain_consumer(&self, tenant: &str, name: &str) -> Result<Consumer, InboxError> {
        self.change_state(tenant, name, "draining", "consumer.drain").await
    }

    /// Nothing is claimed or completed for it any more, wherever a host may be; its rows go by and
    /// by.
    pub async fn delete_consumer(&self, tenant: &str, name: &str) -> Result<Consumer, InboxError> {
        self.change_state(tenant, name, "deleting", "consumer.delete").await
    }

    /// What is so already stays so, without a trace.
    async fn change_state(
        &self,
        tenant: &str,
        name: &str,
        to: &str,
        action: &str,
    ) -> Result<Consumer, InboxError> {
        let consumer = self.consumer(tenant, name).await?;
        let mut tx = self.pool.begin().await?;
        let (from, generation, sought) = lock(&mut tx, &consumer).await?;
        if from == to {
            return consumer_in(&mut tx, &consumer).await;
        }
        if from == "deleting" {
            return Err(InboxError::conflict(format!(
                "consumer `{tenant}/{name}` is being deleted"
            )));
        }
        if to == "draining" && sought {
            return Err(InboxError::conflict(format!(
                "consumer `{tenant}/{name}` is being sought; wait for that, or take the seek back"
            )));
        }
        if to == "draining" && generation == 0 {
            return Err(InboxError::conflict(format!(
                "consumer `{tenant}/{name}` has no deployment, so nothing of it can be finished; \
                    pause it"
            )));
        }
        // Whatever the group was to be set to is of no interest to one that goes.
        const SET: &str = "UPDATE oncebox.consumer SET state = $2, revision = revision + 1, \
            seek = CASE WHEN $2 <> 'deleting' THEN seek END WHERE consumer_id = $1";
        sqlx::query(SET).bind(consumer.consumer_id).bind(to).execute(&mut *tx).await?;
        self.audit(&mut tx, action, Subject::of(tenant, name), json!({ "from": from })).await?;
        tx.commit().await?;
        self.announce(&consumer).await;
        self.consumer(tenant, name).await
    }

    /// Messages of a consumer that are still to be run; more than 10,000 are counted as one more.
    pub async fn open_messages(&self, consumer: &Consumer) -> Result<i64, InboxError> {
        self.open_of(&consumer.tenant, consumer.consumer_id).await
    }

    pub(crate) async fn open_of(&self, tenant: &str, consumer_id: i32) -> Result<i64, InboxError> {
        const OPEN: &str = "SELECT count(*) FROM (SELECT FROM oncebox.inbox WHERE consumer_id = $1 \
            AND status IN ('received', 'in_progress', 'failed_retryable') LIMIT $2) o";
        let place = self.place(&self.tenant(tenant).await?)?;
        Ok(sqlx::query_scalar(OPEN)
            .bind(consumer_id)
            .bind(OPEN_MAX + 1)
            .fetch_one(&place.pool)
            .await?)
    }

    /// Make a consumer whose messages are all settled `paused`. True: it is done, by this host or
    /// by another.
    pub async fn finish_drain(&self, standing: &Standing) -> Result<bool, InboxError> {
        let Standing { consumer_id, tenant, name, revision, .. } = standing;
        let mut tx = self.pool.begin().await?;
        // Once every host has heard of it, only retry workers change the inbox, and they add
        // nothing.
        if !late_hosts(&mut tx, *consumer_id, *revision, false).await?.is_empty()
            || self.open_of(tenant, *consumer_id).await? > 0
        {
            return Ok(false);
        }
        hooks::point("consumer:drained:before");
        const PAUSE: &str = "UPDATE oncebox.consumer SET state = 'paused', revision = revision + 1 \
            WHERE consumer_id = $1 AND revision = $2 AND state = 'draining'";
        let paused = sqlx::query(PAUSE).bind(consumer_id).bind(revision).execute(&mut *tx).await?;
        if paused.rows_affected() > 0 {
            self.audit(&mut tx, "consumer.drained", Subject::of(tenant, name), json!({})).await?;
        }
        tx.commit().await?;
        Ok(true)
    }
}

/// Lock a consumer's row against other changes: its state, its generation, and whether it is being
/// sought.
pub(crate) async fn lock(
    connection: &mut PgConnection,
    consumer: &Consumer,
) -> Result<(String, i64, bool), InboxError> {
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

/// Hosts that live and have not yet done what a revision asks for; with `stopped`, those that still
/// run anything of the consumer.
pub(crate) async fn late_hosts(
    connection: &mut PgConnection,
    consumer_id: i32,
    revision: i64,
    stopped: bool,
) -> Result<Vec<String>, InboxError> {
    let list = format!(
        "SELECT h.name FROM oncebox.host h LEFT JOIN oncebox.host_consumer r ON r.host_id = \
            h.host_id AND r.consumer_id = $1 \
         WHERE h.seen_at > now() - {GONE} AND (r.run_revision IS NULL OR r.run_revision < $2 OR \
         ($3 AND r.run_state <> 'stopped')) \
         ORDER BY h.host_id"
    );
    let late = sqlx::query_scalar(sqlx::AssertSqlSafe(list))
        .bind(consumer_id)
        .bind(revision)
        .bind(stopped);
    Ok(late.fetch_all(connection).await?)
}
