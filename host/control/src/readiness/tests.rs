//! Answers to planted facts. What could go wrong: a fact that is not known passes for one that
//! holds, a fact that does not hold leaves its part met, or spoils another part.

use oncebox_model::{
    policy::{
        BrokerRetention, Horizon, MemoryFacts, Policy, Redelivery, TopicRetention, TopicSettings,
    },
    status::{ConsumerState, TenantState},
};

use super::{
    BaselinePart, FactAnswer, InboxScan, LiveHost, LiveVersion, ReadinessFacts, ReadinessInput,
    of_policy::{sound_facts, sound_scan, sound_version},
    scan::{DEAD_MAX, OF_DEDUP, OF_OUTSIDE, OF_TRANSACTION},
    unmet_by_policy,
};
use crate::doctor::Severity;

/// Everything that an answer depends on.
struct Planted {
    policy: String,
    kept: TopicRetention,
    facts: ReadinessFacts,
    scan: InboxScan,
}

fn policy(lines: &str) -> Policy {
    let outside = if lines.contains("effects") { "" } else { "effects = { outside = 'none' }" };
    let text = format!("topics = ['t']\nack = 'after_commit'\n{outside}\n{lines}");
    Policy::parse(&text).expect("a policy of the test")
}

fn kept(retention_ms: Option<u64>) -> TopicRetention {
    TopicRetention::Known(BrokerRetention {
        retention_ms,
        retention_bytes: None,
        segment_ms: 3_600_000,
        cleanup_policy: "delete".to_owned(),
    })
}

impl Planted {
    /// A consumer that meets all parts.
    fn sound() -> Self {
        Self {
            policy: String::new(),
            kept: kept(Some(3_600_000)),
            facts: sound_facts(),
            scan: sound_scan(),
        }
    }

    fn policy(mut self, lines: &str) -> Self {
        lines.clone_into(&mut self.policy);
        self
    }

    fn facts(mut self, change: impl FnOnce(&mut ReadinessFacts)) -> Self {
        change(&mut self.facts);
        self
    }

    fn scan(mut self, change: impl FnOnce(&mut InboxScan)) -> Self {
        change(&mut self.scan);
        self
    }

    fn severity(self, check: &'static str, severity: Severity) -> Self {
        self.scan(|scan| {
            let finding = scan.findings.iter_mut().find(|finding| finding.check == check);
            finding.expect("a check of a part").severity = severity;
        })
    }

    /// The parts that are not met, with their answers.
    fn unmet(self) -> Vec<(BaselinePart, FactAnswer)> {
        let policy = policy(&self.policy);
        let topics = vec![TopicSettings { topic: "t".to_owned(), kept: self.kept }];
        let redelivery = Redelivery { topics, group_ms: 0 };
        let horizon = Horizon::of(&policy, &redelivery, &MemoryFacts::default());
        let (facts, scan) = (&self.facts, &self.scan);
        let input = ReadinessInput { policy: &policy, horizon: &horizon, facts, scan };
        let answers = input.answers();
        assert_eq!(answers.len(), 7);
        for fact in answers.iter().flat_map(|part| &part.facts) {
            let is_met = fact.answer == FactAnswer::Met;
            assert!(!fact.found.is_empty() && (is_met || fact.advice.is_some()), "{fact:?}");
        }
        let unmet = answers.iter().filter(|part| part.answer() != FactAnswer::Met);
        unmet.map(|part| (part.part, part.answer())).collect()
    }
}

fn check(planted: Planted, expected: &[(BaselinePart, FactAnswer)]) {
    assert_eq!(planted.unmet(), expected);
}

use BaselinePart::{
    CrashTests, DurableDedup, ExternalIdempotency, Observability, ReplayPolicy, StableId,
    TransactionalEffect,
};
use FactAnswer::{NotKnown, NotMet};

