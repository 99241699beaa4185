//! Jobs: how hosts share them, what operators do with them, and what they leave out.

use std::time::Duration;

use oncebox_control::{
    Action, Job, JobAction, JobControl, JobFilter, JobLeft, JobStep, LeasedJob, NewJob,
    OutgoingAction,
};
use oncebox_model::InboxError;
use oncebox_tests::{
    inbox::{InboxFixture, TestConsumer, deliver, record, step},
    job::{inbox_job, of_reason, outgoing_job, these, work_off},
    outgoing::{emitting, emitting_host},
    telemetry::Telemetry,
};
use tokio_util::sync::CancellationToken;

/// Jobs of `acme` with `parked` and `rejected` messages of `orders`.
struct JobFixture {
    inbox: InboxFixture,
    consumer: TestConsumer,
}

impl JobFixture {
    async fn new(parked: i64) -> Self {
        let inbox = InboxFixture::new().await;
        let consumer = inbox.simple("", "retry = { attempts_max = 1 }").await;
        let log: Vec<_> = (0..parked).map(|n| record(n, &format!("m{n}"), "park")).collect();
        deliver(&inbox.host(&consumer), &log).await;
        Self { inbox, consumer }
    }

    async fn start(&self, new: &NewJob) -> Job {
        self.inbox.control.jobs().start("acme", new).await.unwrap()
    }

    async fn lease(&self, job_id: i64) -> Option<LeasedJob> {
        let jobs = self.inbox.control.jobs();
        let database = self.inbox.control.tenant_databases().by_name("").await.unwrap();
        jobs.lease(&database, "a test", Some(job_id)).await.unwrap()
    }

    async fn step(&self, leased: &mut LeasedJob) -> JobStep {
        self.inbox.control.jobs().step(leased).await.unwrap()
    }

    async fn show(&self, job_id: i64) -> Job {
        self.inbox.control.jobs().show("acme", job_id).await.unwrap()
    }

    async fn act(&self, job_id: i64, action: JobControl) -> Result<Job, InboxError> {
        self.inbox.control.jobs().act("acme", job_id, action).await
    }

    /// Ends the lease of a job, as time does.
    async fn end_lease(&self) {
        const END: &str = "UPDATE oncebox.job SET locked_until = now() - interval '1 ms' WHERE \
            locked_until IS NOT NULL";
        self.inbox.execute(END).await;
    }

    /// Numbers of running and paused jobs, and the whole hours for which no host has worked on one
    /// that no operator paused.
    async fn open(&self) -> (i64, i64, i64) {
        let jobs = self.inbox.control.jobs();
        let database = self.inbox.control.tenant_databases().by_name("").await.unwrap();
        let open = jobs.open(&database).await.unwrap();
        assert!(open.iter().all(|jobs| jobs.tenant == "acme") && open.len() <= 1, "{open:?}");
        open.first()
            .map_or((0, 0, 0), |jobs| (jobs.running, jobs.paused, (jobs.idle_s / 3_600.0) as i64))
    }

    /// Lets an hour pass for the jobs.
    async fn pass_an_hour(&self) {
        const PASS: &str = "UPDATE oncebox.job SET leased_at = leased_at - interval '1 hour', \
            due_at = due_at - interval '1 hour'";
        self.inbox.execute(PASS).await;
    }

    async fn in_status(&self, status: &str) -> i64 {
        let count = format!("SELECT count(*) FROM oncebox.inbox WHERE status = '{status}'");
        self.inbox.number(&count).await
    }
}

fn discard(rate: Option<u32>) -> NewJob {
    NewJob { rate, ..inbox_job(Action::Discard, "orders", JobFilter::default()) }
}

