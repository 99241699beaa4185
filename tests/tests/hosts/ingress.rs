//! Messages over HTTP have one effect each, whatever dies between their request and its answer, and
//! whichever way they come a second time. What nobody verifies leaves nothing behind.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    os::unix::process::ExitStatusExt,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use hmac::{Hmac, KeyInit, Mac};
use oncebox_control::{IngressSecretChange, NewDeployment};
use oncebox_devkit::local::free_port;
use oncebox_model::{hooks::INGRESS_POINTS, policy::Policy};
use oncebox_tests::{
    guests::{End, Step, component},
    host::{HostFixture, HostProcess, Options},
    http::exchange,
    shop::Publisher,
    wait::{self, DEADLINE},
};
use serde_json::Value;
use sha2::Sha256;
use sqlx::AssertSqlSafe;

const CONSUMER: &str = "hooks";
const SECRET: &str = "a secret that GitHub has";
const SEEN: &str = "CREATE TABLE seen (place bigint GENERATED ALWAYS AS IDENTITY, message_id text \
    NOT NULL)";
/// Longest wait for an answer.
const ANSWER: Duration = Duration::from_secs(20);

/// A consumer that takes GitHub's webhooks, by HTTP and from a topic. Its handler notes each
/// message.
struct IngressFixture {
    base: HostFixture,
    topic: String,
}

/// What a sender is answered: the status, and the code or the state of the message.
type Answered = (u16, String);

impl IngressFixture {
    async fn new(options: Options) -> Result<Self> {
        let base = HostFixture::with(options).await?;
        let topic = format!("{}.hooks", base.topic);
        base.kafka().create_topic(&topic, 2, &[]).await?;
        let (control, tenant) = (&base.control, &base.tenant.name);
        control.tenant_databases().apply_migration(&base.tenant, "seen", SEEN).await?;
        let policy = format!(
            "topics = ['{topic}']\nack = 'after_commit'\nretry = {{ attempts_max = 20, \
                backoff_min_ms = 50, backoff_max_ms = 200, lease_ms = 4000 }}\n\
             limits = {{ deadline_ms = 1400 }}\n\
             [identity]\nid = [{{ header = 'x-github-delivery' }}]\n\
             event_type = [{{ header = 'x-github-event' }}]\n\
             [ingress]\nverify = 'github'\nbody_bytes_max = 4096\nrequests_per_second = 10000"
        );
        control.consumers().create(tenant, CONSUMER, &Policy::parse(&policy)?).await?;
        let change = IngressSecretChange::Replace(SECRET.to_owned());
        control.ingress().change_secret(tenant, CONSUMER, &change).await?;
        let component = component(&[notes(), Step::GiveUpOnError], &End::Ok);
        let new = NewDeployment::stable("*", "hooks", "");
        control.versions().deploy_compiled(tenant, CONSUMER, new, &component).await?;
        Ok(Self { base, topic })
    }

    /// Starts a host that takes messages over HTTP. Returns where.
    fn start(&self, name: &str, variables: &[(&str, &str)]) -> Result<(HostProcess, SocketAddr)> {
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()?));
        let listen = address.to_string();
        let variables = [variables, &[("ONCEBOX_INGRESS_LISTEN", &listen)]].concat();
        Ok((self.base.start(name, &variables)?, address))
    }

    fn path(&self) -> String {
        format!("/in/{}/{CONSUMER}", self.base.tenant.name)
    }

    /// Sends a webhook that is signed. None where there is no answer.
    async fn send(&self, to: SocketAddr, id: &str, body: &str) -> Option<Answered> {
        self.send_signed(to, id, body, &signature(SECRET, body)).await
    }

    /// Sends a webhook again until the host says that the inbox has it.
    async fn send_until_stored(&self, to: SocketAddr, id: &str, body: &str) -> Answered {
        let mut said = None;
        let is_stored = async || {
            said = self.send(to, id, body).await;
            let status = said.as_ref().map(|(status, _)| *status);
            ensure!([None, Some(429), Some(503), Some(200), Some(202)].contains(&status), "{id}");
            Ok(status.is_some_and(|status| status < 300))
        };
        let late = async || format!("`{id}` is not stored");
        wait::until(DEADLINE, Duration::from_millis(50), is_stored, late).await.unwrap();
        said.expect("an answer")
    }

    async fn send_signed(
        &self,
        to: SocketAddr,
        id: &str,
        body: &str,
        signature: &str,
    ) -> Option<Answered> {
        let headers = format!(
            "x-github-delivery: {id}\r\nx-github-event: push\r\ncontent-type: application/json\r\n\
                x-hub-signature-256: {signature}\r\ncontent-length: {}\r\n",
            body.len()
        );
        ask(to, &format!("POST {}", self.path()), &headers, body).await
    }

    /// The effects of each message.
    async fn effects(&self) -> Result<BTreeMap<String, i64>> {
        let schema = &self.base.tenant.schema_name;
        let sql = format!("SELECT message_id, count(*) FROM {schema}.seen GROUP BY 1");
        let database = self.base.control.tenant_databases().get(&self.base.tenant)?;
        let pool = &database.pool;
        let effects: Vec<_> = sqlx::query_as(AssertSqlSafe(sql)).fetch_all(pool).await?;
        Ok(effects.into_iter().collect())
    }

    /// Waits until each of the messages has had an effect, and checks that it is one.
    async fn wait_effects(&self, ids: &BTreeSet<String>) -> Result<()> {
        wait::until(
            DEADLINE,
            Duration::from_millis(100),
            async || Ok(self.effects().await?.len() >= ids.len()),
            async || format!("not all effects are there: {:?}", self.effects().await),
        )
        .await?;
        let effects = self.effects().await?;
        ensure!(effects.keys().eq(ids.iter()), "effects of other messages: {effects:?}");
        ensure!(effects.values().all(|count| *count == 1), "more than one effect: {effects:?}");
        Ok(())
    }
}

