//! The blocks of the parts that last: tables, sentences about them, and plots. A block is written
//! only where the report has its part.

use oncebox_devkit::output::{bytes, number};

use super::machine;
use crate::{
    history::{History, NEW, RoundMeasure, THROUGHPUT, TIME},
    panels::{Panel, Panels},
    plot::{Line, Plot},
    removal::figures::{RemovalRound, When, ratio},
    report::{Report, Spread},
    soak::{Soak, quantities::Trend},
    tables::{hosts, lasting, outgoing, pages},
};

/// Messages of the inbox that the measured line is continued to.
const FAR: f64 = 1e9;

/// Returns the blocks of the parts that the report has, by the names of their markers.
pub fn blocks(report: &Report) -> Vec<(&'static str, String)> {
    let mut blocks = Vec::new();
    if let Some(history) = &report.history {
        blocks.push(("history", history_block(report, history)));
    }
    if !report.removal.is_empty() {
        blocks.push(("removal", removal_block(report)));
    }
    if report.outgoing.is_some() {
        blocks.push(("outgoing", outgoing_block(report)));
    }
    if report.hosts.is_some() {
        let (scaling, pauses) = (hosts::scaling(report), hosts::pauses(report));
        let rounds = report.environment.rounds;
        let block = format!(
            "{}\n{}\n({}; rounds of the first table: {rounds}.)\n",
            scaling.markdown(),
            pauses.markdown(),
            machine(report)
        );
        blocks.push(("hosts", block));
    }
    if let Some(pages) = &report.pages {
        let (rows, tenants) = (number(pages.rows as i64), pages.tenants);
        let table = pages::table(report).markdown();
        let block = format!(
            "{table}\n(Many: {rows} messages and {tenants} tenants. {}.)\n",
            machine(report)
        );
        blocks.push(("pages", block));
    }
    if let Some(soak) = &report.soak {
        blocks.push(("soak", soak_block(report, soak)));
    }
    blocks
}

/// Returns the images of the parts that the report has, by the names of their files.
pub fn images(report: &Report) -> Vec<(&'static str, String)> {
    let history = report.history.as_ref().map(|history| ("history", history_plot(history).svg()));
    let soak = report.soak.as_ref().map(|soak| ("soak", soak_panels(soak).svg()));
    history.into_iter().chain(soak).collect()
}

fn history_block(report: &Report, history: &History) -> String {
    let [sizes, partitions] = lasting::history(report, false);
    let rounds = report.environment.rounds;
    format!(
        "{}\n{}\n\n![Cost of a message by the size of the history](img/history.svg)\n\n{}\n\
            ({}; rounds: {rounds}.)\n",
        sizes.markdown(),
        history_sentences(history).join(" "),
        partitions.markdown(),
        machine(report)
    )
}

/// Returns the measure that the sentences are about, and its name: the claim alone where it was
/// measured, else the time of a message.
fn cost_of(history: &History) -> (RoundMeasure, &'static str) {
    match history.costs(NEW).is_empty() {
        false => (NEW, "the claim of a new message costs the database"),
        true => (TIME, "a message takes"),
    }
}

/// Returns what the sizes say of the shape of the curve, and what its line says of 10⁹ messages.
fn history_sentences(history: &History) -> Vec<String> {
    let (Some(first), Some(last)) = (history.sizes.first(), history.sizes.last()) else {
        return Vec::new();
    };
    let (measure, what) = cost_of(history);
    let reference = match first.rows {
        0 => "the empty inbox".to_owned(),
        rows => format!("{} messages", number(rows as i64)),
    };
    let median = |measure| last.ratio(first, measure).map_or(f64::NAN, |spread| spread.median);
    let mut sentences = vec![format!(
        "With {} messages in the inbox {what} {:.2}× what it does with {reference}, and the \
            throughput is {:.2}×.",
        number(last.rows as i64),
        median(measure),
        median(THROUGHPUT)
    )];
    sentences.extend(far_sentence(history, measure));
    sentences.extend(depth_sentence(history));
    sentences
}

