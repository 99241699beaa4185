//! Starts that end the process: something that no bound knows of makes a native library abort. What
//! could go wrong: one row of a tenant ends every host, again at each restart; or an innocent
//! consumer is never started again after a power cut.

use std::time::Duration;

use anyhow::{Result, ensure};
use oncebox_control::{Control, Start, StartTurn};
use oncebox_model::policy::Policy;
use oncebox_tests::{
    host::{HostFixture, HostProcess},
    inbox::{InboxFixture, TestConsumer},
    load::{Load, Work},
    wait::{self, DEADLINE},
};

const CONSUMER: &str = "payments";
const BUILD: &str = "1";

// Rows ------------------------------------------------------------------------------------------

async fn begin(control: &Control, host: i64, consumer: &TestConsumer, build: &str) -> StartTurn {
    let row = control.consumers().get(&consumer.tenant.name, &consumer.row.name).await.unwrap();
    let first = control
        .reconciliation()
        .begin_start((host, "h"), (row.consumer_id, row.revision), build, false)
        .await
        .unwrap();
    match first {
        StartTurn::Alone => control
            .reconciliation()
            .begin_start((host, "h"), (row.consumer_id, row.revision), build, true)
            .await
            .unwrap(),
        other => other,
    }
}

async fn begun(control: &Control, host: i64, consumer: &TestConsumer) -> Start {
    match begin(control, host, consumer, BUILD).await {
        StartTurn::Begin(start) => start,
        other => panic!("it is not started: {other:?}"),
    }
}

/// A host ends without a word.
async fn dies(fixture: &InboxFixture, host: i64) -> Vec<String> {
    fixture
        .execute(format!(
            "UPDATE oncebox.host SET seen_at = now() - interval '11 s' WHERE host_id = {host}"
        ))
        .await;
    fixture
        .control
        .reconciliation()
        .judge_gone_starts()
        .await
        .unwrap()
        .into_iter()
        .map(|one| one.consumer)
        .collect()
}

