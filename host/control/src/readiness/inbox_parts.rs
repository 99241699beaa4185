//! The parts that the inbox itself answers: stable id, durable dedup, transactional effect.

use oncebox_model::policy::{Collision, Dedup, HorizonVerdict, IdSource};

use super::{
    Counted, ReadinessFact, ReadinessInput,
    scan::{DEAD_MAX, OF_DEDUP, OF_TRANSACTION, SeenMessages},
};
use crate::doctor::Severity;

impl ReadinessInput<'_> {
    pub(super) fn stable_id(&self) -> Vec<ReadinessFact> {
        vec![self.identity(), self.undecodable(), self.collisions()]
    }

    /// Answers whether messages came with an id of their own, by the newest rows of the inbox.
    fn identity(&self) -> ReadinessFact {
        const NAME: &str = "identity";
        const ADVICE: &str = "let the producer send an id, and take `position` out of \
            `identity.id`: docs/message-id.md";
        let SeenMessages { messages, by_position, .. } = self.scan.seen;
        if self.policy.identity.id.first() == Some(&IdSource::Position) {
            let found = "the id is the position of the record, so that an event that is produced \
                twice is two messages";
            return ReadinessFact::not_met(NAME, found, ADVICE);
        }
        if self.policy.dedup == Dedup::Off {
            let found = "no message that completes leaves its id (`dedup = \"off\"`)";
            return ReadinessFact::not_known(NAME, found, "use `dedup = \"inbox\"`");
        }
        if messages == 0 {
            let advice = "send messages as the producer does, and ask again";
            let found = "the inbox holds no message that came under the present `identity`";
            return ReadinessFact::not_known(NAME, found, advice);
        }
        if by_position > 0 {
            let percent = by_position as f64 * 100.0 / messages as f64;
            let found = format!(
                "{by_position} of the newest {} ({percent:.1} %) fell back to the position of \
                    their record",
                Counted(messages, "message")
            );
            return ReadinessFact::not_met(NAME, found, ADVICE);
        }
        let found = format!("none of the newest {} fell back", Counted(messages, "message"));
        ReadinessFact::met(NAME, found)
    }

    fn undecodable(&self) -> ReadinessFact {
        const NAME: &str = "undecodable";
        match self.scan.seen.undecodable {
            0 if self.scan.seen.is_cut_off() => cut_off(NAME),
            0 => ReadinessFact::met(NAME, "no record without an id is parked"),
            count => ReadinessFact::not_met(
                NAME,
                format!("{}, without a usable id or not readable", parked(count, "record")),
                "`oncebox inbox list --reason undecodable` shows them; mend the producer or \
                    `identity`, then discard them",
            ),
        }
    }

    fn collisions(&self) -> ReadinessFact {
        const NAME: &str = "collisions";
        if self.policy.collision() == Collision::Ignore {
            let found = "a known id with another payload is taken for a duplicate and not counted \
                (`collision = \"ignore\"`)";
            let advice = "use `collision = \"park\"`, which needs `inbox = \"full\"`";
            return ReadinessFact::not_known(NAME, found, advice);
        }
        match self.scan.seen.collisions {
            0 if self.scan.seen.is_cut_off() => cut_off(NAME),
            0 => ReadinessFact::met(NAME, "no id came with two payloads"),
            count => ReadinessFact::not_met(
                NAME,
                format!("{} with a known id and another payload", parked(count, "message")),
                "`oncebox inbox list --reason collision` shows them: a producer uses one id for \
                    two events (docs/message-id.md)",
            ),
        }
    }

    pub(super) fn durable_dedup(&self) -> Vec<ReadinessFact> {
        vec![self.claims(), self.memory(), self.doctor(OF_DEDUP)]
    }

    fn claims(&self) -> ReadinessFact {
        match self.policy.dedup {
            Dedup::Inbox => ReadinessFact::met("claims", "every message is claimed in the inbox"),
            Dedup::Off => ReadinessFact::not_met(
                "claims",
                "nothing is remembered of messages that complete (`dedup = \"off\"`)",
                "use `dedup = \"inbox\"`",
            ),
        }
    }

    fn memory(&self) -> ReadinessFact {
        const NAME: &str = "memory";
        const ADVICE: &str = "`oncebox retention explain` has the settings that it compares";
        let found = self.horizon.conclusion();
        match self.horizon.verdict {
            HorizonVerdict::Holds | HorizonVerdict::Parked => ReadinessFact::met(NAME, found),
            HorizonVerdict::Unknown => ReadinessFact::not_known(NAME, found, ADVICE),
            HorizonVerdict::TooShort | HorizonVerdict::NotRemembered => {
                ReadinessFact::not_met(NAME, found, ADVICE)
            }
        }
    }

    pub(super) fn transactional_effect(&self) -> Vec<ReadinessFact> {
        let transaction = match self.policy.dedup {
            Dedup::Inbox => ReadinessFact::met(
                "transaction",
                "claim, effect and completion commit together, or not at all",
            ),
            Dedup::Off => ReadinessFact::not_met(
                "transaction",
                "nothing that commits with the effect says that it happened (`dedup = \"off\"`)",
                "use `dedup = \"inbox\"`",
            ),
        };
        vec![transaction, self.doctor(OF_TRANSACTION)]
    }

    /// Answers whether some checks of `doctor` hold on the consumer's database. Names the checks
    /// alone: their texts may name objects of other tenants.
    pub(super) fn doctor(&self, checks: &[&str]) -> ReadinessFact {
        const NAME: &str = "doctor";
        let of = |severity: Severity| {
            let findings = self.scan.findings.iter();
            let mut names: Vec<_> = findings
                .filter(|it| it.severity == severity && checks.contains(&it.check))
                .map(|it| it.check)
                .collect();
            names.dedup();
            names.join(", ")
        };
        let (errors, unknown, warnings) =
            (of(Severity::Error), of(Severity::Unknown), of(Severity::Warning));
        let advice = "an operator of the installation runs `oncebox doctor`, which says what is \
            wrong and how to repair it";
        let has_run = checks
            .iter()
            .all(|check| self.scan.findings.iter().any(|finding| finding.check == *check));
        if !errors.is_empty() {
            return ReadinessFact::not_met(NAME, format!("checks with errors: {errors}"), advice);
        }
        if !unknown.is_empty() {
            let found = format!("checks without a result: {unknown}");
            return ReadinessFact::not_known(NAME, found, advice);
        }
        if !has_run {
            let found = "not all checks have run on this version of PostgreSQL";
            return ReadinessFact::not_known(NAME, found, advice);
        }
        // None of these checks has a warning that leaves its promise whole.
        if !warnings.is_empty() {
            let found = format!("no check has an error; with warnings: {warnings}");
            return ReadinessFact::not_known(NAME, found, advice);
        }
        ReadinessFact::met(NAME, format!("no findings of {}", checks.join(", ")))
    }
}

/// Answers where there are more dead letters and parked messages than were read.
pub(super) fn cut_off(name: &'static str) -> ReadinessFact {
    let found = format!("none among {DEAD_MAX} dead letters and parked messages; there are more");
    let advice = "redrive or discard them, and ask again";
    ReadinessFact::not_known(name, found, advice)
}

/// Returns how many of a noun are parked.
fn parked(count: i64, noun: &'static str) -> String {
    let are = if count == 1 { "is" } else { "are" };
    format!("{} {are} parked", Counted(count, noun))
}
