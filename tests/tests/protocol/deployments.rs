//! What is live is a row, and every change of it is one transaction with its audit row: refused
//! when it cannot work, and undone by naming what was there before.

use oncebox_control::{
    Control, Deployment, DeploymentRole, Guard, NewDeployment, NewVersion, Progress, Retries, Slot,
    Version,
};
use oncebox_model::InboxError;
use oncebox_tests::inbox::{InboxFixture, PlainHandlers, TestConsumer, deliver, record, records};
use serde_json::{Value, json};

/// A consumer and some versions of a handler.
struct DeploymentFixture {
    inbox: InboxFixture,
    consumer: TestConsumer,
}

impl DeploymentFixture {
    async fn new() -> Self {
        let inbox = InboxFixture::new().await;
        let consumer = inbox.simple("", "").await;
        Self { inbox, consumer }
    }

    fn control(&self) -> &Control {
        &self.inbox.control
    }

    fn tenant(&self) -> &str {
        &self.consumer.row.tenant
    }

    /// A version that is ready; its bytes are its name.
    async fn version(&self, name: &str) -> Version {
        let new = NewVersion {
            component: name.as_bytes(),
            source_digest: None,
            report: &Value::Null,
            is_compiled: true,
        };
        self.control().versions().add(self.tenant(), "h", new).await.unwrap()
    }

    fn new_deployment(&self, version: &Version) -> NewDeployment {
        NewDeployment::stable("order.placed", "h", &hex::encode(&version.digest))
    }

    async fn deploy(&self, new: &NewDeployment) -> Result<Deployment, InboxError> {
        self.control().deployments().deploy(self.tenant(), &self.consumer.row.name, new).await
    }

    async fn deploy_version(&self, name: &str) -> Deployment {
        let version = self.version(name).await;
        self.deploy(&self.new_deployment(&version)).await.unwrap()
    }

    async fn refused(&self, new: &NewDeployment) -> String {
        let before = self.state().await;
        let error = self.deploy(new).await.unwrap_err();
        assert_eq!(self.state().await, before, "a refused deployment changed something");
        error.to_string()
    }

    /// Everything that a deployment can change.
    async fn state(&self) -> [i64; 3] {
        let number = |sql: &'static str| self.inbox.number(sql.to_owned());
        [
            number("SELECT count(*) FROM oncebox.deployment WHERE ended_at IS NULL").await,
            number("SELECT sum(generation + generation_required)::bigint FROM oncebox.consumer")
                .await,
            number("SELECT count(*) FROM oncebox.audit").await,
        ]
    }

    async fn rollback(&self, to: Option<&str>) -> Result<oncebox_control::Rollback, InboxError> {
        let slot = Slot { event_type: "order.placed".to_owned(), event_versions: None };
        self.control()
            .deployments()
            .roll_back(self.tenant(), &self.consumer.row.name, &slot, to, Some("why"), false)
            .await
    }

    /// The digest of what is live, as the bytes of its component.
    async fn live(&self) -> String {
        let live =
            self.control().deployments().live(self.consumer.row.consumer_id).await.unwrap().live;
        let stable =
            live.iter().find(|deployment| deployment.role == DeploymentRole::Stable).unwrap();
        String::from_utf8(self.control().versions().component(&stable.digest).await.unwrap())
            .unwrap()
    }

    async fn generations(&self) -> (i64, i64) {
        sqlx::query_as("SELECT generation, generation_required FROM oncebox.consumer")
            .fetch_one(&self.control().pool)
            .await
            .unwrap()
    }
}

