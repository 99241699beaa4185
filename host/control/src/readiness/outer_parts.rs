//! The parts about what surrounds the inbox: external idempotency, replay policy, crash tests.

use oncebox_model::{
    contract::{is_emit, is_given},
    policy::{Dedup, HorizonVerdict, OutsideEffects, PastHorizon, PayloadPolicy},
};

use super::{
    Counted, LiveVersion, ReadinessFact, ReadinessInput,
    inbox_parts::cut_off,
    listed,
    scan::{OF_OUTSIDE, SeenMessages},
};

impl ReadinessInput<'_> {
    pub(super) fn external_idempotency(&self) -> Vec<ReadinessFact> {
        let mut facts = vec![self.imports(), self.outside(), self.doctor(OF_OUTSIDE)];
        facts.extend(self.endpoints());
        facts
    }

    /// Tells what endpoints do with a request that is repeated, as was decided for each. Nothing
    /// where no version emits, or the tenant has no endpoint.
    fn endpoints(&self) -> Option<ReadinessFact> {
        const NAME: &str = "endpoints";
        let versions = &self.facts.versions;
        let mut imports = versions.iter().flat_map(|version| version.imports.iter().flatten());
        if !imports.any(|import| is_emit(import)) || self.facts.endpoints.is_empty() {
            return None;
        }
        let accepted: Vec<_> = self
            .facts
            .endpoints
            .iter()
            .filter_map(|endpoint| {
                let by = endpoint.duplicates_accepted_by.as_deref()?;
                let because = endpoint.duplicates_because.as_deref().unwrap_or_default();
                Some(format!("`{}` (accepted by {by}: {because})", endpoint.name))
            })
            .collect();
        let found = match accepted.is_empty() {
            true => {
                "the endpoints of the tenant recognise a repeated request by its key".to_owned()
            }
            false => format!("these endpoints may act twice: {}", listed(&accepted)),
        };
        Some(ReadinessFact::met(NAME, found))
    }

    /// Answers whether the versions that run import nothing that reaches out of the database.
    fn imports(&self) -> ReadinessFact {
        const NAME: &str = "imports";
        let versions = &self.facts.versions;
        if versions.is_empty() {
            return nothing_deployed(NAME);
        }
        let outside: Vec<_> = versions
            .iter()
            .flat_map(|version| {
                let imports = version.imports.iter().flatten();
                imports.filter(|import| !is_given(import)).map(move |import| named(version, import))
            })
            .collect();
        if !outside.is_empty() {
            let found = format!("handlers reach out of the database: {}", listed(&outside));
            let advice = "write a row that says what is to be done, and let a relay do it under \
                an id derived from the message's (docs/inbox-and-outbox.md)";
            return ReadinessFact::not_met(NAME, found, advice);
        }
        let blind: Vec<_> =
            versions.iter().filter(|version| version.imports.is_none()).map(shown).collect();
        if !blind.is_empty() {
            let found = format!("the imports are not known of {}", listed(&blind));
            return ReadinessFact::not_known(
                NAME,
                found,
                "build the component again and deploy it",
            );
        }
        let mut imports = versions.iter().flat_map(|version| version.imports.iter().flatten());
        ReadinessFact::met(
            NAME,
            match imports.any(|import| is_emit(import)) {
                true => {
                    "handlers have no network, and what they send has an id derived from its cause"
                }
                false => "handlers have no network",
            },
        )
    }

    /// Answers what programs do with the rows that handlers write, as the owner declares it.
    fn outside(&self) -> ReadinessFact {
        const NAME: &str = "outside";
        match self.policy.effects.outside {
            None => ReadinessFact::not_known(
                NAME,
                "whether a program acts on the rows of the handlers is not known",
                "declare it: `effects.outside = \"none\"`, or `\"keyed\"` where the other side \
                    recognises an action that is repeated by its key",
            ),
            Some(OutsideEffects::None) => ReadinessFact::met(
                NAME,
                "no program acts on the rows of the handlers, as the policy declares",
            ),
            Some(OutsideEffects::Keyed) => ReadinessFact::met(
                NAME,
                "what acts on the rows of the handlers gives a key, as the policy declares",
            ),
        }
    }

    pub(super) fn replay_policy(&self) -> Vec<ReadinessFact> {
        vec![self.replay(), self.redrive()]
    }

    fn replay(&self) -> ReadinessFact {
        const NAME: &str = "replay";
        const ADVICE: &str = "set `replay.past_horizon = \"park\"`, or `replay.allowed = false`";
        if !self.policy.replay.allowed {
            let found = "offsets cannot be set back by Oncebox (`replay.allowed = false`)";
            return ReadinessFact::met(NAME, found);
        }
        if self.policy.dedup == Dedup::Off {
            return ReadinessFact::not_met(
                NAME,
                "offsets may be set back, and every message that is read again has its effect again",
                "set `replay.allowed = false`, or `dedup = \"inbox\"`",
            );
        }
        match (self.horizon.verdict, self.horizon.past_horizon) {
            (HorizonVerdict::Holds | HorizonVerdict::Parked, _)
            | (HorizonVerdict::Unknown, PastHorizon::Park | PastHorizon::ParkByTime) => {
                let found =
                    "what is read again is a duplicate, or is parked where it may be forgotten";
                ReadinessFact::met(NAME, found)
            }
            (HorizonVerdict::Unknown, PastHorizon::Run) => {
                let found = "offsets may be set back, and whether the inbox has forgotten what is \
                    read again is not known";
                ReadinessFact::not_known(NAME, found, ADVICE)
            }
            (HorizonVerdict::TooShort | HorizonVerdict::NotRemembered, _) => {
                let found = "offsets may be set back to messages that the inbox has forgotten, \
                    which then run again";
                ReadinessFact::not_met(NAME, found, ADVICE)
            }
        }
    }

    fn redrive(&self) -> ReadinessFact {
        const NAME: &str = "redrive";
        let SeenMessages { dead, without_record, .. } = self.scan.seen;
        if self.policy.payload == PayloadPolicy::None {
            let found = "dead letters keep no record (`payload = \"none\"`), and run again only \
                after another delivery";
            return ReadinessFact::not_met(NAME, found, "use `payload = \"failed\"`");
        }
        if without_record > 0 {
            let found = format!(
                "{without_record} of {} cannot run again, since the record was not kept",
                Counted(dead, "dead letter and parked message")
            );
            let advice = "let the producer send them again, or discard them: `oncebox inbox list \
                --status failed_terminal`, `--status parked`";
            return ReadinessFact::not_met(NAME, found, advice);
        }
        if self.scan.seen.is_cut_off() {
            return cut_off(NAME);
        }
        let found = match dead {
            0 => "there is no dead letter, and those to come keep their record".to_owned(),
            1 => "the dead letter keeps its id and its record".to_owned(),
            _ => format!("all {dead} dead letters and parked messages keep their id and record"),
        };
        ReadinessFact::met(NAME, found)
    }

    pub(super) fn crash_tests(&self) -> Vec<ReadinessFact> {
        match self.facts.versions.as_slice() {
            [] => vec![nothing_deployed("verify")],
            versions => versions.iter().map(verified).collect(),
        }
    }
}

