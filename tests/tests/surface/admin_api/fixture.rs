//! A database with two tenants, tokens of every kind, and the API over it.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    http::{HeaderMap, Request, StatusCode},
};
use bytes::Bytes;
use chrono::{DateTime, Utc};
use oncebox_api::{
    Api, Asking, AskingRedelivery, Brokers, Checked, Checking, Components, GroupPosition, Limits,
    Mode, Principal, ProblemBody, SeekTo, Unchecked, wire::Role,
};
use oncebox_control::{
    Control, DatabaseUrl, FetchLimits, NamedDatabase, NamedDatabases, NewToken, NewVersion,
    StoreSettings, Stores,
};
use oncebox_model::policy::{BrokerRetention, Policy, Redelivery, TopicRetention, TopicSettings};
use oncebox_runtime::{RuntimeConfig, WasmRuntime};
use oncebox_sender::{AllowedHosts, Sender, SenderOptions};
use oncebox_tests::inbox::InboxFixture;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use sqlx::AssertSqlSafe;
use tower::ServiceExt;

use super::steps::Step;

pub struct ApiFixture {
    inbox: InboxFixture,
    pub api: Api,
    router: Router,
    tokens: HashMap<(String, Role), String>,
    expired: String,
    revoked: String,
    deployment_id: AtomicI64,
}

/// The policy of the consumers, whose messages may be replayed. Nothing is masked, and what could
/// be is for operators.
const REPLAYABLE: &str = "replay = { kind = 'cache' }\nmasking = { role = 'operator' }";

/// What the API said.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Value,
}

pub fn sha256(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// Uploads are looked at by compiling them.
struct Compiling(WasmRuntime);

impl Components for Compiling {
    fn check(&self, upload: Bytes) -> Checking<'_> {
        Box::pin(async move {
            let refused = |error: oncebox_runtime::LoadError| {
                Unchecked::Refused(vec![ProblemBody {
                    code: "invalid".to_owned(),
                    text: error.to_string(),
                }])
            };
            let loaded = self.0.load(&upload).await.map_err(refused)?;
            let report = json!({ "imports": loaded.imports() });
            Ok(Checked {
                digest: loaded.digest(),
                component: upload,
                source_digest: None,
                report,
                is_compiled: true,
            })
        })
    }

    fn submit(&self, _: [u8; 32]) {}

    fn check_policy(&self, _: &str, _: &str, _: &Policy) -> Result<(), String> {
        Ok(())
    }
}

/// A topic with one partition, in the middle of which every group stands.
struct OnePartition;

impl Brokers for OnePartition {
    fn positions<'a>(
        &'a self,
        _: &'a str,
        _: &'a str,
        policy: &'a Policy,
        to: SeekTo,
        _: Option<DateTime<Utc>>,
    ) -> Asking<'a> {
        let target = if to == SeekTo::Beginning { 0 } else { 100 };
        let (topic, horizon) = (policy.topics[0].clone(), Some(20));
        let position = GroupPosition {
            topic,
            partition: 0,
            committed: Some(50),
            target: Some(target),
            low: 0,
            high: 100,
            horizon,
        };
        Box::pin(async move { Ok(vec![position]) })
    }

    /// Brokers keep the records of every topic for a day.
    fn redelivery<'a>(
        &'a self,
        _: &'a str,
        _: &'a str,
        policy: &'a Policy,
    ) -> AskingRedelivery<'a> {
        const DAY_MS: u64 = 86_400_000;
        let kept = TopicRetention::Known(BrokerRetention {
            retention_ms: Some(DAY_MS),
            retention_bytes: None,
            segment_ms: DAY_MS,
            cleanup_policy: "delete".to_owned(),
        });
        let topics = policy
            .topics
            .iter()
            .map(|topic| TopicSettings { topic: topic.clone(), kept: kept.clone() })
            .collect();
        Box::pin(async move { Redelivery { topics, group_ms: 335_000 } })
    }
}

/// Host of the endpoint, where nobody listens.
const ENDPOINT_HOST: &str = "127.0.0.1:1";

/// A sender that may send to that host.
fn sender() -> Arc<Sender> {
    let hosts = AllowedHosts::parse([ENDPOINT_HOST]).expect("a host");
    let options = SenderOptions {
        allowed_hosts: hosts.clone(),
        plain_http_hosts: hosts,
        private_ranges_allowed: vec!["127.0.0.0/8".parse().expect("a range")],
        ca_file: None,
    };
    Arc::new(Sender::new(options).expect("a sender"))
}

/// A database to which a tenant may move, where nobody listens.
fn elsewhere() -> NamedDatabase {
    NamedDatabase {
        name: "db2".to_owned(),
        url: DatabaseUrl::parse("postgres://oncebox:x@127.0.0.1:1/oncebox").expect("a URL"),
        weight: 0,
        connections_max: 4,
    }
}