/// The step with which a handler notes its message.
fn notes() -> Step {
    Step::ExecuteWithId("INSERT INTO seen (message_id) VALUES ($1)".to_owned())
}

fn signature(secret: &str, body: &str) -> String {
    let mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).expect("any length");
    format!("sha256={}", hex::encode(mac.chain_update(body).finalize().into_bytes()))
}

/// Sends a request and returns the status of the answer, with its code or the state of the message.
async fn ask(to: SocketAddr, line: &str, headers: &str, body: &str) -> Option<Answered> {
    let request =
        format!("{line} HTTP/1.1\r\nhost: hooks\r\nconnection: close\r\n{headers}\r\n{body}");
    let answer = exchange(to, &request, ANSWER).await?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let body: Value = serde_json::from_str(body).unwrap_or_default();
    let said = body["code"].as_str().or(body["status"].as_str()).unwrap_or_default();
    Some((status, said.to_owned()))
}

fn answered(status: u16, said: &str) -> Option<Answered> {
    Some((status, said.to_owned()))
}

/// What could go wrong: an event that comes over HTTP and by Kafka, in either order, is two
/// messages; or a sender that asks again is told something that is not so. S0-045.
#[tokio::test(flavor = "multi_thread")]
async fn an_event_by_http_and_by_kafka_has_one_effect() {
    const EVENTS: usize = 30;
    let options = Options { own_database: true, ..Options::default() };
    let fixture = IngressFixture::new(options).await.unwrap();
    let publisher = Publisher::new(fixture.base.kafka().bootstrap()).unwrap();
    let (host, address) = fixture.start("a", &[]).unwrap();
    host.wait_ready().await.unwrap();
    let ids: Vec<_> = (0..EVENTS).map(|number| format!("d-{number}")).collect();
    let body = |id: &str| format!(r#"{{"ref":"{id}"}}"#);
    let publish = async |id: &str| {
        let headers = [("x-github-delivery", id), ("x-github-event", "push")];
        publisher.publish_with(&fixture.topic, (id, "t", id), &body(id), &headers).await.unwrap();
    };
    // A third comes by Kafka first, a third both ways at the same moment, and a third by Kafka last.
    for id in &ids[..EVENTS / 3] {
        publish(id).await;
    }
    fixture.wait_effects(&ids[..EVENTS / 3].iter().cloned().collect()).await.unwrap();
    for id in &ids[..EVENTS / 3] {
        let said = fixture.send_until_stored(address, id, &body(id)).await;
        assert_eq!(said, (200, "completed".to_owned()), "{id}");
    }
    for id in &ids[EVENTS / 3..2 * EVENTS / 3] {
        let text = body(id);
        futures::join!(fixture.send_until_stored(address, id, &text), publish(id));
    }
    for id in &ids[2 * EVENTS / 3..] {
        let said = fixture.send_until_stored(address, id, &body(id)).await;
        assert_eq!(said, (202, "received".to_owned()), "{id}");
    }
    for id in &ids[2 * EVENTS / 3..] {
        publish(id).await;
    }
    fixture.wait_effects(&ids.iter().cloned().collect()).await.unwrap();
    for id in &ids {
        let said = fixture.send_until_stored(address, id, &body(id)).await;
        assert_eq!(said, (200, "completed".to_owned()), "{id}");
    }
    let other = fixture.send(address, &ids[0], "{}").await;
    assert_eq!(other, answered(422, "collision"), "another body under a known id");
    // Every record is read, and each event has come by both ways.
    let lag = ["consumer", "lag", CONSUMER, "--tenant", &fixture.base.tenant.name, "--json"];
    wait::until(
        DEADLINE,
        Duration::from_millis(200),
        async || {
            let lag: Value = serde_json::from_str(&fixture.base.ok(&lag).await?)?;
            Ok(lag["records"] == 0)
        },
        async || "the records are not acked".to_owned(),
    )
    .await
    .unwrap();
    // S0-045.
    fixture.wait_effects(&ids.iter().cloned().collect()).await.unwrap();
    host.until_metric(REQUESTS, &["outcome=\"collision\""], 1.0).await.unwrap();
    host.stop().await.unwrap();
}

const REQUESTS: &str = "oncebox_ingress_requests_total";

/// What could go wrong: a host dies between the COMMIT and its answer, and the message is stored
/// twice when its sender asks again; or it dies before the COMMIT, after it has answered.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_killed_before_its_answer_leaves_every_effect_once() {
    const EVENTS: usize = 8;
    let fixture = IngressFixture::new(Options::default()).await.unwrap();
    let mut ids = BTreeSet::new();
    for (round, point) in INGRESS_POINTS.iter().enumerate() {
        let armed = format!("{point}@4");
        let (host, address) = fixture.start("a", &[("ONCEBOX_FAILPOINT", &armed)]).unwrap();
        host.wait_ready().await.unwrap();
        let mut unanswered = Vec::new();
        for number in 0..EVENTS {
            let id = format!("d-{round}-{number}");
            match fixture.send(address, &id, "{}").await {
                Some((status, _)) => assert_eq!(status, 202, "{id}"),
                None => unanswered.push(id.clone()),
            }
            ids.insert(id);
        }
        let status = host.wait_exit().await.unwrap();
        assert_eq!(status.signal(), Some(libc::SIGKILL), "`{armed}`: {status}");
        assert_eq!(unanswered.len(), EVENTS - 3, "it died at the fourth");
        let stored = format!(
            "SELECT count(*) FROM oncebox.inbox WHERE topic = 'oncebox-ingress' AND message_id \
                LIKE 'd-{round}-%'"
        );
        let kept = 3 + i64::from(*point == "ingress:commit:after");
        // What was answered is stored, and what was not answered may be.
        assert_eq!(fixture.base.number(&stored).await.unwrap(), kept, "{point}");
        let (host, address) = fixture.start("b", &[]).unwrap();
        host.wait_ready().await.unwrap();
        for id in &unanswered {
            let (status, _) = fixture.send(address, id, "{}").await.expect("an answer");
            assert!([200, 202].contains(&status), "{id}: {status}");
        }
        fixture.wait_effects(&ids).await.unwrap();
        host.kill().await.unwrap();
    }
}

