//! The tables of the parts that last: histories, removals and the soak.

use oncebox_devkit::output::{bytes, number};

use super::{Table, shown};
use crate::{
    history::{HAND_RATE, HOST_RATE, HistoryPoint, KNOWN, NEW, RoundMeasure, THROUGHPUT},
    panels::short,
    removal::figures::{MEASURES, Stage, When, ratio, spread},
    report::{Report, Spread},
};

/// Columns of a history's table that are multiples.
const RATIOS: usize = 5;

/// Returns the tables of the histories, by size and by number of time partitions: multiples of the
/// first row, or with the figures themselves.
pub fn history(report: &Report, absolute: bool) -> [Table; 2] {
    let (sizes, partitions) = match &report.history {
        Some(history) => (history.sizes.as_slice(), history.partitions.as_slice()),
        None => Default::default(),
    };
    [
        by_history("by the size of the history", sizes, absolute),
        by_history("by the number of time partitions", partitions, absolute),
    ]
}

fn by_history(title: &str, points: &[HistoryPoint], absolute: bool) -> Table {
    let header = [
        "messages in the inbox",
        "time partitions",
        "throughput",
        "claim of a new message",
        "claim of a known one",
        "(c) msg/s",
        "(d) msg/s",
        "new µs",
        "known µs",
        "size",
    ];
    let columns = if absolute { header.len() } else { RATIOS };
    let mut table = Table::new(title, &header[..columns]);
    let Some(first) = points.first() else { return table };
    for point in points {
        let times = |measure: RoundMeasure| shown(point.ratio(first, measure));
        let median = |measure: RoundMeasure| {
            point.spread(measure).map_or("–".to_owned(), |spread| short(spread.median))
        };
        let mut row = vec![
            number(point.rows as i64),
            point.partitions.to_string(),
            times(THROUGHPUT),
            times(NEW),
            times(KNOWN),
            median(HOST_RATE),
            median(HAND_RATE),
            median(NEW),
            median(KNOWN),
            bytes(point.bytes),
        ];
        row.truncate(columns);
        table.rows.push(row);
    }
    table
}

/// Returns the table of latencies around a removal: milliseconds, or multiples of the minute
/// before.
pub fn removal(report: &Report, milliseconds: bool) -> Table {
    let names = MEASURES.map(|(name, _)| name);
    let header: Vec<_> = std::iter::once("messages sent in").chain(names).collect();
    let unit = if milliseconds { "milliseconds" } else { "multiples of the minute before" };
    let title = format!("from send to commit around the removal of a partition, {unit}");
    let mut table = Table::new(title, &header);
    if report.removal.is_empty() {
        return table;
    }
    for when in When::ALL {
        let cells = MEASURES.map(|(_, measure)| {
            if milliseconds {
                ranged(spread(&report.removal, when, measure), "ms")
            } else {
                shown(ratio(&report.removal, when, measure))
            }
        });
        table.rows.push(std::iter::once(when.title().to_owned()).chain(cells).collect());
    }
    table
}

/// Returns the table of the durations of a removal's steps.
pub fn removal_steps(report: &Report) -> Table {
    let mut table = Table::new("steps of the removal", &["step", "duration"]);
    if report.removal.is_empty() {
        return table;
    }
    for stage in Stage::STEPS {
        let seconds = Spread::of(report.removal.iter().map(|round| round.step(stage)));
        table.rows.push(vec![stage.title().to_owned(), ranged(seconds, "s")]);
    }
    let whole = Spread::of(report.removal.iter().map(|round| round.seconds()));
    table.rows.push(vec!["all steps".to_owned(), ranged(whole, "s")]);
    table
}

/// Returns the table of the soak's quantities: the mean of each fifth of the time from the first
/// removal on, and the trend.
pub fn soak(report: &Report) -> Table {
    let header = [
        "quantity",
        "1st fifth",
        "2nd",
        "3rd",
        "4th",
        "5th",
        "growth an hour",
        "allowance",
        "is it flat",
    ];
    let mut table = Table::new("a load that lasts, under a short retention", &header);
    let Some(soak) = &report.soak else { return table };
    for series in &soak.series {
        let Some(trend) = series.trend(soak.first_removal) else { continue };
        let verdict = if trend.is_flat { "yes" } else { "no" };
        let row = std::iter::once(series.quantity.title().to_owned())
            .chain(trend.fifths.map(short))
            .chain([
                format!("{:+.1}", trend.per_hour),
                short(series.quantity.allowance()),
                verdict.to_owned(),
            ]);
        table.rows.push(row.collect());
    }
    table
}

/// Formats a median with its unit, and the least and the greatest value where there are several.
fn ranged(spread: Option<Spread>, unit: &str) -> String {
    match spread {
        None => "–".to_owned(),
        Some(Spread { median, min, max }) if min == max => format!("{median:.1} {unit}"),
        Some(Spread { median, min, max }) => {
            format!("{median:.1} {unit} ({min:.1}–{max:.1})")
        }
    }
}
