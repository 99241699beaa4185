//! The body of a request: read as a whole, since its signature covers all of it, within a time and
//! within a memory that requests share.

use std::{sync::Arc, time::Duration};

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Longest time in which a body comes.
const BODY_MAX: Duration = Duration::from_secs(10);

/// The memory for bodies, in kilobytes: that of the host, and the part of it that the bodies of one
/// consumer take at most. So requests that nothing has verified fill a consumer's part before they
/// fill the host's.
#[derive(Clone)]
pub(crate) struct BodyMemory([Arc<Semaphore>; 2]);

impl BodyMemory {
    /// Kilobytes of a host.
    const HOST_KB: usize = 64 << 10;
    /// Kilobytes of a consumer, unless two of its largest bodies have more.
    const CONSUMER_KB: usize = 4 << 10;

    /// Creates the memory of a host.
    pub(crate) fn of_host() -> Arc<Semaphore> {
        Arc::new(Semaphore::new(Self::HOST_KB))
    }

    /// Creates the part of a consumer.
    pub(crate) fn of_consumer(host: Arc<Semaphore>, body_bytes_max: usize) -> Self {
        let largest = body_bytes_max.next_power_of_two() >> 10;
        Self([host, Arc::new(Semaphore::new(Self::CONSUMER_KB.max(2 * largest)))])
    }

    fn take(&self, kilobytes: u32) -> Option<[OwnedSemaphorePermit; 2]> {
        let [host, consumer] = &self.0;
        let of_consumer = consumer.clone().try_acquire_many_owned(kilobytes).ok()?;
        Some([host.clone().try_acquire_many_owned(kilobytes).ok()?, of_consumer])
    }
}

/// A body, with the part of the memory that it takes until the request is answered.
#[derive(Debug)]
pub(crate) struct ReadBody {
    pub(crate) bytes: Bytes,
    pub(crate) memory: Vec<OwnedSemaphorePermit>,
}

/// Why there is no body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BodyError {
    /// Above the bound.
    TooLarge,
    /// Not whole in time, or the client is gone.
    Unfinished,
    /// No memory is free.
    Full,
}

/// Reads a body of at most so many bytes. Memory is taken as the bytes come: a client that sends
/// nothing holds none.
pub(crate) async fn read(
    body: Body,
    bytes_max: usize,
    memory: &BodyMemory,
) -> Result<ReadBody, BodyError> {
    match tokio::time::timeout(BODY_MAX, collect(body, bytes_max, memory)).await {
        Ok(read) => read,
        Err(_) => Err(BodyError::Unfinished),
    }
}

async fn collect(
    mut body: Body,
    bytes_max: usize,
    memory: &BodyMemory,
) -> Result<ReadBody, BodyError> {
    let (mut bytes, mut held) = (BytesMut::new(), Vec::new());
    let mut kilobytes = 0;
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|_| BodyError::Unfinished)?.into_data() else { continue };
        let length = bytes.len() + data.len();
        if length > bytes_max {
            return Err(BodyError::TooLarge);
        }
        // The buffer doubles as it grows.
        let needed = length.next_power_of_two().div_ceil(1 << 10);
        if needed > kilobytes {
            let more = u32::try_from(needed - kilobytes).map_err(|_| BodyError::Full)?;
            held.extend(memory.take(more).ok_or(BodyError::Full)?);
            kilobytes = needed;
        }
        bytes.extend_from_slice(&data);
    }
    Ok(ReadBody { bytes: bytes.freeze(), memory: held })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(host_kb: usize, consumer_kb: usize) -> BodyMemory {
        BodyMemory([host_kb, consumer_kb].map(|kb| Arc::new(Semaphore::new(kb))))
    }

    fn free(memory: &BodyMemory) -> [usize; 2] {
        memory.0.each_ref().map(|part| part.available_permits())
    }

    #[tokio::test]
    async fn a_body_takes_memory_until_it_is_dropped() {
        let memory = memory(32, 16);
        let read = read(Body::from(vec![7; 5_000]), 5_000, &memory).await.unwrap();
        assert_eq!((read.bytes.len(), free(&memory)), (5_000, [24, 8]));
        drop(read);
        assert_eq!(free(&memory), [32, 16]);
    }

    #[tokio::test]
    async fn a_body_is_bounded_by_its_consumer_and_by_the_memory() {
        let read_of = async |length: usize, most: usize, memory: &BodyMemory| {
            read(Body::from(vec![7; length]), most, memory).await.map(|read| read.bytes.len())
        };
        for memory in [memory(32, 4), memory(4, 32)] {
            assert_eq!(read_of(1_001, 1_000, &memory).await, Err(BodyError::TooLarge));
            assert_eq!(read_of(5_000, 10_000, &memory).await, Err(BodyError::Full));
            assert_eq!(read_of(4_000, 10_000, &memory).await, Ok(4_000));
            assert_eq!(free(&memory).iter().sum::<usize>(), 36, "a refused body holds nothing");
        }
    }

    // What could go wrong: clients that begin a body and never end it hold their places for ever.
    #[tokio::test(start_paused = true)]
    async fn a_body_that_does_not_come_is_given_up() {
        let begun = half_a_body();
        let memory = memory(32, 16);
        assert_eq!(read(begun, 5_000, &memory).await.unwrap_err(), BodyError::Unfinished);
        assert_eq!(free(&memory), [32, 16]);
    }

    /// A body of which one part comes and the rest never does.
    fn half_a_body() -> Body {
        let first = futures::stream::iter([Ok::<_, std::io::Error>(Bytes::from_static(b"begun"))]);
        let never = futures::stream::pending();
        Body::from_stream(futures::StreamExt::chain(first, never))
    }
}