/// What could go wrong: a request that nobody signed becomes a row, fills the log, or keeps those of
/// a sender that did sign out.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_verified_leaves_nothing() {
    const FORGED: usize = 2_000;
    let fixture = IngressFixture::new(Options::default()).await.unwrap();
    let (host, address) = fixture.start("a", &[]).unwrap();
    host.wait_ready().await.unwrap();
    let first = fixture.send_until_stored(address, "d-1", "{}").await;
    assert_eq!(first, (202, "received".to_owned()));
    let lines = host.log_lines("");
    for number in 0..FORGED / 8 {
        let kinds = (0..8).map(|kind| forged(&fixture, address, number * 8 + kind));
        for (kind, said) in futures::future::join_all(kinds).await.into_iter().enumerate() {
            // The answer to a large body can be lost with the connection, which is closed before all
            // of the body is read; the count below has it.
            let lost = if kind == 2 { 413 } else { 0 };
            let (status, _) = said.unwrap_or((lost, String::new()));
            assert!((400..500).contains(&status), "kind {kind}: {status}");
        }
    }
    // Bodies that never come hold nothing up, and are given up.
    let slow = (0..20).map(|_| {
        let signed = signature(SECRET, "{}");
        let headers = format!("x-hub-signature-256: {signed}\r\ncontent-length: 100\r\n");
        let line = format!("POST {}", fixture.path());
        async move { ask(address, &line, &headers, "{").await }
    });
    let slow = tokio::spawn(futures::future::join_all(slow));
    let second = fixture.send_until_stored(address, "d-2", "{}").await;
    assert_eq!(second, (202, "received".to_owned()));
    let given_up = slow.await.unwrap();
    assert_eq!(given_up, vec![answered(408, "unfinished"); 20]);
    let ids = ["d-1", "d-2"].map(str::to_owned).into_iter().collect();
    fixture.wait_effects(&ids).await.unwrap();
    let rows = "SELECT count(*) FROM oncebox.inbox WHERE topic = 'oncebox-ingress'";
    assert_eq!(fixture.base.number(rows).await.unwrap(), 2);
    assert!(host.log_lines("") < lines + 50, "the log grew with what was refused");
    assert_eq!(host.log_lines(SECRET), 0);
    let eighth = FORGED as f64 / 8.0;
    host.until_metric(REQUESTS, &["outcome=\"too_large\""], eighth).await.unwrap();
    host.until_metric_reaches(REQUESTS, &["outcome=\"unverified\""], 3.0 * eighth).await.unwrap();
    host.until_metric(REQUESTS, &["outcome=\"no_message\""], eighth).await.unwrap();
    host.until_metric(REQUESTS, &["outcome=\"stored\""], 2.0).await.unwrap();
    host.stop().await.unwrap();
}