/// What the marks of a host that is gone mean, by how far each start was and what was known of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_mark_is_judged_by_how_far_its_start_was() {
    let fixture = InboxFixture::new().await;
    let tenant = fixture.tenant("acme", "").await;
    let control = &fixture.control;
    let consumer = async |name: &str| fixture.consumer(&tenant, name, "").await;
    // Those that live do so however slow this machine is.
    let host = async || {
        let host = control.hosts().start("h").await.unwrap();
        fixture
            .execute(format!(
                "UPDATE oncebox.host SET seen_at = now() + interval '1 hour' WHERE host_id = {host}"
            ))
            .await;
        host
    };
    let is_quarantined = async |of: &TestConsumer| {
        matches!(begin(control, host().await, of, BUILD).await, StartTurn::Quarantined(_))
    };

    // Unproven, and the only one of its host that was in that part: it is the one.
    let (poison, beside, one) = (consumer("poison").await, consumer("beside").await, host().await);
    let settling = begun(control, one, &beside).await;
    assert!(settling.is_unproven);
    control.reconciliation().start_settles(&settling).await.unwrap();
    begun(control, one, &poison).await;
    let two = host().await;
    assert!(
        matches!(begin(control, two, &poison, BUILD).await, StartTurn::Elsewhere(_)),
        "a living host tries it"
    );
    assert_eq!(dies(&fixture, one).await, ["poison"]);
    assert!(dies(&fixture, one).await.is_empty(), "it is judged once");
    assert!(is_quarantined(&poison).await);
    // What is paused and resumed, or suspended with its tenant, is the same policy.
    control.consumers().pause("acme", "poison").await.unwrap();
    control.consumers().resume("acme", "poison").await.unwrap();
    control.tenants().suspend("acme").await.unwrap();
    control.tenants().resume("acme").await.unwrap();
    assert!(is_quarantined(&poison).await, "another revision of the same policy");

    // One that was beside it is started again, and proven by that.
    let again = begun(control, two, &beside).await;
    assert!(again.is_suspected && again.is_unproven);
    control.reconciliation().end_start(&again, Some(BUILD)).await.unwrap();
    let three = host().await;
    assert!(!begun(control, three, &beside).await.is_unproven);
    assert!(
        !begun(control, two, &beside).await.is_unproven,
        "what was survived is started by all at once"
    );
    assert!(
        matches!(begin(control, two, &beside, "another build").await, StartTurn::Elsewhere(_)),
        "it was survived by another program"
    );
    // A host that ends by itself leaves no mark.
    control.hosts().end(three).await.unwrap();
    control.hosts().end(two).await.unwrap();
    assert_eq!(fixture.number("SELECT count(*) FROM oncebox.start_mark").await, 0);

    // What was survived before is quarantined when hosts end in its start again and again.
    for death in 1..=3 {
        let host = host().await;
        begun(control, host, &beside).await;
        assert_eq!(dies(&fixture, host).await.len(), usize::from(death == 3), "death {death}");
    }
    assert!(is_quarantined(&beside).await);

    // One whose host ended late in its first start: the second time.
    let late = consumer("late").await;
    for death in 1..=2 {
        let host = host().await;
        let start = begun(control, host, &late).await;
        control.reconciliation().start_settles(&start).await.unwrap();
        assert_eq!(dies(&fixture, host).await.len(), usize::from(death == 2), "death {death}");
    }

    // Another policy is another try, until it ended too many hosts; an operator's word always is
    // one.
    let policy = |workers: u32| {
        Policy::parse(&format!(
            "topics = ['t']\nack = 'after_commit'\nretry = {{ workers = {workers} }}"
        ))
        .unwrap()
    };
    for death in 2..=3 {
        control.consumers().set_policy("acme", "poison", policy(5 + death), true).await.unwrap();
        assert!(control.consumers().get("acme", "poison").await.unwrap().quarantine.is_none());
        let host = host().await;
        begun(control, host, &poison).await;
        assert_eq!(dies(&fixture, host).await, ["poison"]);
    }
    control.consumers().set_policy("acme", "poison", policy(20), true).await.unwrap();
    assert!(
        is_quarantined(&poison).await,
        "it ended three hosts: only an operator lets it try again"
    );
    assert!(
        control.consumers().release("acme", "poison").await.unwrap()
            && !control.consumers().release("acme", "poison").await.unwrap()
    );
    let four = host().await;
    let start = begun(control, four, &poison).await;

    // A host that was silent, and lives: what it survived, it survived.
    assert_eq!(dies(&fixture, four).await, ["poison"]);
    control.reconciliation().end_start(&start, Some(BUILD)).await.unwrap();
    assert!(!is_quarantined(&poison).await);
    // One that lives and whose start came to nothing: what followed from its silence is undone.
    let (silent, suspect, five) =
        (consumer("silent").await, consumer("suspect").await, host().await);
    let settling = begun(control, five, &suspect).await;
    control.reconciliation().start_settles(&settling).await.unwrap();
    let start = begun(control, five, &silent).await;
    assert_eq!(dies(&fixture, five).await, ["silent"]);
    for start in [start, settling] {
        control.reconciliation().end_start(&start, None).await.unwrap();
    }
    assert!(!is_quarantined(&silent).await);
    let again = begun(control, host().await, &suspect).await;
    assert!(!again.is_suspected && again.is_unproven);
    let actions: Vec<_> = control
        .audit()
        .list(Some("acme"), 100)
        .await
        .unwrap()
        .into_iter()
        .map(|entry| entry.action)
        .collect();
    let count = |action: &str| actions.iter().filter(|known| *known == action).count();
    assert_eq!((count("consumer.quarantine"), count("consumer.release")), (7, 1), "{actions:?}");
    fixture.finish().await;
}

// Hosts -----------------------------------------------------------------------------------------

async fn shown(fixture: &HostFixture) -> Result<String> {
    fixture.ok(&["consumer", "show", CONSUMER, "--tenant", &fixture.tenant.name]).await
}

