//! Cache of compiled schemas, and the decoder that uses it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, Shared, WeakShared};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::payload::{CompiledSchema, Decoded, split};
use crate::{Fault, RegisteredSchema, RegistryError, SchemaLookup, SchemaRegistry};

/// Most cached schemas. A schema never changes under its id.
const SCHEMAS_MAX: usize = 1_000;
/// Most bytes of the cached schemas' texts, references included. A compiled Protobuf schema takes
/// forty times its text in memory.
const TEXTS_BYTES_MAX: usize = 4 << 20;
/// Most cached ids for which the registry has no schema, or none that it hands out.
const MISSES_MAX: usize = 10_000;
/// Lifetime of a cached miss.
const MISS_LIFETIME: Duration = Duration::from_secs(30);
/// Pauses before an unknown id is looked up again. Another replica of the registry may have
/// registered it a moment ago.
const RETRY_PAUSES: [Duration; 3] =
    [Duration::from_millis(500), Duration::from_secs(1), Duration::from_secs(2)];
/// Most lookups at the same time.
const LOOKUPS_MAX: usize = 8;

/// Decodes payloads by the schemas of a registry.
#[derive(Clone)]
pub struct Decoder(Arc<SharedDecoder>);

/// The state that clones of a decoder share.
struct SharedDecoder {
    registry: Arc<dyn SchemaRegistry>,
    known: Mutex<SchemaCache>,
    lookups: Semaphore,
}

/// The cache, and the lookups under way.
#[derive(Default)]
struct SchemaCache {
    /// Cached schemas by id.
    schemas: HashMap<u32, CachedSchema>,
    /// Bytes of the texts of all cached schemas.
    bytes: usize,
    /// Counter of uses. Each schema records its latest one, for eviction.
    uses: u64,
    /// Time and fault of each id without a schema.
    misses: HashMap<u32, (Instant, Fault)>,
    /// Lookups under way, by id.
    flights: HashMap<u32, WeakShared<Flight>>,
}

/// A cached schema.
struct CachedSchema {
    /// Compiled schema, or the fault of one that cannot be compiled.
    schema: Result<Arc<CompiledSchema>, Fault>,
    /// Bytes of its texts.
    bytes: usize,
    /// Number of its latest use.
    used: u64,
}

/// A lookup under way, which every caller for its id awaits.
type Flight = BoxFuture<'static, Result<(), RegistryError>>;

impl Decoder {
    /// Makes a decoder with an empty cache.
    pub fn new(registry: Arc<dyn SchemaRegistry>) -> Self {
        Self(Arc::new(SharedDecoder {
            registry,
            known: Mutex::default(),
            lookups: Semaphore::new(LOOKUPS_MAX),
        }))
    }

    /// Fetches the schema of a payload, unless it is cached. A missing or unusable schema is no
    /// error here: [`Self::decode`] returns it as a fault. Dropping the future is harmless.
    ///
    /// # Errors
    ///
    /// An error of the registry, such as a lost connection. A later call may succeed.
    pub async fn prepare(&self, payload: &[u8]) -> Result<(), RegistryError> {
        let Ok((id, _)) = split(payload) else { return Ok(()) };
        match self.flight(id) {
            Some(flight) => flight.await,
            None => Ok(()),
        }
    }

    /// Decodes a payload into JSON, by the schema that [`Self::prepare`] has fetched.
    ///
    /// # Errors
    ///
    /// The fault of the payload or of its schema. Where the cache has evicted the schema, or
    /// `prepare` was not called, the payload [is not prepared](Fault::is_not_prepared).
    pub fn decode(&self, payload: &[u8]) -> Result<Decoded, Fault> {
        let (schema_id, body) = split(payload)?;
        let schema = self.0.known().find(schema_id).ok_or(Fault::NotPrepared { schema_id })??;
        let (json, name) =
            schema.decode(body).map_err(|why| Fault::undecodable(schema_id, &why))?;
        Ok(Decoded { json, schema_id, name })
    }

