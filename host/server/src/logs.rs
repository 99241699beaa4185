//! Log lines: readable on a terminal, JSON elsewhere, always on standard error.

use std::io::IsTerminal;

use anyhow::{Context, Result, ensure};
use tracing::{Subscriber, level_filters::LevelFilter};
use tracing_subscriber::{
    EnvFilter, Layer,
    layer::SubscriberExt,
    registry::{LookupSpan, Registry},
    util::SubscriberInitExt,
};

use crate::{
    config::{LogFormat, LogSettings, TelemetrySettings},
    telemetry::Telemetry,
};

/// Starts logging, and sending to a collector where there is one; callable once per process. The
/// caller ends the telemetry at the end of the process.
///
/// # Errors
///
/// `log.level` cannot be used, or the sending cannot be prepared.
pub fn start(log: &LogSettings, telemetry: &TelemetrySettings) -> Result<Telemetry> {
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
    let filter = |directives: &str| {
        EnvFilter::try_new(directives).with_context(|| {
            format!("`log.level` is `{}`; use error, warn, info, debug or trace", log.level)
        })
    };
    let mut sending = Telemetry::new(telemetry)?;
    match sending.log_layer() {
        None => {
            let registry = tracing_subscriber::registry().with(filter(&directives)?);
            registry.with(lines(log.format)).try_init()?;
        }
        Some(layer) => {
            // What sends the lines does not send lines about itself.
            let sent = format!(
                "{directives},oncebox::exception=debug,opentelemetry=off,opentelemetry_sdk=off,\
                    opentelemetry_otlp=off,reqwest=off,hyper=off"
            );
            tracing_subscriber::registry()
                .with(lines::<Registry>(log.format).with_filter(filter(&directives)?))
                .with(layer.with_filter(filter(&sent)?))
                .try_init()?;
        }
    }
    // Afterwards, so that what is wrong with its settings is logged.
    sending.start_traces(telemetry)?;
    Ok(sending)
}

/// Returns the layer that writes lines to standard error.
fn lines<S>(format: LogFormat) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
{
    let is_terminal = std::io::stderr().is_terminal();
    let layer = tracing_subscriber::fmt::layer();
    if format == LogFormat::Json || format == LogFormat::Auto && !is_terminal {
        let layer = layer.json().flatten_event(true).with_current_span(true).with_span_list(false);
        return layer.with_writer(std::io::stderr).boxed();
    }
    layer.with_ansi(is_terminal).with_target(false).with_writer(std::io::stderr).boxed()
}