fn nothing_deployed(name: &'static str) -> ReadinessFact {
    let advice = "deploy a version, and ask again";
    ReadinessFact::not_known(name, "no version is deployed", advice)
}

/// Answers whether a version passed `oncebox verify` the last time.
fn verified(version: &LiveVersion) -> ReadinessFact {
    const NAME: &str = "verify";
    const ADVICE: &str = "`oncebox verify … --json > report.json`, then `oncebox version attest \
        report.json`";
    let subject = shown(version);
    let Some(verification) = &version.verification else {
        let found = format!("no outcome of `oncebox verify` is stored for {subject}");
        return ReadinessFact::not_met(NAME, found, ADVICE);
    };
    let at = verification.at.format("%F %T");
    let (windows, actor) = (i64::from(verification.windows), &verification.actor);
    let windows = Counted(windows, "window");
    if verification.is_passed {
        let killed = Counted(i64::from(verification.killed), "killed worker");
        let found =
            format!("{subject} passed {windows} with {killed}, as `{actor}` stored at {at}");
        return ReadinessFact::met(NAME, found);
    }
    let failed = verification.windows_failed;
    let found = format!("{subject} failed in {failed} of {windows}, as `{actor}` stored at {at}");
    ReadinessFact::not_met(NAME, found, ADVICE)
}

/// Returns a version for operators.
fn shown(version: &LiveVersion) -> String {
    let digest = version.digest.get(..12).unwrap_or(&version.digest);
    format!("version {digest} of `{}`", version.handler)
}

fn named(version: &LiveVersion, import: &str) -> String {
    format!("`{import}` of {}", shown(version))
}
