//! The proof that the inbox remembers a completed message for longer than it can come again.
//!
//! Three things bring a completed message again:
//!
//! - Its record, for as long as the topic keeps it. A seek reads it again. So does a group without
//!   offsets, which begins at the first record; `replay.allowed = false` does not prevent that.
//! - Its group, where a host completed it and died before the ack. That takes minutes.
//! - Its producer, or a bridge before the topic, which sends it again. The inbox cannot know for how
//!   long they try; they are taken to give up no later than the policy's own retries.
//!
//! The inbox must remember for [`MARGIN`] times the longest of them. Brokers remove whole segments,
//! so a record may stay for `segment.ms` longer than `retention.ms`: that sum must be covered too. A
//! message that is open, or a dead letter, is never forgotten and needs nothing.

use std::fmt;

use super::{Dedup, PastHorizon, Policy, Retention, Retry, explain::duration};

/// The factor between the longest redelivery and the memory that it needs.
pub const MARGIN: u64 = 2;

/// A length of time. For ever is longer than any number of milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TimeSpan {
    /// Milliseconds.
    Ms(u64),
    /// For ever.
    Forever,
}

impl TimeSpan {
    /// Returns the milliseconds; none for ever.
    pub fn ms(self) -> Option<u64> {
        match self {
            Self::Ms(ms) => Some(ms),
            Self::Forever => None,
        }
    }

    fn map(self, change: impl FnOnce(u64) -> u64) -> Self {
        self.ms().map_or(Self::Forever, |ms| Self::Ms(change(ms)))
    }

    fn with_margin(self) -> Self {
        self.map(|ms| ms.saturating_mul(MARGIN))
    }
}

/// Writes the time in words.
impl fmt::Display for TimeSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ms(ms) => f.write_str(&duration(*ms)),
            Self::Forever => f.write_str("for ever"),
        }
    }
}

/// The settings of a topic, as its brokers tell them now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopicSettings {
    /// Name of the topic; the pattern itself where no topic matches it.
    pub topic: String,
    /// Time for which its records are kept.
    pub kept: TopicRetention,
}

/// The time for which a topic keeps records, as far as it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TopicRetention {
    /// The brokers' answer.
    Known(BrokerRetention),
    /// No such topic, or none that the host may see.
    Missing,
    /// A topic of an embedded broker, which keeps records in memory until its process ends.
    Embedded,
    /// No answer, for this reason.
    Unknown(String),
}

/// The settings by which brokers remove records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokerRetention {
    /// `retention.ms`; none for -1, for ever.
    pub retention_ms: Option<u64>,
    /// `retention.bytes`; none for -1, no bound. It only removes records earlier.
    pub retention_bytes: Option<u64>,
    /// `segment.ms`: time for which a segment takes records.
    pub segment_ms: u64,
    /// `cleanup.policy`: `delete`, `compact`, or both with a comma.
    pub cleanup_policy: String,
}

impl BrokerRetention {
    /// Returns `retention.ms` as it counts. A topic that is only compacted keeps the last record of
    /// each key for ever.
    fn kept(&self) -> TimeSpan {
        match self.retention_ms {
            Some(ms) if self.deletes() => TimeSpan::Ms(ms),
            _ => TimeSpan::Forever,
        }
    }

    fn deletes(&self) -> bool {
        self.cleanup_policy.split(',').any(|policy| policy.trim() == "delete")
    }

    fn inputs(&self, of: &str) -> Vec<HorizonInput> {
        let kept = self.kept();
        let written =
            |value: Option<u64>| value.map_or_else(|| "-1".to_owned(), |value| value.to_string());
        let input = |name, value, needs| HorizonInput::new(of, name, value, needs);
        let retention = self.retention_ms.map_or(TimeSpan::Forever, TimeSpan::Ms);
        let mut inputs = vec![
            input(
                "retention.ms",
                format!("{} ({retention})", written(self.retention_ms)),
                self.deletes().then(|| kept.with_margin()),
            ),
            input(
                "segment.ms",
                format!("{} ({})", self.segment_ms, TimeSpan::Ms(self.segment_ms)),
                kept.ms().map(|ms| TimeSpan::Ms(ms.saturating_add(self.segment_ms))),
            ),
            input(
                "cleanup.policy",
                self.cleanup_policy.clone(),
                (!self.deletes()).then_some(TimeSpan::Forever),
            ),
        ];
        if self.retention_bytes.is_some() {
            inputs.push(input("retention.bytes", written(self.retention_bytes), None));
        }
        inputs
    }
}

