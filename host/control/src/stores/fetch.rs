//! The fetch of an object that a message refers to, under its tenant's access to a store.

use std::{sync::Arc, time::Duration};

use futures::future::BoxFuture;
use oncebox_archive::{ObjectError, ObjectReader, OpenObject};
use oncebox_model::{
    error::InboxError,
    reference::{
        FetchBounds, FetchError, FetchedPayload, ReferenceError, ReferenceFault, ReferenceFetcher,
    },
};
use tokio::{
    sync::{Mutex, Semaphore},
    time::{Instant, timeout_at},
};

use super::{
    access::StoreRow,
    place::{ObjectPlace, shown},
    settings::{TakenMemory, TenantMemory},
};
use crate::{
    control::Control, database::tenant_database::open::answered_within, handles::TenantStores,
    tenants::Tenant,
};

/// Time for which a tenant's access is used before its row is read again.
const KNOWN: Duration = Duration::from_secs(2);
/// Longest wait for the row.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Fetches objects for the messages of one consumer.
struct StoreFetcher {
    control: Control,
    tenant: Tenant,
    store: String,
    /// The fetches that the consumer may yet begin.
    own_permits: Semaphore,
    /// The fetches that the tenant may yet begin from the store on this host.
    permits: Arc<Semaphore>,
    memory: TenantMemory,
    open: Mutex<Option<Arc<OpenStore>>>,
}

/// A store as a tenant's row opened it.
struct OpenStore {
    row: StoreRow,
    reader: Arc<ObjectReader>,
    read_at: Instant,
}

impl TenantStores<'_> {
    /// Returns a fetcher for the messages of a consumer of the tenant, which refer to objects in a
    /// store. It reads the tenant's access when it fetches, and again later.
    pub fn fetcher(&self, tenant: &Tenant, store: &str) -> Arc<dyn ReferenceFetcher> {
        Arc::new(StoreFetcher {
            control: self.0.clone(),
            tenant: tenant.clone(),
            store: store.to_owned(),
            own_permits: Semaphore::new(self.0.stores.limits.consumer_fetches_max.max(1)),
            permits: self.0.stores.permits(tenant.tenant_id, store),
            memory: self.0.stores.memory(tenant.tenant_id),
            open: Mutex::default(),
        })
    }
}

impl ReferenceFetcher for StoreFetcher {
    fn fetch<'a>(
        &'a self,
        reference: &'a str,
        bounds: FetchBounds,
    ) -> BoxFuture<'a, Result<FetchedPayload, FetchError>> {
        Box::pin(self.fetch_object(reference, bounds))
    }
}

impl StoreFetcher {
    /// Fetches an object. A wait for memory holds no permit and no connection, so that a fetch with
    /// a permit goes on.
    async fn fetch_object(
        &self,
        reference: &str,
        bounds: FetchBounds,
    ) -> Result<FetchedPayload, FetchError> {
        let place = ObjectPlace::of(reference)?;
        let mut waited: Option<(usize, TakenMemory)> = None;
        loop {
            // Nobody closes the semaphores.
            let permits =
                (self.own_permits.acquire().await.ok(), self.permits.acquire().await.ok());
            let (object, deadline) = self.open_object(&place, bounds).await?;
            let size = object.size();
            let of_wait = waited.take().filter(|(bytes, _)| *bytes >= size);
            let memory = of_wait.map(|(_, taken)| taken).or_else(|| self.memory.try_take(size));
            if let Some(memory) = memory {
                let bytes = self.within(deadline, &place, bounds, object.read()).await?;
                return Ok(FetchedPayload::new(bytes, Box::new(memory)));
            }
            if !bounds.waits_for_memory {
                return Err(FetchError::NoMemory);
            }
            drop((object, permits));
            waited = Some((size, self.memory.take(size).await));
        }
    }

    /// Asks for an object under the tenant's present access. Returns it with the end of its time.
    async fn open_object(
        &self,
        place: &ObjectPlace<'_>,
        bounds: FetchBounds,
    ) -> Result<(OpenObject, Instant), FetchError> {
        let store = self.open().await?;
        place.check(&store.row.bucket, &store.row.prefix)?;
        let deadline = Instant::now() + bounds.timeout;
        let object = store.reader.open(place.key, bounds.bytes_max);
        Ok((self.within(deadline, place, bounds, object).await?, deadline))
    }

    /// Waits for a part of an exchange with the store, up to the end of its time.
    async fn within<T>(
        &self,
        deadline: Instant,
        place: &ObjectPlace<'_>,
        bounds: FetchBounds,
        part: impl Future<Output = Result<T, ObjectError>>,
    ) -> Result<T, FetchError> {
        match timeout_at(deadline, part).await {
            Ok(done) => done.map_err(|error| self.failed(place, bounds.bytes_max, error)),
            Err(_) => Err(too_slow(bounds.timeout).into()),
        }
    }