    /// Returns the lookup of an id that is not cached, and starts it unless it is under way.
    fn flight(&self, id: u32) -> Option<Shared<Flight>> {
        let mut known = self.0.known();
        if known.find(id).is_some() {
            return None;
        }
        if let Some(flight) = known.flights.get(&id).and_then(WeakShared::upgrade) {
            return Some(flight);
        }
        let inner = self.0.clone();
        let flight = async move { inner.look_up(id).await }.boxed().shared();
        // Lookups of a runtime that was shut down have not removed themselves.
        known.flights.retain(|_, flight| flight.upgrade().is_some());
        known.flights.extend(flight.downgrade().map(|weak| (id, weak)));
        // The task goes on when every waiter has given up: the next call finds the schema cached.
        tokio::spawn(flight.clone());
        Some(flight)
    }
}

impl SharedDecoder {
    fn known(&self) -> MutexGuard<'_, SchemaCache> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn look_up(&self, id: u32) -> Result<(), RegistryError> {
        let mut found = self.fetch(id).await;
        for pause in RETRY_PAUSES {
            if !matches!(found, Ok(Err(Fault::UnknownSchema { .. }))) {
                break;
            }
            tokio::time::sleep(pause).await;
            found = self.fetch(id).await;
        }
        let mut known = self.known();
        known.flights.remove(&id);
        match found? {
            Ok((schema, bytes)) => known.keep(id, schema, bytes),
            Err(fault) => known.miss(id, fault),
        }
        Ok(())
    }

    /// Fetches and compiles a schema. Returns it, or its permanent fault, with the bytes of its
    /// texts; the outer fault is of a schema that the registry does not have or hand out.
    async fn fetch(
        &self,
        id: u32,
    ) -> Result<Result<(Result<Arc<CompiledSchema>, Fault>, usize), Fault>, RegistryError> {
        // The semaphore is never closed, so the error case does not occur.
        let _permit = self.lookups.acquire().await;
        Ok(match self.registry.schema(id).await? {
            SchemaLookup::Unknown => Err(Fault::UnknownSchema { schema_id: id }),
            SchemaLookup::Unusable(why) => Err(Fault::unusable(id, &why)),
            SchemaLookup::Found(schema) => {
                let bytes = text_bytes(&schema);
                let compiled =
                    tokio::task::spawn_blocking(move || CompiledSchema::new(&schema)).await;
                let compiled = compiled.unwrap_or_else(|_| Err("it cannot be read".to_owned()));
                let is_used = compiled.is_ok();
                let compiled = compiled.map(Arc::new).map_err(|why| Fault::unusable(id, &why));
                Ok((compiled, if is_used { bytes } else { 0 }))
            }
        })
    }
}

fn text_bytes(schema: &RegisteredSchema) -> usize {
    schema.text.len() + schema.references.iter().map(|(_, text)| text.len()).sum::<usize>()
}

impl SchemaCache {
    fn find(&mut self, id: u32) -> Option<Result<Arc<CompiledSchema>, Fault>> {
        if id > i32::MAX as u32 {
            // No registry has such ids, and some answer one like an unknown path.
            return Some(Err(Fault::UnknownSchema { schema_id: id }));
        }
        if let Some(kept) = self.schemas.get_mut(&id) {
            self.uses += 1;
            kept.used = self.uses;
            return Some(kept.schema.clone());
        }
        let (since, fault) = self.misses.get(&id)?;
        (since.elapsed() < MISS_LIFETIME).then(|| Err(fault.clone()))
    }