impl TopicSettings {
    fn of(&self) -> String {
        format!("topic `{}`", self.topic)
    }

    fn inputs(&self) -> Vec<HorizonInput> {
        match (&self.kept, self.fault()) {
            (TopicRetention::Known(settings), _) => settings.inputs(&self.of()),
            (_, fault) => vec![HorizonInput::new(
                &self.of(),
                "retention.ms",
                format!("not known: {}", fault.unwrap_or_default()),
                None,
            )],
        }
    }

    /// Returns the reason why the settings are not known.
    fn fault(&self) -> Option<&str> {
        match &self.kept {
            TopicRetention::Known(_) => None,
            TopicRetention::Missing => Some("the brokers know no such topic yet"),
            TopicRetention::Embedded => {
                Some("an embedded broker keeps records in memory, until its process ends")
            }
            TopicRetention::Unknown(reason) => Some(reason),
        }
    }
}

/// The ways in which messages of a consumer come again, without those that its policy tells.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Redelivery {
    /// The consumer's topics. A pattern stands for all topics that it matches.
    pub topics: Vec<TopicSettings>,
    /// Longest time, milliseconds, after which the group redelivers a record that was not acked.
    pub group_ms: u64,
}

/// One input of the proof.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HorizonInput {
    /// Place of the setting, such as a topic.
    pub of: String,
    /// Name of the setting.
    pub name: String,
    /// Its value, with the value in words where it is a time.
    pub value: String,
    /// Memory that it needs; none where it does not count.
    pub needs: Option<TimeSpan>,
}

impl HorizonInput {
    fn new(of: &str, name: &str, value: String, needs: Option<TimeSpan>) -> Self {
        Self { of: of.to_owned(), name: name.to_owned(), value, needs }
    }
}

/// The verdict on a consumer's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HorizonVerdict {
    /// The inbox remembers for as long as is needed.
    Holds,
    /// It forgets too soon, and records that it may have forgotten are parked.
    Parked,
    /// It forgets too soon, and a record that it has forgotten has its effect again.
    TooShort,
    /// A topic's settings are not known.
    Unknown,
    /// Deduplication is off: nothing is remembered.
    NotRemembered,
}

/// The proof for one consumer: its inputs, what they need, and the verdict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Horizon {
    /// All inputs, each with the memory that it needs.
    pub inputs: Vec<HorizonInput>,
    /// Memory that the inputs need together: the longest of theirs.
    pub needed: TimeSpan,
    /// Time for which the inbox surely remembers a completed message.
    pub remembered: TimeSpan,
    /// Retention class of the policy.
    pub retention: Retention,
    /// Treatment of a record that may have been forgotten.
    pub past_horizon: PastHorizon,
    /// The verdict.
    pub verdict: HorizonVerdict,
    /// The first topic whose settings are not known, with the reason.
    unanswered: Option<String>,
    /// Whether the brokers failed to answer about a topic that they have.
    is_refused: bool,
}

impl Horizon {
    /// Proves, or disproves, that a policy remembers for long enough.
    pub fn of(policy: &Policy, redelivery: &Redelivery) -> Self {
        let Redelivery { topics, group_ms } = redelivery;
        let mut inputs: Vec<_> = topics.iter().flat_map(TopicSettings::inputs).collect();
        for (of, name, ms) in [
            ("group", "session, poll interval and drain", *group_ms),
            ("policy", "retry, all of its runs", longest_ms(&policy.retry)),
        ] {
            let span = TimeSpan::Ms(ms);
            let value = format!("{ms} ({span})");
            inputs.push(HorizonInput::new(of, name, value, Some(span.with_margin())));
        }
        let needed = inputs.iter().filter_map(|input| input.needs).max();
        let needed = needed.unwrap_or(TimeSpan::Ms(0));
        let unanswered = topics
            .iter()
            .find_map(|topic| topic.fault().map(|fault| format!("{}: {fault}", topic.of())));
        let verdict = match policy.dedup {
            Dedup::Off => HorizonVerdict::NotRemembered,
            Dedup::Inbox if policy.retention == Retention::Permanent => HorizonVerdict::Holds,
            Dedup::Inbox if needed > policy.retention.span() => match policy.replay.past_horizon {
                PastHorizon::Run => HorizonVerdict::TooShort,
                PastHorizon::Park | PastHorizon::ParkByTime => HorizonVerdict::Parked,
            },
            Dedup::Inbox if unanswered.is_some() => HorizonVerdict::Unknown,
            Dedup::Inbox => HorizonVerdict::Holds,
        };
        Self {
            inputs,
            needed,
            remembered: match policy.dedup {
                Dedup::Inbox => policy.retention.span(),
                Dedup::Off => TimeSpan::Ms(0),
            },
            retention: policy.retention,
            past_horizon: policy.replay.past_horizon,
            verdict,
            unanswered,
            is_refused: topics.iter().any(|t| matches!(t.kept, TopicRetention::Unknown(_))),
        }
    }

