//! Messages for real hosts, and what the tables must hold when each had its effect exactly once.
//!
//! The component is the example `ledger`: its balance is a delta and its entries have no key on the
//! message id, so that a payment booked twice shows. What else a payment does is in its account's
//! name, which a trigger of the harness reads.

use std::{collections::BTreeMap, fmt};

use rand::{Rng, rngs::StdRng, seq::IndexedRandom};

/// What a message does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Books a payment.
    Pay,
    /// Books a payment after it has opened the account, under a savepoint where it exists.
    Open,
    /// Fails in every attempt before this one, then books.
    Fails(i32),
    /// Books after this many milliseconds, spent in the database.
    Sleeps(u32),
    /// Is refused by the handler for ever.
    Reject,
    /// Is left to a person by the handler.
    Park,
    /// Goes to no handler.
    Unrouted,
    /// Has no id.
    NoId,
}

impl Work {
    fn account(self, number: usize) -> String {
        match self {
            Self::Open => format!("opened-{}", number % 3),
            Self::Fails(attempt) => format!("fails-{attempt}"),
            Self::Sleeps(ms) => format!("sleeps-{ms}"),
            Self::Park => "nowhere".to_owned(),
            _ => format!("plain-{}", number % 5),
        }
    }

    /// Whether the account is there before the first message.
    pub fn has_account(self) -> bool {
        !matches!(self, Self::Open | Self::Park)
    }

    /// Status of the row at the end, with the attempts a message has that nothing disturbs.
    pub fn end(self) -> (&'static str, i32) {
        match self {
            Self::Pay | Self::Open | Self::Sleeps(_) => ("completed", 1),
            Self::Fails(attempt) => ("completed", attempt),
            Self::Reject => ("failed_terminal", 1),
            Self::Park => ("parked", 1),
            Self::Unrouted | Self::NoId => ("parked", 0),
        }
    }
}

/// One message, however often it is delivered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Its id, also where it is not sent.
    pub id: String,
    /// What it does.
    pub work: Work,
    /// What it is in order with.
    pub key: Option<usize>,
    /// Its place among those, from 1; undecodable records have none.
    pub version: Option<i64>,
    number: usize,
}

impl Message {
    /// The account it books to.
    pub fn account(&self) -> String {
        self.work.account(self.number)
    }

    /// What it books.
    pub fn amount(&self) -> i64 {
        (self.number % 90 + 1) as i64
    }

    /// The event type.
    pub fn event_type(&self) -> &'static str {
        if self.work == Work::Unrouted { "nobody" } else { "payment.captured" }
    }

    /// The payload.
    pub fn payload(&self) -> String {
        let amount = if self.work == Work::Reject {
            "all of it".to_owned()
        } else {
            self.amount().to_string()
        };
        let (account, open) = (self.account(), self.work == Work::Open);
        format!(r#"{{"account":"{account}","amount":"{amount}","open_account":{open}}}"#)
    }
}

/// Messages in the order of their deliveries, some of which are duplicates.
#[derive(Debug, Clone, Default)]
pub struct Load {
    /// What is delivered; equal ids are the same message.
    pub deliveries: Vec<Message>,
}

impl Load {
    /// One delivery of each.
    pub fn of(works: impl IntoIterator<Item = Work>) -> Self {
        let mut load = Self::default();
        works.into_iter().for_each(|work| load.push(work));
        load
    }

    /// The same under other ids.
    pub fn named(mut self, name: &str) -> Self {
        self.deliveries
            .iter_mut()
            .for_each(|message| message.id = format!("{name}-{}", message.id));
        self
    }

    /// A message more.
    pub fn push(&mut self, work: Work) {
        let number = self.deliveries.len();
        self.deliveries.push(Message {
            id: format!("m-{number}"),
            work,
            key: None,
            version: None,
            number,
        });
    }

    /// The same, each message in order with those of one of so many keys.
    pub fn keyed(mut self, rng: &mut StdRng, keys: usize) -> Self {
        let mut of_id = BTreeMap::new();
        let mut versions = vec![0; keys];
        for message in &mut self.deliveries {
            let (key, version) = *of_id.entry(message.id.clone()).or_insert_with(|| {
                let key = rng.random_range(0..keys);
                versions[key] += i64::from(message.work != Work::NoId);
                (key, versions[key])
            });
            message.key = Some(key);
            message.version = (message.work != Work::NoId).then_some(version);
        }
        self
    }

    /// The same, each delivery up to so many places from where it was.
    pub fn shuffled(mut self, rng: &mut StdRng, places: usize) -> Self {
        for place in 0..self.deliveries.len() {
            let other = rng.random_range(place..(place + places).min(self.deliveries.len()));
            self.deliveries.swap(place, other);
        }
        self
    }

