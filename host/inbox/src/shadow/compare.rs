//! Two runs of one message, side by side.

use std::collections::{BTreeMap, BTreeSet};

use chrono::{DateTime, NaiveDateTime};
use oncebox_model::outgoing::OutgoingMessage;
use serde_json::{Map, Value, json};

use super::{
    capture::Clock,
    net::{Net, NetRow, NetTable, Row},
    table::{ShadowColumn, ShadowTable},
};

/// One thing in which the two runs differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Difference {
    /// Name of the table; empty where the outcome differs.
    pub(super) table: String,
    /// Kind of change of the row: inserted, updated or deleted; or `outcome`.
    pub(super) change: &'static str,
    /// Name of the column; empty where only one of the two has the row.
    pub(super) column: String,
    /// Primary key of the row, as a JSON object.
    pub(super) key: Option<String>,
    pub(super) before: Option<String>,
    pub(super) live: Option<String>,
    pub(super) candidate: Option<String>,
}

/// Both runs of a message, each with the range of times of its clocks.
pub(super) struct Comparison<'a> {
    live: (&'a Net, Clock),
    candidate: (&'a Net, Clock),
    /// Values that sequences gave to the live run's rows, each with the value in the candidate's
    /// matching row.
    counted: BTreeMap<(i64, String, String), Option<String>>,
    found: Vec<Difference>,
}

/// A row of both runs, to be compared column by column.
struct Pair<'a> {
    table: &'a ShadowTable,
    change: &'static str,
    before: Option<&'a Row>,
    live: &'a Row,
    candidate: &'a Row,
}

/// Returns the differences in the tables. Leaves out columns that a sequence fills or that are
/// random by default. Compares columns that refer to such a column by the row that they name.
/// Treats times as equal that each run read from its own clock.
pub(super) fn effects(live: (&Net, Clock), candidate: (&Net, Clock)) -> Vec<Difference> {
    let mut comparison =
        Comparison { live, candidate, counted: BTreeMap::new(), found: Vec::new() };
    let none = NetTable::default();
    let oids: BTreeSet<_> = live.0.keys().chain(candidate.0.keys()).collect();
    let mut pairs = Vec::new();
    for oid in oids {
        let (ours, theirs) =
            (live.0.get(oid).unwrap_or(&none), candidate.0.get(oid).unwrap_or(&none));
        let table = if ours.table.columns.is_empty() { &theirs.table } else { &ours.table };
        comparison.by_key(table, ours, theirs, &mut pairs);
        comparison.by_content(table, ours, theirs, &mut pairs);
    }
    for pair in &pairs {
        comparison.note_counted(pair);
    }
    for pair in &pairs {
        comparison.compare(pair);
    }
    comparison.found
}

/// Returns the difference in the results of two runs that succeeded; none where they are equal as
/// JSON.
pub(super) fn outcome(live: Option<&str>, candidate: Option<&str>) -> Option<Difference> {
    let parsed = |text: Option<&str>| {
        text.map(|text| serde_json::from_str::<Value>(text).map_err(|_| text.to_owned()))
    };
    (parsed(live) != parsed(candidate)).then(|| Difference {
        table: String::new(),
        change: "outcome",
        column: "result".to_owned(),
        key: None,
        before: None,
        live: live.map(str::to_owned),
        candidate: candidate.map(str::to_owned),
    })
}

/// Returns the difference in the messages that two runs emitted: in their destinations, keys,
/// types, payloads and kinds of due times, in the order of the emits. None where they are equal.
/// Shows the messages from the first that differs on.
pub(super) fn outgoing(
    live: &[OutgoingMessage],
    candidate: &[OutgoingMessage],
) -> Option<Difference> {
    let equal = live.iter().zip(candidate).take_while(|(ours, theirs)| is_sent_alike(ours, theirs));
    let equal = equal.count();
    if equal == live.len() && equal == candidate.len() {
        return None;
    }
    let shown = |messages: &[OutgoingMessage]| {
        Value::Array(messages[equal..].iter().map(shown_outgoing).collect()).to_string()
    };
    Some(Difference {
        table: String::new(),
        change: "outcome",
        column: "outgoing".to_owned(),
        key: None,
        before: None,
        live: Some(shown(live)),
        candidate: Some(shown(candidate)),
    })
}

