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
        count @ 1_048_576..1_073_741_824 => format!("{:.1} MiB", count as f64 / 1_048_576.0),
        count => format!("{:.1} GiB", count as f64 / 1_073_741_824.0),
    }
}

/// Formats a number for operators, with a comma between thousands.
pub fn number(number: i64) -> String {
    let digits = number.unsigned_abs().to_string();
    let mut shown = if number < 0 { "-".to_owned() } else { String::new() };
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            shown.push(',');
        }
        shown.push(digit);
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_sizes_are_readable() {
        for (count, shown) in [
            (0, "0"),
            (999, "999"),
            (1_000, "1,000"),
            (12_345_678, "12,345,678"),
            (-1_000, "-1,000"),
        ] {
            assert_eq!(number(count), shown);
        }
        for (count, shown) in
            [(1_023_i64, "1023 B"), (1_536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 30, "3.0 GiB")]
        {
            assert_eq!(bytes(count), shown);
        }
    }
}
