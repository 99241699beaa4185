//! Settings of log lines and of the drain.

use serde::Deserialize;

/// `[log]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogSettings {
    /// `auto`: text on a terminal, JSON elsewhere.
    pub format: LogFormat,
    /// A level, or directives per target.
    pub level: String,
}

impl Default for LogSettings {
    fn default() -> Self {
        Self { format: LogFormat::Auto, level: "info".to_owned() }
    }
}

/// The form of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// Text on a terminal, JSON elsewhere.
    Auto,
    /// Text.
    Text,
    /// JSON, a line each.
    Json,
}

/// `[shutdown]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ShutdownSettings {
    /// Longest time that running work may take after SIGTERM, in milliseconds.
    pub drain_ms: u64,
}

impl Default for ShutdownSettings {
    fn default() -> Self {
        Self { drain_ms: 25_000 }
    }
}