#[test]
fn each_fact_of_the_inbox_decides_its_own_part() {
    let sound = Planted::sound;
    check(sound(), &[]);
    // Stable id.
    check(sound().scan(|scan| scan.seen.by_position = 1), &[(StableId, NotMet)]);
    check(sound().scan(|scan| scan.seen.collisions = 1), &[(StableId, NotMet)]);
    check(sound().scan(|scan| scan.seen.undecodable = 1), &[(StableId, NotMet)]);
    check(sound().scan(|scan| scan.seen.messages = 0), &[(StableId, NotKnown)]);
    check(sound().policy("inbox = 'light'"), &[(StableId, NotKnown)]);
    check(sound().policy("identity = { id = ['position'] }"), &[(StableId, NotMet)]);
    // Durable dedup.
    check(sound().severity("ids", Severity::Error), &[(DurableDedup, NotMet)]);
    check(sound().severity("ids", Severity::Unknown), &[(DurableDedup, NotKnown)]);
    let silent = Planted { kept: TopicRetention::Unknown("away".to_owned()), ..sound() };
    check(silent, &[(DurableDedup, NotKnown)]);
    let unseen = sound().scan(|scan| scan.findings.retain(|it| it.check != "durability"));
    check(unseen, &[(DurableDedup, NotKnown)]);
    // Transactional effect.
    check(sound().severity("guard", Severity::Error), &[(TransactionalEffect, NotMet)]);
    check(sound().severity("host_code", Severity::Unknown), &[(TransactionalEffect, NotKnown)]);
    // Replay policy.
    check(sound().policy("payload = 'none'"), &[(ReplayPolicy, NotMet)]);
    check(sound().scan(|scan| scan.seen.without_record = 1), &[(ReplayPolicy, NotMet)]);
    check(sound().scan(|scan| scan.seen.dead = 7), &[]);
    check(sound().policy("replay = { allowed = false }"), &[]);
}

// What could go wrong: what was not read is taken for what is not there.
#[test]
fn a_count_that_was_cut_off_is_no_zero() {
    let many = || Planted::sound().scan(|scan| scan.seen.dead = DEAD_MAX);
    check(many(), &[(StableId, NotKnown), (ReplayPolicy, NotKnown)]);
    let found = many().scan(|scan| scan.seen.collisions = 1);
    check(found, &[(StableId, NotMet), (ReplayPolicy, NotKnown)]);
    let found = many().scan(|scan| scan.seen.without_record = 1);
    check(found, &[(StableId, NotKnown), (ReplayPolicy, NotMet)]);
}

// What could go wrong: a part is met over a warning of `doctor` that says the opposite.
#[test]
fn a_warning_of_doctor_keeps_a_part_from_being_met() {
    let parts = [
        (OF_DEDUP, DurableDedup),
        (OF_TRANSACTION, TransactionalEffect),
        (OF_OUTSIDE, ExternalIdempotency),
    ];
    for (checks, part) in parts {
        for name in checks {
            check(Planted::sound().severity(name, Severity::Warning), &[(part, NotKnown)]);
        }
    }
}

#[test]
fn each_fact_of_versions_and_effects_decides_its_own_part() {
    let sound = Planted::sound;
    // External idempotency.
    check(sound().severity("foreign_servers", Severity::Error), &[(ExternalIdempotency, NotMet)]);
    let imports =
        |imports: Option<Vec<String>>| sound().facts(|facts| facts.versions[0].imports = imports);
    check(imports(None), &[(ExternalIdempotency, NotKnown)]);
    check(imports(Some(vec!["oncebox:handler/sql@0.1.0".to_owned()])), &[]);
    let http = "wasi:http/outgoing-handler@0.2.0".to_owned();
    check(imports(Some(vec![http])), &[(ExternalIdempotency, NotMet)]);
    check(sound().policy("effects = {}"), &[(ExternalIdempotency, NotKnown)]);
    check(sound().policy("effects = { outside = 'keyed' }"), &[]);
    // Crash tests.
    check(sound().facts(|facts| facts.versions[0].verification = None), &[(CrashTests, NotMet)]);
    let failed = sound().facts(|facts| {
        let verification = facts.versions[0].verification.as_mut();
        verification.expect("one is planted").is_passed = false;
    });
    check(failed, &[(CrashTests, NotMet)]);
    let canary = LiveVersion { verification: None, ..sound_version() };
    check(sound().facts(|facts| facts.versions.push(canary)), &[(CrashTests, NotMet)]);
    let nothing = sound().facts(|facts| facts.versions.clear());
    check(nothing, &[(ExternalIdempotency, NotKnown), (CrashTests, NotKnown)]);
}