async fn until_quarantined(fixture: &HostFixture, host: &HostProcess) -> Result<()> {
    host.until_metric("oncebox_consumer_quarantined", &[&fixture.tenant.name], 1.0).await?;
    let said = shown(fixture).await?;
    ensure!(
        said.contains("quarantined: host `")
            && said.contains(&format!("oncebox consumer resume {CONSUMER}")),
        "{said}"
    );
    Ok(())
}

/// A host dies once: it comes back, starts everything else, and says what it left.
#[tokio::test(flavor = "multi_thread")]
async fn a_start_that_ends_the_process_does_so_once() -> Result<()> {
    // Opened at the start, and by what there is to read.
    for idle_after in ["0", "60000"] {
        let fixture = HostFixture::new().await?;
        fixture.send(&Load::of([Work::Pay; 3])).await?;
        let neighbour = fixture.neighbour(5).await?;
        let variables = [
            ("ONCEBOX_CRASH_TOPIC", fixture.topic.as_str()),
            ("ONCEBOX_KAFKA_IDLE_AFTER_MS", idle_after),
        ];
        let died = fixture.start("a", &variables)?;
        ensure!(!died.wait_exit().await?.success());
        let host = fixture.start("a", &variables)?;
        neighbour.wait_effects(5).await?;
        until_quarantined(&fixture, &host).await?;
        ensure!(host.is_running(), "it ended a host twice");
        let log = std::fs::read_to_string(host.log())?;
        ensure!(log.matches("consumer quarantined").count() == 1, "one event of it");
        host.stop().await?;
        // Not by a restart, and not by a host that would survive it: by an operator.
        let host = fixture.start_ready("a", &[]).await?;
        until_quarantined(&fixture, &host).await?;
        fixture.ok(&["consumer", "resume", CONSUMER, "--tenant", &fixture.tenant.name]).await?;
        fixture.wait_settled().await?;
        host.until_metric("oncebox_consumer_quarantined", &[&fixture.tenant.name], 0.0).await?;
        fixture.check().await?;
        host.stop().await?;
    }
    Ok(())
}

/// Of two hosts that start at the same time one tries it, and the other lives.
#[tokio::test(flavor = "multi_thread")]
async fn of_two_hosts_one_dies() -> Result<()> {
    let fixture = HostFixture::new().await?;
    fixture.send(&Load::of([Work::Pay; 3])).await?;
    let neighbour = fixture.neighbour(5).await?;
    let variables =
        [("ONCEBOX_CRASH_TOPIC", fixture.topic.as_str()), ("ONCEBOX_KAFKA_IDLE_AFTER_MS", "0")];
    let hosts = [fixture.start("a", &variables)?, fixture.start("b", &variables)?];
    wait::until(
        DEADLINE,
        Duration::from_millis(20),
        async || Ok(!hosts.iter().all(HostProcess::is_running)),
        async || "none of them starts it".to_owned(),
    )
    .await?;
    let survivor = hosts
        .iter()
        .find(|host| host.is_running())
        .expect("one lives: the other waits for what becomes of it");
    neighbour.wait_effects(5).await?;
    until_quarantined(&fixture, survivor).await?;
    ensure!(survivor.is_running(), "both ended");
    survivor.stop().await
}

/// A host that is killed while it joins a group says nothing against the consumer.
#[tokio::test(flavor = "multi_thread")]
async fn a_kill_while_it_joins_quarantines_nothing() -> Result<()> {
    let fixture = HostFixture::new().await?;
    fixture.send(&Load::of([Work::Pay; 3])).await?;
    let killed = fixture.start("a", &[("ONCEBOX_FAILPOINT", "kafka:assign:after")])?;
    ensure!(!killed.wait_exit().await?.success());
    let host = fixture.start("a", &[])?;
    fixture.wait_settled().await?;
    fixture.check().await?;
    ensure!(
        fixture
            .number(
                "SELECT count(*) FROM oncebox.consumer_start WHERE quarantined_revision IS NOT NULL"
            )
            .await?
            == 0
    );
    fixture
        .until(
            "SELECT count(*) FROM oncebox.consumer_start WHERE proven_revision IS NOT NULL \
        AND suspicions = 0",
            1,
        )
        .await?;
    host.stop().await
}
