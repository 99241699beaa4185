//! Erasure: what the host stores of the payloads of a data subject becomes unreadable, and the
//! messages of the subject stay refused.
//!
//! A call works for a few seconds and returns how far the erasure is. The caller repeats it until
//! there is a proof. The row of `oncebox.erasure`, in the database with the tenant's inbox, has the
//! progress; each step changes it in the transaction of what it erased. So an erasure continues
//! after a crash at any step, and two callers that request one erasure share it.
//!
//! Each store of payloads has a module that erases in it: the inbox, its detached time partitions,
//! and the archive.

// The inbox, with its history and its edits.
mod inbox;
// Time partitions that are out of the inbox and not dropped yet.
mod removed;
// Files of the archive.
mod archive;
// One such file, in memory.
mod file;
// The messages that one transaction looks at.
mod window;
// The vacuum at the end.
mod vacuum;
// The figures of an erasure that has ended.
mod proof;

use std::time::Duration;

use oncebox_model::{error::InboxError, hooks};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use self::inbox::{ErasedConsumer, ErasureStep, InboxErasure};
use crate::{
    audit::Subject,
    database::tenant_database::TenantDatabase,
    handles::Erasures,
    tenants::{Tenant, moves::check_may_begin},
};

pub use proof::{ErasedCount, ErasureProof};

/// Longest work of one call, before it returns how far the erasure is.
const PATIENCE: Duration = Duration::from_secs(1);
/// Pause before what others hold is tried again.
const AGAIN: Duration = Duration::from_millis(200);

/// The messages of a data subject.
#[derive(Clone, PartialEq, Eq)]
pub enum ErasureTarget {
    /// The message with this id, in each consumer.
    MessageId(String),
    /// The messages whose record key or ordering key this is.
    Key(Vec<u8>),
}

/// An erasure that an operator requests.
#[derive(Clone)]
pub struct ErasureRequest {
    /// Messages that are erased.
    pub target: ErasureTarget,
    /// Name of the only consumer; none for all consumers of the tenant.
    pub consumer: Option<String>,
    /// Reason; stored with each message and in the audit log.
    pub reason: String,
}

/// The progress of an erasure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErasureProgress {
    /// Messages that were erased so far.
    pub erased: i64,
    /// Messages that were looked at so far; each pass looks at all of them.
    pub looked_at: i64,
    /// Messages, or transactions with unknown messages, that others hold. The erasure cannot end
    /// before they let go of them.
    pub in_flight: i64,
    /// Text for operators: what the erasure waits for.
    pub waits_for: Option<String>,
    /// Proof, once the erasure has ended.
    pub proof: Option<ErasureProof>,
}

impl ErasureTarget {
    /// Returns the purpose of the key under which the target is hashed.
    fn purpose(&self) -> &'static str {
        match self {
            Self::MessageId(_) => "erased message id",
            Self::Key(_) => "erased key",
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::MessageId(id) => id.as_bytes(),
            Self::Key(key) => key,
        }
    }

    /// Returns the names of the target for readers: the id in clear, or the hash of the key.
    fn shown(&self, subject: &[u8; 32]) -> (Option<String>, Option<String>) {
        match self {
            Self::MessageId(id) => (Some(id.clone()), None),
            Self::Key(_) => (None, Some(hex::encode(subject))),
        }
    }
}

