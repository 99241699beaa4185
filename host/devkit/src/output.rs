//! Two forms of all output: a table for operators, JSON for programs.

use anyhow::Result;
use serde::Serialize;

/// Prints a value as JSON.
pub fn json(value: &impl Serialize) -> Result<()> {
    // Programs read it: strings are printed as they are, and JSON escapes the rest.
    std::println!("{}", serde_json::to_string_pretty(value)?);
    Ok(())
}

/// Prints that something was done.
pub fn done(as_json: bool, text: &str) -> Result<()> {
    if as_json {
        return json(&serde_json::json!({ "done": text }));
    }
    println!("{text}");
    Ok(())
}

/// Prints a table with aligned columns.
pub fn table(headings: &[&str], rows: &[Vec<String>]) {
    let rows: Vec<Vec<_>> = rows
        .iter()
        .map(|row| row.iter().map(|cell| crate::terminal::cell(cell)).collect())
        .collect();
    let mut widths: Vec<_> = headings.iter().map(|heading| heading.chars().count()).collect();
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |cells: Vec<&str>| {
        let padded: Vec<_> =
            cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        println!("{}", padded.join("  ").trim_end());
    };
    line(headings.to_vec());
    for row in &rows {
        line(row.iter().map(AsRef::as_ref).collect());
    }
}

/// Formats a time for operators.
pub fn time(at: chrono::DateTime<chrono::Utc>) -> String {
    at.format("%F %T").to_string()
}

/// Formats a number of bytes for operators.
pub fn bytes(count: impl TryInto<u64>) -> String {
    match count.try_into().unwrap_or(0) {
        count @ 0..1024 => format!("{count} B"),
        count @ 1024..1_048_576 => format!("{:.1} KiB", count as f64 / 1024.0),
        count => format!("{:.1} MiB", count as f64 / 1_048_576.0),
    }
}
