//! The body of a request: read as a whole, since its signature covers all of it, within a time and
//! within a memory that all requests share.

use std::{sync::Arc, time::Duration};

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes of bodies that are in memory at a time, in kilobytes, for all requests of a host.
pub(crate) const MEMORY_KB: usize = 64 << 10;
/// Longest time in which a body comes.
const BODY_MAX: Duration = Duration::from_secs(10);

/// A body, with the part of the memory that it takes until the request is answered.
#[derive(Debug)]
pub(crate) struct ReadBody {
    pub(crate) bytes: Bytes,
    _memory: Option<OwnedSemaphorePermit>,
}

/// Why there is no body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BodyError {
    /// Above the bound.
    TooLarge,
    /// Not whole in time, or the client is gone.
    Unfinished,
    /// No memory is free.
    Busy,
}

/// Reads a body of at most so many bytes. Memory is taken as the bytes come: a client that sends
/// nothing holds none.
pub(crate) async fn read(
    body: Body,
    bytes_max: usize,
    memory: &Arc<Semaphore>,
) -> Result<ReadBody, BodyError> {
    match tokio::time::timeout(BODY_MAX, collect(body, bytes_max, memory)).await {
        Ok(read) => read,
        Err(_) => Err(BodyError::Unfinished),
    }
}

async fn collect(
    mut body: Body,
    bytes_max: usize,
    memory: &Arc<Semaphore>,
) -> Result<ReadBody, BodyError> {
    let mut bytes = BytesMut::new();
    let mut held: Option<OwnedSemaphorePermit> = None;
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|_| BodyError::Unfinished)?.into_data() else { continue };
        let length = bytes.len() + data.len();
        if length > bytes_max {
            return Err(BodyError::TooLarge);
        }
        let (needed, has) =
            (length.div_ceil(1 << 10), held.as_ref().map_or(0, OwnedSemaphorePermit::num_permits));
        if needed > has {
            let more = u32::try_from(needed - has).map_err(|_| BodyError::Busy)?;
            let more = memory.clone().try_acquire_many_owned(more).map_err(|_| BodyError::Busy)?;
            match &mut held {
                Some(held) => held.merge(more),
                None => held = Some(more),
            }
        }
        bytes.extend_from_slice(&data);
    }
    Ok(ReadBody { bytes: bytes.freeze(), _memory: held })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(kilobytes: usize) -> Arc<Semaphore> {
        Arc::new(Semaphore::new(kilobytes))
    }

    #[tokio::test]
    async fn a_body_takes_memory_until_it_is_dropped() {
        let memory = memory(8);
        let read = read(Body::from(vec![7; 5_000]), 5_000, &memory).await.unwrap();
        assert_eq!((read.bytes.len(), memory.available_permits()), (5_000, 3));
        drop(read);
        assert_eq!(memory.available_permits(), 8);
    }

    #[tokio::test]
    async fn a_body_is_bounded_by_its_consumer_and_by_the_memory() {
        let memory = memory(4);
        let error = |length: usize, most: usize| {
            let memory = memory.clone();
            async move { read(Body::from(vec![7; length]), most, &memory).await.unwrap_err() }
        };
        assert_eq!(error(1_001, 1_000).await, BodyError::TooLarge);
        assert_eq!(error(5_000, 10_000).await, BodyError::Busy);
        assert_eq!(memory.available_permits(), 4, "a refused body holds nothing");
    }
}