/// Continues the line of the measured sizes.
fn far_sentence(history: &History, measure: RoundMeasure) -> Option<String> {
    let per_decade = history.slope_per_decade(measure)?;
    let costs = history.costs(measure);
    let decades: Vec<_> = costs.iter().filter(|(rows, _)| *rows > 0.0).collect();
    let count = decades.len() as f64;
    let middle = decades.iter().map(|(rows, _)| rows.log10()).sum::<f64>() / count;
    let mean = decades.iter().map(|(_, cost)| cost).sum::<f64>() / count;
    let far = mean + per_decade * (FAR.log10() - middle);
    let from = number(decades.first()?.0 as i64);
    let to = number(decades.last()?.0 as i64);
    Some(format!(
        "From {from} to {to} messages, each factor of ten adds {per_decade:+.3} to that multiple \
            (the line of least squares through {count} sizes). Continued by that line, which is no \
            measurement, 10⁹ messages come to {far:.2}×."
    ))
}

/// Says how much deeper the largest index of keys gets on the way to 10⁹ messages.
fn depth_sentence(history: &History) -> Option<String> {
    let last = history.sizes.last()?;
    let entries = last.entries_per_page;
    if entries <= 1.0 || last.rows == 0 {
        return None;
    }
    let levels = (FAR / last.rows as f64).ln() / entries.ln();
    Some(format!(
        "A page of the largest index of keys holds {entries:.0} entries, so that the index gets \
            one level deeper for each factor of about {entries:.0}: from {} to 10⁹ messages that \
            is {levels:.1} levels.",
        number(last.rows as i64)
    ))
}

fn history_plot(history: &History) -> Plot {
    // A logarithmic axis has no zero: the empty inbox stands a factor of ten before the first size.
    let smallest = history.sizes.iter().map(|point| point.rows).find(|rows| *rows > 0);
    let empty = smallest.unwrap_or(10) as f64 / 10.0;
    let place = |rows: f64| if rows > 0.0 { rows } else { empty };
    let line = |name: &str, measure| Line {
        name: name.to_owned(),
        points: history
            .costs(measure)
            .into_iter()
            .map(|(rows, cost)| (place(rows), cost))
            .collect(),
    };
    let ticks =
        history.sizes.iter().map(|point| (place(point.rows as f64), number(point.rows as i64)));
    Plot {
        title: "Cost of a message by the size of the history".to_owned(),
        x_title: "messages in the inbox".to_owned(),
        y_title: "as a multiple of the first size".to_owned(),
        x_ticks: ticks.collect(),
        lines: vec![
            line("time of a message", TIME),
            line("database's CPU for the claim of a new message", NEW),
        ],
        one: "first size".to_owned(),
    }
}

fn removal_block(report: &Report) -> String {
    format!(
        "{}\n{}\n{}\n({}; rounds: {}.)\n",
        lasting::removal(report, false).markdown(),
        lasting::removal_steps(report).markdown(),
        removal_sentence(&report.removal),
        machine(report),
        report.removal.len()
    )
}

fn removal_sentence(rounds: &[RemovalRound]) -> String {
    let p99 = ratio(rounds, When::Minute, |moment| moment.p99_ms);
    let p99 = p99.unwrap_or(Spread { median: f64::NAN, min: f64::NAN, max: f64::NAN });
    let seconds = Spread::of(rounds.iter().map(RemovalRound::seconds));
    let (rows, size, moved) =
        rounds.first().map_or((0, 0, 0), |round| (round.rows, round.bytes, round.moved));
    format!(
        "Each round removed a partition of {} messages ({}) in {:.1} s (median); {} of them had to \
            stay and moved. The 99th percentile of the first minute is {:.2}× that of the minute \
            before it ({:.2}–{:.2}).\n",
        number(rows),
        bytes(size),
        seconds.map_or(f64::NAN, |spread| spread.median),
        number(moved),
        p99.median,
        p99.min,
        p99.max
    )
}

