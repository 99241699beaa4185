//! The pattern that fits, why it does, and what it does not give.

use std::collections::BTreeSet;

use oncebox_control::{BaselinePart, unmet_by_policy};
use oncebox_model::policy::Policy;
use serde::Serialize;

use super::{
    lines::{self, Memory},
    outside,
    questions::{Answers, EffectKind, OrderNeed, OtherSide, YesNo},
};

/// A pattern that makes a repeated delivery harmless.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// A row of the inbox for each message.
    Inbox,
    /// A light row of the inbox for each message.
    LightInbox,
    /// The inbox, with the sequence of versions of each object.
    Sequence,
    /// No row: the effect is idempotent by itself.
    Idempotent,
    /// No row: a repeated effect does no harm.
    Tolerant,
    /// The inbox, and a row that says what another program is to do.
    Outbox,
    /// A chain of messages, each with the inbox, that compensate where they cannot go on.
    Saga,
}

impl Pattern {
    /// Returns the pattern for a reader.
    pub fn title(self) -> &'static str {
        match self {
            Self::Inbox => "a row of the inbox for each message",
            Self::LightInbox => "a light row of the inbox for each message",
            Self::Sequence => "the inbox, with the sequence of versions of each object",
            Self::Idempotent => "an effect that is idempotent by itself, without the inbox",
            Self::Tolerant => "no deduplication",
            Self::Outbox => "the inbox, and a row that says what is to be done outside",
            Self::Saga => "a chain of messages, each with the inbox, and with compensations",
        }
    }

    fn page(self) -> &'static str {
        match self {
            Self::Inbox => "docs/inbox.md",
            Self::LightInbox => "docs/inbox.md#light-rows",
            Self::Sequence => "docs/order.md#versions-of-an-aggregate",
            Self::Idempotent | Self::Tolerant => "docs/when-to-use.md#lighter-modes",
            Self::Outbox => outside::PAGE,
            Self::Saga => "docs/when-to-use.md#more-than-one-database",
        }
    }
}

/// Something that a pattern gives, or does not give.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Property {
    /// A second delivery under one id has no second effect.
    SecondDelivery,
    /// Another payload under a known id is seen.
    OtherPayload,
    /// One fact under two ids has one effect.
    SecondId,
    /// Messages about one object take effect in order.
    Order,
    /// What another system does happens once.
    Outside,
    /// One completed message can be looked up.
    LookUp,
    /// Messages can be read again.
    Replay,
}

impl Property {
    /// Returns the property as a promise.
    pub fn given(self) -> &'static str {
        match self {
            Self::SecondDelivery => "a second delivery under one id has no second effect",
            Self::OtherPayload => "another payload under a known id is parked, and seen",
            Self::SecondId => "one fact under two ids leaves what it leaves under one",
            Self::Order => "messages about one object take effect in their order",
            Self::Outside => "what the other system does happens once, by its key",
            Self::LookUp => "each completed message can be looked up, with its result",
            Self::Replay => "messages can be read again without a second effect",
        }
    }

    /// Returns the property as one that is missing.
    pub fn lacking(self) -> &'static str {
        match self {
            Self::SecondDelivery => "a second delivery has its effect again",
            Self::OtherPayload => "another payload under a known id is dropped unseen",
            Self::SecondId => {
                "one fact under two ids has two effects, unless a unique key of your table \
                    refuses the second one"
            }
            Self::Order => "messages about one object take effect in any order",
            Self::Outside => {
                "what happens outside of the database may happen twice, or be left in doubt"
            }
            Self::LookUp => "single completed messages cannot be looked up",
            Self::Replay => "messages cannot be read again without a second effect, or at all",
        }
    }
}

