//! The writer of the measured figures into the documentation: tables between markers, and plots.

// The blocks of the parts that last.
mod lasting;

use std::{fs, path::Path};

use anyhow::{Context, Result, ensure};

use crate::{
    plot::{Line, Plot},
    report::{CONSUMER, DATABASE, RATE, Report},
    sweep::Point,
    tables,
    variants::Variant,
};

const PAGE: &str = "docs/benchmark.md";

/// Writes the tables and plots of a report into the page. Parts that the report lacks stay
/// unchanged.
pub fn write(root: &Path, report: &Report) -> Result<()> {
    let mut page = page(root)?;
    let sections = [
        ("throughput", tables::ratios(report, RATE)),
        ("consumer-cpu", tables::ratios(report, CONSUMER)),
        ("database-cpu", tables::ratios(report, DATABASE)),
        ("threads", tables::threads(report)),
        ("languages", tables::languages(report)),
        ("latency", tables::latency(report, false)),
        ("swaps", tables::gaps(report)),
        ("fairness", tables::fairness(report)),
        ("isolation", tables::isolation(report, false)),
        ("statements", tables::statements(report)),
        ("network", tables::network::table(report)),
        ("claims", tables::claims(report)),
    ];
    let plots = [
        ("payload", &report.payloads, payload_plot(&report.payloads)),
        ("batch", &report.batches, batch_plot(&report.batches)),
    ];
    let has_plots = plots.iter().any(|(_, points, _)| !points.is_empty());
    // The parts that last have their environment in their own blocks.
    if has_plots || sections.iter().any(|(_, table)| !table.is_empty()) {
        page = replaced(&page, "environment", &environment(report))?;
    }
    for (name, table) in sections.iter().filter(|(_, table)| !table.is_empty()) {
        page = replaced(&page, name, &table.markdown())?;
    }
    if let Some(sentence) = tables::light_sentence(report) {
        page = replaced(&page, "light", &sentence)?;
    }
    if let Some(sentence) = tables::traced_sentence(report) {
        page = replaced(&page, "traced", &sentence)?;
    }
    for (name, block) in lasting::blocks(report) {
        page = replaced(&page, name, &block)?;
    }
    fs::write(root.join(PAGE), page).with_context(|| format!("failed to write `{PAGE}`"))?;
    for (name, points, plot) in plots {
        if !points.is_empty() {
            write_image(root, &format!("throughput-{name}"), &plot.svg())?;
        }
    }
    for (name, svg) in lasting::images(report) {
        write_image(root, name, &svg)?;
    }
    Ok(())
}

/// Checks that the page has the markers of these blocks, before they are measured for hours.
pub fn check(root: &Path, names: &[&str]) -> Result<()> {
    let page = page(root)?;
    names.iter().try_for_each(|name| replaced(&page, name, "").map(drop))
}

fn page(root: &Path) -> Result<String> {
    fs::read_to_string(root.join(PAGE)).with_context(|| format!("failed to read `{PAGE}`"))
}

fn write_image(root: &Path, name: &str, svg: &str) -> Result<()> {
    let path = root.join(format!("docs/img/{name}.svg"));
    fs::create_dir_all(path.parent().unwrap_or(root)).context("failed to create `docs/img`")?;
    fs::write(&path, svg).with_context(|| format!("failed to write `{}`", path.display()))
}

/// Returns the page with the text between `<!-- bench:<name> -->` and `<!-- /bench -->` replaced.
fn replaced(page: &str, name: &str, by: &str) -> Result<String> {
    let (begin, end) = (format!("<!-- bench:{name} -->\n"), "<!-- /bench -->");
    let missing = || {
        format!(
            "`{PAGE}` lacks the markers `<!-- bench:{name} -->` and `{end}`; add them where the \
                table is to stand"
        )
    };
    let (before, rest) = page.split_once(&begin).with_context(missing)?;
    let (old, after) = rest.split_once(end).with_context(missing)?;
    ensure!(!old.contains("<!-- bench:"), "{}", missing());
    Ok(format!("{before}{begin}{by}{end}{after}"))
}

fn environment(report: &Report) -> String {
    format!(
        "{}; rounds: {}, measured seconds of a run: about {}.\n",
        machine(report),
        report.environment.rounds,
        report.environment.seconds
    )
}

/// Returns the machine and the programs of a report.
fn machine(report: &Report) -> String {
    let environment = &report.environment;
    format!(
        "{} cores of `{}`, PostgreSQL {}, programs built with the profile `{}`",
        environment.cores, environment.processor, environment.postgres, environment.profile
    )
}

fn payload_plot(points: &[Point]) -> Plot {
    plot(points, "Throughput by the size of the payload", "bytes of a payload", |bytes| match bytes
    {
        0..1024 => format!("{bytes} B"),
        _ => format!("{} KiB", bytes / 1024),
    })
}

fn batch_plot(points: &[Point]) -> Plot {
    plot(
        points,
        "Throughput by the size of a transaction",
        "messages of a transaction, at most",
        |messages| messages.to_string(),
    )
}

fn plot(points: &[Point], title: &str, x_title: &str, name: fn(usize) -> String) -> Plot {
    let mut places: Vec<_> = points.iter().map(|point| point.at).collect();
    places.dedup();
    let line = |variant: Variant, name: &str| {
        let points = points
            .iter()
            .filter(|point| point.variant == variant)
            .map(|point| (point.at as f64, point.ratio));
        Line { name: name.to_owned(), points: points.collect() }
    };
    Plot {
        title: title.to_owned(),
        x_title: x_title.to_owned(),
        y_title: "messages a second, as a multiple of a consumer written by hand with a \
            transaction per message"
            .to_owned(),
        x_ticks: places.into_iter().map(|at| (at as f64, name(at))).collect(),
        lines: vec![
            line(Variant::Component, "component"),
            line(Variant::BatchComponent, "component that takes batches"),
        ],
        one: "by hand".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_between_the_markers_is_replaced() {
        let page =
            "a\n<!-- bench:x -->\nold\n<!-- /bench -->\nb\n<!-- bench:y -->\n<!-- /bench -->\n";
        let new = replaced(page, "x", "new\n").expect("the markers are there");
        assert_eq!(
            new,
            "a\n<!-- bench:x -->\nnew\n<!-- /bench -->\nb\n<!-- bench:y -->\n<!-- /bench -->\n"
        );
        assert!(replaced(page, "z", "").is_err());
    }
}
