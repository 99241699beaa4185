//! The demo's input: GitHub's example webhooks, multiplied to any number of events.
//!
//! Only the templates are kept: event `i` is generated from the seed at every request for it. So
//! twenty thousand events of 13 KB need no memory, and a second delivery has the bytes of the
//! first.

use anyhow::Result;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use serde::Deserialize;
use serde_json::{Value, json};

use super::files;

/// GitHub's published examples, one `{event, delivery, payload}` per line.
const WEBHOOKS: &str = "data/github-webhooks.jsonl";

/// Number of events that the demo sends by default.
pub const EVENTS_DEFAULT: usize = 20_000;
/// Number of tenants that share the events.
pub(crate) const TENANTS: usize = 2;
/// Number of repositories of each tenant. Both tenants have equal ones, so an effect that lands
/// with the wrong tenant shows as a wrong number.
const REPOSITORIES: i64 = 40;
/// The first repository's id.
const REPOSITORY_BASE: i64 = 186_853_000;
/// Number of issues, and of pull requests, of each repository. It is small, so that several events
/// meet in one row.
const NUMBERS: i64 = 12;
/// Most deliveries of one event.
const DELIVERIES_MAX: usize = 3;
/// Number of events for each malformed record.
const EVENTS_PER_MALFORMED: usize = 100;
/// Length of an overlong message id, in bytes; the limit is 512.
const OVERLONG_ID: usize = 513;

/// One event, as its first and any later delivery carry it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Event {
    /// Index of the event's tenant, from 0.
    pub(crate) tenant: usize,
    /// The message id: unique per event.
    pub(crate) delivery: String,
    /// Event type, such as `com.github.push`.
    pub(crate) event_type: String,
    /// The record's key: the repository's id, or the delivery where there is no repository.
    pub(crate) key: String,
    /// The webhook's own JSON.
    pub(crate) payload: Vec<u8>,
}

/// A record to produce.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PlannedDelivery {
    /// The event of this index, perhaps not for the first time.
    Event(usize),
    /// The malformed record of this index; each is sent once.
    Malformed(usize, Malformed),
}

/// The ways a record can fail to be a message. Each such record becomes a parked row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Malformed {
    /// No CloudEvents header and a value that is not JSON.
    NotJson,
    /// No `ce-id`.
    MissingId,
    /// A `ce-id` of no bytes.
    EmptyId,
    /// A `ce-id` with a line feed inside.
    ControlCharacterInId,
    /// A `ce-id` one byte longer than the longest.
    OverlongId,
    /// No `ce-type`.
    MissingType,
}

impl Malformed {
    /// All kinds.
    pub(crate) const ALL: [Self; 6] = [
        Self::NotJson,
        Self::MissingId,
        Self::EmptyId,
        Self::ControlCharacterInId,
        Self::OverlongId,
        Self::MissingType,
    ];
}

/// A Kafka record, in CloudEvents' binary mode unless it is malformed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    /// Index of the tenant whose topic the record goes to, from 0.
    pub(crate) tenant: usize,
    /// The record's key.
    pub(crate) key: String,
    /// The record's headers in their order.
    pub(crate) headers: Vec<(&'static str, Vec<u8>)>,
    /// The record's value.
    pub(crate) payload: Vec<u8>,
}

/// The events of one seed.
pub(crate) struct Input {
    seed: u64,
    events: usize,
    templates: Vec<Template>,
}

impl Input {
    /// Reads the embedded webhooks. It fails only when they are malformed.
    pub(crate) fn new(seed: u64, events: usize) -> Result<Self> {
        let webhooks = String::from_utf8(files::read(WEBHOOKS)?)?;
        let templates = webhooks.lines().map(Template::parse).collect::<Result<_, _>>()?;
        Ok(Self { seed, events, templates })
    }

    /// Returns the event of an index, identical at each call.
    pub(crate) fn event(&self, index: usize) -> Event {
        let template = &self.templates[index % self.templates.len()];
        let mut random = self.random(index);
        let tenant = random.random_range(0..TENANTS);
        let delivery = delivery_id(&mut random);
        let keys = Keys::draw(&mut random);
        Event {
            tenant,
            event_type: format!("com.github.{}", template.event),
            key: if template.has_repository {
                keys.repository.to_string()
            } else {
                delivery.clone()
            },
            payload: template.render(&keys),
            delivery,
        }
    }

