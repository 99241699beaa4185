//! Settings of the measurement of inboxes.

use serde::{Deserialize, Deserializer, de::Error};

/// Bounds of the pause between two measurements, in milliseconds: a tenth of a second, and a day.
const MEASURE_MS: std::ops::RangeInclusive<u64> = 100..=86_400_000;

/// `[storage]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StorageSettings {
    /// Pause between two measurements of the size of inboxes, in milliseconds.
    #[serde(deserialize_with = "pause")]
    pub measure_ms: u64,
}

impl Default for StorageSettings {
    fn default() -> Self {
        Self { measure_ms: 3_600_000 }
    }
}

fn pause<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let measure_ms = u64::deserialize(deserializer)?;
    if MEASURE_MS.contains(&measure_ms) {
        return Ok(measure_ms);
    }
    Err(D::Error::custom(format!(
        "{measure_ms} milliseconds between two measurements; use {} to {}",
        MEASURE_MS.start(),
        MEASURE_MS.end()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_cannot_work_are_refused_by_name() {
        let parse = toml::from_str::<StorageSettings>;
        assert!(parse("").is_ok_and(|settings| settings.measure_ms == 3_600_000));
        for (text, says) in [
            ("measure_ms = 99", "99 milliseconds between two measurements; use 100 to 86400000"),
            ("measure_ms = 86_400_001", "use 100 to 86400000"),
            ("budget_bytes = 5", "unknown field `budget_bytes`"),
        ] {
            let error = parse(text).expect_err(text).to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