/// What could go wrong: a host whose lease ran out changes messages or counts beside the one that
/// has it now; or a job that was handed over begins anew and counts twice.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_lost_its_lease_changes_nothing() {
    let telemetry = Telemetry::default();
    let fixture = JobFixture::new(6).await;
    let job_id = fixture.start(&discard(Some(2))).await.job_id;
    let mut first = fixture.lease(job_id).await.unwrap();
    assert!(fixture.lease(job_id).await.is_none(), "it has a lease");
    assert!(matches!(fixture.step(&mut first).await, JobStep::Next(_)));
    fixture.end_lease().await;
    let mut second = fixture.lease(job_id).await.unwrap();
    assert_eq!(fixture.step(&mut first).await, JobStep::Lost);
    assert_eq!(fixture.in_status("discarded").await, 2);
    assert!(matches!(fixture.step(&mut second).await, JobStep::Next(_)));
    assert_eq!((fixture.in_status("discarded").await, fixture.show(job_id).await.changed), (4, 4));
    fixture.inbox.control.jobs().work(second, &CancellationToken::new()).await;
    let done = work_off(&fixture.inbox.control, "acme", job_id).await.unwrap();
    assert_eq!((done.changed, done.left_out.0.len(), done.host), (6, 0, None));
    assert!(done.ended_at.is_some());
    let labels = [("tenant", "acme"), ("action", "discard")];
    assert_eq!(telemetry.sum("oncebox_job_messages_total", &labels), 6.0);
    fixture.inbox.finish().await;
}

/// What could go wrong: a job that ends every host ends them all, for ever; or an operator cannot
/// bring it back, or is not told that it has stopped.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_ends_hosts_is_paused() {
    let fixture = JobFixture::new(2).await;
    let job_id = fixture.start(&discard(None)).await.job_id;
    for _ in 0..3 {
        assert!(fixture.lease(job_id).await.is_some());
        fixture.end_lease().await;
    }
    assert!(fixture.lease(job_id).await.is_none());
    let paused = fixture.show(job_id).await;
    assert_eq!((&*paused.state, paused.host, paused.changed), ("paused", None, 0));
    assert!(paused.note.unwrap().contains("3 hosts ended"));
    assert_eq!(fixture.open().await, (0, 1, 0));
    fixture.pass_an_hour().await;
    assert_eq!(fixture.open().await, (0, 1, 1), "hosts paused it");
    let resumed = fixture.act(job_id, JobControl::Resume).await.unwrap();
    assert_eq!((&*resumed.state, resumed.note), ("running", None));
    assert_eq!(fixture.open().await, (1, 0, 0), "it waits from now on");
    fixture.pass_an_hour().await;
    assert_eq!(fixture.open().await, (1, 0, 1), "no host has come");
    assert_eq!(work_off(&fixture.inbox.control, "acme", job_id).await.unwrap().changed, 2);
    assert_eq!(fixture.open().await, (0, 0, 0));
    fixture.inbox.finish().await;
}

/// What could go wrong: a page whose statement fails is tried for ever without a word, or its counts
/// stay though its messages do not change.
#[tokio::test(flavor = "multi_thread")]
async fn a_page_that_fails_is_tried_again_and_then_paused() {
    let fixture = JobFixture::new(2).await;
    const BREAK: &str = "ALTER FUNCTION oncebox.act_on_messages RENAME TO away";
    const MEND: &str = "ALTER FUNCTION oncebox.away RENAME TO act_on_messages";
    fixture.inbox.execute(BREAK).await;
    let job_id = fixture.start(&discard(None)).await.job_id;
    for state in ["running", "running", "paused"] {
        fixture.inbox.execute("UPDATE oncebox.job SET due_at = now()").await;
        let leased = fixture.lease(job_id).await.unwrap();
        fixture.inbox.control.jobs().work(leased, &CancellationToken::new()).await;
        let job = fixture.show(job_id).await;
        assert_eq!((&*job.state, job.changed, job.host), (state, 0, None));
        assert!(job.note.unwrap().contains("act_on_messages"));
        assert!(fixture.lease(job_id).await.is_none(), "it is not tried again at once");
    }
    fixture.inbox.execute(MEND).await;
    fixture.act(job_id, JobControl::Resume).await.unwrap();
    assert_eq!(work_off(&fixture.inbox.control, "acme", job_id).await.unwrap().changed, 2);
    fixture.inbox.finish().await;
}