    /// Returns every event once, in the order of indexes, generated as they are taken.
    pub(crate) fn events(&self) -> impl Iterator<Item = Event> + '_ {
        (0..self.events).map(|index| self.event(index))
    }

    /// Returns the record to produce for a delivery.
    pub(crate) fn record(&self, delivery: PlannedDelivery) -> Record {
        match delivery {
            PlannedDelivery::Event(index) => self.event(index).into(),
            PlannedDelivery::Malformed(index, kind) => malformed(index, kind),
        }
    }

    /// Returns the random numbers of one event, from a seed of its own.
    fn random(&self, index: usize) -> StdRng {
        StdRng::seed_from_u64(self.seed.rotate_left(32) ^ index as u64)
    }
}

/// Returns all deliveries in a random order: each event one to three times, each malformed record
/// once.
pub(crate) fn plan(seed: u64, events: usize) -> Vec<PlannedDelivery> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut plan = Vec::with_capacity(events * (DELIVERIES_MAX + 1) / 2);
    for index in 0..events {
        let times = random.random_range(1..=DELIVERIES_MAX);
        plan.extend(std::iter::repeat_n(PlannedDelivery::Event(index), times));
    }
    plan.extend((0..malformed_count(events)).map(|index| {
        PlannedDelivery::Malformed(index, Malformed::ALL[index % Malformed::ALL.len()])
    }));
    plan.shuffle(&mut random);
    plan
}

/// Returns the number of malformed records for a number of events: about one in a hundred, and each
/// kind at least once.
pub(crate) fn malformed_count(events: usize) -> usize {
    (events / EVENTS_PER_MALFORMED).max(Malformed::ALL.len())
}

impl From<Event> for Record {
    fn from(event: Event) -> Self {
        Self {
            tenant: event.tenant,
            headers: headers(event.delivery, event.event_type),
            key: event.key,
            payload: event.payload,
        }
    }
}

fn headers(id: String, event_type: String) -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("ce_specversion", b"1.0".to_vec()),
        ("ce_id", id.into_bytes()),
        ("ce_source", b"https://github.com".to_vec()),
        ("ce_type", event_type.into_bytes()),
        ("content-type", b"application/json".to_vec()),
    ]
}

fn malformed(index: usize, kind: Malformed) -> Record {
    let id = format!("malformed-{index}");
    let mut headers = headers(broken_id(&id, kind), "com.github.push".into());
    match kind {
        Malformed::NotJson => headers.clear(),
        Malformed::MissingId => headers.retain(|(name, _)| *name != "ce_id"),
        Malformed::MissingType => headers.retain(|(name, _)| *name != "ce_type"),
        Malformed::EmptyId | Malformed::ControlCharacterInId | Malformed::OverlongId => {}
    }
    let payload = match kind {
        Malformed::NotJson => format!("{id} is no JSON"),
        _ => json!({ "zen": id }).to_string(),
    };
    Record {
        tenant: index / Malformed::ALL.len() % TENANTS,
        key: id,
        headers,
        payload: payload.into_bytes(),
    }
}

fn broken_id(id: &str, kind: Malformed) -> String {
    match kind {
        Malformed::EmptyId => String::new(),
        Malformed::ControlCharacterInId => format!("{id}\n"),
        Malformed::OverlongId => format!("{id:x>OVERLONG_ID$}"),
        Malformed::NotJson | Malformed::MissingId | Malformed::MissingType => id.into(),
    }
}

fn delivery_id(random: &mut StdRng) -> String {
    let id = format!("{:032x}", random.random::<u128>());
    [&id[..8], &id[8..12], &id[12..16], &id[16..20], &id[20..]].join("-")
}

/// The values that differ between two events of one template.
struct Keys {
    repository: i64,
    number: i64,
    minute: u32,
}

impl Keys {
    fn updated_at(&self) -> Value {
        format!("2024-05-15T15:{:02}:00Z", self.minute).into()
    }

    fn draw(random: &mut StdRng) -> Self {
        Self {
            repository: REPOSITORY_BASE + random.random_range(0..REPOSITORIES),
            number: random.random_range(1..=NUMBERS),
            minute: random.random_range(0..60),
        }
    }
}