impl Erasures<'_> {
    /// Erases what the inbox and the archive hold of a subject's payloads: payload, headers, their
    /// hash, results and texts of failures, also in history and edits. Messages that are not
    /// settled are discarded. Works for about a second, or for as long as the vacuum of one table
    /// or one file of the archive takes. Returns the progress; there is a proof in it once nothing
    /// is left.
    ///
    /// # Errors
    /// `NotFound` for a tenant or consumer that does not exist. `Conflict` where another caller has
    /// ended the erasure meanwhile, or where this process cannot reach the archive. `Archive` where
    /// a file of it is missing or damaged, or it does not answer. An error of the host's database
    /// or of the tenant's.
    pub async fn erase(
        &self,
        tenant: &str,
        request: &ErasureRequest,
    ) -> Result<ErasureProgress, InboxError> {
        let erasure = self.open(tenant, request).await?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut waits_for = None;
            let mut is_held = false;
            let step = match erasure.step().await? {
                ErasureStep::Done => erasure.look_at_archive().await?,
                step => step,
            };
            match step {
                ErasureStep::Erased => {}
                ErasureStep::Again => is_held = true,
                ErasureStep::Waits(wait) => (waits_for, is_held) = (Some(wait), true),
                ErasureStep::Done => {
                    if !erasure.vacuum_next().await? {
                        return erasure.conclude().await;
                    }
                }
            }
            if Instant::now() > deadline {
                return erasure.progress(waits_for).await;
            }
            if is_held {
                sleep(AGAIN).await;
            }
        }
    }

    /// Finds the erasure that is under way, or begins it.
    async fn open(
        &self,
        tenant: &str,
        request: &ErasureRequest,
    ) -> Result<InboxErasure, InboxError> {
        let tenant = self.0.tenants().get(tenant).await?;
        let database = self.0.tenant_databases().get(&tenant)?;
        let consumer_id = match &request.consumer {
            Some(name) => Some(self.0.consumers().get(&tenant.name, name).await?.consumer_id),
            None => None,
        };
        let (purpose, bytes) = (request.target.purpose(), request.target.bytes());
        let subject = self.0.tenant_databases().credentials(&tenant)?.keyed_hash(purpose, bytes);
        let consumers = self.consumers_of(&tenant, consumer_id).await?;
        let scope = ErasureScope { tenant: &tenant, consumer_id, subject: &subject, request };
        let erasure_id = self.begin(&database, &scope).await?;
        Ok(InboxErasure {
            control: self.0.clone(),
            target: request.target.clone(),
            consumer: request.consumer.clone(),
            tenant,
            database,
            consumers,
            subject,
            erasure_id,
        })
    }

    /// Lists the consumers whose messages are looked at.
    async fn consumers_of(
        &self,
        tenant: &Tenant,
        only: Option<i32>,
    ) -> Result<Vec<ErasedConsumer>, InboxError> {
        const CONSUMERS: &str = "SELECT c.consumer_id, c.name, c.retention_class, \
            ARRAY(SELECT d.deployment_id FROM oncebox.deployment d \
                WHERE d.consumer_id = c.consumer_id AND d.role = 'shadow') AS shadows \
            FROM oncebox.consumer c WHERE c.tenant_id = $1 AND ($2::int IS NULL OR \
            c.consumer_id = $2) ORDER BY c.consumer_id";
        let query = sqlx::query_as(CONSUMERS).bind(tenant.tenant_id).bind(only);
        Ok(query.fetch_all(&self.0.pool).await?)
    }

    /// Returns the id of the erasure's row, which is new where none of this subject is under way.
    /// The audit log has the begin, since what is erased first is gone whether or not the erasure
    /// ends.
    async fn begin(
        &self,
        database: &TenantDatabase,
        scope: &ErasureScope<'_>,
    ) -> Result<i64, InboxError> {
        // What came since the last request is looked at, too.
        const FIND: &str = "UPDATE oncebox.erasure e SET worked_at = now(), \
                pass = CASE WHEN o.is_old THEN greatest(e.pass, 2) ELSE e.pass END, \
                empty_passes = CASE WHEN o.is_old THEN 0 ELSE e.empty_passes END, \
                at_consumer = CASE WHEN o.is_old THEN 0 ELSE e.at_consumer END, \
                at_message = CASE WHEN o.is_old THEN '' ELSE e.at_message END, \
                removed_table = CASE WHEN o.is_old THEN '' ELSE e.removed_table END, \
                removed_consumer = CASE WHEN o.is_old THEN 0 ELSE e.removed_consumer END, \
                removed_message = CASE WHEN o.is_old THEN '' ELSE e.removed_message END, \
                at_file = CASE WHEN o.is_old THEN '' ELSE e.at_file END, \
                passed_at = CASE WHEN o.is_old THEN NULL ELSE e.passed_at END \
            FROM (SELECT p.erasure_id, p.worked_at < now() - interval '1 minute' AS is_old \
                FROM oncebox.erasure p WHERE p.tenant_id = $1 AND \
                coalesce(p.consumer_id, 0) = coalesce($2, 0) AND p.subject = $3) o \
            WHERE e.erasure_id = o.erasure_id RETURNING e.erasure_id";
        // Another caller may have begun it just now.
        const BEGIN: &str = "INSERT INTO oncebox.erasure (tenant_id, consumer_id, subject, actor, \
            reason) VALUES ($1, $2, $3, $4, $5) \
            ON CONFLICT (tenant_id, (coalesce(consumer_id, 0)), subject) \
            DO UPDATE SET subject = excluded.subject RETURNING erasure_id";
        let ErasureScope { tenant, consumer_id, subject, request } = scope;
        let query = sqlx::query_scalar(FIND).bind(tenant.tenant_id).bind(consumer_id);
        let found = query.bind(&subject[..]).fetch_optional(&database.pool).await?;
        if let Some(erasure_id) = found {
            return Ok(erasure_id);
        }
        let (audit, details) = (self.0.audit(), scope.details());
        if database.is_dedicated {
            let mut tx = self.0.pool.begin().await?;
            audit.record(&mut tx, "erase.begin", scope.audit_subject(), details.clone()).await?;
            tx.commit().await?;
        }
        let mut tx = database.pool.begin().await?;
        check_may_begin(&self.0.pool, &mut tx, tenant.tenant_id).await?;
        if !database.is_dedicated {
            audit.record(&mut tx, "erase.begin", scope.audit_subject(), details).await?;
        }
        let query = sqlx::query_scalar(BEGIN).bind(tenant.tenant_id).bind(consumer_id);
        let query = query.bind(&subject[..]).bind(&self.0.actor).bind(&request.reason);
        let erasure_id = query.fetch_one(&mut *tx).await?;
        tx.commit().await?;
        hooks::point("erase:begin:after");
        Ok(erasure_id)
    }
}

/// What an erasure that begins is about.
struct ErasureScope<'a> {
    tenant: &'a Tenant,
    consumer_id: Option<i32>,
    subject: &'a [u8; 32],
    request: &'a ErasureRequest,
}

impl ErasureScope<'_> {
    fn details(&self) -> Value {
        let (message_id, key_hmac) = self.request.target.shown(self.subject);
        json!({ "message_id": message_id, "key_hmac": key_hmac, "reason": self.request.reason })
    }

    fn audit_subject(&self) -> Subject {
        subject(&self.tenant.name, self.request.consumer.as_deref())
    }
}

/// Returns the object of an erasure in the audit log: the tenant, or its one consumer.
fn subject(tenant: &str, consumer: Option<&str>) -> Subject {
    consumer.map_or_else(|| Subject::tenant(tenant), |consumer| Subject::of(tenant, consumer))
}
