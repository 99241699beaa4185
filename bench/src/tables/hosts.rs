//! The tables of several hosts.

use super::Table;
use crate::report::{Report, Spread};

/// Returns the throughput of hosts on a processor of their own each, as multiples of one host's in
/// the same round.
pub fn scaling(report: &Report) -> Table {
    let mut table =
        Table::new("hosts of one consumer", &["hosts", "throughput", "loops without hosts"]);
    let Some(hosts) = &report.hosts else { return table };
    let Some(one) = hosts.scaling.first() else { return table };
    for scaling in &hosts.scaling {
        let cell = |of: &[f64], one: &[f64]| {
            let ratios = of.iter().zip(one).map(|(of, one)| of / one);
            Spread::of(ratios).map_or_else(String::new, |Spread { median, min, max }| {
                format!("{median:.2}× ({min:.2}–{max:.2})")
            })
        };
        table.rows.push(vec![
            scaling.hosts.to_string(),
            cell(&scaling.rates, &one.rates),
            cell(&scaling.loops, &one.loops),
        ]);
    }
    table
}

/// Returns the longest pauses of a partition around the changes of a group.
pub fn pauses(report: &Report) -> Table {
    let header = ["heartbeats", "a host leaves", "longest", "a host comes", "longest"];
    let mut table = Table::new("longest pause of a partition around a change of hosts", &header);
    for pauses in report.hosts.iter().flat_map(|hosts| &hosts.pauses) {
        let [leaving, coming] =
            [&pauses.leaving, &pauses.coming].map(|of| Spread::of(of.iter().copied()));
        let (Some(leaving), Some(coming)) = (leaving, coming) else { continue };
        let ms = |value: f64| format!("{value:.0} ms");
        table.rows.push(vec![
            format!("{} ms", pauses.heartbeat_ms),
            ms(leaving.median),
            ms(leaving.max),
            ms(coming.median),
            ms(coming.max),
        ]);
    }
    table
}
