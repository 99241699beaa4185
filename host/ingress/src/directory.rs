//! The consumers that take messages over HTTP, as the host's database has them now. All of them are
//! read together: a request under a name that nobody has costs no query.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use oncebox_control::{Control, IngressRow};
use oncebox_model::{
    InboxError, PayloadKey,
    policy::{IdentityPolicy, IngressPolicy, Policy},
    token_bucket::TokenBucket,
};
use sqlx::PgPool;
use tokio::{
    sync::{Mutex as AsyncMutex, Semaphore},
    time::{Instant, timeout},
};

use crate::verifier::Verifier;

/// Time for which what was read is used. A change takes effect within it.
const FRESH: Duration = Duration::from_secs(1);
/// Longest look.
const LOOK_MAX: Duration = Duration::from_secs(5);
/// Transactions of one tenant at a time, on this host: fewer than there are for all.
const TENANT_STORES_MAX: usize = 3;

/// A consumer that takes messages over HTTP.
pub(crate) struct Receiver {
    pub(crate) row: IngressRow,
    pub(crate) policy: Policy,
    pub(crate) ingress: IngressPolicy,
    /// Sources of a request's identity.
    pub(crate) identity: IdentityPolicy,
    /// None where no secret can be used: all requests are refused.
    pub(crate) verifier: Option<Verifier>,
    /// Verified requests a second.
    pub(crate) bucket: Mutex<TokenBucket>,
    /// Turns of its tenant.
    pub(crate) turns: Arc<Semaphore>,
    /// Database of the inbox and key of payload hashes, once they are known.
    target: AsyncMutex<Option<(PgPool, PayloadKey)>>,
}

/// The host's database did not say who takes messages over HTTP.
#[derive(Debug, thiserror::Error)]
#[error("failed to read the consumers that take messages over HTTP: {0}")]
pub(crate) struct Unread(String);

impl From<InboxError> for Unread {
    fn from(error: InboxError) -> Self {
        Self(error.to_string())
    }
}

type Names = (String, String);

#[derive(Default)]
struct Known {
    at: Option<Instant>,
    is_read: bool,
    receivers: HashMap<Names, Arc<Receiver>>,
    turns: HashMap<i32, Arc<Semaphore>>,
}

/// The consumers that take messages over HTTP, read again when what is known is older than a second.
pub(crate) struct Directory {
    control: Control,
    known: AsyncMutex<Known>,
}

impl Directory {
    /// Creates a directory that reads the host's database.
    pub(crate) fn new(control: Control) -> Self {
        Self { control, known: AsyncMutex::default() }
    }

    /// Returns a consumer by its names; none where it takes nothing over HTTP.
    ///
    /// # Errors
    ///
    /// An error of the host's database.
    pub(crate) async fn get(
        &self,
        tenant: &str,
        consumer: &str,
    ) -> Result<Option<Arc<Receiver>>, Unread> {
        let mut known = self.known.lock().await;
        if known.at.is_none_or(|at| at.elapsed() >= FRESH) {
            known.at = Some(Instant::now());
            // Until the next look nothing is known where this one fails, or is dropped.
            known.is_read = false;
            let rows = timeout(LOOK_MAX, self.control.ingress().rows()).await;
            self.renew(&mut known, rows.map_err(|_| Unread("no answer in time".to_owned()))??);
            known.is_read = true;
        }
        if !known.is_read {
            return Err(Unread("it did not answer a moment ago".to_owned()));
        }
        Ok(known.receivers.get(&(tenant.to_owned(), consumer.to_owned())).cloned())
    }

    /// Takes over the rows. A consumer whose row is the same keeps what is known of it.
    fn renew(&self, known: &mut Known, rows: Vec<IngressRow>) {
        let mut before = std::mem::take(&mut known.receivers);
        known.turns.retain(|tenant_id, _| rows.iter().any(|row| row.tenant_id == *tenant_id));
        for row in rows {
            let names = (row.tenant.clone(), row.consumer.clone());
            let receiver = match before.remove(&names).filter(|before| before.row == row) {
                Some(before) => Some(before),
                None => self.receiver(row, &mut known.turns).map(Arc::new),
            };
            if let Some(receiver) = receiver {
                known.receivers.insert(names, receiver);
            }
        }
    }

    /// Returns a consumer, ready for requests. None where its policy is not readable.
    fn receiver(
        &self,
        row: IngressRow,
        turns: &mut HashMap<i32, Arc<Semaphore>>,
    ) -> Option<Receiver> {
        let policy: Policy = serde_json::from_value(row.policy.clone()).ok()?;
        let ingress = policy.ingress.clone()?;
        let secrets = self.control.ingress().open(&row);
        let verifier = secrets.as_ref().ok().and_then(|all| Verifier::new(ingress.verify, all));
        if verifier.is_none() {
            tracing::warn!(
                tenant = row.tenant,
                consumer = row.consumer,
                scheme = ingress.verify.name(),
                error = secrets.err().map(tracing::field::display),
                "the secret for messages over HTTP cannot be used, all are refused; set another \
                    one with `oncebox consumer secret set`"
            );
        }
        let turns = turns.entry(row.tenant_id);
        let turns = turns.or_insert_with(|| Semaphore::new(TENANT_STORES_MAX).into());
        Some(Receiver {
            identity: ingress.identity(&policy.identity),
            turns: turns.clone(),
            bucket: Mutex::default(),
            target: AsyncMutex::default(),
            row,
            policy,
            ingress,
            verifier,
        })
    }

    /// Returns the database of a consumer's inbox, and the key of its payload hashes.
    ///
    /// # Errors
    ///
    /// An error of the host's database, or `Sealed` where the tenant's credentials do not open.
    pub(crate) async fn target(
        &self,
        receiver: &Receiver,
    ) -> Result<(PgPool, PayloadKey), InboxError> {
        let mut target = receiver.target.lock().await;
        if let Some(known) = &*target {
            return Ok(known.clone());
        }
        let tenant = self.control.tenants().get(&receiver.row.tenant).await?;
        let of_session = self.control.tenant_databases().session_target(&tenant)?;
        let found = (of_session.pool, of_session.payload_key);
        *target = Some(found.clone());
        Ok(found)
    }
}

impl Receiver {
    /// Forgets the database of the inbox, which is another one now.
    pub(crate) async fn forget_target(&self) {
        *self.target.lock().await = None;
    }

    /// Takes one of the requests of this second; else returns the time until there is one.
    pub(crate) fn admit(&self) -> Result<(), Duration> {
        let (rate, now) = (self.ingress.requests_per_second, Instant::now());
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        if bucket.take(rate, 1, now) == 1 { Ok(()) } else { Err(bucket.next_in(rate)) }
    }
}
