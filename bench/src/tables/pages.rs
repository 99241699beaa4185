//! The table of the console's pages.

use super::Table;
use crate::report::{Report, Spread};

/// Returns the times of each page with few messages and with many, and their ratio.
pub fn table(report: &Report) -> Table {
    let header = ["page", "few", "many", "slowest of many", "many, × few"];
    let mut table = Table::new("pages of the console", &header);
    for times in report.pages.iter().flat_map(|pages| &pages.pages) {
        let Spread { median, max, .. } = times.many;
        table.rows.push(vec![
            format!("`/console{}`", times.page),
            format!("{:.1} ms", times.few.median),
            format!("{median:.1} ms"),
            format!("{max:.1} ms"),
            format!("{:.2}×", median / times.few.median),
        ]);
    }
    table
}
