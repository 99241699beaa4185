//! The meaning of a policy, in sentences.

use super::{
    Ack, Alerts, Collision, Dedup, Gap, IdSource, Jitter, KeySource, NoRoute, Order, PastHorizon,
    PayloadPolicy, Policy, ReferencePolicy, ReferenceSource, Retention, Retry, Sequence,
    TypeSource, VersionSource, WireFormat,
};
/// Steps of a ladder that are named one by one.
const STEPS_SHOWN: u32 = 4;

impl Sequence {
    fn explain(&self) -> String {
        let version = match &self.version {
            VersionSource::Header(name) => format!("the header `{name}`"),
            VersionSource::JsonPointer(pointer) => format!("`{pointer}` of the payload"),
        };
        let first = match self.first {
            Some(first) => format!("version {first}"),
            None => "whatever comes first".to_owned(),
        };
        let then = match self.gap {
            Gap::Park => "is parked, until the gap closes or someone redrives it",
            Gap::Proceed => "runs all the same, and what was missing is skipped when it comes",
        };
        format!(
            "A message's version is {version}; an aggregate begins with {first}. A version that is \
                not above the aggregate's is skipped; \
             one that leaves a gap waits for it to close for {}, and then {then}. A record without \
             a version or a key is parked.",
            duration(self.gap_wait_ms)
        )
    }
}

impl ReferencePolicy {
    fn explain(&self) -> String {
        let place = match &self.source {
            ReferenceSource::Header(name) => format!("the header `{name}`"),
            ReferenceSource::JsonPointer(pointer) => format!("`{pointer}` of the payload"),
        };
        format!(
            " Where {place} is a reference, the payload is the object that it names in the store \
                `{}`: of at most {} bytes, fetched within {} before each run, and not kept.",
            self.store,
            self.bytes_max,
            duration(self.timeout_ms)
        )
    }
}

impl Policy {
    /// Describes what a consumer with this policy does, a paragraph each, in the order of a
    /// message's path.
    pub fn explain(&self) -> Vec<String> {
        let mut parts = vec![
            self.reads(),
            self.identifies(),
            self.acks(),
            self.remembers(),
            self.orders(),
            self.bounds(),
            self.retries(),
            self.parks(),
            self.keeps(),
            self.breaks(),
            self.alerts(),
        ];
        parts.extend(self.ingress.as_ref().map(|ingress| ingress.explain(self)));
        parts.extend(self.masking.explain());
        parts.extend(self.outgoing.explain());
        parts.extend(self.replay.explain());
        parts.extend(self.effects.explain());
        parts
    }

    fn alerts(&self) -> String {
        let Alerts { pending_age_s, parked, dead_letters, collisions } = &self.alerts;
        let bounds = [
            (
                *pending_age_s,
                format!("a message is open for {}", duration(pending_age_s.saturating_mul(1_000))),
            ),
            (*parked, counted(*parked, "is parked", "are parked")),
            (*dead_letters, counted(*dead_letters, "is a dead letter", "are dead letters")),
            (
                *collisions,
                counted(
                    *collisions,
                    "came under a known id with another payload",
                    "came under known ids with other payloads",
                ),
            ),
        ];
        let said: Vec<_> =
            bounds.into_iter().filter(|(bound, _)| *bound > 0).map(|(_, text)| text).collect();
        if said.is_empty() {
            return "Nothing that is open in its inbox is an alert.".to_owned();
        }
        format!("It is an alert when {}.", listed(said.into_iter(), "or"))
    }

    fn reads(&self) -> String {
        let group = match self.kafka.group.as_str() {
            "" => "a Kafka group of its own, `oncebox.<tenant>.<consumer>`".to_owned(),
            group => format!("the Kafka group `{group}`"),
        };
        let encoded = match self.wire_format {
            WireFormat::Plain => "",
            WireFormat::Confluent => {
                " Payloads are decoded by the schemas of the registry, and handlers get JSON; one \
                    that does not decode is parked."
            }
        };
        let fetched = self.reference.as_ref().map(ReferencePolicy::explain).unwrap_or_default();
        format!(
            "It reads {} as {group}.{encoded}{fetched}",
            listed(self.topics.iter().map(|topic| format!("`{topic}`")), "and")
        )
    }

