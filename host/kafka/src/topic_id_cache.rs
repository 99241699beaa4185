//! The topics' ids, each asked for once in an assignment.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::sync::Mutex;

use crate::{
    client::Client,
    topic_id::{TopicId, describe},
};

/// The ids that brokers have answered with, each with the time of its request.
#[derive(Default)]
pub(crate) struct TopicIdCache {
    known: Mutex<HashMap<Arc<str>, (TopicId, Instant)>>,
}

impl TopicIdCache {
    /// Returns the topic's id, as of `since` or later. Partitions of one rebalance share an answer
    /// that way. No partition is opened with the id of a topic that was deleted before the
    /// assignment.
    pub(crate) async fn of(
        &self,
        client: &Arc<Client>,
        topic: &Arc<str>,
        since: Instant,
        within: Duration,
    ) -> Result<TopicId, String> {
        let mut known = self.known.lock().await;
        let before = known.get(topic).cloned();
        match &before {
            Some((None, _)) => return Ok(None),
            Some((id, asked_at)) if *asked_at >= since => return Ok(id.clone()),
            _ => {}
        }
        let (name, asked_at) = (Arc::clone(topic), Instant::now());
        let id = client.lookup(move |client| describe(&client.consumer, &name, within)).await?;
        if before.is_some() && id.is_none() {
            return Err(format!("the broker no longer tells the id of topic `{topic}`"));
        }
        known.insert(Arc::clone(topic), (id.clone(), asked_at));
        Ok(id)
    }
}