impl ApiFixture {
    pub async fn new(mode: Mode, limits: Limits) -> Self {
        let mut inbox = InboxFixture::new().await;
        let store = StoreSettings {
            endpoint: "https://s3.example".to_owned(),
            region: "eu-test-1".to_owned(),
            ..StoreSettings::default()
        };
        let stores = BTreeMap::from([("docs".to_owned(), store)]);
        let stores = Stores::new(
            stores,
            FetchLimits { stall: Duration::from_secs(1), ..FetchLimits::default() },
        );
        inbox.control = inbox
            .control
            .clone()
            .fetching_from(stores)
            .sending_with(sender())
            .placing_in(NamedDatabases::new([elsewhere()]).expect("a database"));
        let mut consumer = None;
        for name in ["acme", "other"] {
            let tenant = inbox.tenant(name, "").await;
            consumer = consumer.or(Some(inbox.consumer(&tenant, "orders", REPLAYABLE).await));
        }
        let consumer = consumer.expect("two tenants");
        let hosts = json!({ "endpoint_hosts_allowed": [ENDPOINT_HOST] });
        let hosts = hosts.as_object().expect("an object");
        inbox.control.tenants().set_limits("acme", hosts).await.expect("limits");
        for bytes in [b"version 1", b"version 2"] {
            let report = json!({ "imports": [String::from_utf8_lossy(bytes)] });
            let version = NewVersion {
                component: bytes,
                source_digest: None,
                report: &report,
                is_compiled: true,
            };
            inbox.control.versions().add("acme", "ledger", version).await.expect("a version");
        }
        inbox
            .execute(format!(
                "INSERT INTO oncebox.inbox (consumer_id, message_id, retention_class, bucket, \
                    topic, partition, \"offset\", record_timestamp_ms, \
                 status, reason, processed_at, headers, payload) \
                 SELECT {}, 'm/1', 1, oncebox.bucket_at(1::smallint, now()), 't', 0, 1, 1, \
                 'failed_terminal', 'reject', now(), '', 'x'",
                consumer.row.consumer_id
            ))
            .await;
        inbox
            .execute(format!(
                "INSERT INTO oncebox.outgoing (consumer_id, message_id, ordinal, bucket, id, \
                    destination, event_type, correlation_id, headers, payload, status, due_at, \
                    next_attempt_at) \
                 SELECT {}, 'm/1', 0, date_trunc('day', now(), 'UTC'), 'o-1', 'kafka:receipts', \
                 'receipt', 'm/1', '', 'x', 'received', now(), now()",
                consumer.row.consumer_id
            ))
            .await;
        inbox
            .execute(format!(
                "INSERT INTO oncebox.replay (consumer_id, kind, emit, filter, until_at, \
                    policy_revision, generation, token_hash, expires_at, planned_by, found, \
                    found_without_payload, is_counted_whole, cursor_at) \
                 SELECT {}, 'cache', 'suppressed', '{{}}', now(), 0, 0, sha256('secret'), \
                 now() + interval '1 day', 'test', 0, 0, true, 'epoch'",
                consumer.row.consumer_id
            ))
            .await;
        let (tokens, expired, revoked) = tokens(&inbox.control).await;
        inbox
            .execute(format!(
                "UPDATE oncebox.token SET expires_at = now() - interval '1 s' WHERE \
            name = '{EXPIRED}'"
            ))
            .await;
        let runtime =
            WasmRuntime::new(RuntimeConfig { instances_max: 1, ..RuntimeConfig::default() })
                .expect("a runtime");
        let api = Api::new(inbox.control.clone(), Arc::new(Compiling(runtime)), limits, mode)
            .with_brokers(Arc::new(OnePartition));
        let router = oncebox_api::router(api.clone());
        Self { inbox, api, router, tokens, expired, revoked, deployment_id: AtomicI64::new(1) }
    }

    /// A token of a role, for a tenant or, without a name, for all.
    pub fn token_of(&self, tenant: &str, role: Role) -> String {
        self.tokens[&(tenant.to_owned(), role)].clone()
    }

    /// The smallest token that an operation takes.
    pub fn token(&self, needed: &str, template: &str) -> String {
        if needed == "platform" {
            return self.token_of("", Role::Admin);
        }
        let role = Role::parse(needed).unwrap_or(Role::Viewer);
        self.token_of(if template.contains("{tenant}") { "acme" } else { "" }, role)
    }

    /// What is no token, or none any more.
    pub fn bad_tokens(&self) -> Vec<(&'static str, Option<String>)> {
        let good = self.token_of("", Role::Admin);
        vec![
            ("none", None),
            ("empty", Some(String::new())),
            ("not like a token", Some("hunter2".to_owned())),
            ("unknown", Some(format!("obx_{}", "0".repeat(64)))),
            ("cut off", Some(good[..67].to_owned())),
            ("in capitals", Some(good.to_uppercase())),
            ("its hash", Some(format!("obx_{}", sha256(good.as_bytes())))),
            ("expired", Some(self.expired.clone())),
            ("revoked", Some(self.revoked.clone())),
        ]
    }