    fn identifies(&self) -> String {
        let identity = &self.identity;
        let id = listed(identity.id.iter().map(IdSource::explain), "else");
        let scope =
            if identity.scoped_by_event_type { ", with the event type before it" } else { "" };
        let kind = listed(identity.event_type.iter().map(TypeSource::explain), "else");
        format!(
            "A message's id is {id}{scope}; that collapses {}. Its event type is {kind}. A record \
                without an id is parked with its bytes.",
            self.collapses()
        )
    }

    fn acks(&self) -> String {
        match self.ack {
            Ack::AfterCommit => {
                "A message is acked after its effect, or the row that says why it has none, is \
                    committed: the broker's lag \
                is the backlog."
                    .to_owned()
            }
            Ack::AfterInsert => format!(
                "A message is acked as soon as it is a row of the inbox, before it runs; then {} \
                    on each host run it. The backlog is in \
                 the inbox, and the broker's lag does not show it.",
                workers(&self.retry)
            ),
        }
    }

    fn remembers(&self) -> String {
        format!("{}{}{}", self.remembers_for(), self.raises(), self.factors.explain())
    }

    /// Describes the raise of a memory that is too short.
    fn raises(&self) -> String {
        self.raise_bound().map_or_else(String::new, |bound| {
            format!(
                " Where that is too short for the longest redelivery, the memory of a new consumer \
                    would be raised, to `{}` at most.",
                bound.name()
            )
        })
    }

    fn remembers_for(&self) -> String {
        let mut replay = if self.replay.allowed {
            String::new()
        } else {
            " Nobody may set its offsets back.".to_owned()
        };
        if self.has_horizon() {
            replay.push_str(match self.replay.past_horizon {
                PastHorizon::Run => " One that was forgotten since runs again.",
                PastHorizon::Park => {
                    " One that may have been forgotten since, by its offset, is parked."
                }
                PastHorizon::ParkByTime => {
                    " One that is older than its retention and is not known is parked, \
                    since it may have run before."
                }
            });
        }
        match self.dedup {
            Dedup::Inbox => {
                let least = match self.retention {
                    Retention::Permanent => "",
                    _ => " at least",
                };
                format!(
                    "A message that completed is remembered {}{least}: another delivery of it is \
                        acked and has no effect.{replay}",
                    self.retention.explain()
                )
            }
            Dedup::Off => {
                format!(
                    "Nothing is remembered of a message that completed: another delivery of it has \
                        its effect again.{replay}"
                )
            }
        }
    }

    fn orders(&self) -> String {
        let key = match &self.identity.ordering_key {
            KeySource::RecordKey => "the record's key".to_owned(),
            KeySource::JsonPointer(pointer) => format!("`{pointer}` of the payload"),
        };
        let waits = "one that failed or is parked holds back those behind it until it completes or \
            is discarded, and nothing else";
        match (self.order, self.ack) {
            (Order::Key, _) if self.sequence.is_some() => format!(
                "Messages of one ordering key ({key}) run in the order of the versions of its \
                    aggregate: {waits}. {}",
                self.sequence.as_ref().map(Sequence::explain).unwrap_or_default()
            ),
            (Order::Key, _) => {
                format!(
                    "Messages of one ordering key ({key}) run in order: {waits}. Those without a \
                        key are in order with nothing."
                )
            }
            (Order::Partition, _) => {
                format!("Messages of a partition run in the order of their offsets: {waits}.")
            }
            (Order::None, Ack::AfterCommit) => format!(
                "Messages of a partition run in the order of their offsets. One that fails lets \
                    those behind it pass, also those of its own \
                 ordering key ({key}); what depends on order guards itself, or says `order = \
                 \"key\"`."
            ),
            (Order::None, Ack::AfterInsert) => {
                format!(
                    "Messages run side by side, in no order, also those of one ordering key \
                        ({key})."
                )
            }
        }
    }

    fn bounds(&self) -> String {
        let Self { batch, limits, .. } = self;
        format!(
            "Up to {} messages share a transaction, and none is started in it after {}. A \
                handler's run ends at the latest after {}, with {} \
             MiB of memory and {} statements. Where its deployment may send messages, a message \
                causes at most {}, and a run at most {} bytes of them.",
            batch.messages_max,
            duration(batch.duration_ms),
            duration(limits.deadline_ms),
            limits.memory_bytes >> 20,
            limits.statements_max,
            limits.outgoing_max,
            limits.outgoing_bytes_max
        )
    }

