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
//! The inbox must remember for [`MARGIN`](super::MARGIN) times the longest of them, and for twice
//! that where a second effect cannot be corrected. Brokers remove whole segments, so a record may
//! stay for `segment.ms` longer than `retention.ms`: that sum must be covered too. A message that
//! is open, or a dead letter, is never forgotten and needs nothing.
//!
//! The owner of a consumer may name further factors ([`Factors`]): a longer replay, and bounds on
//! the time for which a message is kept. A bound below what is needed contradicts it.

use super::{
    Dedup, Factors, HorizonRule, MemoryRaise, PastHorizon, Policy, Retention, TopicRetention,
    TopicSettings,
    explain::listed,
    horizon_input::{HorizonInput, RetentionFactor, TimeSpan},
};

/// The ways in which messages of a consumer come again, without those that its policy tells.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Redelivery {
    /// The consumer's topics. A pattern stands for all topics that it matches.
    pub topics: Vec<TopicSettings>,
    /// Longest time, milliseconds, after which the group redelivers a record that was not acked.
    pub group_ms: u64,
}

/// What is known of a consumer beside its policy and the ways in which its messages come again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryFacts {
    /// Bytes a day that its messages add to the inbox; none where that is not known.
    pub bytes_per_day: Option<u64>,
    /// Longest class that the operator lets a token of its tenant choose; none for no bound.
    pub retention_max: Option<Retention>,
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
    /// All inputs, each with the memory that it needs and the time that it allows.
    pub inputs: Vec<HorizonInput>,
    /// Factor between the longest redelivery and the memory that it needs.
    pub factor: u64,
    /// Memory that the redeliveries need together: the longest of theirs.
    pub needed: TimeSpan,
    /// Time for which the inbox surely remembers a completed message.
    pub remembered: TimeSpan,
    /// Longest time for which a completed message stays in the inbox.
    pub kept: TimeSpan,
    /// Longest time that the inputs allow; for ever without a bound.
    pub allowed: TimeSpan,
    /// Retention class of the policy.
    pub retention: Retention,
    /// Longest class that a new consumer with the policy may get; none where its memory is not
    /// raised.
    pub raise_bound: Option<Retention>,
    /// Treatment of a record that may have been forgotten.
    pub past_horizon: PastHorizon,
    /// The verdict.
    pub verdict: HorizonVerdict,
    /// The setting that sets the bound of a raise, as a part of a sentence.
    raise_bound_by: String,
    /// Treatment of a new consumer whose memory is too short.
    rule: HorizonRule,
    /// Time for which messages can be kept within the budget; none where that is not known.
    affordable: Option<TimeSpan>,
    /// Factors of the policy.
    factors: Factors,
    /// The first topic whose settings are not known, with the reason.
    unanswered: Option<String>,
    /// Whether the brokers failed to answer about a topic that they have.
    is_refused: bool,
}

impl Horizon {
    /// Proves, or disproves, that a consumer with a policy remembers for long enough.
    pub fn of(policy: &Policy, redelivery: &Redelivery, facts: &MemoryFacts) -> Self {
        let topics = &redelivery.topics;
        let mut inputs = redelivery_inputs(policy, redelivery);
        let needed = inputs.iter().filter_map(|input| input.needs).max();
        let needed = needed.unwrap_or(TimeSpan::Ms(0));
        inputs.extend(policy.factors.inputs(facts.bytes_per_day));
        let allowed = inputs.iter().filter_map(|input| input.allows).min();
        mark_decisive(&mut inputs);
        let remembered = remembered(policy);
        let (raise_bound, raise_bound_by) = raise_bound(policy, facts);
        let unanswered = topics
            .iter()
            .find_map(|topic| topic.fault().map(|fault| format!("{}: {fault}", topic.of())));
        let verdict = match policy.dedup {
            Dedup::Off => HorizonVerdict::NotRemembered,
            Dedup::Inbox if remembered == TimeSpan::Forever => HorizonVerdict::Holds,
            Dedup::Inbox if needed > remembered => match policy.replay.past_horizon {
                PastHorizon::Run => HorizonVerdict::TooShort,
                PastHorizon::Park | PastHorizon::ParkByTime => HorizonVerdict::Parked,
            },
            Dedup::Inbox if unanswered.is_some() => HorizonVerdict::Unknown,
            Dedup::Inbox => HorizonVerdict::Holds,
        };
        Self {
            inputs,
            factor: policy.factors.effect_risk.margin(),
            needed,
            remembered,
            kept: match policy.dedup {
                Dedup::Inbox => policy.retention.longest_kept(),
                Dedup::Off => TimeSpan::Ms(0),
            },
            allowed: allowed.unwrap_or(TimeSpan::Forever),
            retention: policy.retention,
            raise_bound,
            past_horizon: policy.replay.past_horizon,
            verdict,
            raise_bound_by,
            rule: policy.replay.horizon,
            affordable: policy.factors.affordable(facts.bytes_per_day),
            factors: policy.factors.clone(),
            unanswered,
            is_refused: topics.iter().any(|t| matches!(t.kept, TopicRetention::Unknown(_))),
        }
    }