/// Sends one of eight kinds of requests that are refused.
async fn forged(fixture: &IngressFixture, to: SocketAddr, number: usize) -> Option<Answered> {
    let (id, body) = (format!("forged-{number}"), format!(r#"{{"number":{number}}}"#));
    let signed = signature(SECRET, &body);
    match number % 8 {
        0 => fixture.send_signed(to, &id, &body, &signature("another secret of 16", &body)).await,
        1 => fixture.send_signed(to, &id, &format!("{body} "), &signed).await,
        2 => {
            let large = "x".repeat(5_000);
            fixture.send(to, &id, &large).await
        }
        3 => fixture.send(to, "", &body).await,
        4 => ask(to, &format!("POST /in/nobody-{number}/{CONSUMER}"), LENGTH_0, "").await,
        5 => ask(to, &format!("GET {}", fixture.path()), "", "").await,
        6 => ask(to, &format!("POST {}/more/{number}", fixture.path()), LENGTH_0, "").await,
        _ => ask(to, "POST no path at all", "a b: c\r\n", "").await,
    }
}

const LENGTH_0: &str = "content-length: 0\r\n";

/// What could go wrong: messages of a key run in another order than they came in, or a sender that
/// sends more than it may fills the inbox.
#[tokio::test(flavor = "multi_thread")]
async fn messages_of_a_key_run_in_their_order_and_no_more_come_than_may() {
    const TOKEN: &str = "0123456789abcdef0123456789abcdef";
    let fixture = IngressFixture::new(Options::default()).await.unwrap();
    let (control, tenant) = (&fixture.base.control, &fixture.base.tenant.name);
    for (name, order, rate) in [("ordered", "key", 10_000), ("slow", "none", 1)] {
        let policy = format!(
            "topics = ['{}']\nack = 'after_commit'\norder = '{order}'\n[ingress]\nverify = \
                'bearer'\nevent_type = 'order'\nrequests_per_second = {rate}",
            fixture.topic
        );
        let policy = Policy::parse(&policy).unwrap();
        control.consumers().create(tenant, name, &policy).await.unwrap();
        let secret = IngressSecretChange::Replace(TOKEN.to_owned());
        control.ingress().change_secret(tenant, name, &secret).await.unwrap();
        let component = component(&[notes(), Step::GiveUpOnError], &End::Ok);
        let new = NewDeployment::stable("*", "hooks", "");
        control.versions().deploy_compiled(tenant, name, new, &component).await.unwrap();
    }
    // What comes is stored, and waits for its turn.
    control.consumers().pause(tenant, "ordered").await.unwrap();
    let (host, address) = fixture.start("a", &[]).unwrap();
    host.wait_ready().await.unwrap();
    let send = async |name: &str, id: &str| {
        let headers = format!(
            "authorization: Bearer {TOKEN}\r\nidempotency-key: {id}\r\nce-partitionkey: k\r\n\
                content-length: 2\r\n"
        );
        ask(address, &format!("POST /in/{tenant}/{name}"), &headers, "{}").await.expect("an answer")
    };
    let ids: Vec<_> = (0..20).map(|number| format!("o-{number}")).collect();
    for (nth, id) in ids.iter().enumerate() {
        let state = if nth == 0 { "received" } else { "waiting" };
        assert_eq!(send("ordered", id).await, (202, state.to_owned()), "{id}");
    }
    control.consumers().resume(tenant, "ordered").await.unwrap();
    let all: BTreeSet<_> = ids.iter().cloned().collect();
    fixture.wait_effects(&all).await.unwrap();
    let schema = &fixture.base.tenant.schema_name;
    let sql = format!("SELECT message_id FROM {schema}.seen ORDER BY place");
    let query = sqlx::query_scalar(AssertSqlSafe(sql));
    let places: Vec<String> = query.fetch_all(&fixture.base.pool).await.unwrap();
    assert_eq!(places, ids);

    let many: Vec<_> = (0..20).map(|number| format!("s-{number}")).collect();
    let burst = futures::future::join_all(many.iter().map(|id| send("slow", id))).await;
    let taken = burst.iter().filter(|(status, _)| *status == 202).count();
    let refused = burst.iter().filter(|said| **said == (429, "rate_limited".to_owned())).count();
    assert!(taken > 0 && refused > 0 && taken + refused == many.len(), "{burst:?}");
    host.stop().await.unwrap();
}

/// What could go wrong: a secret that was replaced or taken away goes on opening the inbox, or a
/// suspended tenant's inbox grows.
#[tokio::test(flavor = "multi_thread")]
async fn secrets_and_tenants_count_as_they_are_now() {
    const NEXT: &str = "another secret of GitHub";
    let fixture = IngressFixture::new(Options::default()).await.unwrap();
    let (control, tenant) = (&fixture.base.control, &fixture.base.tenant.name);
    let (host, address) = fixture.start("a", &[]).unwrap();
    host.wait_ready().await.unwrap();
    let until = async |secret: &str, status: u16, code: &str| {
        let mut number = 0;
        let mut said = None;
        wait::until(
            DEADLINE,
            Duration::from_millis(200),
            async || {
                number += 1;
                let (id, signed) = (format!("{secret}-{status}-{number}"), signature(secret, "{}"));
                said = fixture.send_signed(address, &id.replace(' ', "-"), "{}", &signed).await;
                Ok(said == answered(status, code))
            },
            async || format!("`{secret}` is not answered {status}"),
        )
        .await
        .context(status)
        .unwrap();
    };
    until(SECRET, 202, "received").await;
    let change = async |change: IngressSecretChange| {
        control.ingress().change_secret(tenant, CONSUMER, &change).await.map(|now| now.secrets)
    };
    let rotate = IngressSecretChange::Rotate(NEXT.to_owned());
    assert_eq!(change(rotate.clone()).await.unwrap(), 2);
    until(NEXT, 202, "received").await;
    until(SECRET, 202, "received").await;
    assert!(change(rotate).await.unwrap_err().to_string().contains("has two secrets"));
    assert_eq!(change(IngressSecretChange::Finish).await.unwrap(), 1);
    until(SECRET, 401, "unverified").await;
    until(NEXT, 202, "received").await;
    let none_left = change(IngressSecretChange::Finish).await.unwrap_err().to_string();
    assert!(none_left.contains("no rotation"), "{none_left}");
    control.tenants().suspend(tenant).await.unwrap();
    until(NEXT, 503, "closed").await;
    let rows = fixture.base.number("SELECT count(*) FROM oncebox.inbox").await.unwrap();
    until(NEXT, 503, "closed").await;
    assert_eq!(fixture.base.number("SELECT count(*) FROM oncebox.inbox").await.unwrap(), rows);
    control.tenants().resume(tenant).await.unwrap();
    until(NEXT, 202, "received").await;
    control.ingress().remove_secret(tenant, CONSUMER).await.unwrap();
    until(NEXT, 401, "unverified").await;
    let missing = control.ingress().secret(tenant, CONSUMER).await.unwrap_err().to_string();
    assert!(missing.contains("oncebox consumer secret set"), "{missing}");
    host.stop().await.unwrap();
}