    fn retries(&self) -> String {
        let retry = &self.retry;
        let preset =
            retry.preset.map_or_else(String::new, |preset| format!(" (`{}`)", preset.name()));
        if retry.attempts_max == 1 {
            return format!("A message that fails is a dead letter at once{preset}.");
        }
        let last = retry.attempts_max - 1;
        let step = |attempts| duration(retry.bound(attempts).as_millis() as u64);
        let mut steps: Vec<_> = (1..=last.min(STEPS_SHOWN)).map(step).collect();
        if last > STEPS_SHOWN {
            steps.push(format!("so on to {}", step(last)));
        }
        let up_to = if retry.jitter == Jitter::Full { "a time of up to " } else { "" };
        let age = retry.age_max_ms.map_or_else(String::new, |age| {
            format!(
                ", and so is one that fails {} after it was received or redriven",
                duration(age)
            )
        });
        let together = (1..=last)
            .map(|attempts| retry.bound(attempts).as_millis() as u64)
            .fold(0, u64::saturating_add);
        format!(
            "A message that fails is run again after {up_to}{}{preset}; after {} runs, {} at most \
                after the first, it is a dead \
             letter{age}. A worker that dies while it runs a message again is waited for {}.",
            listed(steps.into_iter(), "and"),
            retry.attempts_max,
            duration(together),
            duration(self.lease().as_millis() as u64)
        )
    }

    fn parks(&self) -> String {
        let no_route = match self.no_route {
            NoRoute::Park => "is parked",
            NoRoute::Skip => "is skipped, and its row keeps no payload",
            NoRoute::Reject => "is a dead letter at once",
        };
        let collision = match self.collision() {
            Collision::Park => "is parked beside the first",
            Collision::Ignore => "is taken for a duplicate",
        };
        let schemas = match self.schemas.is_empty() {
            true => String::new(),
            false => format!(
                " A payload of {} that is not what its JSON Schema says is parked.",
                listed(self.schemas.keys().map(|event_type| format!("`{event_type}`")), "or")
            ),
        };
        let large = format!(
            " A payload of more than {} bytes is parked, and is not kept.",
            self.limits.payload_bytes_max
        );
        let copies = self.dead_letters.topic.as_ref();
        let copies = copies.map_or_else(String::new, |topic| {
            format!(" Dead letters and parked messages are copied to the topic `{topic}`.")
        });
        format!(
            "A message that no deployment takes {no_route}. A known id that comes with another \
                payload {collision}.{large}{schemas}{copies}"
        )
    }

    fn keeps(&self) -> String {
        format!("{}{}", self.keeps_record(), self.strips())
    }

    /// Describes what leaves the row of a message when it completes.
    fn strips(&self) -> String {
        if !self.is_light() {
            return String::new();
        }
        let result = if self.light.result { ", the handler's result" } else { "" };
        format!(
            " The row of a message that completed is light: it keeps the id, the position, the \
                version that ran it{result} and the times, and neither key, type, trace nor the \
                payload's hash."
        )
    }

    fn keeps_record(&self) -> &'static str {
        match self.payload {
            PayloadPolicy::Failed => {
                "Payload and headers stay in the row of a message until it \
                completes."
            }
            PayloadPolicy::All => {
                "Payload and headers stay in the row of every message for as \
                long as the row does."
            }
            PayloadPolicy::None => {
                "Payload and headers leave the row of a message as soon as it is settled, also of \
                    a dead letter: it cannot be run again before a redelivery brings its record \
                    back."
            }
        }
    }

    fn breaks(&self) -> String {
        let breaker = &self.breaker;
        if !breaker.enabled {
            return "Messages of a version that fails are failed by it one after the other: there \
                is no circuit breaker."
                .to_owned();
        }
        format!(
            "When more than {} % of a version's first runs within {} fail, of {} at least (one \
                that reached its deadline stands for five), its \
             messages wait; one is tried after {}.",
            breaker.failures_percent,
            duration(breaker.window_ms),
            breaker.runs_min,
            duration(breaker.pause_ms)
        )
    }
}

impl IdSource {
    pub(super) fn explain(&self) -> String {
        match self {
            Self::Header(name) => format!("the header `{name}`"),
            Self::Cloudevents => "CloudEvents `source` and `id` together".to_owned(),
            Self::JsonPointer(pointer) => format!("`{pointer}` of the payload"),
            Self::Position => "the record's position".to_owned(),
        }
    }
}