    /// Returns the verdict as a sentence.
    pub fn conclusion(&self) -> String {
        let Self { needed, remembered, .. } = self;
        match self.verdict {
            HorizonVerdict::Holds if self.retention == Retention::Permanent => {
                "it holds: the inbox forgets no completed message".to_owned()
            }
            HorizonVerdict::Holds => format!(
                "it holds: {needed} are needed, and the inbox remembers a completed message for \
                    {remembered} at least"
            ),
            HorizonVerdict::Parked => format!(
                "the inbox forgets too soon: {}; a record that it may have forgotten is parked, so \
                    that none runs twice; to prevent that, {}",
                self.shortage(),
                self.ways_out(false)
            ),
            HorizonVerdict::TooShort => format!(
                "the inbox forgets too soon: {}; with `replay.past_horizon = \"run\"` a message \
                    that comes again after that has its effect again; choose {}",
                self.shortage(),
                self.ways_out(true)
            ),
            HorizonVerdict::Unknown => format!(
                "it is not known whether the inbox remembers for long enough: {}",
                self.unanswered.as_deref().unwrap_or_default()
            ),
            HorizonVerdict::NotRemembered => {
                "nothing is remembered (`dedup = \"off\"`): every redelivery has its effect again"
                    .to_owned()
            }
        }
    }

    /// Returns the reason to refuse a policy that would let a redelivery have its effect again.
    pub fn refusal(&self) -> Option<String> {
        (self.verdict == HorizonVerdict::TooShort).then(|| self.conclusion())
    }

    /// Returns a warning where the memory is too short, or brokers failed to answer. A topic that
    /// does not exist yet, and one of an embedded broker, are no reason to warn.
    pub fn warning(&self) -> Option<String> {
        let warns = match self.verdict {
            HorizonVerdict::Parked | HorizonVerdict::TooShort => true,
            HorizonVerdict::Unknown => self.is_refused,
            HorizonVerdict::Holds | HorizonVerdict::NotRemembered => false,
        };
        warns.then(|| self.conclusion())
    }

    /// Returns the first of the inputs that need the most.
    fn decisive(&self) -> Option<&HorizonInput> {
        self.inputs.iter().find(|input| input.needs == Some(self.needed))
    }

    fn shortage(&self) -> String {
        let Self { needed, remembered, retention, .. } = self;
        let cause = self
            .decisive()
            .map(|input| format!("`{}` of {} is {}", input.name, input.of, input.value))
            .unwrap_or_default();
        let of = if *needed == TimeSpan::Forever { "" } else { "of " };
        format!(
            "{cause}, which needs a memory {of}{needed}, and `retention = \"{}\"` remembers for \
                {remembered}",
            retention.name()
        )
    }

    fn ways_out(&self, may_run: bool) -> String {
        let class = Retention::at_least(self.needed).name();
        let park = if may_run { ", `replay.past_horizon = \"park\"`" } else { "" };
        let shorter = match self.decisive() {
            Some(input) if input.of == "policy" => "fewer or shorter retries".to_owned(),
            Some(input) => format!("a shorter `retention.ms` of {}", input.of),
            None => String::new(),
        };
        let choose = if may_run { "" } else { "choose " };
        format!("{choose}`retention = \"{class}\"` for a new consumer{park} or {shorter}")
    }
}

impl Policy {
    /// Returns whether the inbox remembers completed messages, and forgets them after a time.
    pub fn has_horizon(&self) -> bool {
        self.dedup == Dedup::Inbox && self.retention != Retention::Permanent
    }
}

impl Retention {
    /// The classes, the shortest first.
    const ALL: [Self; 4] = [Self::SevenDays, Self::ThirtyDays, Self::OneYear, Self::Permanent];

    /// Returns the time for which a completed message is surely remembered.
    fn span(self) -> TimeSpan {
        match self.days() {
            Some(days) => TimeSpan::Ms(days.unsigned_abs() * 86_400_000),
            None => TimeSpan::Forever,
        }
    }