/// What could go wrong: a paused job goes on, one that was resumed begins anew, or one that is over
/// is brought back.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_paused_resumed_and_cancelled_between_pages() {
    let fixture = JobFixture::new(6).await;
    let job_id = fixture.start(&discard(Some(2))).await.job_id;
    let mut leased = fixture.lease(job_id).await.unwrap();
    fixture.step(&mut leased).await;
    for _ in 0..2 {
        assert_eq!(fixture.act(job_id, JobControl::Pause).await.unwrap().state, "paused");
    }
    assert!(fixture.lease(job_id).await.is_none());
    fixture.pass_an_hour().await;
    assert_eq!(fixture.open().await, (0, 1, 0), "an operator paused it");
    fixture.act(job_id, JobControl::Resume).await.unwrap();
    // The host that had it before the pause has lost it, although it runs again.
    assert_eq!(fixture.step(&mut leased).await, JobStep::Lost);
    let mut leased = fixture.lease(job_id).await.unwrap();
    fixture.step(&mut leased).await;
    assert_eq!(fixture.show(job_id).await.changed, 4);
    assert_eq!(fixture.act(job_id, JobControl::Cancel).await.unwrap().state, "cancelled");
    assert_eq!(fixture.step(&mut leased).await, JobStep::Lost);
    assert_eq!((fixture.in_status("discarded").await, fixture.in_status("parked").await), (4, 2));
    let error = fixture.act(job_id, JobControl::Resume).await.unwrap_err().to_string();
    assert!(error.contains("is cancelled"), "{error}");
    let audit = fixture.inbox.control.audit().list(Some("acme"), 100).await.unwrap();
    let mut of_jobs: Vec<_> = audit.iter().map(|entry| &*entry.action).collect();
    of_jobs.retain(|action| action.starts_with("job.") || action.starts_with("inbox."));
    assert_eq!(of_jobs, ["job.cancel", "job.resume", "job.pause", "inbox.discard"]);
    fixture.inbox.finish().await;
}

/// What could go wrong: a message that somebody else works on is passed over for good, or counted as
/// done; or a job waits for it without end.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_held_is_left_out_and_taken_by_the_next_pass() {
    let fixture = JobFixture::new(2).await;
    let mut holder = fixture.inbox.pool.begin().await.unwrap();
    const HOLD: &str = "SELECT FROM oncebox.inbox WHERE message_id = 'm0' FOR UPDATE";
    sqlx::query(HOLD).execute(&mut *holder).await.unwrap();
    let job_id = fixture.start(&discard(None)).await.job_id;
    let mut leased = fixture.lease(job_id).await.unwrap();
    for pass in 1..=2 {
        let next = fixture.step(&mut leased).await;
        // The second pass begins after a pause.
        assert!(matches!(next, JobStep::Next(pause) if pause > Duration::ZERO), "{next:?}");
        let job = fixture.show(job_id).await;
        assert_eq!((job.changed, job.pass), (1, pass + 1));
    }
    holder.rollback().await.unwrap();
    fixture.inbox.control.jobs().work(leased, &CancellationToken::new()).await;
    let done = work_off(&fixture.inbox.control, "acme", job_id).await.unwrap();
    assert_eq!((done.changed, done.left_out.0.len()), (2, 0));

    // One that is held for good.
    let late = [record(2, "late", "park")];
    deliver(&fixture.inbox.host(&fixture.consumer), &late).await;
    const HOLD_LATE: &str = "SELECT FROM oncebox.inbox WHERE message_id = 'late' FOR UPDATE";
    let mut holder = fixture.inbox.pool.begin().await.unwrap();
    sqlx::query(HOLD_LATE).execute(&mut *holder).await.unwrap();
    let job_id = fixture.start(&discard(None)).await.job_id;
    let mut leased = fixture.lease(job_id).await.unwrap();
    while fixture.step(&mut leased).await != JobStep::Done {}
    let done = fixture.show(job_id).await;
    assert_eq!((done.changed, done.pass), (0, 10));
    assert_eq!(done.left_out.0, [("busy".to_owned(), 1)].into());
    holder.rollback().await.unwrap();
    fixture.inbox.finish().await;
}