impl TypeSource {
    fn explain(&self) -> String {
        match self {
            Self::Cloudevents => "CloudEvents `type`".to_owned(),
            Self::Header(name) => format!("the header `{name}`"),
            Self::JsonPointer(pointer) => format!("`{pointer}` of the payload"),
            Self::Topic => "the topic's name".to_owned(),
            Self::Schema => "the name in the payload's schema".to_owned(),
        }
    }
}

impl Retention {
    pub(super) fn explain(self) -> &'static str {
        match self {
            Self::SevenDays => "for 7 days",
            Self::ThirtyDays => "for 30 days",
            Self::OneYear => "for 366 days",
            Self::Permanent => "for ever",
        }
    }
}

fn counted(count: u64, one: &str, more: &str) -> String {
    if count == 1 { format!("1 message {one}") } else { format!("{count} messages {more}") }
}

fn workers(retry: &Retry) -> String {
    match retry.workers {
        1 => "one worker".to_owned(),
        workers => format!("{workers} workers"),
    }
}

/// Joins items with commas, and the last with a word.
pub(super) fn listed(items: impl Iterator<Item = String>, word: &str) -> String {
    let mut items: Vec<_> = items.collect();
    match items.pop() {
        Some(last) if !items.is_empty() => format!("{} {word} {last}", items.join(", ")),
        last => last.unwrap_or_default(),
    }
}

