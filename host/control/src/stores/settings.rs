//! The stores that the settings of a process name, and the bounds of fetches from them.

use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use oncebox_model::error::InboxError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A server that speaks S3, as an operator names it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StoreSettings {
    /// URL of the server; empty for that of AWS in the region.
    pub endpoint: String,
    /// Region of the buckets.
    pub region: String,
    /// Certificates (PEM) of authorities to trust, beside the system's.
    pub ca_file: Option<PathBuf>,
    /// Whether an endpoint on another machine may be without TLS.
    pub allow_http: bool,
    /// Whether the endpoint may have an address of a private network.
    pub allow_private: bool,
}

/// Bounds of the fetches of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FetchLimits {
    /// Longest time of a fetch without progress.
    pub stall: Duration,
    /// Most fetches of one tenant from one store at a time.
    pub fetches_max: usize,
    /// Most fetches of one consumer at a time.
    pub consumer_fetches_max: usize,
    /// Memory for fetched payloads, bytes.
    pub memory_bytes: usize,
    /// Memory for the fetched payloads of one tenant, bytes.
    pub tenant_memory_bytes: usize,
}

impl Default for FetchLimits {
    fn default() -> Self {
        Self {
            stall: Duration::from_secs(10),
            fetches_max: 8,
            consumer_fetches_max: 4,
            memory_bytes: 512 << 20,
            tenant_memory_bytes: 128 << 20,
        }
    }
}

/// The stores of a process, and the fetches under way.
pub struct Stores {
    stores: BTreeMap<String, StoreSettings>,
    pub(super) limits: FetchLimits,
    /// The fetches that each tenant may yet begin from each store.
    permits: Pools<(i32, String)>,
    /// The memory that each tenant may yet use.
    tenants: Pools<i32>,
    /// The memory that all tenants may yet use.
    memory: Arc<Semaphore>,
}

/// Semaphores by key, each for as long as it is used.
struct Pools<K>(Mutex<HashMap<K, Weak<Semaphore>>>);

impl<K: Hash + Eq> Pools<K> {
    /// Returns the semaphore of a key, with this many permits where it is new.
    fn of(&self, key: K, permits: usize) -> Arc<Semaphore> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = all.get(&key).and_then(Weak::upgrade) {
            return known;
        }
        all.retain(|_, known| known.strong_count() > 0);
        let new = Arc::new(Semaphore::new(permits));
        all.insert(key, Arc::downgrade(&new));
        new
    }
}

impl<K> Default for Pools<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl Stores {
    /// Returns stores by name, with the bounds of fetches from them.
    pub fn new(stores: BTreeMap<String, StoreSettings>, limits: FetchLimits) -> Self {
        let memory = Arc::new(Semaphore::new(pages(limits.memory_bytes) as usize));
        let (permits, tenants) = (Pools::default(), Pools::default());
        Self { stores, limits, permits, tenants, memory }
    }

    /// Returns the settings of a store.
    ///
    /// # Errors
    /// `Invalid` where no store has this name.
    pub(super) fn get(&self, store: &str) -> Result<&StoreSettings, InboxError> {
        self.stores.get(store).ok_or_else(|| {
            let known = match self.stores.is_empty() {
                true => "they name none".to_owned(),
                false => {
                    let names = self.stores.keys().map(|name| format!("`{name}`"));
                    format!("they name {}", names.collect::<Vec<_>>().join(", "))
                }
            };
            InboxError::Invalid(format!(
                "the settings of this host name no store `{store}`; {known}. An operator adds one \
                    as `[references.stores.{store}]`"
            ))
        })
    }

    /// Returns the permits of a tenant's fetches from a store, which its consumers share. Fetches
    /// from one store take no permit of another.
    pub(super) fn permits(&self, tenant_id: i32, store: &str) -> Arc<Semaphore> {
        self.permits.of((tenant_id, store.to_owned()), self.limits.fetches_max.max(1))
    }

    /// Returns the memory for the payloads of a tenant.
    pub(super) fn memory(&self, tenant_id: i32) -> TenantMemory {
        let host_max = pages(self.limits.memory_bytes);
        let tenant_max = pages(self.limits.tenant_memory_bytes).min(host_max);
        let tenant = self.tenants.of(tenant_id, tenant_max as usize);
        TenantMemory { tenant, host: self.memory.clone(), tenant_max }
    }
}

impl Default for Stores {
    fn default() -> Self {
        Self::new(BTreeMap::new(), FetchLimits::default())
    }
}

const NEVER_CLOSED: &str = "nobody closes the semaphores";
/// Bytes of one permit for memory.
const PAGE: usize = 1 << 10;

fn pages(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(PAGE)).unwrap_or(u32::MAX).max(1)
}

/// The host's memory for fetched payloads, as far as one tenant may use it.
pub(super) struct TenantMemory {
    tenant: Arc<Semaphore>,
    host: Arc<Semaphore>,
    /// Permits of the tenant's share.
    tenant_max: u32,
}

/// Memory that is taken until this is dropped.
pub(super) struct TakenMemory {
    _tenant: OwnedSemaphorePermit,
    _host: OwnedSemaphorePermit,
}

impl TenantMemory {
    /// Returns the permits of an object. It counts twice: as fetched, and as the handler gets it.
    /// One that is larger than the tenant's share takes the whole share.
    fn permits(&self, bytes: usize) -> u32 {
        pages(bytes.saturating_mul(2)).min(self.tenant_max)
    }

    /// Takes memory for an object; none where there is too little.
    pub(super) fn try_take(&self, bytes: usize) -> Option<TakenMemory> {
        let permits = self.permits(bytes);
        Some(TakenMemory {
            _tenant: self.tenant.clone().try_acquire_many_owned(permits).ok()?,
            _host: self.host.clone().try_acquire_many_owned(permits).ok()?,
        })
    }

    /// Waits for memory for an object. The wait for the host's memory holds that of the tenant,
    /// and never the other way round.
    pub(super) async fn take(&self, bytes: usize) -> TakenMemory {
        let permits = self.permits(bytes);
        let tenant = self.tenant.clone().acquire_many_owned(permits).await;
        let host = self.host.clone().acquire_many_owned(permits).await;
        let (tenant, host) = (tenant.expect(NEVER_CLOSED), host.expect(NEVER_CLOSED));
        TakenMemory { _tenant: tenant, _host: host }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: one store, or one tenant, takes what another is to have; an object that
    // is larger than the share is never fetched.
    #[tokio::test]
    async fn stores_and_tenants_have_shares_of_their_own() {
        let limits = FetchLimits {
            fetches_max: 1,
            memory_bytes: 100 << 10,
            tenant_memory_bytes: 60 << 10,
            ..FetchLimits::default()
        };
        let stores = Stores::new(BTreeMap::new(), limits);
        let slow = stores.permits(1, "slow");
        let _held = slow.try_acquire().expect("the only one");
        assert!(stores.permits(1, "slow").try_acquire().is_err());
        assert!(stores.permits(1, "other").try_acquire().is_ok());
        assert!(stores.permits(2, "slow").try_acquire().is_ok());

        let (one, two) = (stores.memory(1), stores.memory(2));
        let large = one.try_take(1 << 30).expect("the whole share");
        assert!(stores.memory(1).try_take(1).is_none());
        assert!(two.try_take(30 << 10).is_none(), "more than the host has left");
        let _small = two.try_take(20 << 10).expect("what the host has left");
        drop(large);
        let _taken = one.take(30 << 10).await;
    }
}
