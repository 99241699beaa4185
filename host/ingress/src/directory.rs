//! The consumers that take messages over HTTP, as the host's database has them now. A task reads all
//! of them together, once a second, so that no request waits for that, and one under an unknown name
//! costs no query.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
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
    time::{Instant, sleep, timeout},
};

use crate::{body::BodyMemory, verifier::Verifier};

/// Pause between two looks. A change takes effect with the next one.
const EVERY: Duration = Duration::from_secs(1);
/// Longest look.
const LOOK_MAX: Duration = Duration::from_secs(5);
/// Age at which what was read counts no more: a secret may have been taken away since.
const STALE: Duration = Duration::from_secs(10);
/// Transactions of one tenant at a time, on this host: fewer than there are for all.
const TENANT_STORES_MAX: usize = 3;
/// The same in a database of its own, of whose few connections the host's own work needs the rest.
const OWN_STORES_MAX: usize = 1;

/// A consumer that takes messages over HTTP.
pub(crate) struct Receiver {
    pub(crate) row: IngressRow,
    pub(crate) policy: Policy,
    pub(crate) ingress: IngressPolicy,
    /// Sources of a request's identity.
    pub(crate) identity: IdentityPolicy,
    pub(crate) verifier: Verifier,
    /// Memory for the bodies of its requests.
    pub(crate) memory: BodyMemory,
    /// Verified requests a second.
    bucket: Mutex<TokenBucket>,
    /// Turns of its tenant.
    pub(crate) turns: Arc<Semaphore>,
    /// Database of the inbox and key of payload hashes, once they are known.
    target: AsyncMutex<Option<(PgPool, PayloadKey)>>,
}

/// What is known of a name.
pub(crate) enum Lookup {
    Receiver(Arc<Receiver>),
    /// No consumer takes messages over HTTP under it.
    Nobody,
    /// The policy or the secret cannot be used.
    Unusable,
    /// The database has not answered for a while.
    Unknown,
}

type Names = (String, String);

#[derive(Default)]
struct Known {
    read_at: Option<Instant>,
    /// Whether the last look failed.
    is_failing: bool,
    /// None: a policy or a secret that cannot be used.
    receivers: Arc<HashMap<Names, Option<Arc<Receiver>>>>,
    turns: HashMap<i32, Arc<Semaphore>>,
}

/// The consumers that take messages over HTTP.
pub(crate) struct Directory {
    control: Control,
    memory: Arc<Semaphore>,
    known: Mutex<Known>,
}

impl Directory {
    /// Creates a directory that reads the host's database.
    pub(crate) fn new(control: Control) -> Self {
        Self { control, memory: BodyMemory::of_host(), known: Mutex::default() }
    }

    /// Reads the consumers again and again. Does not end.
    pub(crate) async fn keep(&self) {
        loop {
            sleep(EVERY).await;
            self.look().await;
        }
    }

    /// Reads the consumers. Where that fails, what is known stays until it is stale.
    pub(crate) async fn look(&self) {
        let began = Instant::now();
        let error = match timeout(LOOK_MAX, self.control.ingress().rows()).await {
            Ok(Ok(rows)) => return self.renew(began, rows),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "no answer in time".to_owned(),
        };
        if !std::mem::replace(&mut self.known().is_failing, true) {
            tracing::warn!(error, "failed to read which consumers take messages over HTTP");
        }
    }

    /// Returns what is known of a consumer by its names.
    pub(crate) fn get(&self, tenant: &str, consumer: &str) -> Lookup {
        let names = (tenant.to_owned(), consumer.to_owned());
        let known = self.known();
        if known.read_at.is_none_or(|at| at.elapsed() > STALE) {
            return Lookup::Unknown;
        }
        match known.receivers.get(&names) {
            Some(Some(receiver)) => Lookup::Receiver(receiver.clone()),
            Some(None) => Lookup::Unusable,
            None => Lookup::Nobody,
        }
    }

    /// Takes over the rows. A consumer whose row is the same keeps what is known of it. Policies are
    /// read and secrets opened before the lock is taken, for which requests wait.
    fn renew(&self, began: Instant, rows: Vec<IngressRow>) {
        let (before, mut turns) = {
            let known = self.known();
            (known.receivers.clone(), known.turns.clone())
        };
        let tenants: HashSet<_> = rows.iter().map(|row| row.tenant_id).collect();
        turns.retain(|tenant_id, _| tenants.contains(tenant_id));
        let mut receivers = HashMap::with_capacity(rows.len());
        for row in rows {
            let names = (row.tenant.clone(), row.consumer.clone());
            let receiver = match before.get(&names) {
                Some(Some(same)) if same.row == row => Some(same.clone()),
                other => {
                    let receiver = self.receiver(row, &mut turns).map(Arc::new);
                    if receiver.is_none() && !matches!(other, Some(None)) {
                        tracing::warn!(
                            tenant = names.0,
                            consumer = names.1,
                            "messages over HTTP are refused, the policy or the secret cannot be \
                                used; set another secret with `oncebox consumer secret set`"
                        );
                    }
                    receiver
                }
            };
            receivers.insert(names, receiver);
        }
        *self.known() =
            Known { read_at: Some(began), is_failing: false, receivers: receivers.into(), turns };
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a consumer, ready for requests. None where its policy or its secret cannot be used.
    fn receiver(
        &self,
        row: IngressRow,
        turns: &mut HashMap<i32, Arc<Semaphore>>,
    ) -> Option<Receiver> {
        let policy: Policy = serde_json::from_value(row.policy.clone()).ok()?;
        let ingress = policy.ingress.clone()?;
        let opened = self.control.ingress().open(&row).ok();
        let opened = opened.filter(|opened| opened.scheme == ingress.verify)?;
        let verifier = Verifier::new(ingress.verify, &opened.secrets)?;
        let most = if row.has_own_database { OWN_STORES_MAX } else { TENANT_STORES_MAX };
        let turns = turns.entry(row.tenant_id);
        let turns = turns.or_insert_with(|| Semaphore::new(most).into());
        Some(Receiver {
            identity: ingress.identity(&policy.identity),
            memory: BodyMemory::of_consumer(self.memory.clone(), ingress.body_bytes_max),
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
