//! Parts that pages have in common: links, times, states, tables.

use chrono::{DateTime, SecondsFormat, Utc};
use maud::{Markup, html};
use oncebox_api::link::escaped;
use oncebox_model::{MessageStatus, outgoing::OutgoingStatus};

/// Longest text in a cell of a table, characters.
const CELL_CHARS: usize = 160;

/// Begin of a segment that would be read as another one without it.
pub(crate) const MARK: char = '~';

/// Returns the path of a page, from its segments as they stand.
pub(crate) fn link(segments: &[&str]) -> String {
    let escaped = |segment: &str| {
        // A browser takes a segment of dots for a step in the path, also where it is escaped.
        let is_step = !segment.is_empty() && segment.bytes().all(|byte| byte == b'.');
        let mark = if is_step || segment.starts_with(MARK) { "~" } else { "" };
        format!("{mark}{}", escaped(segment))
    };
    segments.iter().fold("/console".to_owned(), |path, segment| path + "/" + &escaped(segment))
}

/// Returns the path of a page of a tenant.
pub(crate) fn of_tenant(tenant: &str, rest: &[&str]) -> String {
    link(&[&["tenants", tenant], rest].concat())
}

/// Returns the path of a page of a consumer.
pub(crate) fn of_consumer(tenant: &str, consumer: &str, rest: &[&str]) -> String {
    link(&[&["tenants", tenant, "consumers", consumer], rest].concat())
}

/// How a state is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tone {
    /// All is well.
    Good,
    /// Something waits, or stands still on purpose.
    Wait,
    /// Someone must look.
    Bad,
    /// Over, or nothing to say of.
    Plain,
}

/// Returns a state, with its tone.
pub(crate) fn badge(tone: Tone, text: &str) -> Markup {
    let class = match tone {
        Tone::Good => "badge good",
        Tone::Wait => "badge wait",
        Tone::Bad => "badge bad",
        Tone::Plain => "badge",
    };
    html! { span class=(class) { (text) } }
}

/// Returns the state of a message.
pub(crate) fn message_status(status: MessageStatus) -> Markup {
    let tone = match status {
        MessageStatus::Completed => Tone::Good,
        MessageStatus::Received | MessageStatus::InProgress | MessageStatus::Waiting => Tone::Wait,
        MessageStatus::FailedRetryable | MessageStatus::FailedTerminal | MessageStatus::Parked => {
            Tone::Bad
        }
        MessageStatus::Skipped | MessageStatus::Discarded => Tone::Plain,
    };
    badge(tone, status.as_str())
}

/// Returns the state of an outgoing message.
pub(crate) fn outgoing_status(status: OutgoingStatus) -> Markup {
    let tone = match status {
        OutgoingStatus::Completed => Tone::Good,
        OutgoingStatus::Received | OutgoingStatus::InProgress => Tone::Wait,
        OutgoingStatus::FailedRetryable | OutgoingStatus::Parked => Tone::Bad,
        OutgoingStatus::Cancelled | OutgoingStatus::Discarded => Tone::Plain,
    };
    badge(tone, status.as_str())
}

/// Returns a state of anything else, by its name in the API.
pub(crate) fn state(name: &str) -> Markup {
    let tone = match name {
        "running" | "active" | "ready" | "switched" | "done" | "ok" | "live" => Tone::Good,
        "failing" | "failed" | "error" | "open" | "quarantined" => Tone::Bad,
        "paused" | "draining" | "suspended" | "deleting" | "starting" | "compiling" | "queued"
        | "planned" | "warning" | "half_open" | "unknown" | "moving" | "counted" => Tone::Wait,
        _ => Tone::Plain,
    };
    badge(tone, name)
}

/// Returns a time: in UTC, and in the reader's zone where a script runs.
pub(crate) fn time(at: DateTime<Utc>) -> Markup {
    let machine = at.to_rfc3339_opts(SecondsFormat::Millis, true);
    let text = at.format("%Y-%m-%d %H:%M:%S UTC").to_string();
    html! { time datetime=(machine) title=(text) { (text) } }
}

/// Returns a time, or a dash.
pub(crate) fn time_or_dash(at: Option<DateTime<Utc>>) -> Markup {
    match at {
        Some(at) => time(at),
        None => dash(),
    }
}