    /// A bit of everything: failures, refusals, undecodable records, and every seventh delivery a
    /// duplicate of an earlier one.
    pub fn mixed(rng: &mut StdRng, deliveries: usize) -> Self {
        let mut load = Self::default();
        load.mix(rng, deliveries);
        load
    }

    /// A bit of everything more.
    pub fn mix(&mut self, rng: &mut StdRng, deliveries: usize) {
        for delivery in 0..deliveries {
            let earlier: Vec<_> =
                self.deliveries.iter().filter(|message| message.work != Work::NoId).collect();
            if delivery % 7 == 6
                && let Some(message) = earlier.choose(rng)
            {
                let duplicate = (*message).clone();
                self.deliveries.push(duplicate);
                continue;
            }
            self.push(match rng.random_range(0..100) {
                0..60 => Work::Pay,
                60..72 => Work::Open,
                72..82 => Work::Fails(2),
                82..84 => Work::Fails(3),
                84..92 => Work::Sleeps(20),
                92..94 => Work::Reject,
                94..96 => Work::Park,
                96..98 => Work::Unrouted,
                _ => Work::NoId,
            });
        }
    }

    /// Every message, once.
    pub fn messages(&self) -> BTreeMap<&str, &Message> {
        self.deliveries
            .iter()
            .filter(|message| message.work != Work::NoId)
            .map(|message| (message.id.as_str(), message))
            .collect()
    }

    /// The ids of each key, in order.
    pub fn keys(&self) -> BTreeMap<usize, Vec<&Message>> {
        let mut keys: BTreeMap<usize, Vec<&Message>> = BTreeMap::new();
        for message in self.deliveries.iter().filter(|message| message.work != Work::NoId) {
            let of_key = message.key.map(|key| keys.entry(key).or_default());
            if let Some(of_key) =
                of_key.filter(|of_key| of_key.iter().all(|known| known.id != message.id))
            {
                of_key.push(message);
            }
        }
        keys.values_mut().for_each(|of_key| of_key.sort_by_key(|message| message.version));
        keys
    }

    /// Records without an id; each becomes a row of its own.
    pub fn undecodable(&self) -> usize {
        self.deliveries.iter().filter(|message| message.work == Work::NoId).count()
    }

    /// Accounts that must be there beforehand.
    pub fn accounts(&self) -> Vec<String> {
        let mut accounts: Vec<_> = self
            .deliveries
            .iter()
            .filter(|message| message.work.has_account())
            .map(Message::account)
            .collect();
        accounts.sort();
        accounts.dedup();
        accounts
    }
}

/// A promise that was not kept, as the database or the broker shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation(pub String);

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Violation {}

/// A row of the inbox, as far as the check needs it.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct Found {
    /// The message id.
    pub message_id: String,
    /// Its state.
    pub status: String,
    /// Why it is not completed.
    pub reason: Option<String>,
    /// Runs that were counted.
    pub attempts: i32,
    /// Those of them that ended with their process or connection.
    pub crashes: i32,
    /// Entries it booked.
    pub effects: i64,
}

impl Found {
    /// Whether it will not run any more.
    pub fn is_settled(&self) -> bool {
        matches!(self.status.as_str(), "completed" | "failed_terminal" | "parked")
    }

    /// A completed message has one effect, any other none.
    pub fn has_its_effect(&self) -> bool {
        self.effects == i64::from(self.status == "completed")
    }

    /// A message whose process died three times while it ran is left to a person, whatever it would
    /// have come to.
    fn is_crashed(&self) -> bool {
        self.status == "parked" && self.reason.as_deref() == Some("crashed") && self.crashes >= 3
    }

    /// What is wrong with the row of a message behind one of its key that is not done.
    pub fn fault_behind(&self, work: Work) -> Option<String> {
        let expected = if work == Work::Unrouted { "parked" } else { "waiting" };
        let fine = self.status == expected
            && self.effects == 0
            && (self.attempts == 0 || self.crashes > 0);
        (!fine).then(|| {
            format!("`{}` ({work:?}): should wait for its turn: {self:?}", self.message_id)
        })
    }

    /// What is wrong with the row of this message.
    pub fn fault(&self, work: Work) -> Option<String> {
        let (status, attempts) = work.end();
        let wrong =
            |what: &str| Some(format!("`{}` ({work:?}): {what}: {self:?}", self.message_id));
        if !self.has_its_effect() {
            return wrong("a completed message has one effect, any other none");
        }
        if self.is_crashed() {
            return None;
        }
        if self.status != status {
            return wrong(&format!("should be {status}"));
        }
        if !(attempts..=attempts + self.crashes).contains(&self.attempts) {
            return wrong(&format!("attempts are not {attempts}"));
        }
        None
    }
}