/// What could go wrong: a filter that finds little reads the whole inbox in one statement, holds its
/// locks for that time, or misses what lies behind the first page.
#[tokio::test(flavor = "multi_thread")]
async fn a_page_reads_its_messages_whatever_the_filter_finds() {
    let fixture = JobFixture::new(1_200).await;
    fixture
        .inbox
        .execute("UPDATE oncebox.inbox SET reason = 'crashed' WHERE message_id = 'm1199'")
        .await;
    // All of one transaction have one time, so that the ids decide about the place.
    let rare = inbox_job(Action::Discard, "orders", of_reason("crashed"));
    let job_id = fixture.start(&rare).await.job_id;
    let mut leased = fixture.lease(job_id).await.unwrap();
    let mut pages = 0;
    while fixture.show(job_id).await.pass == 1 {
        fixture.step(&mut leased).await;
        pages += 1;
    }
    assert_eq!((pages, fixture.show(job_id).await.changed), (3, 1), "500, 500 and 200");
    while fixture.step(&mut leased).await != JobStep::Done {}
    assert_eq!(
        (fixture.in_status("discarded").await, fixture.in_status("parked").await),
        (1, 1_199)
    );
    fixture.inbox.finish().await;
}

/// What could go wrong: a message moves to another status while a job passes over it, and is missed.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_moves_meanwhile_is_not_missed() {
    let inbox = InboxFixture::new().await;
    let policy = "retry = { attempts_max = 2, backoff_min_ms = 1, backoff_max_ms = 1 }";
    let consumer = inbox.simple("", policy).await;
    let host = inbox.host(&consumer);
    let log: Vec<_> = (0..3).map(|n| record(n, &format!("m{n}"), "trap")).collect();
    deliver(&host, &log).await;
    let fixture = JobFixture { inbox, consumer };
    // Two a page: the third becomes a dead letter before its page.
    let job_id = fixture.start(&discard(Some(2))).await.job_id;
    let mut leased = fixture.lease(job_id).await.unwrap();
    fixture.step(&mut leased).await;
    while step(&host).await.unwrap() > 0 {}
    assert_eq!(fixture.in_status("failed_terminal").await, 1);
    while fixture.step(&mut leased).await != JobStep::Done {}
    assert_eq!((fixture.in_status("discarded").await, fixture.show(job_id).await.changed), (3, 3));
    fixture.inbox.finish().await;
}

/// What could go wrong: a job that says too little or too much is started, and acts on what nobody
/// meant; or a tenant's jobs have no bound.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_is_not_sound_is_refused() {
    let fixture = JobFixture::new(1).await;
    let refused = async |new: NewJob, part: &str| {
        let error = fixture.inbox.control.jobs().start("acme", &new).await.unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
    };
    let without_consumer = NewJob { consumer: None, ..discard(None) };
    refused(without_consumer, "name it with `consumer`").await;
    refused(NewJob { consumer: Some("order".to_owned()), ..discard(None) }, "`acme/order`").await;
    refused(discard(Some(0)), "`rate` is in messages per second").await;
    refused(inbox_job(Action::Redrive, "orders", these(&[])), "`filter.ids` is empty").await;
    let to_topic = JobFilter { destination: Some("kafka:a".to_owned()), ..JobFilter::default() };
    refused(inbox_job(Action::Redrive, "orders", to_topic), "`filter.destination`").await;
    refused(outgoing_job(OutgoingAction::Redrive, of_reason("x")), "`filter.reason`").await;
    let missing = fixture.inbox.control.jobs().show("acme", 7).await.unwrap_err();
    assert!(matches!(missing, InboxError::NotFound(_)), "{missing}");

    for _ in 0..20 {
        fixture.start(&discard(None)).await;
    }
    refused(discard(None), "20 jobs of tenant `acme` are not over").await;
    let listed = fixture.inbox.control.jobs().list("acme", Some("orders")).await.unwrap();
    assert_eq!(listed.len(), 20);
    assert!(listed.iter().all(|job| job.action == JobAction::Inbox(Action::Discard).name()));
    fixture.act(listed[0].job_id, JobControl::Cancel).await.unwrap();
    // A job that has been over for long is forgotten when the next one starts.
    fixture
        .inbox
        .execute(
            "UPDATE oncebox.job SET ended_at = now() - interval '91 days' WHERE \
        ended_at IS NOT NULL",
        )
        .await;
    fixture.start(&discard(None)).await;
    let gone = fixture.inbox.control.jobs().show("acme", listed[0].job_id).await.unwrap_err();
    assert!(matches!(gone, InboxError::NotFound(_)), "{gone}");
    fixture.inbox.finish().await;
}

