//! The tenants and consumers, as the host's database has them now. That database is their source; a
//! tenant's own database has a copy without limits and policies.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use oncebox_model::{
    error::InboxError,
    outgoing::matches_destination,
    policy::{OnParked, Policy},
    tenant_limits::TenantLimits,
    tx::bounded,
};
use sqlx::PgPool;
use tokio::time::Instant;

/// Time for which an answer is used. A suspension, a limit or a policy takes effect within it.
const FRESH: Duration = Duration::from_secs(1);
/// Time after which an answer that nobody asks for is dropped.
const KEPT: Duration = Duration::from_secs(60);

/// A tenant, as far as its outgoing messages need it.
#[derive(Debug)]
pub(crate) struct TenantFacts {
    /// Key.
    pub(crate) tenant_id: i32,
    /// Name.
    pub(crate) name: String,
    /// Whether the tenant is neither suspended nor being deleted.
    pub(crate) is_active: bool,
    /// Destinations that its handlers may send to.
    pub(crate) allowed: Vec<String>,
    /// Its consumers, by key.
    pub(crate) consumers: BTreeMap<i32, ConsumerFacts>,
}

/// A consumer, as far as its outgoing messages need it.
#[derive(Debug)]
pub(crate) struct ConsumerFacts {
    /// Key.
    pub(crate) consumer_id: i32,
    /// Name.
    pub(crate) name: String,
    /// Whether it is being deleted.
    pub(crate) is_deleting: bool,
    /// Whether hosts keep their hands off its policy, since a host ended while it started it.
    pub(crate) is_quarantined: bool,
    /// Policy; none where it is not readable.
    pub(crate) policy: Option<Arc<Policy>>,
}

impl ConsumerFacts {
    /// Returns whether its messages may be sent now.
    pub(crate) fn is_sending(&self) -> bool {
        !self.is_deleting && !self.is_quarantined && self.policy.is_some()
    }
}

impl TenantFacts {
    /// Returns the consumers whose messages may be sent now.
    pub(crate) fn sending(&self) -> Vec<i32> {
        let sending = self.consumers.values().filter(|consumer| consumer.is_sending());
        sending.map(|consumer| consumer.consumer_id).collect()
    }

    /// Returns the consumers whose parked messages hold their lanes.
    pub(crate) fn stopping(&self) -> Vec<i32> {
        let stops = |policy: &Arc<Policy>| policy.outgoing.on_parked == OnParked::Stop;
        let stopping =
            self.consumers.values().filter(|consumer| consumer.policy.as_ref().is_some_and(stops));
        stopping.map(|consumer| consumer.consumer_id).collect()
    }

    /// Returns whether the tenant may send to a destination now.
    pub(crate) fn allows(&self, destination: &str) -> bool {
        self.allowed.iter().any(|entry| matches_destination(entry, destination))
    }

    /// Returns a consumer by its name, unless it is being deleted.
    pub(crate) fn by_name(&self, name: &str) -> Option<&ConsumerFacts> {
        self.consumers.values().find(|consumer| consumer.name == name && !consumer.is_deleting)
    }
}

#[derive(sqlx::FromRow)]
struct TenantRow {
    name: String,
    is_active: bool,
    #[sqlx(json)]
    limits: TenantLimits,
}

#[derive(sqlx::FromRow)]
struct ConsumerRow {
    consumer_id: i32,
    name: String,
    is_deleting: bool,
    is_quarantined: bool,
    policy: serde_json::Value,
}

/// An answer, and the time of its question; none for a tenant that does not exist.
type Known = (Instant, Option<Arc<TenantFacts>>);

/// Tenants and their consumers, read again when an answer is older than a second.
pub(crate) struct Directory {
    pool: PgPool,
    known: Mutex<HashMap<i32, Known>>,
}

impl Directory {
    /// Creates a directory that reads the host's database.
    pub(crate) fn new(pool: PgPool) -> Self {
        Self { pool, known: Mutex::default() }
    }

    /// Returns a tenant with its consumers; none where it does not exist.
    ///
    /// # Errors
    ///
    /// An error of the host's database.
    pub(crate) async fn tenant(
        &self,
        tenant_id: i32,
    ) -> Result<Option<Arc<TenantFacts>>, InboxError> {
        let now = Instant::now();
        self.tenant_since(tenant_id, now.checked_sub(FRESH).unwrap_or(now)).await
    }