    pub async fn answer(&self, step: &Step, token: Option<&str>) -> Answer {
        self.send(step.method, &step.path(self), step.body.bytes(), step.body.media_type(), token)
            .await
    }

    pub async fn send(
        &self,
        method: &str,
        path: &str,
        body: Vec<u8>,
        media_type: &str,
        token: Option<&str>,
    ) -> Answer {
        let mut request = Request::builder().method(method).uri(path).header("host", "localhost");
        if !media_type.is_empty() {
            request = request.header("content-type", media_type);
        }
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        self.ask(request.body(Body::from(body)).unwrap_or_else(|error| panic!("{path}: {error}")))
            .await
    }

    /// As somebody in this process.
    pub async fn as_local(
        &self,
        principal: Principal,
        method: &str,
        path: &str,
        body: &'static str,
    ) -> Answer {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("content-type", "application/json")
            .extension(principal);
        self.ask(request.body(Body::from(body)).expect("a request")).await
    }

    async fn ask(&self, request: Request<Body>) -> Answer {
        let response = self.router.clone().oneshot(request).await.expect("it always answers");
        let (head, body) = response.into_parts();
        let body = axum::body::to_bytes(body, 64 << 20).await.expect("a body");
        let body = serde_json::from_slice(&body)
            .unwrap_or_else(|error| panic!("{}: {error}", String::from_utf8_lossy(&body)));
        assert!(head.headers.contains_key("x-request-id"));
        Answer { status: head.status, headers: head.headers, body }
    }

    /// The next steps speak of the deployment that was made last.
    pub fn remember(&self, answer: &Answer) {
        let id = answer.body["deployment_id"]
            .as_i64()
            .or_else(|| answer.body["live"]["deployment_id"].as_i64());
        if let Some(id) = id {
            self.deployment_id.store(id, Ordering::Relaxed);
        }
    }

    pub fn deployment_id(&self) -> i64 {
        self.deployment_id.load(Ordering::Relaxed)
    }

    /// All that is in the host's tables, and which tables the tenants have.
    pub async fn digest(&self) -> String {
        const TABLES: &str = "SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class c JOIN \
            pg_namespace n ON n.oid = c.relnamespace \
            WHERE c.relkind = 'r' AND n.nspname NOT LIKE 'pg\\_%' AND n.nspname <> \
            'information_schema' ORDER BY 1";
        let tables: Vec<String> =
            sqlx::query_scalar(TABLES).fetch_all(&self.inbox.pool).await.expect("tables");
        assert!(tables.iter().any(|table| table == "oncebox.audit"));
        let mut all = String::new();
        for table in tables {
            let sql = format!(
                "SELECT coalesce(md5(string_agg(t::text, '|' ORDER BY t::text)), '') FROM {table} t"
            );
            let rows: String = sqlx::query_scalar(AssertSqlSafe(sql))
                .fetch_one(&self.inbox.pool)
                .await
                .expect("a digest");
            all += &format!("{table} {rows}\n");
        }
        all
    }

    /// The same without the log of who did what.
    pub async fn digest_but_audit(&self) -> String {
        self.digest()
            .await
            .lines()
            .filter(|line| !line.starts_with("oncebox.audit "))
            .map(|line| format!("{line}\n"))
            .collect()
    }

    /// A statement of a superuser.
    pub async fn execute(&self, sql: &str) {
        self.inbox.execute(sql).await;
    }

    /// Take a consumer's row away, as if it had never been.
    pub async fn remove_consumer(&self, name: &str) {
        self.inbox.execute(format!("DELETE FROM oncebox.consumer WHERE name = '{name}'")).await;
    }

    pub async fn finish(self) {
        self.api.finish().await;
        self.inbox.execute("DELETE FROM oncebox.inbox").await;
        self.inbox.finish().await;
    }
}

const EXPIRED: &str = "expired";

async fn tokens(control: &Control) -> (HashMap<(String, Role), String>, String, String) {
    let make = async |name: &str, role: Role, tenant: Option<&str>| {
        let expires_at = (name == EXPIRED).then(|| chrono::Utc::now() + chrono::Duration::days(1));
        let new = NewToken { name, role: role.into(), tenant, expires_at };
        let (token, secret) = control.tokens().create(&new).await.expect("a token");
        (token.token_id, secret.reveal().to_owned())
    };
    // The first is a tenant's own, so that both ways to revoke one find it.
    let mut all = HashMap::new();
    let (_, expired) = make(EXPIRED, Role::Admin, Some("acme")).await;
    let (revoked_id, revoked) = make("revoked", Role::Admin, Some("acme")).await;
    control.tokens().revoke(None, revoked_id).await.expect("it ends");
    for tenant in ["", "acme", "other"] {
        for role in Role::ALL {
            let name =
                if tenant.is_empty() { format!("all-{role}") } else { format!("{tenant}-{role}") };
            let (_, secret) =
                make(&name, role, Some(tenant).filter(|tenant| !tenant.is_empty())).await;
            all.insert((tenant.to_owned(), role), secret);
        }
    }
    (all, expired, revoked)
}