/// Returns whether two messages are one to their receiver. Payloads of JSON are compared as JSON.
fn is_sent_alike(live: &OutgoingMessage, candidate: &OutgoingMessage) -> bool {
    let json = |message: &OutgoingMessage| {
        serde_json::from_slice::<Value>(message.payload.as_deref().unwrap_or_default()).ok()
    };
    let has_same_payload = || {
        live.payload == candidate.payload
            || json(live).zip(json(candidate)).is_some_and(|(ours, theirs)| ours == theirs)
    };
    live.destination == candidate.destination
        && live.key == candidate.key
        && live.event_type == candidate.event_type
        && live.due.kind() == candidate.due.kind()
        && has_same_payload()
}

/// Returns an outgoing message as a difference shows it.
fn shown_outgoing(message: &OutgoingMessage) -> Value {
    let text = |bytes: &Vec<u8>| String::from_utf8_lossy(bytes).into_owned();
    json!({
        "destination": message.destination.to_string(),
        "event_type": message.event_type,
        "key": message.key.as_ref().map(text),
        "due": message.due.kind(),
        "payload": message.payload.as_ref().map(text),
    })
}

impl<'a> Comparison<'a> {
    /// Pairs rows of both runs that have one key, and records rows that only one run has.
    fn by_key(
        &mut self,
        table: &'a ShadowTable,
        live: &'a NetTable,
        candidate: &'a NetTable,
        pairs: &mut Vec<Pair<'a>>,
    ) {
        let keys: BTreeSet<_> = live.rows.keys().chain(candidate.rows.keys()).collect();
        for key in keys {
            let (ours, theirs) = (live.rows.get(key), candidate.rows.get(key));
            let before = ours.or(theirs).and_then(|row| row.before.as_ref());
            if before.is_none() && table.is_key_counted() && (ours.is_none() || theirs.is_none()) {
                continue; // a new row under a number of its own: by content
            }
            let after = |row: Option<&'a NetRow>| row.map_or(before, |row| row.after.as_ref());
            match (after(ours), after(theirs)) {
                (Some(live), Some(candidate)) => {
                    let change = if before.is_none() { "inserted" } else { "updated" };
                    pairs.push(Pair { table, change, before, live, candidate });
                }
                (None, None) => {}
                (live, candidate) => {
                    let change = if before.is_none() { "inserted" } else { "deleted" };
                    self.only_one(table, change, before, live, candidate);
                }
            }
        }
    }

    /// Pairs new rows whose key a sequence gave, and rows without a key, where they hold equal
    /// values. Pairs the remaining ones in the order in which they came.
    fn by_content(
        &mut self,
        table: &'a ShadowTable,
        live: &'a NetTable,
        candidate: &'a NetTable,
        pairs: &mut Vec<Pair<'a>>,
    ) {
        let mut theirs = candidate.fresh(live);
        let mut left = Vec::new();
        for row in live.fresh(candidate) {
            match theirs.iter().position(|other| self.holds_same(table, row, other)) {
                Some(found) => pairs.push(Pair {
                    table,
                    change: "inserted",
                    before: None,
                    live: row,
                    candidate: theirs.remove(found),
                }),
                None => left.push(row),
            }
        }
        let both = left.len().min(theirs.len());
        let pair = |(live, candidate): (&&'a Row, &&'a Row)| Pair {
            table,
            change: "inserted",
            before: None,
            live,
            candidate,
        };
        pairs.extend(left.iter().zip(&theirs).map(pair));
        for row in &left[both..] {
            self.only_one(table, "inserted", None, Some(row), None);
        }
        for row in &theirs[both..] {
            self.only_one(table, "inserted", None, None, Some(row));
        }
        // A removed row without a key is compared as a whole.
        let (mut ours, mut theirs): (Vec<_>, Vec<_>) =
            (live.removed.iter().collect(), candidate.removed.iter().collect());
        ours.retain(|(_, row)| match theirs.iter().position(|(_, other)| other.text == row.text) {
            Some(found) => {
                theirs.remove(found);
                false
            }
            None => true,
        });
        for (_, row) in ours {
            self.only_one(table, "deleted", Some(row), None, Some(row));
        }
        for (_, row) in theirs {
            self.only_one(table, "deleted", Some(row), Some(row), None);
        }
    }