/// What could go wrong: a deployment that cannot work is taken, or refused in a way that helps
/// nobody.
#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_work_is_refused_and_changes_nothing() {
    let f = DeploymentFixture::new().await;
    let version = f.version("a").await;
    let plain = || f.new_deployment(&version);
    let object = |value: Value| value.as_object().unwrap().clone();
    for (new, expected) in [
        (
            NewDeployment { handler: "other".to_owned(), ..plain() },
            "handler `other` has no version",
        ),
        (NewDeployment { version: "abc".to_owned(), ..plain() }, "6 to 64 hexadecimal digits"),
        (NewDeployment { version: "ffffffff".to_owned(), ..plain() }, "has no version `ffffffff`"),
        (
            NewDeployment {
                slot: Slot { event_type: String::new(), event_versions: None },
                ..plain()
            },
            "event type is empty",
        ),
        (
            NewDeployment {
                slot: Slot { event_type: "a*b".to_owned(), event_versions: None },
                ..plain()
            },
            "`a*b` is no event type",
        ),
        (
            NewDeployment {
                slot: Slot { event_type: "a".to_owned(), event_versions: Some("two".to_owned()) },
                ..plain()
            },
            "`two` is no range of event versions",
        ),
        (NewDeployment { percent: Some(5.0), ..plain() }, "`percent` is for a canary or a shadow"),
        (
            NewDeployment { role: DeploymentRole::Canary, percent: Some(5.0), ..plain() },
            "nothing is live for `order.placed`",
        ),
        (
            NewDeployment { role: DeploymentRole::Canary, percent: None, ..plain() },
            "a canary needs `percent`",
        ),
        (
            NewDeployment { role: DeploymentRole::Canary, percent: Some(0.0), ..plain() },
            "`percent` is 0",
        ),
        (
            NewDeployment { role: DeploymentRole::Canary, percent: Some(f64::NAN), ..plain() },
            "`percent` is NaN",
        ),
        (
            NewDeployment {
                role: DeploymentRole::Canary,
                percent: Some(5.0),
                guard: Some(Guard { window_s: 0, ..Guard::default() }),
                ..plain()
            },
            "`guard.window_s` is 0",
        ),
        (
            NewDeployment { limits: object(json!({ "deadline_ms": 1_000_000 })), ..plain() },
            "`limits.deadline_ms` is 1000000",
        ),
        (
            NewDeployment { limits: object(json!({ "deadline": 1 })), ..plain() },
            "`limits.deadline` is not a limit",
        ),
        (
            NewDeployment { requires_migration: Some("0007_note".to_owned()), ..plain() },
            "does not hold migration `0007_note`",
        ),
    ] {
        let error = f.refused(&new).await;
        assert!(error.contains(expected), "{error}, not {expected}");
    }
    let report = json!({ "memory_bytes_min": 65 << 20 });
    let large =
        NewVersion { component: b"large", source_digest: None, report: &report, is_compiled: true };
    let large = f.control().versions().add(f.tenant(), "h", large).await.unwrap();
    assert!(
        f.refused(&f.new_deployment(&large))
            .await
            .contains("`limits.memory_bytes` allows 67108864")
    );
    let queued = NewVersion {
        component: b"queued",
        source_digest: None,
        report: &Value::Null,
        is_compiled: false,
    };
    let queued = f.control().versions().add(f.tenant(), "h", queued).await.unwrap();
    assert!(
        f.refused(&f.new_deployment(&queued))
            .await
            .contains("is queued; deploy it when it is ready")
    );
    f.inbox
        .execute(
            "UPDATE oncebox.component SET state = 'failed', problems = '[{\"code\": \"x\", \
        \"text\": \"it is broken\"}]' WHERE state = 'queued'",
        )
        .await;
    assert!(
        f.refused(&f.new_deployment(&queued)).await.contains("cannot be deployed: it is broken")
    );
    f.inbox.finish().await;
}