    /// Returns the store with the tenant's present access.
    async fn open(&self) -> Result<Arc<OpenStore>, FetchError> {
        let mut open = self.open.lock().await;
        let known = open.clone();
        if let Some(known) = known.as_ref().filter(|known| known.read_at.elapsed() < KNOWN) {
            return Ok(known.clone());
        }
        let stores = self.stores();
        let row = answered_within(ANSWER_MAX, stores.row(self.tenant.tenant_id, &self.store));
        let row = row.await.and_then(|row| row).map_err(|error| self.not_opened(&error))?;
        let row = row.ok_or_else(|| self.without_access())?;
        let reader = match known {
            Some(known) if known.row == row => known.reader.clone(),
            _ => {
                let reader = stores.open(&self.tenant, &self.store, &row);
                Arc::new(reader.map_err(|error| self.not_opened(&error))?)
            }
        };
        let opened = Arc::new(OpenStore { row, reader, read_at: Instant::now() });
        *open = Some(opened.clone());
        Ok(opened)
    }

    fn stores(&self) -> TenantStores<'_> {
        self.control.tenant_stores()
    }

    fn without_access(&self) -> ReferenceError {
        let (tenant, store) = (&self.tenant.name, &self.store);
        let text = format!(
            "tenant `{tenant}` has no access to the store `{store}` that the policy names; give it \
                some with `oncebox tenant store set {tenant} {store}`, then redrive"
        );
        ReferenceError::new(ReferenceFault::NotAllowed, text)
    }

    /// Returns the error of a store that this host does not open. No message is at fault.
    fn not_opened(&self, error: &InboxError) -> FetchError {
        let (tenant, store) = (&self.tenant.name, &self.store);
        tracing::warn!(tenant, store, %error, "store not opened");
        FetchError::Host(format!(
            "the host cannot open the store `{store}` for tenant `{tenant}`; its log says why, \
                under `store not opened`, and the messages wait"
        ))
    }

    /// Returns the error of a store that refuses every request of this host.
    fn host_refused(&self, code: &str) -> FetchError {
        let (tenant, store) = (&self.tenant.name, &self.store);
        tracing::warn!(tenant, store, error = code, "store not opened");
        let advice = match code {
            "RequestTimeTooSkewed" => "set the clock of the host".to_owned(),
            _ => {
                format!("set the access key anew with `oncebox tenant store set {tenant} {store}`")
            }
        };
        FetchError::Host(format!(
            "the store `{store}` refuses every request for tenant `{tenant}` (`{code}`), and the \
                messages wait; {advice}"
        ))
    }

    /// Returns the error of an object that was not read.
    fn failed(&self, place: &ObjectPlace<'_>, bytes_max: usize, error: ObjectError) -> FetchError {
        let (tenant, store) = (&self.tenant.name, &self.store);
        let object = shown(&format!("s3://{}/{}", place.bucket, place.key));
        let (fault, text) = match error {
            ObjectError::BadKey => {
                return place.refused("its key is none that the host can ask for").into();
            }
            ObjectError::HostRefused(code) => return self.host_refused(code),
            ObjectError::Missing => (
                ReferenceFault::Missing,
                format!(
                    "the store `{store}` has no object `{object}`; have the producer put it there, \
                        then redrive"
                ),
            ),
            ObjectError::Refused => (
                ReferenceFault::NotAllowed,
                format!(
                    "the store `{store}` refuses `{object}` to the tenant's access key, or has no \
                        such object; let the key read it, or set another one with `oncebox tenant \
                        store set {tenant} {store}`; then redrive"
                ),
            ),
            ObjectError::TooLarge { bytes } => (
                ReferenceFault::TooLarge,
                format!(
                    "`{object}` has {bytes} bytes, and `reference.bytes_max` of the policy allows \
                        {bytes_max}; raise that, or have the producer put less there, then redrive"
                ),
            ),
            ObjectError::Unavailable(cause) => {
                tracing::warn!(tenant, store, error = cause, "payload not fetched");
                (
                    ReferenceFault::Unavailable,
                    format!(
                        "the store `{store}` did not deliver `{object}`, and the host's log says \
                            why; it is tried again"
                    ),
                )
            }
        };
        ReferenceError::new(fault, text).into()
    }
}

fn too_slow(timeout: Duration) -> ReferenceError {
    let text = format!(
        "the payload was not fetched within the {} ms of `reference.timeout_ms`; it is tried \
            again, and the tenant's store should be looked at where that goes on",
        timeout.as_millis()
    );
    ReferenceError::new(ReferenceFault::Unavailable, text)
}