/// Returns a dash, for what there is not.
pub(crate) fn dash() -> Markup {
    html! { span.none aria-label="none" role="img" { "–" } }
}

/// Returns a text, or a dash.
pub(crate) fn text_or_dash(text: Option<&str>) -> Markup {
    match text {
        Some(text) if !text.is_empty() => html! { (cut(text)) },
        _ => dash(),
    }
}

/// Returns the begin of a text.
pub(crate) fn cut(text: &str) -> String {
    match text.char_indices().nth(CELL_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Returns the first digits of a digest.
pub(crate) fn digest(digest: &str) -> Markup {
    html! { code title=(digest) { (digest.chars().take(12).collect::<String>()) } }
}

/// Returns a number with its thousands apart.
pub(crate) fn number(number: i64) -> String {
    let digits = number.unsigned_abs().to_string();
    let mut text = if number < 0 { "-".to_owned() } else { String::new() };
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Returns a number of bytes, with its unit.
pub(crate) fn bytes(bytes: i64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (bytes as f64, 0);
    while value >= 1024.0 && unit + 1 < units.len() {
        (value, unit) = (value / 1024.0, unit + 1);
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", units[unit]) }
}

/// Returns a duration, with its two largest units.
pub(crate) fn duration(seconds: f64) -> String {
    let seconds = seconds.max(0.0) as u64;
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3_600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, minutes) => format!("{minutes} min {} s", seconds % 60),
        (0, hours, minutes) => format!("{hours} h {minutes} min"),
        (days, hours, _) => format!("{days} d {hours} h"),
    }
}

/// Returns a JSON value over several lines.
pub(crate) fn pretty(value: &serde_json::Value) -> String {
    serde_json::to_string_pretty(value).unwrap_or_default()
}

/// Returns a table with a name for readers that cannot see it. Without rows it says what to do next.
pub(crate) fn table(name: &str, columns: &[&str], rows: &[Markup], empty: Markup) -> Markup {
    html! {
        @if rows.is_empty() {
            p.empty { (empty) }
        } @else {
            div.scroll tabindex="0" role="region" aria-label=(name) {
                table {
                    thead { tr { @for column in columns { th scope="col" { (column) } } } }
                    tbody { @for row in rows { tr { (row) } } }
                }
            }
        }
    }
}

/// Returns names with their values.
pub(crate) fn facts(facts: &[(&str, Markup)]) -> Markup {
    html! {
        dl.facts {
            @for (name, value) in facts { div { dt { (name) } dd { (value) } } }
        }
    }
}

/// Returns a field with its label.
pub(crate) fn input(name: &str, label: &str, value: &str, is_required: bool) -> Markup {
    html! {
        label.field {
            span { (label) }
            input name=(name) value=(value) required[is_required];
        }
    }
}

/// Returns a choice with its label. The empty option stands for all.
pub(crate) fn choice(name: &str, label: &str, options: &[&str], chosen: &str) -> Markup {
    html! {
        label.field {
            span { (label) }
            select name=(name) {
                option value="" { "any" }
                @for option in options {
                    option value=(option) selected[*option == chosen] { (option) }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        for (value, text) in [(0, "0"), (999, "999"), (1_000, "1,000"), (-1_234_567, "-1,234,567")]
        {
            assert_eq!(number(value), text);
        }
        for (value, text) in
            [(0, "0 B"), (1_023, "1023 B"), (1_536, "1.5 KiB"), (1 << 40, "1.0 TiB")]
        {
            assert_eq!(bytes(value), text);
        }
        for (value, text) in [
            (0.4, "0 s"),
            (61.0, "1 min 1 s"),
            (7_260.0, "2 h 1 min"),
            (90_000.0, "1 d 1 h"),
            (-1.0, "0 s"),
        ] {
            assert_eq!(duration(value), text);
        }
    }

    #[test]
    fn a_text_is_cut_between_characters() {
        assert_eq!(cut("kurz"), "kurz");
        assert_eq!(cut(&"ä".repeat(200)).chars().count(), CELL_CHARS + 1);
    }

    #[test]
    fn a_segment_is_no_path() {
        assert_eq!(of_tenant("..", &["~x", "a.b"]), "/console/tenants/~%2E%2E/~~x/a.b");
        assert_eq!(of_tenant("a/../b", &["x?y"]), "/console/tenants/a%2F..%2Fb/x%3Fy");
    }
}