/// What could go wrong: two live rows for one slot, a canary beside nothing, a promotion that
/// leaves both.
#[tokio::test(flavor = "multi_thread")]
async fn a_slot_holds_one_of_each_role() {
    let f = DeploymentFixture::new().await;
    let first = f.deploy_version("a").await;
    let second = f.deploy_version("b").await;
    assert_eq!(
        f.control()
            .deployments()
            .get(f.consumer.row.consumer_id, first.deployment_id)
            .await
            .unwrap()
            .ended_how
            .as_deref(),
        Some("superseded")
    );
    let (b, c) = (f.version("b").await, f.version("c").await);
    let canary = |version: &Version| NewDeployment {
        role: DeploymentRole::Canary,
        percent: Some(10.0),
        ..f.new_deployment(version)
    };
    assert!(f.refused(&canary(&b)).await.contains("live for `order.placed` already"));
    let running = f.deploy(&canary(&c)).await.unwrap();
    assert_eq!(running.guard, Some(Guard::default()));
    assert!(f.refused(&canary(&c)).await.contains("runs for `order.placed` already; end it first"));
    assert!(f.refused(&f.new_deployment(&c)).await.contains("a canary runs for `order.placed`"));
    let (tenant, consumer) = (f.tenant(), f.consumer.row.name.as_str());
    let error = f
        .control()
        .deployments()
        .end(tenant, consumer, second.deployment_id, None)
        .await
        .unwrap_err();
    assert!(error.to_string().contains("runs beside it"), "{error}");
    assert_eq!(
        f.control()
            .deployments()
            .set_percent(tenant, consumer, running.deployment_id, 50.0)
            .await
            .unwrap()
            .percent,
        Some(50.0)
    );
    assert!(
        f.control()
            .deployments()
            .set_percent(tenant, consumer, second.deployment_id, 50.0)
            .await
            .is_err()
    );
    let promoted =
        f.control().deployments().promote(tenant, consumer, running.deployment_id).await.unwrap();
    assert_eq!((promoted.role, f.live().await.as_str()), (DeploymentRole::Stable, "c"));
    assert!(
        f.control().deployments().promote(tenant, consumer, running.deployment_id).await.is_err()
    );
    let live = f.control().deployments().live(f.consumer.row.consumer_id).await.unwrap().live;
    assert_eq!(live.len(), 1, "{live:?}");
    f.inbox.finish().await;
}

/// What could go wrong: a rollback goes to what was itself withdrawn, or cannot say what there is.
/// It fences what it withdraws; a deployment does not, before every host has switched.
#[tokio::test(flavor = "multi_thread")]
async fn a_rollback_goes_to_the_version_before_or_to_a_named_one() {
    let f = DeploymentFixture::new().await;
    assert!(f.rollback(None).await.unwrap_err().to_string().contains("nothing is live"));
    let a = f.deploy_version("a").await;
    assert!(
        f.rollback(None).await.unwrap_err().to_string().contains("no version before the live one")
    );
    f.deploy_version("b").await;
    f.deploy_version("c").await;
    assert_eq!(f.generations().await, (3, 0));
    let rollback = f.rollback(None).await.unwrap();
    assert_eq!((f.live().await.as_str(), f.generations().await), ("b", (4, 4)));
    assert_eq!(
        (rollback.withdrawn.ended_how.as_deref(), rollback.withdrawn.ended_reason.as_deref()),
        (Some("rolled_back"), Some("why"))
    );
    // Not forward again to what was withdrawn.
    f.rollback(None).await.unwrap();
    assert_eq!(f.live().await, "a");
    assert!(f.rollback(None).await.is_err());
    // But where someone names it.
    f.rollback(Some(&hex::encode(&f.version("c").await.digest)[..10])).await.unwrap();
    assert_eq!(f.live().await, "c");
    let unknown = f.version("d").await;
    let error = f.rollback(Some(&hex::encode(&unknown.digest))).await.unwrap_err();
    assert!(error.to_string().contains("was never live for `order.placed`"), "{error}");
    // The tables stay as they are, and it says so.
    let tenant = f.control().tenants().get(f.tenant()).await.unwrap();
    f.control()
        .tenant_databases()
        .apply_migration(&tenant, "0002_note", "CREATE TABLE note (id int)")
        .await
        .unwrap();
    let needs = NewDeployment {
        requires_migration: Some("0002_note".to_owned()),
        ..f.new_deployment(&unknown)
    };
    f.deploy(&needs).await.unwrap();
    let rollback = f.rollback(Some(&hex::encode(&a.digest))).await.unwrap();
    assert_eq!(rollback.migrations_kept, ["0002_note"]);
    // A canary is what a rollback withdraws.
    let c = f.version("c").await;
    let canary = f
        .deploy(&NewDeployment {
            role: DeploymentRole::Canary,
            percent: Some(1.0),
            ..f.new_deployment(&c)
        })
        .await
        .unwrap();
    let rollback = f.rollback(None).await.unwrap();
    assert_eq!(
        (rollback.withdrawn.deployment_id, f.live().await.as_str()),
        (canary.deployment_id, "a")
    );
    f.inbox.finish().await;
}