/// What could go wrong: the jobs of one tenant keep those of another from their turn.
#[tokio::test(flavor = "multi_thread")]
async fn tenants_have_their_turns() {
    let fixture = JobFixture::new(1).await;
    let other = fixture.inbox.tenant("globex", "").await;
    fixture.inbox.consumer(&other, "orders", "").await;
    let jobs = fixture.inbox.control.jobs();
    let database = fixture.inbox.control.tenant_databases().by_name("").await.unwrap();
    for tenant in ["acme", "acme", "acme", "globex"] {
        jobs.start(tenant, &discard(None)).await.unwrap();
    }
    let mut turns = Vec::new();
    for _ in 0..8 {
        let leased = jobs.lease(&database, "a test", None).await.unwrap().unwrap();
        turns.push((leased.tenant.clone(), leased.job_id));
        jobs.leave(&leased, &JobLeft::Until(Duration::ZERO)).await.unwrap();
    }
    let mut of_acme = turns.iter().filter(|(tenant, _)| tenant == "acme").map(|(_, id)| *id);
    assert_eq!(of_acme.clone().count(), 4, "every other turn: {turns:?}");
    let first: Vec<_> = of_acme.by_ref().take(3).collect();
    assert_eq!(first.iter().collect::<std::collections::BTreeSet<_>>().len(), 3, "{turns:?}");
    assert_eq!(of_acme.next(), Some(first[0]), "the job that waited the longest: {turns:?}");
    fixture.inbox.finish().await;
}

/// What could go wrong: a job of ids changes all of them at once whatever its rate says, or never
/// comes to the last.
#[tokio::test(flavor = "multi_thread")]
async fn ids_keep_the_rate() {
    let fixture = JobFixture::new(5).await;
    let these = these(&["m0", "m1", "m3", "m4", "missing"]);
    let new = NewJob { rate: Some(3), ..inbox_job(Action::Discard, "orders", these) };
    let job_id = fixture.start(&new).await.job_id;
    assert_eq!(fixture.show(job_id).await.ids, Some(5));
    let mut leased = fixture.lease(job_id).await.unwrap();
    assert_eq!(fixture.step(&mut leased).await, JobStep::Next(Duration::from_secs(1)));
    assert_eq!(fixture.show(job_id).await.changed, 3);
    fixture.step(&mut leased).await;
    assert_eq!(fixture.step(&mut leased).await, JobStep::Done);
    assert_eq!((fixture.show(job_id).await.changed, fixture.in_status("parked").await), (4, 1));
    let listed = fixture.inbox.control.jobs().list("acme", None).await.unwrap();
    assert_eq!((listed[0].ids, &listed[0].filter.0.ids), (Some(5), &None));
    fixture.inbox.finish().await;
}

/// What could go wrong: a message that a host runs is passed over without a word, so that it is
/// tried again although it was to be discarded.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_a_host_runs_is_waited_for() {
    let fixture = JobFixture::new(1).await;
    const RUNS: &str = "UPDATE oncebox.inbox SET status = 'in_progress', reason = NULL, \
        processed_at = NULL, locked_by = 'a host', locked_until = now() + interval '1 minute'";
    const FAILS: &str = "UPDATE oncebox.inbox SET status = 'failed_retryable', reason = 'trap', \
        locked_by = NULL, locked_until = NULL, next_attempt_at = now()";
    fixture.inbox.execute(RUNS).await;
    let job_id = fixture.start(&discard(None)).await.job_id;
    let mut leased = fixture.lease(job_id).await.unwrap();
    assert!(matches!(fixture.step(&mut leased).await, JobStep::Next(pause) if !pause.is_zero()));
    fixture.inbox.execute(FAILS).await;
    while fixture.step(&mut leased).await != JobStep::Done {}
    let done = fixture.show(job_id).await;
    assert_eq!((done.changed, done.left_out.0.len()), (1, 0), "{done:?}");
    fixture.inbox.finish().await;
}