/// The value of a member in an event with these keys.
type Rekey = fn(&Keys) -> Value;

/// Members that each event gets values of its own for. Issue and pull request get a new time too,
/// by the minute. So any event may be the newest of its issue, and two can be equally new.
const REKEYED: [(&str, Rekey); 8] = [
    ("/repository/id", |keys| keys.repository.into()),
    ("/repository/name", |keys| format!("repo-{}", keys.repository).into()),
    ("/repository/full_name", |keys| format!("octo/repo-{}", keys.repository).into()),
    ("/number", |keys| keys.number.into()),
    ("/issue/number", |keys| keys.number.into()),
    ("/pull_request/number", |keys| keys.number.into()),
    ("/issue/updated_at", Keys::updated_at),
    ("/pull_request/updated_at", Keys::updated_at),
];

/// The start of the text that stands for a re-keyed member; its index in [`REKEYED`] and a quote
/// follow.
const MARK: &str = "\"rekeyed:";

/// A webhook whose text is parsed once; its events are assembled from the parts.
struct Template {
    event: String,
    has_repository: bool,
    /// The text before the first re-keyed member.
    head: String,
    /// Indexes in [`REKEYED`], each with the text that follows the member.
    tail: Vec<(usize, String)>,
}

/// A line of the embedded file.
#[derive(Deserialize)]
struct Webhook {
    event: String,
    payload: Value,
}

impl Template {
    fn parse(line: &str) -> serde_json::Result<Self> {
        let Webhook { event, mut payload } = serde_json::from_str(line)?;
        let has_repository = payload.pointer("/repository/id").is_some();
        for (place, (path, _)) in REKEYED.iter().enumerate() {
            if let Some(member) = payload.pointer_mut(path) {
                *member = format!("rekeyed:{place}").into();
            }
        }
        let (head, tail) = split(&payload.to_string());
        Ok(Self { event, has_repository, head, tail })
    }

    fn render(&self, keys: &Keys) -> Vec<u8> {
        let mut text = self.head.clone();
        for (place, following) in &self.tail {
            let (_, value) = REKEYED[*place];
            text.push_str(&value(keys).to_string());
            text.push_str(following);
        }
        text.into_bytes()
    }
}