    /// Returns whether two new rows hold equal values, apart from those that sequences gave.
    fn holds_same(&self, table: &ShadowTable, live: &Row, candidate: &Row) -> bool {
        (0..table.columns.len())
            .filter(|position| {
                !table.columns[*position].is_counted && !self.may_follow(&table.columns[*position])
            })
            .all(|position| {
                self.is_same(
                    &table.columns[position],
                    &live.values[position],
                    &candidate.values[position],
                )
            })
    }

    /// Returns whether a column refers to one that a sequence fills, in a table that was changed.
    fn may_follow(&self, column: &ShadowColumn) -> bool {
        let Some((table, name)) = &column.refers_to else { return false };
        let changed = self.live.0.get(table).or_else(|| self.candidate.0.get(table));
        changed.is_some_and(|changed| {
            changed.table.columns.iter().any(|column| column.name == *name && column.is_counted)
        })
    }

    fn note_counted(&mut self, pair: &Pair<'_>) {
        if pair.before.is_some() {
            return;
        }
        for (position, column) in
            pair.table.columns.iter().enumerate().filter(|(_, column)| column.is_counted)
        {
            if let Some(live) = &pair.live.values[position] {
                let place = (pair.table.oid, column.name.clone(), live.clone());
                self.counted.insert(place, pair.candidate.values[position].clone());
            }
        }
    }

    fn compare(&mut self, pair: &Pair<'_>) {
        for (position, column) in pair.table.columns.iter().enumerate() {
            let (live, candidate) = (&pair.live.values[position], &pair.candidate.values[position]);
            if column.is_counted
                || self.is_same(column, live, candidate)
                || self.follows(column, live, candidate)
            {
                continue;
            }
            self.found.push(Difference {
                table: pair.table.name.clone(),
                change: pair.change,
                column: column.name.clone(),
                key: pair.table.shown_key(pair.live),
                before: pair.before.and_then(|row| row.values[position].clone()),
                live: live.clone(),
                candidate: candidate.clone(),
            });
        }
    }

    /// Returns whether a reference names the matching new row, under the number that each run gave
    /// it.
    fn follows(
        &self,
        column: &ShadowColumn,
        live: &Option<String>,
        candidate: &Option<String>,
    ) -> bool {
        let (Some((table, name)), Some(live)) = (&column.refers_to, live) else { return false };
        self.counted
            .get(&(*table, name.clone(), live.clone()))
            .is_some_and(|expected| expected == candidate)
    }

    /// Returns whether two values are equal, or each was read from the clock of its own run.
    fn is_same(
        &self,
        column: &ShadowColumn,
        live: &Option<String>,
        candidate: &Option<String>,
    ) -> bool {
        if live == candidate {
            return true;
        }
        let (Some(live), Some(candidate)) = (live, candidate) else { return false };
        self.live.1.said(column, live) && self.candidate.1.said(column, candidate)
    }

    /// Records a row that only one of the two runs has in the end.
    fn only_one(
        &mut self,
        table: &ShadowTable,
        change: &'static str,
        before: Option<&Row>,
        live: Option<&Row>,
        candidate: Option<&Row>,
    ) {
        self.found.push(Difference {
            table: table.name.clone(),
            change,
            column: String::new(),
            key: live.or(candidate).or(before).and_then(|row| table.shown_key(row)),
            before: before.map(|row| table.shown(row)),
            live: live.map(|row| table.shown(row)),
            candidate: candidate.map(|row| table.shown(row)),
        });
    }
}

impl NetTable {
    /// Returns the new rows that the other run has no row of equal key for, in the order in which
    /// they came.
    fn fresh<'a>(&'a self, other: &NetTable) -> Vec<&'a Row> {
        let mut fresh: Vec<_> = self.added.iter().map(|(at, row)| (*at, row)).collect();
        if self.table.is_key_counted() {
            let alone = self
                .rows
                .iter()
                .filter(|(key, row)| row.before.is_none() && !other.rows.contains_key(*key));
            fresh.extend(alone.filter_map(|(_, row)| Some((row.last, row.after.as_ref()?))));
        }
        fresh.sort_by_key(|(at, _)| *at);
        fresh.into_iter().map(|(_, row)| row).collect()
    }
}

impl ShadowTable {
    /// Returns whether a new row's key is not the handler's choice alone.
    fn is_key_counted(&self) -> bool {
        self.key.iter().any(|position| {
            self.columns[*position].is_counted || self.columns[*position].refers_to.is_some()
        })
    }

