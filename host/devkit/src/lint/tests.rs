//! Tests of the rules. The dangers are a rule that finds nothing, and one that finds fault with
//! sound SQL.

use std::{collections::BTreeSet, time::Duration};

use oncebox_runtime::{RunRecord, StatementRecord};

use super::{LintSubject, ShownStatement, lint};
use crate::tables::Table;

/// Checks the findings of one message that sent these statements, as `level rule statement:line`.
fn check(shown: ShownStatement, sent: &[(&str, u64)], expected: &[&str]) {
    let statement = |(text, rows): &(&str, u64)| StatementRecord {
        text: (*text).to_owned(),
        params: Vec::new(),
        is_query: false,
        rows: Some(*rows),
        error: None,
        elapsed: Duration::ZERO,
    };
    let runs = [RunRecord {
        message_id: "m".into(),
        statements: sent.iter().map(statement).collect(),
        ..RunRecord::default()
    }];
    let tables = [
        Table::sample("account", &["id", "balance", "n"], &[&["id"]], &[]),
        Table::sample(
            "entry",
            &["entry", "fact", "amount"],
            &[&["entry"]],
            &[("entry", "nextval('s'::regclass)")],
        ),
        Table::sample(
            "token",
            &["id", "fact", "at"],
            &[&["id"]],
            &[("id", "gen_random_uuid()"), ("at", "now()")],
        ),
        Table::sample("log", &["line"], &[], &[]),
    ];
    let completed: BTreeSet<String> = ["m".to_owned()].into();
    let found = lint(&LintSubject { tables: &tables, runs: &runs, completed: &completed, shown });
    let lines: Vec<_> = found
        .iter()
        .map(|finding| {
            let place = finding
                .place
                .map(|place| format!(" {}:{}", place.statement, place.line))
                .unwrap_or_default();
            format!("{} {}{place}", finding.level.name(), finding.rule)
        })
        .collect();
    assert_eq!(lines, expected, "{found:#?}");
}

fn nothing_shown() -> ShownStatement {
    ShownStatement::default()
}

// S4-004, S4-019.
#[test]
fn a_delta_is_a_warning_only_where_it_was_seen_to_double() {
    let sql = [("UPDATE account\n   SET balance = balance + $1\n WHERE id = $2", 1)];
    check(nothing_shown(), &sql, &["hint delta 1:2"]);
    let doubled = ShownStatement {
        changed_by_second_id: Some(["account".to_owned()].into()),
        ..ShownStatement::default()
    };
    // S4-004, S4-019.
    check(doubled, &sql, &["warning delta 1:2"]);
    check(
        nothing_shown(),
        &[("UPDATE account SET balance = greatest(balance, $1) WHERE id = $2", 1)],
        &[],
    );
}

// S4-004.
#[test]
fn an_insert_needs_a_unique_key_that_is_not_made_up() {
    check(nothing_shown(), &[("INSERT INTO account (id, balance) VALUES ($1, $2)", 1)], &[]);
    check(
        nothing_shown(),
        &[("INSERT INTO account VALUES ($1, $2, 0) ON CONFLICT DO NOTHING", 1)],
        &[],
    );
    // S4-004.
    check(
        nothing_shown(),
        &[("INSERT INTO log (line) VALUES ($1)", 1)],
        &["warning unguarded-insert 1:1"],
    );
    check(
        nothing_shown(),
        &[("INSERT INTO entry (fact, amount)\nVALUES ($1, $2)", 1)],
        &["warning unguarded-insert 1:1"],
    );
    check(
        nothing_shown(),
        &[("INSERT INTO entry VALUES (DEFAULT, $1, $2)", 1)],
        &["warning unguarded-insert 1:1"],
    );
    // The key is a default that differs each time. So is the time, which is only worth a hint.
    check(
        nothing_shown(),
        &[("INSERT INTO token (fact) VALUES ($1)", 1)],
        &["warning unguarded-insert 1:1", "hint session-value 1:1"],
    );
    check(nothing_shown(), &[("INSERT INTO token (id, at) VALUES ($1, $2)", 1)], &[]);
}

#[test]
fn values_of_the_session_are_found_where_they_stand() {
    check(
        nothing_shown(),
        &[("UPDATE account SET balance = $1,\n n = extract(epoch FROM now())\nWHERE id = $2", 1)],
        &["warning session-value 1:2"],
    );
    check(nothing_shown(), &[("UPDATE account SET balance = $1 WHERE id = $2 -- now()", 1)], &[]);
    check(nothing_shown(), &[("SELECT CURRENT_TIMESTAMP", 1)], &["hint session-value 1:1"]);
    check(
        nothing_shown(),
        &[("INSERT INTO token (id, fact, at) VALUES (gen_random_uuid(), $1, $2)", 1)],
        &["warning unguarded-insert 1:1", "warning session-value 1:1"],
    );
}

// S1-014, S4-005.
#[test]
fn last_write_wins_is_reported_where_order_was_seen_to_matter() {
    let sql = [(
        "INSERT INTO account (id, balance) VALUES ($1, $2)\nON CONFLICT (id) DO UPDATE SET balance \
            = excluded.balance",
        1,
    )];
    check(nothing_shown(), &sql, &[]);
    let order = || ShownStatement {
        changed_by_order: ["account".to_owned()].into(),
        ..ShownStatement::default()
    };
    // S4-005.
    check(order(), &sql, &["warning last-write-wins 1:2"]);
    check(order(), &[("UPDATE account SET balance = $1, n = $2 WHERE id = $3 AND n < $2", 1)], &[]);
}

#[test]
fn a_value_read_without_a_lock_and_written_back_is_found() {
    let update = ("UPDATE account SET balance = $1 WHERE id = $2", 1);
    check(
        nothing_shown(),
        &[("SELECT balance FROM account WHERE id = $1", 1), update],
        &["warning read-then-write 2:1"],
    );
    check(
        nothing_shown(),
        &[("SELECT balance FROM account WHERE id = $1 FOR UPDATE", 1), update],
        &[],
    );
    check(nothing_shown(), &[("SELECT n FROM account WHERE id = $1", 1), update], &[]);
    check(
        nothing_shown(),
        &[
            ("SELECT balance FROM account", 1),
            ("UPDATE account SET balance = $1 WHERE id = $2 AND balance = $3", 1),
        ],
        &[],
    );
}

#[test]
fn an_update_that_touched_nothing_is_worth_a_hint() {
    check(
        nothing_shown(),
        &[("UPDATE account SET balance = $1 WHERE id = $2", 0)],
        &["hint no-row-touched 1:1"],
    );
    check(nothing_shown(), &[("SELECT n FROM account WHERE id = $1", 0)], &[]);
}
