//! The start of a consumer.

use std::{sync::Arc, thread, time::Duration};

use oncebox_model::{hooks, inbox::Inbox};
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::{
    client::Client,
    config::ConsumerConfig,
    error::ConsumerError,
    event_loop::EventLoop,
    handle::ConsumerHandle,
    metric::Labels,
    offsets::OffsetTracker,
    pause::PauseList,
    poll::{BATCHES_WAITING, Poller},
    rebalance::Context,
    status::{ConsumerState, StatusSnapshot},
    topic_id_cache::TopicIdCache,
    worker::WorkerContext,
};

/// Time that a revocation waits beyond the loop's own deadlines.
const MARGIN: Duration = Duration::from_secs(2);

/// Starts a consumer, which joins its group as one member and passes records to `inbox`. Must be
/// called on a tokio runtime. Brokers that do not answer are no error here; the consumer tries them
/// again.
///
/// # Errors
///
/// A [`ConsumerError`] when a property or setting is refused, or the client cannot be created.
pub fn start_consumer(
    config: ConsumerConfig,
    inbox: Arc<dyn Inbox>,
) -> Result<ConsumerHandle, ConsumerError> {
    let labels = Labels { tenant: config.tenant.clone(), consumer: config.consumer.clone() };
    let (sender, events) = mpsc::channel(BATCHES_WAITING);
    let patience = config.timing.revoke + config.timing.commit + MARGIN;
    let context = Context::new(labels.clone(), sender.clone(), patience);
    let client = Arc::new(Client::new(connect(&config, context)?));
    let (stop, left) = (CancellationToken::new(), CancellationToken::new());
    let pauses = Arc::new(PauseList::default());
    let poller = Poller {
        client: Arc::clone(&client),
        events: sender,
        stop: stop.clone(),
        labels: labels.clone(),
        pauses: Arc::clone(&pauses),
        topics: Vec::new(),
    };
    spawn_poller(poller, left.clone())?;

    let shared = Arc::new(WorkerContext {
        client,
        inbox,
        offset_tracker: OffsetTracker::default(),
        topic_ids: TopicIdCache::default(),
        labels,
        pauses,
        lookup: config.timing.lookup,
        commit: config.timing.commit,
        replacing: tokio::sync::Mutex::default(),
        wake: tokio::sync::Notify::new(),
    });
    let (drain, drain_asked) = watch::channel(None);
    let (snapshot, snapshots) =
        watch::channel(StatusSnapshot { state: ConsumerState::Running, partitions: Vec::new() });
    let (ending, ended) = watch::channel(None);
    let event_loop = EventLoop::new(config, shared, events, drain_asked, snapshot, stop, left);
    tokio::spawn(async move { ending.send_replace(Some(event_loop.run().await)) });
    Ok(ConsumerHandle { drain, snapshots, ended })
}

fn connect(
    config: &ConsumerConfig,
    context: Context,
) -> Result<BaseConsumer<Context>, ConsumerError> {
    let failed = |error| ConsumerError::from_creation(error, &config.secrets());
    let consumer: BaseConsumer<Context> =
        config.client_config()?.create_with_context(context).map_err(failed)?;
    let topics: Vec<&str> = config.topics.iter().map(String::as_str).collect();
    consumer.subscribe(&topics).map_err(failed)?;
    hooks::subscribed(&config.topics);
    Ok(consumer)
}

fn spawn_poller(poller: Poller, left: CancellationToken) -> Result<(), ConsumerError> {
    let left = left.drop_guard();
    thread::Builder::new()
        .name("oncebox-poll".to_owned())
        .spawn(move || {
            poller.run();
            drop(left);
        })
        .map(|_| ())
        .map_err(|error| ConsumerError::Client { text: format!("no thread to poll on: {error}") })
}