    /// Returns the shortest class that remembers for at least a time.
    fn at_least(needed: TimeSpan) -> Self {
        Self::ALL.into_iter().find(|class| class.span() >= needed).unwrap_or(Self::Permanent)
    }

    /// Returns the name of the class in a policy.
    pub fn name(self) -> &'static str {
        match self {
            Self::SevenDays => "7d",
            Self::ThirtyDays => "30d",
            Self::OneYear => "1y",
            Self::Permanent => "permanent",
        }
    }
}

/// Returns the longest time from the first to the last run of a message.
fn longest_ms(retry: &Retry) -> u64 {
    let bound = |attempts| u64::try_from(retry.bound(attempts).as_millis()).unwrap_or(u64::MAX);
    let delays = retry.attempts_max.saturating_sub(1);
    // A bound that grows has reached `backoff_max_ms` by then.
    let growing = delays.min(u64::BITS);
    let constant = bound(delays).saturating_mul(u64::from(delays - growing));
    let delays = (1..=growing).map(bound).fold(constant, u64::saturating_add);
    let runs = retry.lease_ms.saturating_mul(u64::from(retry.attempts_max));
    let longest = delays.saturating_add(runs);
    // A run that fails at a greater age is the last.
    retry.age_max_ms.map_or(longest, |age| longest.min(age.saturating_add(retry.lease_ms)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: u64 = 86_400_000;

    fn policy(text: &str) -> Policy {
        Policy::parse(&format!("topics = ['orders']\nack = 'after_commit'\n{text}"))
            .expect("a policy of the test")
    }

    fn topic(retention_ms: i64, segment_ms: u64, cleanup_policy: &str) -> TopicSettings {
        TopicSettings {
            topic: "orders".to_owned(),
            kept: TopicRetention::Known(BrokerRetention {
                retention_ms: u64::try_from(retention_ms).ok(),
                retention_bytes: None,
                segment_ms,
                cleanup_policy: cleanup_policy.to_owned(),
            }),
        }
    }

    fn days(days: i64) -> TopicSettings {
        topic(days * DAY as i64, DAY, "delete")
    }

    fn horizon(text: &str, topics: &[TopicSettings]) -> Horizon {
        let redelivery = Redelivery { topics: topics.to_vec(), group_ms: 335_000 };
        Horizon::of(&policy(text), &redelivery)
    }

    // What could go wrong: a memory that is shorter than a record can be read again passes for long
    // enough, or one that suffices is refused.
    #[test]
    fn a_memory_holds_from_twice_the_longest_redelivery_on() {
        use HorizonVerdict::{Holds, NotRemembered, Parked, TooShort};
        let run = "replay = { past_horizon = 'run' }";
        let half = topic(7 * DAY as i64 / 2, DAY, "delete");
        let more = topic(7 * DAY as i64 / 2 + 1, DAY, "delete");
        for (text, topic, verdict) in [
            (run, &half, Holds),
            (run, &more, TooShort),
            ("", &more, Parked),
            ("replay = { past_horizon = 'park_by_time' }", &more, Parked),
            (run, &days(7), TooShort),
            ("retention = '30d'\nreplay = { past_horizon = 'run' }", &days(7), Holds),
            ("retention = '1y'\nreplay = { past_horizon = 'run' }", &days(365), TooShort),
            (run, &topic(-1, DAY, "delete"), TooShort),
            ("retention = '1y'", &topic(-1, DAY, "delete"), Parked),
            ("retention = 'permanent'", &topic(-1, DAY, "delete"), Holds),
            ("dedup = 'off'", &days(1), NotRemembered),
            // A record leaves with its segment, and never where its topic is only compacted.
            (run, &topic(DAY as i64, 6 * DAY, "delete"), Holds),
            (run, &topic(DAY as i64, 7 * DAY, "delete"), TooShort),
            (run, &topic(DAY as i64, DAY, "compact"), TooShort),
            (run, &topic(DAY as i64, DAY, ""), TooShort),
            (run, &topic(DAY as i64, DAY, "compact,delete"), Holds),
            // An operator's ban of seeks does not keep a group from losing its offsets.
            ("replay = { allowed = false, past_horizon = 'run' }", &days(7), TooShort),
        ] {
            let found = horizon(text, std::slice::from_ref(topic));
            // S1-121, S2-017, S4-012, S4-020.
            assert_eq!(found.verdict, verdict, "`{text}`, {topic:?}: {found:?}");
        }
        let two = horizon(run, &[days(1), days(7)]);
        assert_eq!((two.verdict, two.needed), (TooShort, TimeSpan::Ms(14 * DAY)));
    }

    // What could go wrong: one of the ways in which a message comes again is left out.
    #[test]
    fn every_redelivery_counts() {
        let short = topic(60_000, 60_000, "delete");
        let found = horizon("", std::slice::from_ref(&short));
        // S1-046.
        assert_eq!(found.needed, TimeSpan::Ms(670_000), "the group");
        let retries = "retry = { attempts_max = 3, backoff_min_ms = 1_000_000, jitter = 'none' }";
        let found = horizon(retries, std::slice::from_ref(&short));
        assert_eq!(found.needed, TimeSpan::Ms(2 * (3_000_000 + 3 * 30_000)), "the retries");
        let bounded =
            "retry = { attempts_max = 3, backoff_min_ms = 1_000_000, age_max_ms = 500_000 }";
        assert_eq!(horizon(bounded, &[short]).needed, TimeSpan::Ms(2 * 530_000), "their bound");
        let years = "retry = { attempts_max = 1_000, backoff_max_ms = 2_592_000_000 }";
        let found = horizon(years, &[days(1)]);
        assert_eq!(found.verdict, HorizonVerdict::Parked);
        assert!(found.conclusion().ends_with("or fewer or shorter retries"), "{found:?}");
    }

    // What could go wrong: silence of the brokers passes for a proof, or hides a topic that is
    // already known to be kept for too long.
    #[test]
    fn a_missing_answer_is_no_proof() {
        let missing = |kept| TopicSettings { topic: "gone".to_owned(), kept };
        let silent = missing(TopicRetention::Unknown("they do not answer".to_owned()));
        for (kept, warns) in [
            (silent.kept.clone(), true),
            (TopicRetention::Missing, false),
            (TopicRetention::Embedded, false),
        ] {
            let found = horizon("replay = { past_horizon = 'run' }", &[days(1), missing(kept)]);
            assert_eq!(found.verdict, HorizonVerdict::Unknown);
            assert_eq!(found.warning().is_some(), warns, "{found:?}");
            assert_eq!(found.refusal(), None);
            assert!(found.conclusion().contains("topic `gone`: "), "{found:?}");
        }
        let found = horizon("", &[silent.clone(), days(7)]);
        assert_eq!(found.verdict, HorizonVerdict::Parked);
        assert_eq!(horizon("retention = 'permanent'", &[silent]).verdict, HorizonVerdict::Holds);
    }

    // What could go wrong: a policy that says nothing of its memory has none, or one for ever.
    #[test]
    fn a_policy_always_has_a_memory_that_ends_or_is_permanent() {
        // S4-014.
        assert_eq!(policy("").retention.span(), TimeSpan::Ms(7 * DAY));
        for class in Retention::ALL {
            let written = policy(&format!("retention = '{}'", class.name()));
            assert_eq!(written.retention, class);
        }
        let none = Policy::parse("topics = ['t']\nack = 'after_commit'\nretention = 'none'");
        assert!(none.is_err(), "a memory of another length is refused");
    }

    // What could go wrong: a refusal does not say which setting is at fault, or names a way out that
    // is none.
    #[test]
    fn a_refusal_names_the_cause_and_the_ways_out() {
        let found = horizon("replay = { past_horizon = 'run' }", &[days(1), days(7)]);
        assert_eq!(
            found.refusal().expect("it is refused"),
            "the inbox forgets too soon: `retention.ms` of topic `orders` is 604800000 (7 d), \
             which needs a memory of 14 d, and `retention = \"7d\"` remembers for 7 d; with \
             `replay.past_horizon = \"run\"` a message that comes again after that has its effect \
             again; choose `retention = \"30d\"` for a new consumer, `replay.past_horizon = \
             \"park\"` or a shorter `retention.ms` of topic `orders`"
        );
        let found = horizon("", &[topic(-1, DAY, "delete")]);
        assert_eq!(found.refusal(), None);
        let warning = found.warning().expect("a warning");
        for part in ["is -1 (for ever)", "a memory for ever", "`retention = \"permanent\"`"] {
            assert!(warning.contains(part), "`{part}` is missing in\n{warning}");
        }
        for needed in [DAY, 7 * DAY, 7 * DAY + 1, 365 * DAY + 1] {
            let class = Retention::at_least(TimeSpan::Ms(needed));
            assert!(class.span() >= TimeSpan::Ms(needed), "{class:?}");
        }
    }
}