    fn shown_key(&self, row: &Row) -> Option<String> {
        (!self.key.is_empty()).then(|| self.object(row, self.key.iter().copied()))
    }

    fn shown(&self, row: &Row) -> String {
        self.object(row, 0..self.columns.len())
    }

    fn object(&self, row: &Row, positions: impl Iterator<Item = usize>) -> String {
        let cell = |position: usize| {
            (
                self.columns[position].name.clone(),
                row.values[position].clone().map_or(Value::Null, Value::String),
            )
        };
        Value::Object(positions.map(cell).collect::<Map<_, _>>()).to_string()
    }
}

impl Clock {
    /// Returns whether a value is a time that a clock of this run can have shown. A column that
    /// keeps no fractions rounds, so it may be a second off.
    fn said(&self, column: &ShadowColumn, value: &str) -> bool {
        let slack = if column.r#type.contains('(') { 1_000_000 } else { 0 };
        let at = if column.r#type.ends_with("with time zone")
            && column.r#type.starts_with("timestamp")
        {
            DateTime::parse_from_str(value, "%Y-%m-%d %H:%M:%S%.f%#z")
                .map(|at| at.timestamp_micros())
        } else if column.r#type.starts_with("timestamp") {
            NaiveDateTime::parse_from_str(value, "%Y-%m-%d %H:%M:%S%.f")
                .map(|at| at.and_utc().timestamp_micros() - i64::from(self.zone_s) * 1_000_000)
        } else {
            return false;
        };
        at.is_ok_and(|at| (self.began_us - slack..=self.ended_us + slack).contains(&at))
    }
}

#[cfg(test)]
mod tests {
    use oncebox_model::outgoing::{Destination, Due};

    use super::{
        super::net::{
            net,
            tests::{changes, places},
        },
        *,
    };

    fn check(
        columns: &[&str],
        key: &[usize],
        live: &[(&str, &str)],
        candidate: &[(&str, &str)],
        expected: &[&str],
    ) {
        let places = places(columns, key);
        let net = |given| net(&changes(given), &places).expect("changes that fit");
        let hour = |hour: i64| Clock {
            began_us: hour * 3_600_000_000,
            ended_us: hour * 3_600_000_000 + 5_000_000,
            zone_s: 0,
        };
        let found = effects((&net(live), hour(1)), (&net(candidate), hour(2)));
        let shown = |value: &Option<String>| value.as_deref().unwrap_or("-").to_owned();
        let line = |d: &Difference| {
            format!(
                "{} {} {} {} {}",
                d.change,
                d.column,
                shown(&d.before),
                shown(&d.live),
                shown(&d.candidate)
            )
        };
        assert_eq!(found.iter().map(line).collect::<Vec<_>>(), expected);
    }

    fn sent(topic: &str, payload: &str) -> OutgoingMessage {
        OutgoingMessage {
            ordinal: 0,
            id: "an id of its run".to_owned(),
            destination: Destination::Kafka { topic: topic.to_owned() },
            event_type: "paid".to_owned(),
            content_type: None,
            key: Some(b"k".to_vec()),
            headers: Vec::new(),
            payload: Some(payload.as_bytes().to_vec()),
            due: Due::Now,
            cancel_token: None,
        }
    }

