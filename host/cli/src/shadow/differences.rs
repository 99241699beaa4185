//! Summary of what a shadow would have done differently.

use oncebox_devkit::output;
use serde::Deserialize;

/// Answer of the API, as far as the output needs it.
#[derive(Deserialize)]
pub(super) struct Differences {
    messages: i64,
    same: i64,
    differ: i64,
    failed: i64,
    #[serde(default)]
    skipped: Vec<Skipped>,
    #[serde(default)]
    pub(super) uncaptured_tables: Vec<String>,
    live_us: i64,
    candidate_us: i64,
    live_statements: i64,
    candidate_statements: i64,
    sums: Vec<Sum>,
    differences: Vec<Difference>,
}

/// Messages that were not compared.
#[derive(Deserialize)]
struct Skipped {
    meaning: String,
    messages: i64,
}

/// One way in which messages differ.
#[derive(Deserialize)]
struct Sum {
    table: String,
    change: String,
    column: String,
    messages: i64,
}

/// One difference in one message.
#[derive(Deserialize)]
struct Difference {
    message_id: String,
    table: String,
    change: String,
    column: String,
    row_key: Option<String>,
    before: Option<String>,
    live: Option<String>,
    candidate: Option<String>,
}

/// Returns the quoted names of tables.
pub(super) fn tables(names: &[String]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

pub(super) fn print(found: &Differences) {
    println!("{}", summary(found));
    for skipped in &found.skipped {
        println!("  {} not compared: {}", count(skipped.messages, "message"), skipped.meaning);
    }
    if !found.uncaptured_tables.is_empty() {
        println!(
            "nothing is compared yet: changes of {} are not captured",
            tables(&found.uncaptured_tables)
        );
    }
    let compared = found.same + found.differ;
    if compared > 0 {
        let per_message = |sum: i64| sum as f64 / compared as f64;
        println!(
            "per message: live {:.2} ms and {:.1} statements, candidate {:.2} ms and {:.1} \
                statements",
            per_message(found.live_us) / 1_000.0,
            per_message(found.live_statements),
            per_message(found.candidate_us) / 1_000.0,
            per_message(found.candidate_statements),
        );
    }
    if found.sums.is_empty() {
        return;
    }
    println!();
    let sums = found.sums.iter().map(|sum| {
        vec![sum.messages.to_string(), place(&sum.table, &sum.column), sum.change.clone()]
    });
    output::table(&["MESSAGES", "WHERE", "CHANGE"], &sums.collect::<Vec<_>>());
    println!();
    let shown = |value: &Option<String>| value.as_deref().map_or_else(String::new, printable);
    let rows = found.differences.iter().map(|d| {
        let key = d.row_key.as_deref().map_or_else(String::new, printable);
        vec![
            printable(&d.message_id),
            place(&d.table, &d.column),
            d.change.clone(),
            key,
            shown(&d.before),
            shown(&d.live),
            shown(&d.candidate),
        ]
    });
    output::table(
        &["MESSAGE", "WHERE", "CHANGE", "ROW", "BEFORE", "LIVE", "CANDIDATE"],
        &rows.collect::<Vec<_>>(),
    );
}

/// Returns a line such as `1,000 messages, 997 same, 3 differ`.
fn summary(found: &Differences) -> String {
    let mut parts = vec![
        count(found.messages, "message"),
        format!("{} same", thousands(found.same)),
        format!("{} differ", thousands(found.differ)),
    ];
    if found.failed > 0 {
        parts.push(format!("{} failed in the candidate only", thousands(found.failed)));
    }
    parts.join(", ")
}

fn place(table: &str, column: &str) -> String {
    match (table, column) {
        ("", column) => column.to_owned(),
        (table, "") => format!("{table}, the whole row"),
        (table, column) => format!("{table}.{column}"),
    }
}

fn count(count: i64, noun: &str) -> String {
    format!("{} {noun}{}", thousands(count), if count == 1 { "" } else { "s" })
}

fn thousands(number: i64) -> String {
    let digits = number.to_string();
    let groups: Vec<_> = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy).collect();
    groups.join(",")
}

/// Replaces control characters, since text that handlers wrote must not steer a terminal.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_summed_up_as_a_person_says_it() {
        let found = serde_json::json!({ "deployment_id": 7, "messages": 1000, "same": 997, "differ": 3, "failed": 0, "skipped": [],
            "live_us": 1, "candidate_us": 1, "live_statements": 1, "candidate_statements": 1, "sums": [], "differences": [] });
        let mut found: Differences = serde_json::from_value(found).expect("as the API tells it");
        assert_eq!(summary(&found), "1,000 messages, 997 same, 3 differ");
        (found.messages, found.failed) = (1, 1);
        assert_eq!(
            summary(&found),
            "1 message, 997 same, 3 differ, 1 failed in the candidate only"
        );
        for (table, column, shown) in [
            ("account", "balance", "account.balance"),
            ("account", "", "account, the whole row"),
            ("", "result", "result"),
        ] {
            assert_eq!(place(table, column), shown);
        }
        assert_eq!(
            (thousands(12), thousands(1_234_567)),
            ("12".to_owned(), "1,234,567".to_owned())
        );
    }
}