/// What could go wrong: the same change made from two places at once leaves two live rows, or one
/// of them is lost without a word.
#[tokio::test(flavor = "multi_thread")]
async fn changes_of_a_consumer_come_one_after_the_other() {
    let f = DeploymentFixture::new().await;
    let versions = [f.version("a").await, f.version("b").await];
    let deploy = |n: usize| {
        let new = f.new_deployment(&versions[n % 2]);
        let f = &f;
        async move { f.deploy(&new).await }
    };
    let made = futures::future::join_all((0..16).map(deploy)).await;
    let generations: std::collections::BTreeSet<_> =
        made.into_iter().map(|made| made.unwrap().generation).collect();
    assert_eq!(generations, (1..=16).collect());
    assert_eq!(f.state().await[0], 1);
    f.inbox.finish().await;
}

/// What could go wrong: a version that is being withdrawn by a plain deployment is fenced while a
/// host that lives has nothing else yet, or never.
#[tokio::test(flavor = "multi_thread")]
async fn a_superseded_version_is_fenced_when_every_host_that_lives_has_switched() {
    let f = DeploymentFixture::new().await;
    let (control, consumer) = (f.control(), f.consumer.row.consumer_id);
    let (one, two) =
        (control.hosts().start("one").await.unwrap(), control.hosts().start("two").await.unwrap());
    f.deploy_version("a").await;
    for host in [one, two] {
        control.hosts().report_progress(host, consumer, 1, &Progress::Switched).await.unwrap();
    }
    assert_eq!(f.generations().await, (1, 1));
    f.deploy_version("b").await;
    control.hosts().report_progress(one, consumer, 2, &Progress::Switched).await.unwrap();
    control
        .hosts()
        .report_progress(two, consumer, 2, &Progress::Failed("no room".to_owned()))
        .await
        .unwrap();
    assert_eq!(f.generations().await, (2, 1), "host two goes on with what it has");
    let progress = control.hosts().progress(consumer).await.unwrap();
    assert_eq!(
        (progress[1].generation, progress[1].state.as_str(), progress[1].error.as_deref()),
        (1, "failed", Some("no room"))
    );
    f.inbox
        .execute(
            "UPDATE oncebox.host SET seen_at = now() - interval '11 seconds' WHERE name = 'two'",
        )
        .await;
    control.hosts().report_progress(one, consumer, 2, &Progress::Switched).await.unwrap();
    assert_eq!(f.generations().await, (2, 2), "a host that is gone is waited for by nobody");
    f.inbox.finish().await;
}

/// What could go wrong: DDL is applied and not recorded, or recorded and not applied, or applied
/// twice.
#[tokio::test(flavor = "multi_thread")]
async fn a_tenants_migration_is_applied_once_with_its_record() {
    let f = DeploymentFixture::new().await;
    let tenant = f.control().tenants().get(f.tenant()).await.unwrap();
    const SQL: &str = "CREATE TABLE note (id int); INSERT INTO note VALUES (1)";
    assert!(
        f.control().tenant_databases().apply_migration(&tenant, "0002_note", SQL).await.unwrap()
    );
    assert!(
        !f.control().tenant_databases().apply_migration(&tenant, "0002_note", SQL).await.unwrap()
    );
    let error = f
        .control()
        .tenant_databases()
        .apply_migration(&tenant, "0002_note", "CREATE TABLE other (id int)")
        .await
        .unwrap_err();
    assert!(error.to_string().contains("applied with another text"), "{error}");
    let error = f
        .control()
        .tenant_databases()
        .apply_migration(&tenant, "0003_bad", "CREATE TABLE third (id int); SELECT 1/0")
        .await
        .unwrap_err();
    assert!(error.to_string().contains("division by zero"), "{error}");
    let tables = format!(
        "SELECT count(*) FROM pg_tables WHERE schemaname = '{}' AND tablename IN ('other', \
            'third')",
        tenant.schema_name
    );
    assert_eq!(f.inbox.number(tables).await, 0);
    let names: Vec<_> = f
        .control()
        .tenant_databases()
        .migrations(&tenant.name)
        .await
        .unwrap()
        .into_iter()
        .map(|migration| migration.name)
        .collect();
    assert_eq!(names, ["tables", "0002_note"]);
    f.inbox.finish().await;
}

