//! The receiver of a consumer's partitions, as they are assigned.

use std::sync::Arc;

use futures::{FutureExt, TryFutureExt, future::BoxFuture};
use oncebox_model::inbox::{Behind, Inbox, OpenAt, Opened, PartitionInboxError};

use super::PartitionInbox;
use crate::consumer::ConsumerInbox;

/// A consumer's inbox, as the receiver of its Kafka records.
pub struct PartitionReceiver(pub Arc<ConsumerInbox>);

impl Inbox for PartitionReceiver {
    fn open(&self, at: OpenAt) -> BoxFuture<'_, Result<Opened, PartitionInboxError>> {
        PartitionInbox::open_at(self.0.clone(), at)
            .map_ok(|opened| match opened {
                Ok(inbox) => Opened::Ready(Box::new(inbox)),
                Err(behind) => Opened::Behind(behind),
            })
            .map_err(PartitionInboxError::from)
            .boxed()
    }

    fn behind(&self, at: OpenAt) -> BoxFuture<'_, Result<Option<Behind>, PartitionInboxError>> {
        async move { self.0.behind(&at).await.map_err(PartitionInboxError::from) }.boxed()
    }
}