    fn keep(&mut self, id: u32, schema: Result<Arc<CompiledSchema>, Fault>, bytes: usize) {
        self.misses.remove(&id);
        while self.schemas.len() >= SCHEMAS_MAX || self.bytes + bytes > TEXTS_BYTES_MAX {
            let Some(oldest) =
                self.schemas.iter().min_by_key(|(_, kept)| kept.used).map(|(id, _)| *id)
            else {
                break;
            };
            self.bytes -= self.schemas.remove(&oldest).map_or(0, |kept| kept.bytes);
        }
        self.uses += 1;
        self.bytes += bytes;
        self.schemas.insert(id, CachedSchema { schema, bytes, used: self.uses });
    }

    fn miss(&mut self, id: u32, fault: Fault) {
        if self.misses.len() >= MISSES_MAX {
            self.misses.retain(|_, (since, _)| since.elapsed() < MISS_LIFETIME);
        }
        if self.misses.len() >= MISSES_MAX {
            // A flood of made-up ids: every entry is young, and each id would be looked up anyway.
            self.misses.clear();
        }
        self.misses.insert(id, (Instant::now(), fault));
    }
}

impl std::fmt::Debug for Decoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Decoder")
            .field("schemas", &self.0.known().schemas.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::Notify;

    use super::*;
    use crate::Format;

    /// A registry with the schema `"int"` under each even id below 10,000, and `"nonsense"` under
    /// 4. A test can make it fail or wait.
    #[derive(Default)]
    struct Fake {
        asked: AtomicUsize,
        at_once: AtomicUsize,
        at_once_max: AtomicUsize,
        fails: std::sync::atomic::AtomicBool,
        waits: Option<Notify>,
    }

    impl SchemaRegistry for Fake {
        fn schema(&self, id: u32) -> BoxFuture<'_, Result<SchemaLookup, RegistryError>> {
            async move {
                self.asked.fetch_add(1, Ordering::Relaxed);
                let at_once = self.at_once.fetch_add(1, Ordering::Relaxed) + 1;
                self.at_once_max.fetch_max(at_once, Ordering::Relaxed);
                match &self.waits {
                    Some(notify) => notify.notified().await,
                    None => tokio::task::yield_now().await,
                }
                self.at_once.fetch_sub(1, Ordering::Relaxed);
                if self.fails.load(Ordering::Relaxed) {
                    return Err(RegistryError::Failed { url: "fake".to_owned(), status: 500 });
                }
                let text = if id == 4 { "\"nonsense\"" } else { "\"int\"" }.to_owned();
                let found = RegisteredSchema { format: Format::Avro, text, references: Vec::new() };
                Ok(if id.is_multiple_of(2) && id < 10_000 {
                    SchemaLookup::Found(found)
                } else {
                    SchemaLookup::Unknown
                })
            }
            .boxed()
        }
    }

    fn decoder(fake: Fake) -> (Arc<Fake>, Decoder) {
        let fake = Arc::new(fake);
        (fake.clone(), Decoder::new(fake))
    }

    fn payload(id: u32) -> Vec<u8> {
        [&[0][..], &id.to_be_bytes(), &[14]].concat()
    }

    #[tokio::test(start_paused = true)]
    async fn a_payload_is_prepared_and_decoded() {
        let (fake, decoder) = decoder(Fake::default());
        assert!(decoder.decode(&payload(2)).expect_err("not asked for yet").is_not_prepared());
        for id in [2, 2, 3, 3, 4, 4] {
            decoder.prepare(&payload(id)).await.expect("no trouble");
        }
        let decoded = decoder.decode(&payload(2)).expect("it decodes");
        assert_eq!(decoded, Decoded { json: b"7".to_vec(), schema_id: 2, name: None });
        let fault = |payload: &[u8]| decoder.decode(payload).expect_err("a fault").to_string();
        assert_eq!(fault(&payload(3)), "schema 3 is not in the registry");
        assert_eq!(
            fault(&payload(4)),
            "schema 4 cannot be used: it is no Avro schema: there is no type `nonsense`"
        );
        assert_eq!(
            fault(&payload(2)[..5]),
            "it does not decode by schema 2: it ends too early at ``"
        );
        assert_eq!(
            fault(b"{}"),
            "its first byte is not 0, so it is not in the schema registry's wire format"
        );
        assert_eq!(
            fault(&[0, 0, 0, 2]),
            "it ends within the first five bytes of the schema registry's wire format"
        );
        assert_eq!(
            fault(&payload(1 << 31)),
            "schema 2147483648 is not in the registry",
            "no registry has such ids"
        );
        decoder.prepare(&payload(1 << 31)).await.expect("nothing to prepare");
        decoder.prepare(b"{}").await.expect("nothing to prepare");
        assert_eq!(fake.asked.load(Ordering::Relaxed), 2 + 1 + RETRY_PAUSES.len());
    }

    #[tokio::test]
    async fn trouble_is_not_remembered() {
        let (fake, decoder) = decoder(Fake::default());
        fake.fails.store(true, Ordering::Relaxed);
        let error = decoder.prepare(&payload(2)).await.expect_err("trouble");
        assert_eq!(error.to_string(), "the schema registry at `fake` answers 500");
        assert!(decoder.decode(&payload(2)).expect_err("not there").is_not_prepared());
        fake.fails.store(false, Ordering::Relaxed);
        decoder.prepare(&payload(2)).await.expect("no trouble any more");
        assert!(decoder.decode(&payload(2)).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn an_id_is_looked_up_once_however_many_wait_for_it() {
        let (fake, decoder) = decoder(Fake { waits: Some(Notify::new()), ..Fake::default() });
        let payload = payload(2);
        let dropped =
            tokio::time::timeout(Duration::from_millis(1), decoder.prepare(&payload)).await;
        assert!(dropped.is_err());
        let waiting = futures::future::join_all((0..50).map(|_| decoder.prepare(&payload)));
        let answered = async {
            tokio::task::yield_now().await;
            fake.waits.as_ref().expect("it waits").notify_waiters();
        };
        let (prepared, ()) = futures::join!(waiting, answered);
        assert!(prepared.iter().all(Result::is_ok));
        assert_eq!(fake.asked.load(Ordering::Relaxed), 1, "also for the one who was gone");
        assert!(decoder.0.known().flights.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn lookups_at_a_time_are_bounded() {
        let (fake, decoder) = decoder(Fake::default());
        let payloads: Vec<_> = (0..100).map(|id| payload(2 * id)).collect();
        let prepared =
            futures::future::join_all(payloads.iter().map(|payload| decoder.prepare(payload)))
                .await;
        assert!(prepared.iter().all(Result::is_ok));
        assert_eq!(fake.asked.load(Ordering::Relaxed), 100);
        assert_eq!(fake.at_once_max.load(Ordering::Relaxed), LOOKUPS_MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_not_there_is_asked_for_again_after_a_while() {
        let (fake, decoder) = decoder(Fake::default());
        for (waits, asked) in [(0, 4), (29, 4), (2, 8)] {
            tokio::time::advance(Duration::from_secs(waits)).await;
            decoder.prepare(&payload(3)).await.expect("no trouble");
            assert_eq!(fake.asked.load(Ordering::Relaxed), asked);
        }
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut known = SchemaCache::default();
        let compiled = Ok(Arc::new(CompiledSchema::Json));
        for id in 0..2_000 {
            known.keep(id, compiled.clone(), 1);
            assert!(known.find(0).is_some(), "what is in use stays");
        }
        assert_eq!((known.schemas.len(), known.bytes), (SCHEMAS_MAX, SCHEMAS_MAX));
        known.keep(3_000, compiled.clone(), TEXTS_BYTES_MAX - 1);
        assert_eq!((known.schemas.len(), known.bytes), (2, TEXTS_BYTES_MAX));
        for id in 0..25_000 {
            known.miss(id, Fault::UnknownSchema { schema_id: id });
        }
        assert!(known.misses.len() <= MISSES_MAX && known.misses.contains_key(&24_999));
    }
}
