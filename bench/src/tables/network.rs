//! The table of a database that is away.

use super::{Table, shown};
use crate::{
    report::{Cell, RATE, Report},
    variants::Variant,
};

/// Returns throughput by distance, as multiples of (d)'s and of (d64)'s at the same distance.
pub fn table(report: &Report) -> Table {
    let columns: Vec<_> = report
        .network
        .iter()
        .flat_map(|distance| {
            let ms = distance.round_trip_ms;
            [format!("{ms} ms, × (d)"), format!("{ms} ms, × (d64)")]
        })
        .collect();
    let header: Vec<_> =
        std::iter::once("variant").chain(columns.iter().map(String::as_str)).collect();
    let mut table = Table::new("a database that is away", &header);
    let Some(nearest) = report.network.first() else { return table };
    for Cell { variant, title, .. } in &nearest.cells {
        let cells = report.network.iter().flat_map(|distance| {
            let of =
                |variant: &Variant| distance.cells.iter().find(|cell| cell.variant == *variant);
            [Variant::ByHand, Variant::ByHandBatch]
                .map(|reference| of(variant)?.ratio(of(&reference)?, RATE))
        });
        let name = format!("({}) {title}", variant.letter());
        table.rows.push(std::iter::once(name).chain(cells.map(shown)).collect());
    }
    table
}
