//! The parts that a policy alone decides: those that it leaves unmet in a system in which all else
//! is as it should be.

use oncebox_model::{
    policy::{
        BrokerRetention, Horizon, MemoryFacts, Policy, Redelivery, TopicRetention, TopicSettings,
    },
    status::{ConsumerState, TenantState},
};

use super::{
    BaselinePart, DesiredRun, FactAnswer, InboxScan, LiveHost, LiveVersion, ReadinessFacts,
    ReadinessInput, SeenMessages,
    scan::{OF_DEDUP, OF_OUTSIDE, OF_TRANSACTION},
};
use crate::{
    deployments::verification::Verification,
    doctor::{Finding, Severity},
};

/// Returns the parts that no consumer with this policy meets, however it runs, in the order of
/// [`BaselinePart::ALL`].
pub fn unmet_by_policy(policy: &Policy) -> Vec<BaselinePart> {
    let (facts, scan) = (sound_facts(), sound_scan());
    let horizon = Horizon::of(policy, &short_lived(policy), &MemoryFacts::default());
    let input = ReadinessInput { policy, horizon: &horizon, facts: &facts, scan: &scan };
    let unmet = input.answers().into_iter().filter(|part| part.answer() != FactAnswer::Met);
    unmet.map(|part| part.part).collect()
}

/// Returns topics that keep records for an hour.
fn short_lived(policy: &Policy) -> Redelivery {
    const HOUR_MS: u64 = 3_600_000;
    let topic = |topic: &String| TopicSettings {
        topic: topic.clone(),
        kept: TopicRetention::Known(BrokerRetention {
            retention_ms: Some(HOUR_MS),
            retention_bytes: None,
            segment_ms: HOUR_MS,
            cleanup_policy: "delete".to_owned(),
        }),
    };
    Redelivery { topics: policy.topics.iter().map(topic).collect(), group_ms: 0 }
}

/// Returns the facts of a consumer that runs a verified version on a host that is read.
pub(super) fn sound_facts() -> ReadinessFacts {
    ReadinessFacts {
        desired: DesiredRun {
            state: ConsumerState::Running,
            tenant_state: TenantState::Active,
            revision: 1,
            is_quarantined: false,
            is_sought: false,
        },
        versions: vec![sound_version()],
        hosts: vec![LiveHost {
            name: "a/1".to_owned(),
            scraped_ago_s: Some(0),
            status: "running".to_owned(),
            status_revision: 1,
        }],
        endpoints: Vec::new(),
    }
}

/// Returns a version without imports that passed `oncebox verify`.
pub(super) fn sound_version() -> LiveVersion {
    LiveVersion {
        handler: "handler".to_owned(),
        digest: String::new(),
        imports: Some(Vec::new()),
        verification: Some(Verification {
            verification_id: 1,
            at: chrono::DateTime::default(),
            actor: String::new(),
            is_passed: true,
            messages: 1,
            windows: 1,
            windows_failed: 0,
            killed: 1,
            warnings: 0,
            seed: 0,
            program_version: String::new(),
        }),
    }
}

/// Returns the facts of an inbox whose messages have ids, in a database without findings.
pub(super) fn sound_scan() -> InboxScan {
    let finding = |check| Finding {
        place: String::new(),
        check,
        severity: Severity::Ok,
        found: String::new(),
        sql: None,
        advice: None,
    };
    InboxScan {
        seen: SeenMessages { messages: 1, ..SeenMessages::default() },
        findings: [OF_DEDUP, OF_TRANSACTION, OF_OUTSIDE]
            .concat()
            .into_iter()
            .map(finding)
            .collect(),
    }
}