    /// Returns the verdict as a sentence.
    pub fn conclusion(&self) -> String {
        let Self { needed, remembered, .. } = self;
        match self.verdict {
            HorizonVerdict::Holds if *remembered == TimeSpan::Forever => {
                "it holds: the inbox forgets no completed message".to_owned()
            }
            HorizonVerdict::Holds => format!(
                "it holds: {needed} are needed, and the inbox remembers a completed message for \
                    {remembered} at least"
            ),
            HorizonVerdict::Parked => format!(
                "the inbox forgets too soon: {}; a record that it may have forgotten is parked, so \
                    that none runs twice; to prevent that, choose {}{}",
                self.shortage(),
                self.ways_out(false),
                self.raise_note()
            ),
            HorizonVerdict::TooShort => format!(
                "the inbox forgets too soon: {}; with `replay.past_horizon = \"run\"` a message \
                    that comes again after that has its effect again; choose {}{}",
                self.shortage(),
                self.ways_out(true),
                self.raise_note()
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

    /// Returns the reason to refuse another policy of an existing consumer: factors that contradict
    /// the redelivery, or a redelivery that would have its effect again.
    pub fn refusal(&self) -> Option<String> {
        let too_short = || (self.verdict == HorizonVerdict::TooShort).then(|| self.conclusion());
        self.contradiction().or_else(too_short)
    }

    /// Returns the reason to refuse the policy of a new consumer, as [`refusal`](Self::refusal)
    /// does. Where the memory is raised, that is a bound below what is needed.
    pub fn refusal_of_new(&self) -> Option<String> {
        let Some(bound) = self.raise_bound else { return self.refusal() };
        let beyond = || {
            let text = format!(
                "the inbox would forget too soon: {}, and {} lets the memory be raised to `{}` at \
                    most; choose {}",
                self.shortage(),
                self.raise_bound_by,
                bound.name(),
                self.ways_out(false)
            );
            (self.needed > bound.span()).then_some(text)
        };
        self.contradiction().or_else(beyond)
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

    /// Returns a warning where messages of the present growth take more than the budget until they
    /// are removed. The budget shortens no memory.
    pub fn cost_warning(&self) -> Option<String> {
        let affordable = self.affordable.filter(|affordable| *affordable < self.kept)?;
        let stays = match self.kept {
            TimeSpan::Forever => "for ever".to_owned(),
            kept => format!("for up to {kept}"),
        };
        Some(format!(
            "with the present growth `factors.budget_bytes` lasts for {affordable}, and a \
                completed message stays {stays}: choose a higher budget, `inbox = \"light\"`, or a \
                shorter `retention` for a new consumer"
        ))
    }

    /// Returns the raise that a new consumer gets; none where its memory is long enough, or where
    /// no raise suffices.
    pub fn raise(&self) -> Option<MemoryRaise> {
        let to = Retention::at_least(self.needed);
        let is_due = self.needed > self.retention.span() && to <= self.raise_bound?;
        is_due.then(|| MemoryRaise {
            from: self.retention,
            to,
            cause: format!("{}, which needs a memory {}", self.cause(), of_time(self.needed)),
        })
    }

    /// Names the factor that allows a completed message a shorter time than the redelivery needs.
    fn contradiction(&self) -> Option<String> {
        let is_below = |(_, days): &(&'static str, u64)| TimeSpan::days(*days) < self.needed;
        let (key, days) = self.factors.ceilings().find(is_below)?;
        Some(format!(
            "`{key}` contradicts the longest redelivery: it is {days}, and {}, which needs a \
                memory {}; choose a higher `{key}` or {}",
            self.cause(),
            of_time(self.needed),
            self.shorter()
        ))
    }

    /// Returns the first of the inputs that need the most.
    fn decisive(&self) -> Option<&HorizonInput> {
        self.inputs.iter().find(|input| input.needs == Some(self.needed))
    }

    /// Returns the setting that needs the most, with its value.
    fn cause(&self) -> String {
        self.decisive().map(HorizonInput::cause).unwrap_or_default()
    }

    fn shortage(&self) -> String {
        let Self { needed, remembered, retention, .. } = self;
        format!(
            "{}, which needs a memory {}, and `retention = \"{}\"` remembers for {remembered}",
            self.cause(),
            of_time(*needed),
            retention.name()
        )
    }

    /// Lists what makes the memory suffice. A class that a factor forbids is not among it.
    fn ways_out(&self, may_run: bool) -> String {
        let class = Retention::at_least(self.needed);
        let ceiling = self.factors.ceiling();
        let is_allowed =
            ceiling.is_none_or(|(_, days)| class.longest_kept() <= TimeSpan::days(days));
        let longer = || format!("`retention = \"{}\"` for a new consumer", class.name());
        let park = || "`replay.past_horizon = \"park\"`".to_owned();
        let ways = [is_allowed.then(longer), may_run.then(park), Some(self.shorter())];
        listed(ways.into_iter().flatten(), "or")
    }

    /// Returns the change that makes the longest redelivery shorter.
    fn shorter(&self) -> String {
        match self.decisive() {
            Some(input) if input.factor == RetentionFactor::ReplayWindow => {
                format!("a shorter `{}`", input.name)
            }
            Some(input) if input.of == "policy" => "fewer or shorter retries".to_owned(),
            Some(input) => format!("a shorter `retention.ms` of {}", input.of),
            None => String::new(),
        }
    }

    /// Tells the owner who wants a raise that the class of an existing consumer stays.
    fn raise_note(&self) -> &'static str {
        match self.rule {
            HorizonRule::Keep => "",
            HorizonRule::Raise => {
                "; `replay.horizon = \"raise\"` is for a new consumer: the memory of an existing \
                    one cannot be raised"
            }
        }
    }
}

/// Returns the longest class that a new consumer with a policy may get, and the setting that bounds
/// it. The operator's bound is below that of the policy, if at all.
fn raise_bound(policy: &Policy, facts: &MemoryFacts) -> (Option<Retention>, String) {
    let own = policy.raise_bound();
    let of_tenant = facts.retention_max.filter(|most| own.is_some_and(|own| *most < own));
    match of_tenant {
        Some(most) => {
            (Some(most.max(policy.retention)), "the tenant's limit `retention_max`".to_owned())
        }
        None => (own, format!("`{}`", policy.raise_bound_key())),
    }
}

/// Returns the inputs that bring a message again, each with the memory that it needs.
fn redelivery_inputs(policy: &Policy, redelivery: &Redelivery) -> Vec<HorizonInput> {
    let Redelivery { topics, group_ms } = redelivery;
    let factor = policy.factors.effect_risk.margin();
    let mut inputs: Vec<_> = topics.iter().flat_map(|topic| topic.inputs(factor)).collect();
    for (of, name, ms) in [
        ("group", "session, poll interval and drain", *group_ms),
        ("policy", "retry, all of its runs", longest_ms(policy)),
    ] {
        let span = TimeSpan::Ms(ms);
        let value = format!("{ms} ({span})");
        let input = HorizonInput::new(RetentionFactor::Redelivery, of, name, value);
        inputs.push(input.needing(Some(span.times(factor))));
    }
    inputs.push(policy.factors.replay_input());
    inputs
}

/// Marks the first input that needs the most, and the first that allows the least.
fn mark_decisive(inputs: &mut [HorizonInput]) {
    let most = inputs.iter().filter_map(|input| input.needs).max();
    let least = inputs.iter().filter_map(|input| input.allows).min();
    if let Some(input) = inputs.iter_mut().find(|input| most.is_some() && input.needs == most) {
        input.decides = true;
    }
    if let Some(input) = inputs.iter_mut().find(|input| least.is_some() && input.allows == least) {
        input.decides = true;
    }
}

/// Returns the time for which a consumer surely remembers a completed message.
fn remembered(policy: &Policy) -> TimeSpan {
    match policy.dedup {
        Dedup::Off => TimeSpan::Ms(0),
        Dedup::Inbox => policy.retention.span(),
    }
}

/// Returns a time as what a memory is of.
fn of_time(span: TimeSpan) -> String {
    match span {
        TimeSpan::Forever => span.to_string(),
        TimeSpan::Ms(_) => format!("of {span}"),
    }
}

impl Policy {
    /// Returns whether the inbox remembers completed messages, and forgets them after a time.
    pub fn has_horizon(&self) -> bool {
        self.dedup == Dedup::Inbox && self.retention != Retention::Permanent
    }
}

/// Returns the longest time from the first to the last run of a message.
fn longest_ms(policy: &Policy) -> u64 {
    let (retry, attempt_ms) = (&policy.retry, policy.attempt_ms());
    let bound = |attempts| u64::try_from(retry.bound(attempts).as_millis()).unwrap_or(u64::MAX);
    let delays = retry.attempts_max.saturating_sub(1);
    // A bound that grows has reached `backoff_max_ms` by then.
    let growing = delays.min(u64::BITS);
    let constant = bound(delays).saturating_mul(u64::from(delays - growing));
    let delays = (1..=growing).map(bound).fold(constant, u64::saturating_add);
    let runs = attempt_ms.saturating_mul(u64::from(retry.attempts_max));
    let longest = delays.saturating_add(runs);
    // A run that fails at a greater age is the last.
    retry.age_max_ms.map_or(longest, |age| longest.min(age.saturating_add(attempt_ms)))
}

#[cfg(test)]
mod tests {
    use super::{super::BrokerRetention, *};

    const DAY: u64 = 86_400_000;

    fn policy(text: &str) -> Policy {
        Policy::parse(&format!("topics = ['orders']\nack = 'after_commit'\n{text}"))
            .expect("a policy of the test")
    }

    // What could go wrong: the proof forgets the fetch before each run, and a message comes again
    // after its memory.
    #[test]
    fn a_fetch_is_a_part_of_each_attempt() {
        const RETRY: &str = "retry = { attempts_max = 1 }";
        let referring =
            format!("{RETRY}\nreference = {{ store = 'docs', source = {{ header = 'ref' }} }}");
        let longer = longest_ms(&policy(&referring)) - longest_ms(&policy(RETRY));
        assert_eq!(longer, 30_000 + 10_000);
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
        Horizon::of(&policy(text), &redelivery, &MemoryFacts::default())
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
            ("retention = '1y'\nreplay = { past_horizon = 'run' }", &days(183), Holds),
            ("retention = '1y'\nreplay = { past_horizon = 'run' }", &days(184), TooShort),
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

    // What could go wrong: a factor that the owner names is not compared, a weaker one is shown as
    // the one that decides, or a policy that cannot satisfy two of them passes.
    #[test]
    fn every_factor_counts_and_the_one_that_decides_is_named() {
        const ALL: &str = "retention = '30d'\nfactors = { legal_min_days = 20, legal_max_days = \
            400, id_unique_days = 300, replay_days = 3, budget_bytes = 4_200 }";
        let facts = MemoryFacts { bytes_per_day: Some(100), ..MemoryFacts::default() };
        let with_facts = |text: &str, topic: &TopicSettings| {
            let redelivery = Redelivery { topics: vec![topic.clone()], group_ms: 335_000 };
            Horizon::of(&policy(text), &redelivery, &facts)
        };
        let decisive = |found: &Horizon| {
            let named = found.inputs.iter().filter(|input| input.decides);
            named.map(|input| (input.factor.name(), input.name.clone())).collect::<Vec<_>>()
        };
        let named = |factor: &'static str, name: &str| (factor, name.to_owned());
        let budget = || named("cost", "factors.budget_bytes");
        let found = with_facts(ALL, &days(7));
        // Broker retention, replay window, DLQ window, legal, cost, id uniqueness, effect risk.
        // S1-046.
        assert_eq!(
            found.inputs.iter().map(|input| input.factor.name()).collect::<Vec<_>>(),
            [
                "broker retention",
                "broker retention",
                "broker retention",
                "redelivery",
                "redelivery",
                "replay window",
                "dead letters",
                "effect risk",
                "law",
                "law",
                "id uniqueness",
                "cost",
            ]
        );
        let numbers: Vec<_> =
            found.inputs[5..].iter().map(|i| (i.value.as_str(), i.needs, i.allows)).collect();
        let span = |days| Some(TimeSpan::days(days));
        assert_eq!(
            numbers,
            [
                ("3", span(6), None),
                ("never forgotten", None, None),
                ("normal (factor 2)", None, None),
                ("20", span(20), None),
                ("400", None, span(400)),
                ("300", None, span(300)),
                ("4200 (100 more each day)", None, span(42)),
            ]
        );
        assert_eq!(decisive(&found), [named("law", "factors.legal_min_days"), budget()]);
        assert_eq!((found.verdict, found.cost_warning()), (HorizonVerdict::Holds, None));

        let found = with_facts(&ALL.replace("replay_days = 3", "replay_days = 12"), &days(7));
        let replay = named("replay window", "factors.replay_days");
        assert_eq!(decisive(&found), [replay, budget()]);
        let found = with_facts(ALL, &days(14));
        assert_eq!(decisive(&found), [named("broker retention", "retention.ms"), budget()]);
        let found = with_facts(&ALL.replace("4_200", "3_900"), &days(7));
        let warning = found.cost_warning().expect("a warning");
        assert!(warning.contains("lasts for 39 d") && warning.contains("for up to 961 h"));
        let high = with_facts("retention = '30d'\nfactors = { effect_risk = 'high' }", &days(7));
        assert_eq!((high.factor, high.needed), (4, TimeSpan::days(28)), "the risk");
    }

    // What could go wrong: a bound of the law, or of the ids, ends the memory before the last
    // redelivery, and the consumer is made all the same since its records are parked.
    #[test]
    fn a_bound_below_the_longest_redelivery_is_refused_by_name() {
        for (factor, days_of_topic, is_refused) in [
            ("legal_max_days = 10", 5, false),
            ("legal_max_days = 10", 6, true),
            ("id_unique_days = 11", 5, false),
            ("id_unique_days = 11", 6, true),
        ] {
            let found = horizon(&format!("factors = {{ {factor} }}"), &[days(days_of_topic)]);
            let refusal = found.refusal().unwrap_or_default();
            let key = factor.split(' ').next().unwrap_or_default();
            let named = format!("`factors.{key}` contradicts the longest redelivery: it is 1");
            // S1-046.
            assert_eq!(refusal.starts_with(&named), is_refused, "{factor}: {refusal}");
            assert_eq!(refusal.is_empty(), !is_refused, "{factor}: {refusal}");
            assert_eq!(refusal.contains("a memory of 12 d; choose a higher"), is_refused);
        }
    }

    // What could go wrong: a new consumer gets a longer class without a need, or one beyond its
    // bounds; or it is created although no class within them suffices.
    #[test]
    fn a_raise_goes_as_far_as_is_needed_and_no_further_than_its_bound() {
        use Retention::{OneYear, Permanent, SevenDays, ThirtyDays};
        let raise = |more: &str| format!("replay = {{ horizon = 'raise'{more} }}");
        let for_ever = || topic(-1, DAY, "delete");
        for (text, topic, limit, to, is_refused) in [
            (raise(""), days(3), None, None, false),
            (raise(""), days(7), None, Some(ThirtyDays), false),
            (raise(", past_horizon = 'run'"), days(7), None, Some(ThirtyDays), false),
            (raise(""), days(100), None, None, true),
            (raise(", raise_max = '1y'"), days(100), None, Some(OneYear), false),
            (raise(", raise_max = '7d'"), days(7), None, None, true),
            (raise(", raise_max = '1y'"), for_ever(), None, None, true),
            (raise(", raise_max = 'permanent'"), for_ever(), None, Some(Permanent), false),
            (raise(", raise_max = 'permanent'"), for_ever(), Some(OneYear), None, true),
            (raise(""), days(7), Some(ThirtyDays), Some(ThirtyDays), false),
            (raise(""), days(7), Some(SevenDays), None, true),
            (
                raise(", raise_max = '1y'") + "\nfactors = { legal_max_days = 220 }",
                days(100),
                None,
                None,
                true,
            ),
            (String::new(), days(7), None, None, false),
            ("replay = { raise_max = '1y' }".to_owned(), days(7), None, None, false),
        ] {
            let redelivery = Redelivery { topics: vec![topic.clone()], group_ms: 335_000 };
            let facts = MemoryFacts { retention_max: limit, ..MemoryFacts::default() };
            let found = Horizon::of(&policy(&text), &redelivery, &facts);
            let at = format!("{text}, {topic:?}, {limit:?}");
            assert_eq!(found.raise().map(|raise| raise.to), to, "{at}");
            assert_eq!(found.refusal_of_new().is_some(), is_refused, "{at}");
        }
        let refusal = horizon(&raise(""), &[days(100)]).refusal_of_new().expect("a refusal");
        assert!(
            refusal.contains("and `replay.raise_max` lets the memory be raised to `30d` at most"),
            "{refusal}"
        );
        let lawful = raise(", raise_max = '1y'") + "\nfactors = { legal_max_days = 220 }";
        let refusal = horizon(&lawful, &[days(100)]).refusal_of_new().expect("a refusal");
        assert!(
            refusal.ends_with(
                "and `factors.legal_max_days` lets the memory be raised to `30d` at most; choose a \
                    shorter `retention.ms` of topic `orders`"
            ),
            "a class that the law forbids is no way out: {refusal}"
        );
        let found = horizon(&raise(""), &[days(7)]).raise().expect("a raise");
        let change = "raised from `7d` to `30d` (`replay.horizon = \"raise\"`): `retention.ms` of \
            topic `orders` is 604800000 (7 d), which needs a memory of 14 d";
        assert_eq!(found.made(), format!("the memory is {change}"));
        assert!(found.described().ends_with(&format!("would be {change}")), "{found:?}");
    }

    // What could go wrong: an existing consumer passes since its policy says "raise", which does
    // nothing for it; or its owner does not hear what to do.
    #[test]
    fn an_existing_consumer_that_is_too_short_is_refused_with_raise_as_without() {
        let raise = "replay = { horizon = 'raise', past_horizon = 'run' }";
        let refusal = horizon(raise, &[days(7)]).refusal().expect("it is refused");
        // S1-047.
        assert!(
            refusal.ends_with(
                "choose `retention = \"30d\"` for a new consumer, `replay.past_horizon = \"park\"` \
                    or a shorter `retention.ms` of topic `orders`; `replay.horizon = \"raise\"` is \
                    for a new consumer: the memory of an existing one cannot be raised"
            ),
            "{refusal}"
        );
        let parked = horizon("replay = { horizon = 'raise' }", &[days(7)]);
        assert_eq!((parked.verdict, parked.refusal()), (HorizonVerdict::Parked, None));
        assert!(parked.warning().is_some_and(|text| text.ends_with("cannot be raised")));
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
        for needed in [DAY, 7 * DAY, 7 * DAY + 1, 366 * DAY + 1] {
            let class = Retention::at_least(TimeSpan::Ms(needed));
            assert!(class.span() >= TimeSpan::Ms(needed), "{class:?}");
        }
    }
}
