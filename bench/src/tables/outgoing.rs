//! The tables of outgoing messages.

use oncebox_devkit::output::number;

use super::{Table, shown};
use crate::{
    report::{CONSUMER, DATABASE, RATE, Report},
    variants::Variant::{self, ByHand, ByHandOutbox, ComponentEmitting, ComponentQuiet},
};

/// Each variant that sends, with the variant that does the same and sends nothing.
const PAIRS: [(Variant, Variant); 2] =
    [(ByHandOutbox, ByHand), (ComponentEmitting, ComponentQuiet)];

/// Returns the tables of throughput and of delays.
pub fn tables(report: &Report) -> [Table; 2] {
    [throughput(report), delays(report)]
}

/// Returns the throughput of what sends, as multiples of the same without sending and of the outbox
/// by hand, round by round; and the CPU as multiples of the former.
fn throughput(report: &Report) -> Table {
    let header = [
        "variant",
        "throughput, × without",
        "throughput, × outbox by hand",
        "process CPU, × without",
        "database CPU, × without",
        "messages/s",
    ];
    let mut table = Table::new("one outgoing message of each message", &header);
    let Some(outgoing) = &report.outgoing else { return table };
    for (sending, without) in PAIRS {
        let Some(cell) = outgoing.cell(&sending) else { continue };
        let ratio =
            |to: &Variant, measure| shown(outgoing.cell(to).and_then(|to| cell.ratio(to, measure)));
        let rate = outgoing.rate(&sending);
        table.rows.push(vec![
            name(&sending),
            ratio(&without, RATE),
            ratio(&ByHandOutbox, RATE),
            ratio(&without, CONSUMER),
            ratio(&without, DATABASE),
            rate.map_or("–".to_owned(), |rate| format!("{rate:.0}")),
        ]);
    }
    table
}

fn delays(report: &Report) -> Table {
    let header = ["variant", "p50", "p99", "messages", "messages/s"];
    let mut table = Table::new("from commit to broker, at half load", &header);
    for delay in report.outgoing.iter().flat_map(|outgoing| &outgoing.delays) {
        table.rows.push(vec![
            name(&delay.variant),
            format!("{:.1} ms", delay.p50_ms),
            format!("{:.1} ms", delay.p99_ms),
            number(delay.messages),
            format!("{:.0}", delay.rate),
        ]);
    }
    table
}

fn name(variant: &Variant) -> String {
    format!("({}) {}", variant.letter(), variant.title())
}

/// Returns the sentence about timers; nothing where none were measured.
pub fn sentence(report: &Report) -> String {
    let Some(outgoing) = &report.outgoing else { return String::new() };
    let timers = &outgoing.timers;
    let ratio = outgoing.rate(&ComponentEmitting).map(|rate| timers.rate / rate);
    format!(
        "{} outgoing messages, due within {:.1} s, were on the broker {:.1} s after the first of \
            them: {:.0} a second, {} the throughput of (c-emit).\n",
        number(timers.messages as i64),
        timers.due_s,
        timers.drained_s,
        timers.rate,
        ratio.map_or("–".to_owned(), |ratio| format!("{ratio:.2}×"))
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        load::Workload,
        measure::Cpu,
        outgoing::{Delay, Outgoing, Timers},
        report::{Cell, Environment},
        run::Figures,
    };

    fn cell(variant: Variant, rate: f64) -> Cell {
        let run = Figures {
            messages: 10,
            seconds: 1.0,
            rate,
            longest_gap_ms: 1.0,
            cpu: Cpu { consumer: 1.0, database: 1.0, broker: 1.0 },
            threads: Default::default(),
            inbox_bytes: None,
        };
        let (title, workload) = (variant.title(), Workload::Spread);
        Cell { variant, title, workload, partitions: 4, runs: vec![run] }
    }

    fn report() -> Report {
        let mut report = Report::new(Environment {
            processor: "p".to_owned(),
            cores: 2,
            postgres: "15".to_owned(),
            profile: "measure".to_owned(),
            rounds: 1,
            seconds: 1.0,
        });
        report.outgoing = Some(Outgoing {
            cells: vec![
                cell(ByHand, 1_000.0),
                cell(ByHandOutbox, 500.0),
                cell(ComponentQuiet, 2_000.0),
                cell(ComponentEmitting, 1_900.0),
            ],
            delays: vec![Delay {
                variant: ComponentEmitting,
                rate: 950.0,
                messages: 9_500,
                p50_ms: 8.04,
                p99_ms: 31.0,
            }],
            timers: Timers { messages: 1_000_000, due_s: 60.0, drained_s: 500.0, rate: 2_000.0 },
        });
        report
    }

    // What could go wrong: a ratio has the wrong variant below the line, or a report with variants
    // that no option names cannot be read again.
    #[test]
    fn what_sends_is_compared_with_the_same_that_does_not() {
        let json = serde_json::to_string(&report()).expect("JSON");
        let report: Report = serde_json::from_str(&json).expect("a report");
        let [throughput, delays] = tables(&report).map(|table| table.markdown());
        for cells in ["| 0.50× | 1.00× | 1.00× |", "| 0.95× | 3.80× | 1.00× |"] {
            assert!(throughput.contains(cells), "{cells} in {throughput}");
        }
        assert!(delays.contains("| 8.0 ms | 31.0 ms | 9,500 | 950 |"), "{delays}");
        let sentence = sentence(&report);
        assert!(sentence.contains("2000 a second, 1.05× the throughput"), "{sentence}");
        assert!("c-emit".parse::<Variant>().is_err(), "no option names it");
    }
}
