//! Settings of retention.

use chrono::{DateTime, NaiveTime, Utc};
use serde::{Deserialize, Deserializer, de::Error};

/// Bounds of the pause between two runs, in milliseconds: a tenth of a second, and a day.
const INTERVAL_MS: std::ops::RangeInclusive<u64> = 100..=86_400_000;
/// Bounds of the time for which outgoing messages are kept, in days.
const OUTGOING_DAYS: std::ops::RangeInclusive<u32> = 1..=3_660;

/// `[retention]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RetentionSettings {
    /// Whether this host removes what is past its retention. Otherwise an operator or a scheduler
    /// runs `oncebox retention run`.
    pub enabled: bool,
    /// Pause between two runs, in milliseconds.
    #[serde(deserialize_with = "interval")]
    pub interval_ms: u64,
    /// Time of day at which runs may begin; none for any time.
    #[serde(deserialize_with = "window")]
    pub window: Option<DailyWindow>,
    /// Days for which outgoing messages are kept once they are settled, from the day on which they
    /// were emitted.
    #[serde(deserialize_with = "outgoing_days")]
    pub outgoing_days: u32,
}

impl Default for RetentionSettings {
    fn default() -> Self {
        Self { enabled: true, interval_ms: 3_600_000, window: None, outgoing_days: 7 }
    }
}

/// A time of every day, in UTC, such as `02:00-05:00`. It may cross midnight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DailyWindow {
    from: NaiveTime,
    to: NaiveTime,
}

impl DailyWindow {
    /// Parses a window.
    ///
    /// # Errors
    /// A text for operators, where it is none.
    fn parse(text: &str) -> Result<Self, String> {
        let time = |text: &str| NaiveTime::parse_from_str(text.trim(), "%H:%M").ok();
        let both = text.split_once('-').and_then(|(from, to)| Some((time(from)?, time(to)?)));
        match both {
            None => Err(format!(
                "`{text}` is no time of day; write the begin and the end in UTC, as `02:00-05:00`"
            )),
            Some((from, to)) if from == to => {
                Err(format!("`{text}` ends where it begins; leave the window out for all day"))
            }
            Some((from, to)) => Ok(Self { from, to }),
        }
    }

    /// Returns whether a time is in the window. The end is not.
    pub fn contains(&self, at: DateTime<Utc>) -> bool {
        let at = at.time();
        if self.from < self.to {
            self.from <= at && at < self.to
        } else {
            self.from <= at || at < self.to
        }
    }
}

fn interval<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let interval_ms = u64::deserialize(deserializer)?;
    if INTERVAL_MS.contains(&interval_ms) {
        return Ok(interval_ms);
    }
    Err(D::Error::custom(format!(
        "{interval_ms} milliseconds between two runs; use {} to {}",
        INTERVAL_MS.start(),
        INTERVAL_MS.end()
    )))
}

fn outgoing_days<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    let days = u32::deserialize(deserializer)?;
    if OUTGOING_DAYS.contains(&days) {
        return Ok(days);
    }
    Err(D::Error::custom(format!(
        "outgoing messages are kept for {days} days; use {} to {}",
        OUTGOING_DAYS.start(),
        OUTGOING_DAYS.end()
    )))
}

fn window<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<DailyWindow>, D::Error> {
    let text = String::deserialize(deserializer)?;
    match text.trim() {
        "" => Ok(None),
        text => DailyWindow::parse(text).map(Some).map_err(D::Error::custom),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(time: &str) -> DateTime<Utc> {
        format!("2026-11-20T{time}:00Z").parse().expect("a time")
    }

    // What could go wrong: a window across midnight is never open, or always.
    #[test]
    fn a_window_is_open_from_its_begin_to_its_end() {
        for (window, open, closed) in [
            ("02:00-05:00", ["02:00", "04:59"], ["01:59", "05:00"]),
            ("22:30-01:00", ["22:30", "00:59"], ["22:29", "01:00"]),
            ("22:00-00:00", ["22:00", "23:59"], ["21:59", "00:00"]),
        ] {
            let parsed = DailyWindow::parse(window).expect(window);
            // S3-017.
            assert!(open.iter().all(|time| parsed.contains(at(time))), "{window}");
            assert!(!closed.iter().any(|time| parsed.contains(at(time))), "{window}");
        }
    }

    #[test]
    fn settings_that_cannot_work_are_refused_by_name() {
        let parse = toml::from_str::<RetentionSettings>;
        assert!(parse("window = ''").is_ok_and(|settings| settings.window.is_none()));
        for (text, says) in [
            ("window = 'at night'", "`at night` is no time of day"),
            ("window = '02:00-24:00'", "is no time of day"),
            ("window = '02:00-02:00'", "ends where it begins"),
            ("interval_ms = 0", "0 milliseconds between two runs; use 100 to 86400000"),
            ("outgoing_days = 0", "outgoing messages are kept for 0 days; use 1 to 3660"),
            ("interval = 5", "unknown field `interval`"),
        ] {
            let error = parse(text).expect_err(text).to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