// What could go wrong: the part is met by other consumers, while nobody runs this one.
#[test]
fn observability_is_about_this_consumer() {
    let host = |change: &dyn Fn(&mut LiveHost)| {
        Planted::sound().facts(|facts| change(&mut facts.hosts[0]))
    };
    let unseen = [(Observability, NotMet)];
    for state in ["starting", "stopped", "failing"] {
        check(host(&|host| host.status = state.to_owned()), &unseen);
    }
    check(host(&|host| host.status = "idle".to_owned()), &[]);
    check(host(&|host| host.status_revision = 0), &unseen);
    check(host(&|host| host.scraped_ago_s = None), &unseen);
    check(host(&|host| host.scraped_ago_s = Some(301)), &unseen);
    check(host(&|host| host.scraped_ago_s = Some(300)), &[]);
    let another = |state: &str, ago: Option<i64>| {
        let another = LiveHost {
            name: "b/2".to_owned(),
            scraped_ago_s: ago,
            status: state.to_owned(),
            status_revision: 1,
        };
        Planted::sound().facts(|facts| facts.hosts.push(another))
    };
    check(another("running", Some(1)), &[]);
    check(another("running", None), &unseen);
    check(another("starting", None), &[]);
    check(another("failing", Some(1)), &unseen);
    check(Planted::sound().facts(|facts| facts.hosts.clear()), &unseen);

    let states = [ConsumerState::Paused, ConsumerState::Draining, ConsumerState::Deleting];
    for state in states {
        check(Planted::sound().facts(|facts| facts.desired.state = state), &unseen);
    }
    for state in [TenantState::Suspended, TenantState::Deleting] {
        check(Planted::sound().facts(|facts| facts.desired.tenant_state = state), &unseen);
    }
    check(Planted::sound().facts(|facts| facts.desired.is_quarantined = true), &unseen);
    check(Planted::sound().facts(|facts| facts.desired.is_sought = true), &unseen);
    let silenced = "alerts = { pending_age_s = 0, parked = 0, dead_letters = 0, collisions = 0 }";
    check(Planted::sound().policy(silenced), &unseen);
}

// What could go wrong: a policy without deduplication, or one whose memory is too short, is met.
#[test]
fn a_policy_that_gives_a_promise_up_says_so_in_each_part() {
    let off = Planted::sound().policy("dedup = 'off'");
    let expected = [
        (StableId, NotKnown),
        (DurableDedup, NotMet),
        (TransactionalEffect, NotMet),
        (ReplayPolicy, NotMet),
    ];
    check(off, &expected);
    let long = |lines: &str| Planted { kept: kept(None), ..Planted::sound() }.policy(lines);
    let short = [(DurableDedup, NotMet), (ReplayPolicy, NotMet)];
    check(long("replay = { past_horizon = 'run' }"), &short);
    check(long(""), &[]);
    // Brokers that do not answer.
    let silent = |lines: &str| {
        let kept = TopicRetention::Unknown("away".to_owned());
        Planted { kept, ..Planted::sound() }.policy(lines)
    };
    let unknown = [(DurableDedup, NotKnown), (ReplayPolicy, NotKnown)];
    check(silent("replay = { past_horizon = 'run' }"), &unknown);
    check(silent("replay = { past_horizon = 'park' }"), &[(DurableDedup, NotKnown)]);
    check(
        silent("replay = { past_horizon = 'run', allowed = false }"),
        &[(DurableDedup, NotKnown)],
    );
}

// What could go wrong: a part is called out of reach that a consumer with the policy can meet.
#[test]
fn a_policy_leaves_the_parts_unmet_that_it_decides() {
    let unmet = |lines: &str| unmet_by_policy(&policy(lines));
    for lines in ["", "replay = { past_horizon = 'run' }"] {
        assert!(unmet(lines).is_empty(), "{lines}");
    }
    assert_eq!(unmet("inbox = 'light'"), [StableId]);
    assert_eq!(unmet("effects = {}\npayload = 'none'"), [ExternalIdempotency, ReplayPolicy]);
    let off = [StableId, DurableDedup, TransactionalEffect];
    assert_eq!(unmet("dedup = 'off'\nreplay = { allowed = false }"), off);
}