/// The end of a path of answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// Pattern that fits.
    pub pattern: Pattern,
    /// Reasons for it.
    pub why: Vec<&'static str>,
    /// Duties of the handler and of what surrounds it.
    pub duties: Vec<&'static str>,
    /// Properties that it gives.
    pub gives: BTreeSet<Property>,
    /// Properties that it does not give.
    pub lacks: BTreeSet<Property>,
    /// Lines of a policy, in TOML.
    pub policy: String,
    /// Parts of the gate before a release that no consumer with this policy meets.
    pub unmet: Vec<BaselinePart>,
    /// Pages to read, the most important first.
    pub pages: Vec<&'static str>,
}

impl Choice {
    /// Decides by answers; none while one is missing, or one does not matter.
    pub fn of(answers: &Answers) -> Option<Self> {
        let is_whole = answers.next().is_none() && answers.unneeded().is_none();
        let effect = answers.effect.filter(|_| is_whole)?;
        let (memory, pattern) = (memory(answers), pattern(effect, answers));
        let (gives, lacks) = properties(effect, answers, memory);
        let policy = lines::policy(answers, memory);
        let unmet = unmet_by_policy(&Policy::parse(&policy).ok()?);
        Some(Self {
            pattern,
            why: why(effect, answers, memory),
            duties: duties(effect, answers),
            gives,
            lacks,
            policy,
            unmet,
            pages: pages(pattern, answers),
        })
    }

    /// Returns the parts of the gate that a consumer with this policy can meet.
    pub fn within_reach(&self) -> impl Iterator<Item = BaselinePart> {
        BaselinePart::ALL.into_iter().filter(|part| !self.unmet.contains(part))
    }
}

fn memory(answers: &Answers) -> Memory {
    match answers.look_up {
        _ if answers.effect == Some(EffectKind::Tolerant) || answers.is_idempotent() => Memory::Off,
        Some(YesNo::No) if !answers.must_compare() => Memory::Light,
        _ => Memory::Full,
    }
}

fn pattern(effect: EffectKind, answers: &Answers) -> Pattern {
    match effect {
        EffectKind::Tolerant => Pattern::Tolerant,
        EffectKind::Call | EffectKind::Copy | EffectKind::Long => Pattern::Outbox,
        EffectKind::Steps => Pattern::Saga,
        EffectKind::Amount | EffectKind::Entry | EffectKind::Value => match memory(answers) {
            Memory::Off => Pattern::Idempotent,
            _ if answers.order == Some(OrderNeed::Version) => Pattern::Sequence,
            Memory::Light => Pattern::LightInbox,
            Memory::Full => Pattern::Inbox,
        },
    }
}

fn why(effect: EffectKind, answers: &Answers, memory: Memory) -> Vec<&'static str> {
    let mut why = vec![match effect {
        EffectKind::Amount => "adding an amount twice is wrong, so each id must run once",
        EffectKind::Entry => "a second row for one message is wrong, so each id must run once",
        EffectKind::Value if answers.is_idempotent() => {
            "setting a value twice leaves the same row, and any order is right"
        }
        EffectKind::Value => "setting an old value again is wrong once a newer one is there",
        EffectKind::Call => "no transaction spans the other system, so the call is made after it",
        EffectKind::Copy => "no transaction spans the other store, so it is updated after it",
        EffectKind::Long => "a handler holds a transaction, and has seconds and not minutes",
        EffectKind::Steps => "no transaction spans several services, so each step is a message",
        EffectKind::Tolerant => "a guarantee that nobody needs would cost a row for each message",
    }];
    if answers.must_compare() {
        why.push("full rows keep a hash, by which another payload under a known id is seen");
    }
    if memory == Memory::Light {
        why.push("nobody looks for single completed messages, and light rows take less space");
    }
    match answers.order {
        Some(OrderNeed::Arrival) => why.push("messages of a key wait behind one that failed"),
        Some(OrderNeed::Version) => why.push("the position of each object outlives its messages"),
        Some(OrderNeed::Any) | None => {}
    }
    why
}

