//! The policies of `docs/samples` run as they are written, but for the name of the topic. What could
//! go wrong: a sample that people copy is refused, or does something else than its page says.

use std::{collections::BTreeSet, time::Duration};

use anyhow::Result;
use oncebox_control::NewDeployment;
use oncebox_model::{
    MessageStatus,
    policy::{Ack, Collision, Dedup, NoRoute, Order, Policy, Preset},
};
use oncebox_tests::{
    guests::{Emit, End, Step, component},
    host::{HostFixture, Options},
    outgoing::derived_id,
    provider::{Behaviour, Provider},
    shop::Publisher,
    wait::{self, DEADLINE},
};
use serde_json::{Value, json};
use sqlx::AssertSqlSafe;

const SEEN: &str = "CREATE TABLE seen (place bigint GENERATED ALWAYS AS IDENTITY, message_id text \
    NOT NULL)";

/// The policy of a sample.
fn sample(name: &str) -> Policy {
    let path = format!("{}/../docs/samples/{name}.toml", env!("CARGO_MANIFEST_DIR"));
    Policy::parse(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Creates a consumer with a sample's policy, whose handler notes each message and then takes these
/// steps. Returns the name of its topic, which is new.
async fn consumer(base: &HostFixture, name: &str, steps: &[Step]) -> Result<String> {
    let mut policy = sample(name);
    let topic = format!("{}.{}", base.topic, policy.topics[0]);
    base.kafka().create_topic(&topic, 2, &[]).await?;
    policy.topics = vec![topic.clone()];
    let tenant = &base.tenant.name;
    base.control.tenant_databases().apply_migration(&base.tenant, "seen", SEEN).await?;
    base.control.consumers().create(tenant, name, &policy).await?;
    let notes = Step::ExecuteWithId("INSERT INTO seen (message_id) VALUES ($1)".to_owned());
    let steps = [&[notes, Step::GiveUpOnError], steps].concat();
    let grants = steps.iter().any(|step| matches!(step, Step::Emit(_))).then(|| "emit".to_owned());
    let new = NewDeployment {
        grants: grants.into_iter().collect(),
        ..NewDeployment::stable("*", "sample", "")
    };
    let component = component(&steps, &End::Ok);
    base.control.versions().deploy_compiled(tenant, name, new, &component).await?;
    Ok(topic)
}

/// Waits until the consumer's group has acked all records.
async fn wait_read(base: &HostFixture, name: &str) -> Result<()> {
    let lag = ["consumer", "lag", name, "--tenant", &base.tenant.name, "--json"];
    wait::until(
        DEADLINE,
        Duration::from_millis(200),
        async || {
            let lag: Value = serde_json::from_str(&base.ok(&lag).await?)?;
            Ok(lag["records"] == 0)
        },
        async || "the records are not acked".to_owned(),
    )
    .await
}

/// The messages that the handler has noted, in the order of their effects.
async fn seen(base: &HostFixture) -> Result<Vec<String>> {
    let sql = format!("SELECT message_id FROM {}.seen ORDER BY place", base.tenant.schema_name);
    Ok(sqlx::query_scalar(AssertSqlSafe(sql)).fetch_all(&base.pool).await?)
}

/// Notifications that come twice are sent once each, under keys that the host derives; another
/// payload under a known id is parked, which is an alert; nothing is read again.
#[tokio::test(flavor = "multi_thread")]
async fn a_sender_of_notifications_runs_as_written() {
    const NAME: &str = "notification-sender";
    let provider = Provider::start(Behaviour::sound()).await;
    let options = Options { config: provider.host_settings(), ..Options::default() };
    let mut base = HostFixture::with(options).await.unwrap();
    base.control = base.control.clone().sending_with(provider.sender());
    let tenant = base.tenant.name.clone();
    let limits = json!({
        "destinations_allowed": ["http:mail"],
        "endpoint_hosts_allowed": [provider.authority()],
    });
    base.control.tenants().set_limits(&tenant, limits.as_object().unwrap()).await.unwrap();
    base.control.endpoints().set(&tenant, &provider.endpoint("mail"), false).await.unwrap();
    let sends = Step::Emit(Emit::to("http:mail", "notification.send"));
    let topic = consumer(&base, NAME, &[sends]).await.unwrap();

    let publisher = Publisher::new(base.kafka().bootstrap()).unwrap();
    let ids: Vec<_> = (0..20).map(|number| format!("n-{number}")).collect();
    let publish = async |id: &str, payload: &str| {
        let header = [("message-id", id)];
        publisher.publish_with(&topic, (id, "t", id), payload, &header).await.unwrap();
    };
    for id in ids.iter().chain(&ids) {
        publish(id, &format!("to {id}")).await;
    }
    publish(&ids[0], "to somebody else").await;

    let host = base.start_ready("a", &[]).await.unwrap();
    base.until("SELECT count(*) FROM {schema}.seen", 20).await.unwrap();
    let sent = "SELECT count(*) FROM oncebox.outgoing WHERE status = 'completed'";
    base.until(sent, 20).await.unwrap();
    wait_read(&base, NAME).await.unwrap();

    let policy = sample(NAME);
    let Policy { ack, dedup, no_route, collision, replay, alerts, .. } = &policy;
    // S1-117.
    assert_eq!((*ack, *dedup, replay.allowed), (Ack::AfterInsert, Dedup::Inbox, false));
    assert_eq!((*no_route, *collision), (NoRoute::Park, Some(Collision::Park)));
    assert_eq!((alerts.pending_age_s, alerts.parked), (60, 1));
    let preset = Some(Preset::ExponentialJitter);
    assert_eq!((policy.retry.attempts_max, policy.retry.preset), (10, preset));
    let keys: BTreeSet<_> = ids.iter().map(|id| derived_id(&tenant, NAME, id, 0)).collect();
    let ledger = provider.ledger();
    assert_eq!(ledger.keys().cloned().collect::<BTreeSet<_>>(), keys);
    assert!(ledger.values().all(|entry| entry.effects == 1), "{ledger:?}");
    assert_eq!(provider.faults(), Vec::<String>::new());
    let (mut noted, mut expected) = (seen(&base).await.unwrap(), ids.clone());
    noted.sort();
    expected.sort();
    assert_eq!(noted, expected);
    let (backlog, alerts) = base.control.messages().backlog(&tenant, NAME).await.unwrap();
    assert_eq!((backlog.messages(MessageStatus::Parked), backlog.pending()), (1, 0));
    let alerts: Vec<_> = alerts.iter().map(|alert| (alert.name, alert.value)).collect();
    // A collision is an alert by default.
    assert_eq!(alerts, [("parked", 1.0), ("collisions", 1.0)]);
    let seek = ["consumer", "seek", NAME, "--tenant", &tenant, "--to", "beginning", "--yes"];
    let refused = base.ok(&seek).await.unwrap_err().to_string();
    assert!(refused.contains("`replay.allowed = false`; nothing was changed"), "{refused}");
    host.stop().await.unwrap();
}

/// Events that come twice and out of their order take effect once each, in the order of their
/// versions.
#[tokio::test(flavor = "multi_thread")]
async fn a_projection_of_orders_runs_as_written() {
    const NAME: &str = "order-projection";
    const ORDERS: usize = 3;
    let base = HostFixture::with(Options::default()).await.unwrap();
    let topic = consumer(&base, NAME, &[]).await.unwrap();
    let publisher = Publisher::new(base.kafka().bootstrap()).unwrap();
    let (tenant, host) = (&base.tenant.name, base.start_ready("a", &[]).await.unwrap());
    let key = |order: usize| format!("{tenant}-{order}");
    for version in ["1", "3", "3", "2", "1", "4", "2"] {
        for order in 0..ORDERS {
            let (key, id) = (key(order), format!("{}-{version}", key(order)));
            let headers = [
                ("message-id", &*id),
                ("event-type", "order.changed"),
                ("aggregate-version", version),
            ];
            let of = (&*id, "t", &*key);
            publisher.publish_with(&topic, of, "{}", &headers).await.unwrap();
        }
    }
    base.until("SELECT count(*) FROM {schema}.seen", 4 * ORDERS as i64).await.unwrap();
    wait_read(&base, NAME).await.unwrap();
    let open = "SELECT count(*) FROM oncebox.inbox WHERE status <> 'completed'";
    assert_eq!(base.number(open).await.unwrap(), 0);
    let policy = sample(NAME);
    let Policy { order, retention, alerts, .. } = &policy;
    // S1-116.
    assert_eq!((*order, retention.days()), (Order::Key, Some(30)));
    assert_eq!((alerts.pending_age_s, alerts.parked), (300, 1));
    let seen = seen(&base).await.unwrap();
    for order in (0..ORDERS).map(key) {
        let of_order: Vec<_> = seen.iter().filter_map(|id| id.strip_prefix(&order)).collect();
        // S1-116.
        assert_eq!(of_order, ["-1", "-2", "-3", "-4"], "{order}: {seen:?}");
    }
    host.stop().await.unwrap();
}
