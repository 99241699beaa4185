//! Log lines: readable on a terminal, JSON elsewhere, always on standard error.

use std::io::IsTerminal;

use anyhow::{Context, Result, ensure};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::{EnvFilter, layer::SubscriberExt, util::SubscriberInitExt};

use crate::config::{LogFormat, LogSettings};

/// Starts logging; callable once per process.
pub fn start(log: &LogSettings) -> Result<()> {
    let is_level = log.level.parse::<LevelFilter>().is_ok();
    ensure!(
        is_level || log.level.contains('='),
        "`log.level` is `{}`; use error, warn, info, debug or trace",
        log.level
    );
    // Notices of the database, such as of migrations that are up to date, would only be noise.
    let directives = if log.level.contains('=') {
        log.level.clone()
    } else {
        format!("{},sqlx=warn,sqlx::postgres::notice=off", log.level)
    };
    let filter = EnvFilter::try_new(&directives).with_context(|| {
        format!("`log.level` is `{}`; use error, warn, info, debug or trace", log.level)
    })?;
    let json = log.format == LogFormat::Json
        || log.format == LogFormat::Auto && !std::io::stderr().is_terminal();
    let registry = tracing_subscriber::registry().with(filter);
    if json {
        let layer = tracing_subscriber::fmt::layer()
            .json()
            .flatten_event(true)
            .with_current_span(true)
            .with_span_list(false)
            .with_writer(std::io::stderr);
        registry.with(layer).try_init()?;
    } else {
        let colours = std::io::stderr().is_terminal();
        registry
            .with(
                tracing_subscriber::fmt::layer()
                    .with_ansi(colours)
                    .with_target(false)
                    .with_writer(std::io::stderr),
            )
            .try_init()?;
    }
    Ok(())
}
