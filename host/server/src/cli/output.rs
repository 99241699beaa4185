//! Two forms of everything: a table for people, JSON for programs.

use anyhow::Result;
use serde::Serialize;

/// Print a value as JSON.
pub(super) fn json(value: &impl Serialize) -> Result<()> {
    println!("{}", serde_json::to_string_pretty(value)?);
    Ok(())
}

/// Say that something was done.
pub(super) fn done(as_json: bool, text: &str) -> Result<()> {
    if as_json {
        return json(&serde_json::json!({ "done": text }));
    }
    println!("{text}");
    Ok(())
}

/// Print a table with aligned columns.
pub(crate) fn table(headings: &[&str], rows: &[Vec<String>]) {
    let mut widths: Vec<_> = headings.iter().map(|heading| heading.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |cells: Vec<&str>| {
        let padded: Vec<_> = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        println!("{}", padded.join("  ").trim_end());
    };
    line(headings.to_vec());
    for row in rows {
        line(row.iter().map(String::as_str).collect());
    }
}