/// What could go wrong: whoever may write rows may also rewrite what was done.
#[tokio::test(flavor = "multi_thread")]
async fn the_audit_log_is_append_only_and_names_the_actor() {
    let f = DeploymentFixture::new().await;
    f.deploy_version("a").await;
    let other = f.control().acting_as("someone");
    other
        .deployments()
        .roll_back(
            f.tenant(),
            &f.consumer.row.name,
            &Slot { event_type: "x".to_owned(), event_versions: None },
            None,
            None,
            false,
        )
        .await
        .unwrap_err();
    let version = f.version("b").await;
    other
        .deployments()
        .deploy(f.tenant(), &f.consumer.row.name, &f.new_deployment(&version))
        .await
        .unwrap();
    let log = other.audit().list(Some(f.tenant()), 10).await.unwrap();
    assert_eq!(
        (log[0].action.as_str(), log[0].actor.as_str(), log[0].tenant.as_deref()),
        ("deploy", "someone", Some(f.tenant()))
    );
    for change in [
        "UPDATE oncebox.audit SET actor = 'x'",
        "DELETE FROM oncebox.audit",
        "TRUNCATE oncebox.audit",
    ] {
        let error =
            sqlx::query(sqlx::AssertSqlSafe(change)).execute(&f.control().pool).await.unwrap_err();
        assert!(error.to_string().contains("append-only"), "{error}");
    }
    f.inbox.finish().await;
}

/// What could go wrong: a message that nobody takes holds its partition, is lost, or is a dead
/// letter although its consumer wants to hear nothing of it. S1-114.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_without_a_route_is_parked_skipped_or_rejected() {
    for (policy, status, keeps_payload) in [
        ("", "parked", 1),
        ("no_route = 'skip'", "skipped", 0),
        ("no_route = 'reject'", "failed_terminal", 1),
    ] {
        let inbox = InboxFixture::new().await;
        let policy = format!(
            "identity = {{ id = [{{ header = 'id' }}], event_type = [{{ header = 'type' }}] \
                }}\n{policy}"
        );
        let consumer = inbox.simple("", &policy).await;
        let host = inbox.host(&consumer);
        host.set_handlers(PlainHandlers::resolving(0, |_| None));
        let mut log = vec![record(0, "a", ""), record(1, "b", "")];
        log.iter_mut()
            .for_each(|record| record.headers.push(("type".to_owned(), b"nobody".to_vec())));
        for _ in 0..2 {
            deliver(&host, &log).await;
        }
        let of = |what: &str| {
            format!(
                "SELECT count(*) FROM oncebox.inbox WHERE reason = 'no_route' AND status = \
                    '{status}' AND {what}"
            )
        };
        // S0-019, S1-114.
        assert_eq!(
            inbox.number(of("attempts = 0 AND processed_at IS NOT NULL")).await,
            2,
            "{status}"
        );
        assert_eq!(inbox.number(of("payload IS NOT NULL")).await, 2 * keeps_payload, "{status}");
        inbox.finish().await;
    }
}

/// What could go wrong: a version that a live row is pinned to is not loaded any more. The second
/// half is in `hot_swap`, with real hosts.
#[tokio::test(flavor = "multi_thread")]
async fn superseded_versions_stay_loaded_while_a_message_is_pinned_to_them() {
    let f = DeploymentFixture::new().await;
    let version = f.version("a").await;
    f.deploy(&NewDeployment { retries: Retries::Pinned, ..f.new_deployment(&version) })
        .await
        .unwrap();
    f.deploy_version("b").await;
    let pinned = async || {
        f.control().deployments().live(f.consumer.row.consumer_id).await.unwrap().pinned.len()
    };
    assert_eq!(pinned().await, 1, "another host may still fail a message on it");
    f.inbox
        .execute(
            "UPDATE oncebox.deployment SET ended_at = now() - interval '1 hour' WHERE \
        ended_at IS NOT NULL",
        )
        .await;
    assert_eq!(pinned().await, 0);
    deliver(&f.inbox.host(&f.consumer), &records(["m"])).await;
    f.inbox
        .execute(&format!(
            "UPDATE oncebox.inbox SET status = 'failed_retryable', reason = 'trap', \
                next_attempt_at = now(), processed_at = NULL, version_id = {}",
            version.version_id
        ))
        .await;
    assert_eq!(pinned().await, 1);
    f.inbox
        .execute(
            "UPDATE oncebox.inbox SET status = 'completed', next_attempt_at = NULL, \
        processed_at = now()",
        )
        .await;
    f.inbox.finish().await;
}