    // What could go wrong: equal versions differ by the order of members of a payload, or a version
    // that sends elsewhere, later, less or in another order passes for equal.
    #[test]
    fn emitted_messages_differ_by_what_their_receiver_sees() {
        let live = [sent("a", r#"{"x": 1, "y": 2}"#), sent("b", "text")];
        let alike = [sent("a", r#"{"y":2,"x":1}"#), sent("b", "text")];
        assert_eq!(outgoing(&live, &alike), None);
        assert_eq!(outgoing(&[], &[]), None);
        let later = OutgoingMessage { due: Due::At(1), ..sent("b", "text") };
        let keyless = OutgoingMessage { key: None, ..sent("b", "text") };
        let renamed = OutgoingMessage { event_type: "due".to_owned(), ..sent("b", "text") };
        for other in [sent("c", "text"), sent("b", "test"), later, keyless, renamed] {
            let candidate = [live[0].clone(), other];
            let found = outgoing(&live, &candidate).expect("a difference");
            assert_eq!((found.table.as_str(), found.column.as_str()), ("", "outgoing"));
            let shown = found.live.expect("what the live version sent");
            assert!(shown.contains("kafka:b") && !shown.contains("kafka:a"), "{shown}");
        }
        let fewer = outgoing(&live, &live[..1]).expect("a difference");
        assert_eq!(fewer.candidate.as_deref(), Some("[]"));
        let turned = [live[1].clone(), live[0].clone()];
        assert!(outgoing(&live, &turned).is_some());
    }

    #[test]
    fn rows_of_one_key_differ_by_column() {
        let columns = ["id", "n", "note"];
        check(&columns, &[0], &[("(1,0,a)", "(1,1,a)")], &[("(1,0,a)", "(1,1,a)")], &[]);
        check(
            &columns,
            &[0],
            &[("(1,0,a)", "(1,1,b)")],
            &[("(1,0,a)", "(1,2,b)")],
            &["updated n 0 1 2"],
        );
        check(
            &columns,
            &[0],
            &[("(1,0,a)", "(1,1,b)")],
            &[],
            &["updated n 0 1 0", "updated note a b a"],
        );
        check(&columns, &[0], &[], &[("(1,0,a)", "(1,1,a)")], &["updated n 0 0 1"]);
        check(&columns, &[0], &[("", "(1,0,a)")], &[("", "(1,,a)")], &["inserted n - 0 -"]);
        let row = r#"{"id":"1","n":"0","note":"a"}"#;
        check(&columns, &[0], &[("", "(1,0,a)")], &[], &[&format!("inserted  - {row} -")]);
        check(&columns, &[0], &[("(1,0,a)", "")], &[], &[&format!("deleted  {row} - {row}")]);
        check(&columns, &[0], &[], &[("(1,0,a)", "")], &[&format!("deleted  {row} {row} -")]);
    }

    #[test]
    fn numbers_of_a_sequence_are_left_out_and_rows_found_by_content() {
        let columns = ["id#", "n"];
        check(
            &columns,
            &[0],
            &[("", "(1,a)"), ("", "(2,b)")],
            &[("", "(7,b)"), ("", "(8,a)")],
            &[],
        );
        check(
            &columns,
            &[0],
            &[("", "(1,a)"), ("", "(2,b)")],
            &[("", "(7,b)"), ("", "(8,c)")],
            &["inserted n - a c"],
        );
        check(
            &columns,
            &[0],
            &[("", "(1,a)")],
            &[("", "(7,a)"), ("", "(8,a)")],
            &[r#"inserted  - - {"id":"8","n":"a"}"#],
        );
        // A row that existed before has one number in both runs.
        check(&columns, &[0], &[("(1,a)", "(1,b)")], &[("(1,a)", "(1,c)")], &["updated n a b c"]);
    }

    #[test]
    fn rows_without_a_key_are_compared_by_what_they_hold() {
        check(
            &["n"],
            &[],
            &[("", "(a)"), ("", "(a)")],
            &[("", "(a)")],
            &[r#"inserted  - {"n":"a"} -"#],
        );
        check(&["n"], &[], &[("(a)", "(b)")], &[("(a)", "(c)")], &["inserted n - b c"]);
    }

    #[test]
    fn times_of_each_runs_own_clock_are_the_same() {
        let columns = ["id", "seen_at"];
        let at = |time: &str| format!("(1,\"1970-01-01 {time}\")");
        let check = |live: &str, candidate: &str, expected: &[&str]| {
            check(&columns, &[0], &[("", &at(live))], &[("", &at(candidate))], expected)
        };
        check("01:00:00+00", "02:00:00+00", &[]);
        check("01:00:04.5+00", "02:00:00.000001+00", &[]);
        check("01:00:00+00", "04:00:03+02", &[]);
        check(
            "01:00:00+00",
            "01:00:01+00",
            &["inserted seen_at - 1970-01-01 01:00:00+00 1970-01-01 01:00:01+00"],
        );
        check(
            "00:59:59+00",
            "02:00:00+00",
            &["inserted seen_at - 1970-01-01 00:59:59+00 1970-01-01 02:00:00+00"],
        );
    }

    #[test]
    fn results_are_compared_as_json() {
        assert_eq!(outcome(Some(r#"{"a":1,"b":2}"#), Some(r#"{"b": 2, "a": 1}"#)), None);
        assert_eq!(outcome(None, None), None);
        assert!(outcome(Some("1"), None).is_some() && outcome(Some("1"), Some("2")).is_some());
    }
}