    /// Returns a tenant as it was at this moment, or later.
    ///
    /// # Errors
    ///
    /// An error of the host's database.
    pub(crate) async fn tenant_since(
        &self,
        tenant_id: i32,
        since: Instant,
    ) -> Result<Option<Arc<TenantFacts>>, InboxError> {
        let asked = Instant::now();
        if let Some((at, facts)) = self.known().get(&tenant_id)
            && *at >= since
        {
            return Ok(facts.clone());
        }
        let facts = self.read(tenant_id).await?.map(Arc::new);
        let mut known = self.known();
        known.retain(|_, (at, _)| at.elapsed() < KEPT);
        known.insert(tenant_id, (asked, facts.clone()));
        Ok(facts)
    }

    async fn read(&self, tenant_id: i32) -> Result<Option<TenantFacts>, InboxError> {
        const TENANT: &str = "SELECT t.name, t.state = 'active' AS is_active, t.limits \
            FROM oncebox.tenant t WHERE t.tenant_id = $1";
        const CONSUMERS: &str = "SELECT c.consumer_id, c.name, c.state = 'deleting' AS \
            is_deleting, coalesce(s.quarantined_revision = c.policy_revision \
                OR s.quarantined_revision IS NOT NULL AND s.deaths >= 3, false) \
                AS is_quarantined, c.policy \
            FROM oncebox.consumer c LEFT JOIN oncebox.consumer_start s USING (consumer_id) \
            WHERE c.tenant_id = $1";
        let query = sqlx::query_as::<_, TenantRow>(TENANT).bind(tenant_id);
        let Some(tenant) = bounded(query.fetch_optional(&self.pool)).await? else {
            return Ok(None);
        };
        let query = sqlx::query_as::<_, ConsumerRow>(CONSUMERS).bind(tenant_id);
        let consumers = bounded(query.fetch_all(&self.pool)).await?;
        let consumers = consumers.into_iter().map(|row| (row.consumer_id, row.into_facts()));
        Ok(Some(TenantFacts {
            tenant_id,
            name: tenant.name,
            is_active: tenant.is_active,
            allowed: tenant.limits.destinations_allowed().to_vec(),
            consumers: consumers.collect(),
        }))
    }

    fn known(&self) -> MutexGuard<'_, HashMap<i32, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ConsumerRow {
    fn into_facts(self) -> ConsumerFacts {
        let Self { consumer_id, name, is_deleting, is_quarantined, policy } = self;
        let policy = serde_json::from_value(policy).ok().map(Arc::new);
        ConsumerFacts { consumer_id, name, is_deleting, is_quarantined, policy }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn consumer(consumer_id: i32, name: &str, policy: &str) -> (i32, ConsumerFacts) {
        let policy = Policy::parse(&format!("topics = ['t']\nack = 'after_commit'\n{policy}"));
        let facts = ConsumerFacts {
            consumer_id,
            name: name.to_owned(),
            is_deleting: false,
            is_quarantined: false,
            policy: policy.ok().map(Arc::new),
        };
        (consumer_id, facts)
    }

    fn tenant(consumers: Vec<(i32, ConsumerFacts)>) -> TenantFacts {
        TenantFacts {
            tenant_id: 1,
            name: "acme".to_owned(),
            is_active: true,
            allowed: vec!["kafka:acme.*".to_owned(), "inbox:billing".to_owned()],
            consumers: consumers.into_iter().collect(),
        }
    }

    // What could go wrong: a destination that was taken away is still sent to, or a parked message
    // stops the lanes of a consumer that lets them go on.
    #[test]
    fn what_may_be_sent_and_what_stops_is_by_the_rows() {
        let stopping = "[outgoing]\non_parked = 'stop'";
        let mut of = vec![
            consumer(1, "a", ""),
            consumer(2, "b", stopping),
            consumer(3, "c", ""),
            consumer(4, "d", "no = 'policy'"),
        ];
        of[2].1.is_deleting = true;
        let mut facts = tenant(of);
        assert_eq!((facts.sending(), facts.stopping()), (vec![1, 2], vec![2]));
        assert!(facts.by_name("a").is_some() && facts.by_name("c").is_none());
        let allowed = ["kafka:acme.orders", "kafka:other", "inbox:billing", "inbox:billing2"];
        assert_eq!(allowed.map(|text| facts.allows(text)), [true, false, true, false]);
        facts.allowed.clear();
        assert!(!facts.allows("inbox:billing"));
        if let Some(quarantined) = facts.consumers.get_mut(&1) {
            quarantined.is_quarantined = true;
        }
        assert_eq!(facts.sending(), [2]);
    }
}