fn outgoing_block(report: &Report) -> String {
    let tables = outgoing::tables(report).map(|table| table.markdown());
    format!(
        "{}\n{}\n({}; rounds: {}, measured seconds of a run: about {}.)\n",
        tables.join("\n"),
        outgoing::sentence(report),
        machine(report),
        report.environment.rounds,
        report.environment.seconds
    )
}

fn soak_block(report: &Report, soak: &Soak) -> String {
    format!(
        "{}\n{}\n\n![Quantities during the load](img/soak.svg)\n\n({}.)\n",
        lasting::soak(report).markdown(),
        soak_sentences(soak),
        machine(report)
    )
}

fn soak_sentences(soak: &Soak) -> String {
    let trends: Vec<(&str, Trend)> = soak
        .series
        .iter()
        .filter_map(|series| Some((series.quantity.title(), series.trend(soak.first_removal)?)))
        .collect();
    let growing: Vec<_> =
        trends.iter().filter(|(_, trend)| !trend.is_flat).map(|(title, _)| *title).collect();
    let verdict = match growing.as_slice() {
        [] => format!("All {} quantities are flat.", trends.len()),
        growing => {
            format!("Of {} quantities these are not flat: {}.", trends.len(), growing.join("; "))
        }
    };
    format!(
        "In {:.0} minutes the host processed {} messages and refused {} duplicates. It removed {} \
            time partitions with {} messages, the first after {:.1} minutes. {} dead letters were \
            redriven and {} messages discarded. {verdict}",
        soak.minutes,
        number(soak.messages as i64),
        number(soak.refused),
        number(soak.removals),
        number(soak.removed),
        soak.first_removal,
        number(soak.redriven),
        number(soak.discarded)
    )
}

fn soak_panels(soak: &Soak) -> Panels {
    let panel = |series: &crate::soak::quantities::Series| Panel {
        title: series.quantity.title().replace('`', ""),
        points: series.points.clone(),
    };
    Panels {
        title: "A load that lasts, under a short retention".to_owned(),
        x_title: "minutes; the dotted line is the first removal".to_owned(),
        mark: soak.first_removal,
        panels: soak.series.iter().map(panel).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{history::tests::history, removal::figures::tests::round};

    #[test]
    fn the_far_size_is_on_the_measured_line() {
        let history = history(&[
            (0, 4_000.0, 10.0),
            (1_000_000, 4_000.0, 11.0),
            (100_000_000, 2_000.0, 13.0),
        ]);
        let text = history_sentences(&history).join(" ");
        for part in [
            "With 100,000,000 messages in the inbox the claim of a new message costs the database \
                1.30× what it does with the empty inbox, and the throughput is 0.50×.",
            "each factor of ten adds +0.100",
            "10⁹ messages come to 1.40×",
            "holds 100 entries",
            "that is 0.5 levels",
        ] {
            assert!(text.contains(part), "`{part}` is not in `{text}`");
        }
        let plot = history_plot(&history);
        assert_eq!(plot.x_ticks[0], (100_000.0, "0".to_owned()));
        assert!(plot.lines.iter().all(|line| line.points.len() == 3));
    }

    #[test]
    fn one_size_says_nothing_of_others() {
        let history = history(&[(0, 4_000.0, 10.0)]);
        assert_eq!(history_sentences(&history).len(), 1);
    }

    #[test]
    fn a_removal_is_compared_with_the_minute_before_it() {
        let text = removal_sentence(&[round(2.0, 3.0, 2.0), round(2.0, 5.0, 2.0)]);
        assert!(text.contains("is 2.00× that of the minute before it (1.50–2.50)"), "{text}");
        assert!(text.contains("of 1,000 messages") && text.contains("in 14.0 s"), "{text}");
    }
}