fn split(text: &str) -> (String, Vec<(usize, String)>) {
    let (head, tail) = text.split_once(MARK).unwrap_or((text, ""));
    let piece = |piece: &str| {
        let (place, following) = piece.split_once('"')?;
        Some((place.parse().ok()?, following.to_owned()))
    };
    (head.to_owned(), tail.split(MARK).filter_map(piece).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test, a panic is the report")]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    const SEED: u64 = 7;

    fn input(events: usize) -> Input {
        Input::new(SEED, events).unwrap()
    }

    fn payload(event: &Event) -> Value {
        serde_json::from_slice(&event.payload).unwrap()
    }

    #[test]
    fn an_event_is_the_same_whenever_asked_for_and_differs_by_seed() {
        let (one, same, other) = (input(500), input(500), Input::new(SEED + 1, 500).unwrap());
        for index in [0, 1, 147, 148, 499] {
            assert_eq!(one.event(index), same.event(index));
            assert_ne!(one.event(index).delivery, other.event(index).delivery);
        }
        assert_eq!(one.events().count(), 500);
    }

    #[test]
    fn deliveries_are_distinct_and_the_keys_are_spread() {
        let events: Vec<_> = input(5_000).events().collect();
        let deliveries: BTreeSet<_> = events.iter().map(|it| &it.delivery).collect();
        let rows: BTreeSet<_> = events
            .iter()
            .filter(|it| it.key != it.delivery)
            .map(|it| (it.tenant, &it.key))
            .collect();
        assert_eq!(deliveries.len(), 5_000);
        assert!(deliveries.iter().all(|it| it.len() == 36));
        assert_eq!(rows.len(), TENANTS * REPOSITORIES as usize);
    }

    #[test]
    fn every_event_type_of_the_examples_is_there_in_its_share() {
        let mut counts = BTreeMap::<_, usize>::new();
        input(1_480).events().for_each(|it| *counts.entry(it.event_type).or_default() += 1);
        assert_eq!(counts.len(), 20);
        assert_eq!(counts["com.github.issues"], 290);
        assert_eq!(counts["com.github.pull_request"], 290);
        assert_eq!(counts["com.github.push"], 70);
    }

    #[test]
    fn re_keying_reaches_every_member_and_nothing_else() {
        let input = input(1_480);
        let webhooks = String::from_utf8(files::read(WEBHOOKS).unwrap()).unwrap();
        let lines: Vec<Webhook> =
            webhooks.lines().map(|it| serde_json::from_str(it).unwrap()).collect();
        for (index, event) in input.events().enumerate() {
            let (mut given, mut made) =
                (lines[index % lines.len()].payload.clone(), payload(&event));
            if let Some(id) = made.pointer("/repository/id") {
                assert_eq!(id.to_string(), event.key);
                assert_eq!(made["repository"]["full_name"], format!("octo/repo-{id}"));
            }
            for (path, _) in REKEYED {
                let members = (given.pointer_mut(path), made.pointer_mut(path));
                assert_eq!(members.0.is_some(), members.1.is_some());
                if let (Some(old), Some(new)) = members {
                    assert_eq!(old.is_number(), new.is_number());
                    (*old, *new) = (Value::Null, Value::Null);
                }
            }
            assert_eq!(given, made);
        }
    }

    #[test]
    fn the_plan_delivers_each_event_one_to_three_times_in_an_order_of_its_seed() {
        let deliveries = plan(SEED, 2_000);
        let mut times = vec![0; 2_000];
        for delivery in &deliveries {
            if let PlannedDelivery::Event(index) = delivery {
                times[*index] += 1;
            }
        }
        assert_eq!(times.iter().collect::<BTreeSet<_>>(), BTreeSet::from([&1, &2, &3]));
        assert_eq!(deliveries, plan(SEED, 2_000));
        assert_ne!(deliveries, plan(SEED + 1, 2_000));
        assert!(deliveries[..20].iter().any(|it| *it > PlannedDelivery::Event(1_000)));
    }

    #[test]
    fn one_in_a_hundred_is_malformed_once_and_of_every_kind() {
        let broken: Vec<_> = plan(SEED, 20_000)
            .into_iter()
            .filter(|it| matches!(it, PlannedDelivery::Malformed(..)))
            .collect();
        let kinds: BTreeSet<_> = broken
            .iter()
            .filter_map(|it| match it {
                PlannedDelivery::Malformed(_, kind) => Some(*kind),
                PlannedDelivery::Event(_) => None,
            })
            .collect();
        assert_eq!(broken.len(), 200);
        assert_eq!(broken.iter().collect::<BTreeSet<_>>().len(), 200);
        assert_eq!(kinds, BTreeSet::from(Malformed::ALL));
        assert_eq!(malformed_count(10), Malformed::ALL.len());
    }

    #[test]
    fn a_malformed_record_is_broken_in_its_own_way_only() {
        let header = |kind, name| {
            let record = malformed(3, kind);
            record.headers.into_iter().find(|(it, _)| *it == name).map(|(_, value)| value)
        };
        let id = |kind| header(kind, "ce_id").map(|it| it.len());
        assert_eq!(id(Malformed::NotJson), None);
        assert_eq!(id(Malformed::MissingId), None);
        assert_eq!(id(Malformed::EmptyId), Some(0));
        assert_eq!(id(Malformed::OverlongId), Some(OVERLONG_ID));
        assert_eq!(header(Malformed::ControlCharacterInId, "ce_id").unwrap().last(), Some(&b'\n'));
        assert_eq!(header(Malformed::MissingType, "ce_type"), None);
        assert!(id(Malformed::MissingType).is_some_and(|it| (1..=512).contains(&it)));
        assert!(
            serde_json::from_slice::<Value>(&malformed(0, Malformed::NotJson).payload).is_err()
        );
    }

    #[test]
    fn a_record_carries_the_event_in_binary_mode() {
        let input = input(1);
        let (event, record) = (input.event(0), input.record(PlannedDelivery::Event(0)));
        assert!(record.headers.contains(&("ce_id", event.delivery.clone().into_bytes())));
        assert!(record.headers.contains(&("ce_type", event.event_type.clone().into_bytes())));
        assert_eq!(
            (record.tenant, &record.key, &record.payload),
            (event.tenant, &event.key, &event.payload)
        );
    }
}