/// What could go wrong: two consumers hand the same messages to one handler, and nobody is told
/// that each has its effect twice. S1-053.
#[tokio::test(flavor = "multi_thread")]
async fn the_same_handler_behind_two_consumers_of_a_topic_is_told() {
    let f = DeploymentFixture::new().await;
    let version = f.version("a").await;
    let all = Slot { event_type: "order.*".to_owned(), event_versions: None };
    let first = f.deploy(&NewDeployment { slot: all, ..f.new_deployment(&version) }).await.unwrap();
    assert_eq!(
        f.control()
            .deployments()
            .overlap_warnings(f.consumer.row.consumer_id, &first)
            .await
            .unwrap(),
        Vec::<String>::new()
    );
    let tenant = f.control().tenants().get(f.tenant()).await.unwrap();
    let other = f.inbox.consumer(&tenant, "other", "").await.row;
    let second = f
        .control()
        .deployments()
        .deploy(f.tenant(), "other", &f.new_deployment(&version))
        .await
        .unwrap();
    let warnings =
        f.control().deployments().overlap_warnings(other.consumer_id, &second).await.unwrap();
    assert_eq!(warnings.len(), 1);
    let expected = format!("consumer `{}` hands messages of topic", f.consumer.row.name);
    // S1-053.
    assert!(
        warnings[0].starts_with(&expected)
            && warnings[0].contains("its effect once for each consumer"),
        "{warnings:?}"
    );
    let elsewhere = NewDeployment {
        slot: Slot { event_type: "payment".to_owned(), event_versions: None },
        ..f.new_deployment(&version)
    };
    let elsewhere =
        f.control().deployments().deploy(f.tenant(), "other", &elsewhere).await.unwrap();
    assert_eq!(
        f.control().deployments().overlap_warnings(other.consumer_id, &elsewhere).await.unwrap(),
        Vec::<String>::new()
    );
    f.inbox.finish().await;
}

// What could go wrong: during an update a handler goes live that hosts of the earlier release cannot
// load, and their partitions stand still.
#[tokio::test]
async fn a_handler_that_earlier_hosts_cannot_load_waits_for_the_update() {
    let fixture = InboxFixture::new().await;
    let consumer = fixture.simple("", "").await;
    let control = &fixture.control;
    let new = |handler: &str, digest: &[u8]| NewDeployment {
        version: hex::encode(digest),
        ..NewDeployment::stable("*", handler, "")
    };
    let mut digests = Vec::new();
    for (handler, import) in
        [("waits", "oncebox:handler/sql@0.1.0"), ("enqueues", "oncebox:handler/sql@0.2.0")]
    {
        let version = NewVersion {
            component: handler.as_bytes(),
            source_digest: None,
            report: &json!({ "imports": ["oncebox:handler/types@0.1.0", import] }),
            is_compiled: true,
        };
        digests.push(control.versions().add("acme", handler, version).await.unwrap().digest);
    }
    fixture.execute("INSERT INTO oncebox.host (name, version) VALUES ('new', '0.2.0')").await;
    fixture.execute("INSERT INTO oncebox.host (name) VALUES ('old')").await;
    let deploy = |handler: &'static str, digest: Vec<u8>| {
        let new = new(handler, &digest);
        async move { control.deployments().deploy("acme", "orders", &new).await }
    };
    let error = deploy("enqueues", digests[1].clone()).await.unwrap_err();
    let InboxError::Conflict { code: "host_too_old", text } = error else { panic!("{error}") };
    assert!(text.contains("the host `old` of an earlier release"), "{text}");
    deploy("waits", digests[0].clone()).await.unwrap();
    fixture.execute("UPDATE oncebox.host SET seen_at = now() - interval '1 hour'").await;
    deploy("enqueues", digests[1].clone()).await.unwrap();
    assert_eq!(consumer.row.name, "orders");
    fixture.finish().await;
}