/// Formats a duration in the largest unit that leaves no remainder. Without such a unit, more than
/// ten seconds are rounded up to seconds, and less stays in milliseconds.
pub(super) fn duration(ms: u64) -> String {
    const UNITS: [(u64, &str); 4] =
        [(86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s")];
    match UNITS.iter().find(|(unit, _)| ms >= *unit && ms.is_multiple_of(*unit)) {
        Some((unit, name)) => format!("{} {name}", ms / unit),
        None if ms > 10_000 => format!("{} s", ms.div_ceil(1_000)),
        None => format!("{ms} ms"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn explained(text: &str) -> String {
        let policy = Policy::parse(&format!("topics = ['orders']\nack = 'after_commit'\n{text}"))
            .expect("a policy of the test");
        policy.explain().join("\n")
    }

    #[test]
    fn durations_are_read_as_people_say_them() {
        for (ms, expected) in [
            (1, "1 ms"),
            (1_500, "1500 ms"),
            (5_000, "5 s"),
            (90_000, "90 s"),
            (120_000, "2 min"),
            (3_600_000, "1 h"),
            (630_500, "631 s"),
        ] {
            assert_eq!(duration(ms), expected);
        }
    }

    #[test]
    fn a_policy_says_what_it_does() {
        let text = explained("");
        for part in [
            "It reads `orders` as a Kafka group of its own",
            "A message's id is CloudEvents `source` and `id` together; that collapses every \
                delivery of one event",
            "is acked after its effect",
            "is remembered for 7 days",
            "One that fails lets those behind it pass",
            "Up to 64 messages share a transaction, and none is started in it after 50 ms",
            "run again after a time of up to 1 s, 2 s, 4 s and 8 s; after 5 runs, 15 s at most \
                after the first, it is a dead letter",
            "no deployment takes is parked",
            "until it completes",
            "more than 50 % of a version's first runs within 30 s fail, of 20 at least",
        ] {
            // S0-017.
            assert!(text.contains(part), "`{part}` is missing in\n{text}");
        }
    }

    // What could go wrong: a sentence says the opposite of what a key was set to.
    #[test]
    fn every_choice_is_in_the_sentences() {
        for (policy, part) in [
            ("dedup = 'off'", "has its effect again"),
            ("retention = 'permanent'", "remembered for ever: another delivery"),
            (
                "retention = '30d'",
                "remembered for 30 days at least: another delivery of it is acked and has no \
                    effect. One that may have been forgotten since, by its offset, is parked.",
            ),
            ("replay = { past_horizon = 'run' }", "forgotten since runs again."),
            (
                "replay = { horizon = 'raise', raise_max = '30d' }",
                "too short for the longest redelivery, the memory of a new consumer would be \
                    raised, to `30d` at most.",
            ),
            (
                "factors = { legal_min_days = 5, legal_max_days = 40, effect_risk = 'high' }",
                "compared with what its owner says: the law demands 5 days at least, the law \
                    allows 40 days at most and a second effect cannot be corrected.",
            ),
            (
                "limits = { outgoing_max = 7, outgoing_bytes_max = 4096 }",
                "may send messages, a message causes at most 7, and a run at most 4096 bytes",
            ),
            (
                "outgoing = { on_parked = 'stop' }",
                "and that is parked holds back those of its destination and key",
            ),
            ("payload = 'none'", "cannot be run again"),
            ("payload = 'all'", "of every message"),
            (
                "masking = { fields = ['/card'], headers = ['x-a', 'x-b'], key = true }",
                "masked: `/card` of the payload, or all of it where it is not JSON; the headers \
                    `x-a` and `x-b`; the keys. With the role `admin` one sees a single message \
                    unmasked",
            ),
            ("no_route = 'skip'", "is skipped"),
            ("no_route = 'reject'", "takes is a dead letter at once"),
            ("collision = 'ignore'", "taken for a duplicate"),
            ("inbox = 'light'", "another payload is taken for a duplicate"),
            (
                "inbox = 'light'",
                "until it completes. The row of a message that completed is light: it keeps the \
                    id, the position, the version that ran it and the times, and neither key",
            ),
            ("inbox = 'light'\nlight = { result = true }", "ran it, the handler's result and"),
            ("breaker = { enabled = false }", "no circuit breaker"),
            ("retry = { attempts_max = 1 }", "fails is a dead letter at once."),
            (
                "retry = { age_max_ms = 86_400_000 }",
                "it is a dead letter, and so is one that fails 1 d after it was received or \
                    redriven.",
            ),
            (
                "limits = { payload_bytes_max = 4096 }",
                "A payload of more than 4096 bytes is parked, and is not kept.",
            ),
            ("dead_letters = { topic = 'orders.dead' }", "are copied to the topic `orders.dead`."),
            ("replay = { allowed = false }", "Nobody may set its offsets back."),
            (
                "replay = { past_horizon = 'park_by_time' }",
                "is not known is parked, since it may have run before.",
            ),
            (
                "retry = { preset = 'seed-002' }",
                "run again after 30 s and 2 min (`seed-002`); after 3 runs, 150 s at most",
            ),
            (
                "retry = { preset = 'exponential-jitter' }",
                "up to 1 s, 2 s, 4 s, 8 s and so on to 256 s (`exponential-jitter`); after 10 runs",
            ),
            ("kafka = { group = 'mine' }", "the Kafka group `mine`"),
            ("wire_format = 'confluent'", "are decoded by the schemas of the registry"),
            (
                "reference = { store = 'docs', source = { header = 'ref' } }",
                "Where the header `ref` is a reference, the payload is the object that it names in \
                    the store `docs`: of at most 8388608 bytes, fetched within 30 s before each run",
            ),
            (
                "reference = { store = 'docs', source = { header = 'ref' } }",
                "while it runs a message again is waited for 40 s",
            ),
            (
                "reference = { store = 'docs', source = { json_pointer = '/r' }, bytes_max = 9 }",
                "Where `/r` of the payload is a reference, the payload is the object that it names \
                    in the store `docs`: of at most 9 bytes",
            ),
            (
                "wire_format = 'confluent'\nidentity = { event_type = ['schema'] }",
                "Its event type is the name in the payload's schema",
            ),
            (
                "identity = { id = [{ header = 'a' }, { json_pointer = '/b' }, 'position'] }",
                "the header `a`, `/b` of the payload else the record's position",
            ),
            ("identity = { scoped_by_event_type = true }", "with the event type before it"),
            ("identity = { ordering_key = { json_pointer = '/k' } }", "(`/k` of the payload)"),
        ] {
            let text = explained(policy);
            // S1-048.
            assert!(text.contains(part), "`{part}` is missing for `{policy}` in\n{text}");
        }
        let policy =
            Policy::parse("topics = ['a', 'b']\nack = 'after_insert'\nretry = { workers = 1 }")
                .expect("a policy of the test");
        let text = policy.explain().join("\n");
        for part in [
            "It reads `a` and `b`",
            "before it runs; then one worker on each host run it",
            "in no order",
        ] {
            assert!(text.contains(part), "`{part}` is missing in\n{text}");
        }
    }
}