/// What could go wrong: an outgoing message that fails again is redriven again and again by one job,
/// one that is emitted after the start is discarded with the others, or one that is being sent is
/// passed over without a word.
#[tokio::test(flavor = "multi_thread")]
async fn outgoing_messages_are_taken_once_and_as_of_the_start() {
    let inbox = InboxFixture::new().await;
    let consumer = inbox.simple("", "").await;
    let host = emitting_host(&inbox, &consumer);
    let limits = serde_json::json!({ "destinations_allowed": ["inbox:*"] });
    inbox.control.tenants().set_limits("acme", limits.as_object().unwrap()).await.unwrap();
    let emit = |offset: i64| emitting(offset, &format!("m{offset}"), &["emit inbox:nobody"]);
    deliver(&host, &[emit(0), emit(1), emit(2), emit(3)]).await;
    let fixture = JobFixture { inbox, consumer };
    const PARK: &str = "UPDATE oncebox.outgoing SET status = 'parked', reason = 'refused', \
        next_attempt_at = NULL WHERE status = 'received'";
    const SEND: &str = "UPDATE oncebox.outgoing SET status = 'in_progress', reason = NULL, \
        locked_by = 'a host', locked_until = now(), next_attempt_at = NULL WHERE message_id = 'm3'";
    fixture.inbox.execute(PARK).await;
    fixture.inbox.execute(SEND).await;

    let redrive = outgoing_job(OutgoingAction::Redrive, JobFilter::default());
    let job_id = fixture.start(&NewJob { rate: Some(2), ..redrive }).await.job_id;
    let mut leased = fixture.lease(job_id).await.unwrap();
    assert_eq!(fixture.step(&mut leased).await, JobStep::Next(Duration::from_secs(1)));
    fixture.inbox.execute(PARK).await;
    assert_eq!(fixture.step(&mut leased).await, JobStep::Done);
    let done = fixture.show(job_id).await;
    assert_eq!((done.changed, done.left_out.0), (3, [("busy".to_owned(), 1)].into()));
    let status = async |status: &str| {
        let count = format!("SELECT count(*) FROM oncebox.outgoing WHERE status = '{status}'");
        fixture.inbox.number(&count).await
    };
    assert_eq!((status("parked").await, status("received").await), (2, 1));

    let discard = outgoing_job(OutgoingAction::Discard, JobFilter::default());
    let job_id = fixture.start(&NewJob { rate: Some(2), ..discard }).await.job_id;
    let mut leased = fixture.lease(job_id).await.unwrap();
    fixture.step(&mut leased).await;
    deliver(&host, &[emit(4)]).await;
    while fixture.step(&mut leased).await != JobStep::Done {}
    assert_eq!(fixture.show(job_id).await.changed, 3);
    assert_eq!((status("discarded").await, status("received").await), (3, 1), "m4 is later");
    fixture.inbox.finish().await;
}

/// What could go wrong: a job on one consumer becomes one on all of the tenant's, because that
/// consumer is gone.
#[tokio::test(flavor = "multi_thread")]
async fn a_job_whose_consumer_is_gone_acts_on_nothing() {
    let fixture = JobFixture::new(1).await;
    let other = fixture.inbox.consumer(&fixture.consumer.tenant, "other", "").await;
    let discard = outgoing_job(OutgoingAction::Discard, JobFilter::default());
    let job_id =
        fixture.start(&NewJob { consumer: Some("other".to_owned()), ..discard }).await.job_id;
    // As in a tenant's own database, until it is told that the consumer is gone.
    let gone = format!(
        "ALTER TABLE oncebox.job DROP CONSTRAINT job_consumer_id_fkey; \
            DELETE FROM oncebox.consumer WHERE consumer_id = {}",
        other.row.consumer_id
    );
    fixture.inbox.execute(gone).await;
    assert!(fixture.lease(job_id).await.is_none());
    let job = fixture.show(job_id).await;
    assert_eq!((&*job.state, job.changed), ("paused", 0));
    assert!(job.note.unwrap().contains("is gone"));
    fixture.inbox.finish().await;
}
