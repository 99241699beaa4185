//! The inbox and its Kafka consumer as the host wires them, with a handler in Rust.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use anyhow::{Context, Result};
use clap::Args;
use futures::{FutureExt, future::BoxFuture};
use oncebox_control::{Control, MasterKey};
use oncebox_inbox::{Budget, ConsumerInbox, SessionSettings, Sessions, retry};
use oncebox_kafka::{ConsumerConfig, Timing};
use oncebox_model::{
    handler::{Answer, Handler, Handlers, Run},
    message::Message,
    outcome::{Failure, FailureKind},
    outgoing::Output,
    tx::Tx,
};
use tokio_util::sync::CancellationToken;

use crate::{Servers, order::Order, until_terminated};

#[derive(Args)]
pub(crate) struct NativeOptions {
    #[command(flatten)]
    servers: Servers,
    /// The host's master key.
    #[arg(long)]
    master_key: String,
    /// Name of a tenant that exists.
    #[arg(long)]
    tenant: String,
    /// Name of its consumer.
    #[arg(long)]
    consumer: String,
}

pub(crate) async fn run(options: NativeOptions) -> Result<()> {
    let control = Control::new(
        options.servers.database.parse()?,
        MasterKey::parse(&options.master_key)?,
        "bench",
    );
    let tenant = control.tenants().get(&options.tenant).await?;
    let consumer = control.consumers().get(&options.tenant, &options.consumer).await?;
    let policy = consumer.policy()?;
    let sessions = Sessions::of(
        control.tenant_databases().session_target(&tenant)?,
        &SessionSettings::default(),
        Budget::new(32),
    );
    let (tenant, name, owner) = (consumer.tenant, consumer.name, "bench".to_owned());
    let inbox = ConsumerInbox::new(
        consumer.consumer_id,
        tenant.clone(),
        name.clone(),
        policy.clone(),
        owner,
        sessions,
        Arc::new(PlaceOrders),
    );
    let host_properties =
        BTreeMap::from([("bootstrap.servers".to_owned(), options.servers.brokers)]);
    let config = ConsumerConfig {
        tenant,
        consumer: name,
        topics: policy.topics,
        kafka: policy.kafka,
        host_properties,
        timing: Timing::default(),
    };
    let kafka = oncebox_kafka::start_consumer(
        config,
        Arc::new(oncebox_inbox::PartitionReceiver(inbox.clone())),
    )?;
    let stop = CancellationToken::new();
    let workers: Vec<_> = (0..policy.retry.workers)
        .map(|_| tokio::spawn(retry::work(inbox.clone(), stop.clone())))
        .collect();
    until_terminated().await?;
    stop.cancel();
    kafka.drain(Duration::from_secs(10)).await;
    for worker in workers {
        worker.await.context("a retry worker ended")?;
    }
    Ok(())
}

/// The handler, for every event type.
struct PlaceOrders;

impl Handlers for PlaceOrders {
    fn resolve(&self, _message: &Message, _failed: Option<i32>) -> Option<Arc<dyn Handler>> {
        Some(Arc::new(Self))
    }

    fn generation(&self) -> i64 {
        1
    }
}

impl Handler for PlaceOrders {
    fn version(&self) -> i32 {
        1
    }

    fn handle<'a>(&'a self, tx: &'a Tx, run: &'a Run<'a>) -> BoxFuture<'a, Answer> {
        place(tx, run).boxed()
    }
}

async fn place(tx: &Tx, run: &Run<'_>) -> Answer {
    let payload = run.message.record.payload.as_deref().unwrap_or_default();
    let malformed =
        |error| Failure::new(FailureKind::Reject, format!("malformed payload: {error}"));
    let order: Order = serde_json::from_slice(payload).map_err(malformed)?;
    let mut statement = tx.statement().await;
    let applied = order.apply(statement.connection()).await;
    statement.finish(applied.as_ref().err());
    match applied {
        Ok(true) => Ok(Output::default()),
        Ok(false) => {
            Err(Failure::new(FailureKind::Reject, format!("no account {}", order.account)))
        }
        Err(error) => Err(Failure::new(FailureKind::Other, error.to_string())),
    }
}
