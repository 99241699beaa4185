//! Changes of the offsets of a consumer's group. The target offsets are in the row until they are
//! set, and until then no host runs the consumer. If a host dies on the way, another host completes
//! the seek. Setting the offsets twice has the effect of setting them once.

use chrono::{DateTime, Utc};
use oncebox_model::error::InboxError;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sqlx::{Postgres, types::Json};

use crate::{
    audit::Subject,
    consumers::{
        Consumer, lock_consumer,
        state::{late_hosts, lock},
    },
    control::Control,
    handles::{Consumers, Reconciliation},
};

/// The offsets at which a group is to continue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seek {
    /// Next offset of each partition that is set.
    pub offsets: Vec<SeekOffset>,
    /// Actor that requested it.
    pub by: String,
    /// Time of the request.
    pub at: DateTime<Utc>,
}

/// The next offset of a partition.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SeekOffset {
    /// Topic.
    pub topic: String,
    /// Partition.
    pub partition: i32,
    /// Offset of the record that is read next.
    pub offset: i64,
}

/// The work on a seek.
pub enum SeekTurn {
    /// None: the seek is complete, or another host works on it.
    None,
    /// Waiting for these hosts, which still run the consumer.
    Waits(Vec<String>),
    /// The caller's work.
    Ours(Box<SeekInHand>),
}

/// A seek that no other host carries out or cancels while this is held.
pub struct SeekInHand {
    /// Consumer, with its policy.
    pub consumer: Consumer,
    /// Offsets to set.
    pub offsets: Vec<SeekOffset>,
    control: Control,
    tx: sqlx::Transaction<'static, Postgres>,
}

impl Consumers<'_> {
    /// Requests a seek. A repeated request with equal offsets changes nothing. Another one is
    /// refused while the first is under way. Returns the consumer.
    ///
    /// # Errors
    /// `NotFound` where there is no such consumer. `Conflict` where it is being deleted or drained,
    /// or where another seek is under way.
    pub async fn begin_seek(
        &self,
        tenant: &str,
        name: &str,
        offsets: Vec<SeekOffset>,
        details: Value,
    ) -> Result<Consumer, InboxError> {
        let consumer = self.get(tenant, name).await?;
        let mut tx = self.0.pool.begin().await?;
        let (state, _, sought) = lock(&mut tx, &consumer).await?;
        if !state.allows_seek() {
            return Err(InboxError::conflict(format!(
                "consumer `{tenant}/{name}` is {state}; a seek needs one that runs or is paused"
            )));
        }
        if sought {
            let under_way = lock_consumer(&mut tx, &consumer).await?;
            return if under_way.seek.as_ref().is_some_and(|seek| seek.offsets == offsets) {
                Ok(under_way)
            } else {
                Err(InboxError::conflict(format!(
                    "consumer `{tenant}/{name}` is being sought already; wait for that, or take it \
                        back"
                )))
            };
        }
        let seek = Seek { offsets, by: self.0.actor.clone(), at: Utc::now() };
        const SET: &str =
            "UPDATE oncebox.consumer SET seek = $2, revision = revision + 1 WHERE consumer_id = $1";
        sqlx::query(SET).bind(consumer.consumer_id).bind(Json(&seek)).execute(&mut *tx).await?;
        self.0
            .audit()
            .record(
                &mut tx,
                "consumer.seek",
                Subject::of(tenant, name),
                json!({ "offsets": seek.offsets, "plan": details }),
            )
            .await?;
        tx.commit().await?;
        self.0.deployments().announce(&consumer).await;
        self.get(tenant, name).await
    }

    /// Cancels a seek that is not complete. Waits for a host that is about to carry it out.
    /// Returns the consumer.
    ///
    /// # Errors
    /// `NotFound` where there is no such consumer, or an error of the host's database.
    pub async fn cancel_seek(&self, tenant: &str, name: &str) -> Result<Consumer, InboxError> {
        let consumer = self.get(tenant, name).await?;
        let mut tx = self.0.pool.begin().await?;
        if !lock(&mut tx, &consumer).await?.2 {
            return lock_consumer(&mut tx, &consumer).await;
        }
        clear(&mut tx, consumer.consumer_id).await?;
        self.0
            .audit()
            .record(&mut tx, "consumer.seek.cancel", Subject::of(tenant, name), json!({}))
            .await?;
        tx.commit().await?;
        self.0.deployments().announce(&consumer).await;
        self.get(tenant, name).await
    }
}

impl Reconciliation<'_> {
    /// Takes a seek for this host, once no live host runs the consumer.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn seek_turn(&self, consumer_id: i32) -> Result<SeekTurn, InboxError> {
        let mut tx = self.0.pool.begin().await?;
        // A host that stops in the middle must not hold the lock for ever.
        sqlx::query("SET LOCAL idle_in_transaction_session_timeout = '60s'")
            .execute(&mut *tx)
            .await?;
        const LOCK: &str = "SELECT revision FROM oncebox.consumer WHERE consumer_id = $1 AND seek \
            IS NOT NULL AND state <> 'deleting' \
            FOR NO KEY UPDATE SKIP LOCKED";
        let Some(revision) =
            sqlx::query_scalar(LOCK).bind(consumer_id).fetch_optional(&mut *tx).await?
        else {
            return Ok(SeekTurn::None);
        };
        let late = late_hosts(&mut tx, consumer_id, revision, true).await?;
        if !late.is_empty() {
            tx.rollback().await?;
            return Ok(SeekTurn::Waits(late));
        }
        let Some(consumer) = self.0.consumers().by_id(consumer_id).await? else {
            return Ok(SeekTurn::None);
        };
        let Some(Seek { offsets, .. }) = consumer.seek.clone() else { return Ok(SeekTurn::None) };
        Ok(SeekTurn::Ours(Box::new(SeekInHand { consumer, offsets, control: self.0.clone(), tx })))
    }
}

impl SeekInHand {
    /// Records that the brokers have the offsets. The consumer then continues.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn done(mut self) -> Result<(), InboxError> {
        let Consumer { consumer_id, tenant, name, .. } = &self.consumer;
        clear(&mut self.tx, *consumer_id).await?;
        self.control
            .audit()
            .record(
                &mut self.tx,
                "consumer.seek.done",
                Subject::of(tenant, name),
                json!({ "offsets": self.offsets }),
            )
            .await?;
        self.tx.commit().await?;
        self.control.deployments().announce(&self.consumer).await;
        Ok(())
    }
}

async fn clear(connection: &mut sqlx::PgConnection, consumer_id: i32) -> Result<(), InboxError> {
    const CLEAR: &str =
        "UPDATE oncebox.consumer SET seek = NULL, revision = revision + 1 WHERE consumer_id = $1";
    sqlx::query(CLEAR).bind(consumer_id).execute(connection).await?;
    Ok(())
}