fn duties(effect: EffectKind, answers: &Answers) -> Vec<&'static str> {
    let mut duties = Vec::new();
    if matches!(effect, EffectKind::Call | EffectKind::Copy | EffectKind::Long | EffectKind::Steps)
    {
        duties.extend([outside::HANDLER, outside::RELAY]);
    }
    duties.extend(match (effect, answers.other_side) {
        (_, Some(OtherSide::Key)) => Some("the relay gives the derived id as the idempotency key"),
        (_, Some(OtherSide::Lookup)) => {
            Some("the relay asks the other system before it repeats a call that got no answer")
        }
        (_, Some(OtherSide::Neither)) => Some(
            "the relay notes the start of a call, and an operator decides on one that got no answer",
        ),
        (EffectKind::Copy, _) => Some("the relay writes by key, and only what is not older"),
        (EffectKind::Long, _) => Some("the program that does the work tolerates a second start"),
        (EffectKind::Steps, _) => {
            Some("each step keeps its state in a row, and has a message that compensates it")
        }
        _ => None,
    });
    if answers.may_have_two_ids() && !is_harmless(effect, answers) {
        duties.push("a unique key of the business in your table refuses the fact's second id");
    }
    if matches!(answers.order, Some(OrderNeed::Arrival | OrderNeed::Version)) {
        duties.push("the producer gives messages about one object one record key");
    }
    duties
}

/// Returns whether a second effect of one fact does no harm.
fn is_harmless(effect: EffectKind, answers: &Answers) -> bool {
    effect == EffectKind::Tolerant || answers.is_idempotent()
}

/// Returns the properties that are given, and those that are not. One that the answers do not ask
/// for is in neither.
fn properties(
    effect: EffectKind,
    answers: &Answers,
    memory: Memory,
) -> (BTreeSet<Property>, BTreeSet<Property>) {
    let is_tolerant = effect == EffectKind::Tolerant;
    let may_have_two_ids = is_tolerant || answers.may_have_two_ids();
    let order = match answers.order {
        Some(OrderNeed::Arrival | OrderNeed::Version) => Some(true),
        Some(OrderNeed::Any) => None,
        None => Some(false),
    };
    let outside = match effect {
        // A second id of one fact is another key to the other side.
        EffectKind::Call => {
            let is_keyed = answers.other_side == Some(OtherSide::Key);
            Some(is_keyed && !may_have_two_ids)
        }
        EffectKind::Long | EffectKind::Steps => Some(false),
        _ => None,
    };
    let known = [
        (Property::SecondDelivery, Some(!is_tolerant)),
        (Property::OtherPayload, (memory != Memory::Off).then_some(memory == Memory::Full)),
        (Property::SecondId, second_id(answers, may_have_two_ids)),
        (Property::Order, order),
        (Property::Outside, outside),
        (Property::LookUp, Some(memory == Memory::Full)),
        (Property::Replay, Some(answers.replay == Some(YesNo::Yes))),
    ];
    let of = |wanted: bool| {
        let wanted = known.iter().filter(|(_, is_given)| *is_given == Some(wanted));
        wanted.map(|(property, _)| *property).collect()
    };
    (of(true), of(false))
}

fn second_id(answers: &Answers, may_have_two_ids: bool) -> Option<bool> {
    match (answers.is_idempotent(), may_have_two_ids) {
        (true, _) => Some(true),
        (false, true) => Some(false),
        (false, false) => None,
    }
}

fn pages(pattern: Pattern, answers: &Answers) -> Vec<&'static str> {
    let mut pages = vec![pattern.page()];
    let is_ordered = matches!(answers.order, Some(OrderNeed::Arrival | OrderNeed::Version));
    if is_ordered && pattern != Pattern::Sequence {
        pages.push("docs/order.md");
    }
    if answers.id.is_some() {
        pages.push("docs/message-id.md");
    }
    pages.push("docs/policy.md");
    pages
}
