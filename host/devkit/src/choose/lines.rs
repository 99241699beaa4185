//! The lines of a policy for a choice.

use super::questions::{Answers, EffectKind, IdPlace, OrderNeed, OtherSide, YesNo};

/// How messages are remembered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Memory {
    /// A row for each message.
    Full,
    /// A light row for each message that completes.
    Light,
    /// No row for a message that completes.
    Off,
}

/// Returns a policy in TOML, with what its owner has to fill in.
pub(super) fn policy(answers: &Answers, memory: Memory) -> String {
    let mut lines = vec![
        "topics = [\"events\"]            # your topics".to_owned(),
        "ack = \"after_commit\"".to_owned(),
    ];
    match memory {
        Memory::Full => {}
        Memory::Light => lines.push("inbox = \"light\"".to_owned()),
        Memory::Off => lines.push("dedup = \"off\"".to_owned()),
    }
    if memory != Memory::Off {
        lines.extend([
            "# At least twice the topics' `retention.ms`, and `retention.ms` with `segment.ms`:"
                .to_owned(),
            "# \"7d\", \"30d\", \"1y\" or \"permanent\". Kafka's defaults need \"30d\".".to_owned(),
            "retention = \"30d\"".to_owned(),
        ]);
        if matches!(answers.order, Some(OrderNeed::Arrival | OrderNeed::Version)) {
            lines.push("order = \"key\"".to_owned());
        }
    }
    if let Some(id) = answers.id {
        let is_tolerant = answers.effect == Some(EffectKind::Tolerant);
        lines.extend([String::new(), "[identity]".to_owned(), identity(id, is_tolerant)]);
    }
    if memory != Memory::Off && answers.order == Some(OrderNeed::Version) {
        let version = "version = { header = \"version\" }   # or { json_pointer = \"/…\" }";
        let first = "first = 1                       # the version that each object begins with";
        let sequence = ["", "[sequence]", version, first];
        lines.extend(sequence.map(str::to_owned));
    }
    if answers.replay == Some(YesNo::No) {
        lines.extend([String::new(), "[replay]".to_owned(), "allowed = false".to_owned()]);
    }
    if let Some(outside) = outside(answers) {
        lines.extend([String::new(), "[effects]".to_owned(), outside.to_owned()]);
    }
    lines.join("\n") + "\n"
}

/// Returns the sources of the id. Where a second effect does no harm, a record without an id counts
/// by its position, instead of being parked.
fn identity(id: IdPlace, is_tolerant: bool) -> String {
    let (source, about) = match id {
        IdPlace::Cloudevents => ("\"cloudevents\"", ""),
        IdPlace::Header => ("{ header = \"message-id\" }", "   # the header's name"),
        IdPlace::Payload => ("{ json_pointer = \"/id\" }", "   # the place in the payload"),
        IdPlace::Nowhere => return "id = [\"position\"]".to_owned(),
    };
    let fallback = if is_tolerant { ", \"position\"" } else { "" };
    format!("id = [{source}{fallback}]{about}")
}

/// Returns what the owner can declare about effects outside of the database; none where the other
/// side may act twice.
fn outside(answers: &Answers) -> Option<&'static str> {
    const NONE: &str = "outside = \"none\"                # no program acts on the handler's rows";
    const KEYED: &str = "outside = \"keyed\"               # your relay gives the derived id";
    const STORED: &str = "outside = \"keyed\"               # your relay writes by key";
    let is_keyed = answers.other_side == Some(OtherSide::Key) && !answers.may_have_two_ids();
    match answers.effect? {
        EffectKind::Amount | EffectKind::Entry | EffectKind::Value | EffectKind::Tolerant => {
            Some(NONE)
        }
        EffectKind::Call => is_keyed.then_some(KEYED),
        EffectKind::Copy => Some(STORED),
        EffectKind::Long | EffectKind::Steps => None,
    }
}
