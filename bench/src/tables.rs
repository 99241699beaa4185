//! The report as tables: everything for a terminal, ratios for the documentation.

// The tables of the parts that last.
pub mod lasting;
// The tables of outgoing messages.
pub mod outgoing;
// The table of a database that is away.
pub mod network;
// The tables of several hosts.
pub mod hosts;
// The table of the console's pages.
pub mod pages;

use std::fmt::Write as _;

use crate::{
    fairness::Times,
    load::Workload,
    report::{CONSUMER, Cell, DATABASE, INBOX_BYTES, Measure, RATE, Report, Spread},
    variants::Variant,
};

/// A table of texts.
pub struct Table {
    title: String,
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    fn new(title: impl Into<String>, header: &[&str]) -> Self {
        Self {
            title: title.into(),
            header: header.iter().map(|name| (*name).to_owned()).collect(),
            rows: Vec::new(),
        }
    }

    /// Returns the table for a terminal. The first column is aligned to the left, the others to the
    /// right.
    pub fn text(&self) -> String {
        let width = |column: usize| {
            let cells =
                self.rows.iter().filter_map(|row| row.get(column)).chain(self.header.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let mut text = format!("\n{}\n", self.title);
        for row in std::iter::once(&self.header).chain(&self.rows) {
            let line = row.iter().enumerate().map(|(column, cell)| {
                let width = width(column);
                if column == 0 { format!("{cell:<width$}") } else { format!("  {cell:>width$}") }
            });
            let _ = writeln!(text, "{}", line.collect::<String>().trim_end());
        }
        text
    }

    /// Returns the table in Markdown.
    pub fn markdown(&self) -> String {
        let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        let rule: Vec<_> = (0..self.header.len())
            .map(|column| if column == 0 { "---" } else { "--:" }.to_owned())
            .collect();
        let rows: String = self.rows.iter().map(|row| line(row)).collect();
        format!("{}{}{rows}", line(&self.header), line(&rule))
    }

    /// Returns whether the table has no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

/// Returns all tables of a report, for a terminal.
pub fn terminal(report: &Report) -> String {
    let mut tables: Vec<Table> = report
        .loads()
        .into_iter()
        .map(|(workload, partitions)| {
            let plural = if partitions == 1 { "" } else { "s" };
            let title = format!("{} rows, {partitions} partition{plural}", workload.name());
            let cells: Vec<_> = report
                .throughput
                .iter()
                .filter(|cell| (cell.workload, cell.partitions) == (workload, partitions))
                .collect();
            figures(title, &cells, Variant::ByHand)
        })
        .collect();
    tables.push(figures(
        "languages, spread rows, 4 partitions".to_owned(),
        &report.languages.iter().collect::<Vec<_>>(),
        Variant::Component,
    ));
    tables.extend([
        threads(report),
        latency(report, true),
        gaps(report),
        fairness(report),
        isolation(report, true),
        statements(report),
        claims(report),
        network::table(report),
        light(report),
    ]);
    tables.extend(lasting::history(report, true));
    tables.extend([
        lasting::removal(report, true),
        lasting::removal(report, false),
        lasting::removal_steps(report),
        lasting::soak(report),
    ]);
    tables.extend(outgoing::tables(report));
    tables.extend([hosts::scaling(report), hosts::pauses(report)]);
    tables.push(pages::table(report));
    tables.iter().filter(|table| !table.is_empty()).map(Table::text).collect()
}

fn figures(title: String, cells: &[&Cell], reference: Variant) -> Table {
    let letter = reference.letter();
    let by = format!("× ({letter})");
    let header =
        ["VARIANT", "MSG/S", "MIN–MAX", &by, "CPU µs", &by, "DB µs", &by, "BROKER µs", "GAP ms"];
    let mut table = Table::new(title, &header);
    let reference = cells.iter().find(|cell| cell.variant == reference);
    for cell in cells {
        let (Some(rate), Some(cpu)) = (cell.spread(RATE), cell.cpu()) else { continue };
        let by = |measure: Measure| {
            reference
                .and_then(|to| cell.ratio(to, measure))
                .map_or("–".to_owned(), |r| format!("{:.2}", r.median))
        };
        table.rows.push(vec![
            format!("{} {}", cell.variant.letter(), cell.title),
            format!("{:.0}", rate.median),
            format!("{:.0}–{:.0}", rate.min, rate.max),
            by(RATE),
            format!("{:.0}", cpu.consumer),
            by(CONSUMER),
            format!("{:.0}", cpu.database),
            by(DATABASE),
            format!("{:.0}", cpu.broker),
            format!("{:.0}", cell.longest_gap_ms()),
        ]);
    }
    table
}

/// Returns the table of a measure: every variant with every load, as a multiple of (d)'s.
pub fn ratios(report: &Report, measure: Measure) -> Table {
    let loads = report.loads();
    let names: Vec<_> = loads
        .iter()
        .map(|(workload, partitions)| format!("{} rows, {partitions} part.", workload.name()))
        .collect();
    let header: Vec<_> =
        std::iter::once("variant").chain(names.iter().map(String::as_str)).collect();
    let mut table = Table::new("", &header);
    for variant in report.variants() {
        let cells = loads.iter().map(|(workload, partitions)| {
            let (cell, by_hand) = (
                report.cell(&variant, *workload, *partitions)?,
                report.cell(&Variant::ByHand, *workload, *partitions)?,
            );
            cell.ratio(by_hand, measure)
        });
        let name = format!("({}) {}", variant.letter(), variant.title());
        table.rows.push(std::iter::once(name).chain(cells.map(shown)).collect());
    }
    table
}

/// Returns the table of the languages, as multiples of the component in Rust round by round.
pub fn languages(report: &Report) -> Table {
    let mut table = Table::new("", &["component", "throughput", "host CPU per message"]);
    let Some(rust) = report.languages.iter().find(|cell| cell.variant == Variant::Component) else {
        return table;
    };
    for cell in report.languages.iter().filter(|cell| cell.variant != Variant::Component) {
        table.rows.push(vec![
            cell.title.clone(),
            shown(cell.ratio(rust, RATE)),
            shown(cell.ratio(rust, CONSUMER)),
        ]);
    }
    table
}

/// Returns the table of the time from send to commit: in milliseconds, or as multiples of (d)'s.
pub fn latency(report: &Report, milliseconds: bool) -> Table {
    let mut table = Table::new(
        "from send to commit at a tenth of the load",
        &["variant", "p50", "p99", "messages/s"],
    );
    let by_hand = report.latency.iter().find(|latency| latency.variant == Variant::ByHand);
    for latency in &report.latency {
        let shown = |value: f64, of: Option<f64>| match of {
            _ if milliseconds => format!("{value:.1} ms"),
            Some(of) => format!("{:.2}×", value / of),
            None => "–".to_owned(),
        };
        table.rows.push(vec![
            format!("({}) {}", latency.variant.letter(), latency.variant.title()),
            shown(latency.p50_ms, by_hand.map(|by_hand| by_hand.p50_ms)),
            shown(latency.p99_ms, by_hand.map(|by_hand| by_hand.p99_ms)),
            if milliseconds {
                format!("{:.0}", latency.rate)
            } else {
                shown(latency.rate, by_hand.map(|by_hand| by_hand.rate))
            },
        ]);
    }
    table
}

/// Returns the table of pauses with and without swaps.
pub fn gaps(report: &Report) -> Table {
    let mut table = Table::new(
        "longest pause of a partition around a swap",
        &["run", "looks", "p50", "p99", "max"],
    );
    for gaps in &report.gaps {
        let ms = |value: f64| format!("{value:.0} ms");
        let name = if gaps.swaps { "with swaps" } else { "without, at the same moments" };
        table.rows.push(vec![
            name.to_owned(),
            gaps.looks.to_string(),
            ms(gaps.p50_ms),
            ms(gaps.p99_ms),
            ms(gaps.max_ms),
        ]);
    }
    table
}

/// Returns the table of a tenant's latency alone and beside another tenant's backlog.
pub fn fairness(report: &Report) -> Table {
    let header = ["a few messages a second", "alone", "beside the backlog", "ratio of pairs"];
    let mut table =
        Table::new("from send to commit, of a tenant beside another one's backlog", &header);
    type TimesMeasure = fn(&Times) -> f64;
    let measures: [(&str, TimesMeasure); 2] =
        [("p50", |times| times.p50_ms), ("p99", |times| times.p99_ms)];
    for (name, of) in measures {
        let pairs = || report.fairness.iter();
        let (alone, beside) = (
            Spread::of(pairs().map(|pair| of(&pair.alone))),
            Spread::of(pairs().map(|pair| of(&pair.beside))),
        );
        let (Some(alone), Some(beside)) = (alone, beside) else { continue };
        let ratio = Spread::of(pairs().map(|pair| of(&pair.beside) / of(&pair.alone)));
        table.rows.push(vec![
            name.to_owned(),
            format!("{:.1} ms", alone.median),
            format!("{:.1} ms", beside.median),
            shown(ratio),
        ]);
    }
    table
}

/// Returns the table of a tenant's figures beside a hostile neighbour, against those beside a
/// polite one with that load.
pub fn isolation(report: &Report, milliseconds: bool) -> Table {
    let header = [
        "the neighbour",
        "throughput, hostile / polite",
        "p99, hostile / polite",
        "p99 polite",
        "p99 hostile",
    ];
    let mut table =
        Table::new("a tenant beside a hostile one", &header[..if milliseconds { 5 } else { 3 }]);
    for isolation in &report.isolation {
        let times = |ratio: f64| format!("{ratio:.2}×");
        let mut row = vec![
            isolation.deed.clone(),
            times(isolation.ratio(|felt| felt.rate)),
            times(isolation.ratio(|felt| felt.p99_ms)),
        ];
        if milliseconds {
            let medians = [
                isolation.median(|pair| pair.polite.p99_ms),
                isolation.median(|pair| pair.hostile.p99_ms),
            ];
            row.extend(medians.map(|ms| format!("{ms:.1} ms")));
        }
        table.rows.push(row);
    }
    table
}

/// Returns the table of statements per message.
pub fn statements(report: &Report) -> Table {
    let mut table = Table::new("statements per message", &["variant", "statements"]);
    for counted in &report.statements {
        let name = format!("({}) {}", counted.variant.letter(), counted.variant.title());
        table.rows.push(vec![name, format!("{:.2}", counted.per_message)]);
    }
    table
}

/// Returns the table of CPU by kind of thread, with spread rows and the most partitions.
pub fn threads(report: &Report) -> Table {
    let mut table = Table::new("CPU by kind of thread", &["variant", "threads"]);
    let Some((workload, partitions)) =
        report.loads().into_iter().filter(|(workload, _)| *workload == Workload::Spread).max()
    else {
        return table;
    };
    for variant in report.variants() {
        let Some(cell) = report.cell(&variant, workload, partitions) else { continue };
        let Some(run) = cell.runs.last().filter(|run| !run.threads.is_empty()) else { continue };
        let total: f64 = run.threads.values().sum();
        let mut kinds: Vec<_> = run
            .threads
            .iter()
            .map(|(kind, cpu)| (100.0 * cpu / total, kind))
            .filter(|(share, _)| *share >= 1.0)
            .collect();
        kinds.sort_by(|one, other| other.0.total_cmp(&one.0));
        let kinds: Vec<_> =
            kinds.into_iter().map(|(share, kind)| format!("`{kind}` {share:.0} %")).collect();
        table
            .rows
            .push(vec![format!("({}) {}", variant.letter(), variant.title()), kinds.join(", ")]);
    }
    table
}

/// Returns the table of the costs of a claim. CPU is a multiple of the first way's, for new and
/// known messages apart.
pub fn claims(report: &Report) -> Table {
    let header =
        ["way", "messages", "per transaction", "statements each", "database CPU", "log bytes"];
    let mut table = Table::new("the claim alone, per message", &header);
    for cost in &report.claims {
        let Some(first) = report.claims.iter().find(|first| first.duplicates == cost.duplicates)
        else {
            continue;
        };
        table.rows.push(vec![
            cost.way.title().to_owned(),
            if cost.duplicates { "known" } else { "new" }.to_owned(),
            cost.batch.to_string(),
            format!("{:.2}", cost.statements_each),
            format!("{:.2}×", cost.cpu_us / first.cpu_us),
            format!("{:.0}", cost.wal_bytes),
        ]);
    }
    table
}

/// Returns the table of light rows, as multiples of full ones, round by round.
fn light(report: &Report) -> Table {
    let header = ["rows", "messages/s", "database CPU", "inbox bytes each", "× full"];
    let mut table = Table::new("light rows, spread rows of the effect", &header);
    let Some((full, light)) = report.beside(&Variant::ComponentLight) else { return table };
    for (name, cell) in [("full", full), ("light", light)] {
        let bytes =
            cell.spread(INBOX_BYTES).map_or_else(String::new, |b| format!("{:.0}", b.median));
        let ratio = |measure| shown(cell.ratio(full, measure));
        table.rows.push(vec![
            name.to_owned(),
            ratio(RATE),
            ratio(DATABASE),
            bytes,
            ratio(INBOX_BYTES),
        ]);
    }
    table
}

/// Returns the sentence about light rows for the documentation; `None` where they were not
/// measured.
pub fn light_sentence(report: &Report) -> Option<String> {
    let (full, light) = report.beside(&Variant::ComponentLight)?;
    let ratio = |measure| shown(light.ratio(full, measure));
    Some(format!(
        "With light rows (`inbox = \"light\"`, (c2)) the inbox takes {} of the bytes for each \
            completed message, indexes included, and the host handles {} of the messages a second \
            of (c).\n",
        ratio(INBOX_BYTES),
        ratio(RATE)
    ))
}

/// Returns the sentence about traces for the documentation; `None` where they were not measured.
pub fn traced_sentence(report: &Report) -> Option<String> {
    let (without, with) = report.beside(&Variant::ComponentTraced)?;
    let ratio = |measure| shown(with.ratio(without, measure));
    Some(format!(
        "With traces of one message in a hundred ((c3), `telemetry.sample = 0.01`) the host handles \
            {} of the messages a second of (c), and takes {} of its CPU for each.\n",
        ratio(RATE),
        ratio(CONSUMER)
    ))
}

fn shown(ratio: Option<Spread>) -> String {
    match ratio {
        None => "–".to_owned(),
        Some(Spread { median, min, max }) if min == max => format!("{median:.2}×"),
        Some(Spread { median, min, max }) => format!("{median:.2}× ({min:.2}–{max:.2})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new("t", &["a", "value"]);
        table.rows.push(vec!["long name".to_owned(), "1×".to_owned()]);
        assert_eq!(table.text(), "\nt\na          value\nlong name     1×\n");
        assert_eq!(table.markdown(), "| a | value |\n| --- | --: |\n| long name | 1× |\n");
    }
}
