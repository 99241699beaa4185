//! Lines of a handler's log for one message, under the span that the inbox opened for it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{
    bindings::oncebox::handler::log::Level,
    record::LineRecord,
    text::{bounded, printable},
};

/// Most bytes of one line. A longer one is cut.
const LINE_BYTES_MAX: usize = 8 << 10;
/// Bytes that a line costs beside its text, so that empty lines are not free.
const LINE_COST: usize = 64;
/// Most bytes of the last lines, which become part of a failure's text.
const LAST_WORDS_BYTES: usize = 1024;

/// The handler's log for one message. Clones share it.
#[derive(Clone)]
pub(crate) struct HandlerLog {
    lines: Arc<Mutex<Lines>>,
}

/// The lines of a log, and the bytes that are left for more.
struct Lines {
    bytes_left: usize,
    is_truncated: bool,
    /// The last error line, and the lines on standard error after it.
    last_words: String,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    /// All lines, for a recorder. None without one.
    kept: Option<Vec<LineRecord>>,
}

/// A standard stream of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StdStream {
    Stdout,
    Stderr,
}

impl HandlerLog {
    /// Makes a log of at most `bytes_max`. With `keeps` the lines can be taken at the end.
    pub(crate) fn new(bytes_max: usize, keeps: bool) -> Self {
        let lines = Lines {
            bytes_left: bytes_max,
            is_truncated: false,
            last_words: String::new(),
            stdout: Vec::new(),
            stderr: Vec::new(),
            kept: keeps.then(Vec::new),
        };
        Self { lines: Arc::new(Mutex::new(lines)) }
    }

    /// Appends bytes of standard output or error, and logs every line that is complete.
    pub(crate) fn write(&self, output: StdStream, bytes: &[u8]) {
        let mut lines = self.lines();
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let buffer = lines.buffer(output);
            let room = LINE_BYTES_MAX.saturating_sub(buffer.len());
            buffer.extend_from_slice(&piece[..piece.len().min(room)]);
            if piece.ends_with(b"\n") {
                lines.flush(output);
            }
        }
    }

    /// Returns the guest's last error lines, if there are any.
    pub(crate) fn last_words(&self) -> Option<String> {
        let mut lines = self.lines();
        lines.flush(StdStream::Stdout);
        lines.flush(StdStream::Stderr);
        let words = lines.last_words.trim();
        (!words.is_empty()).then(|| words.to_owned())
    }

    /// Takes the lines that were logged; there are none without a recorder.
    pub(crate) fn take_lines(&self) -> Vec<LineRecord> {
        let mut lines = self.lines();
        lines.flush(StdStream::Stdout);
        lines.flush(StdStream::Stderr);
        lines.kept.take().unwrap_or_default()
    }

    /// Logs a line of `log`. An error line becomes the first of the last words.
    pub(super) fn line(&self, level: Level, text: &str) {
        let mut lines = self.lines();
        if level == Level::Error {
            lines.last_words.clear();
            lines.remember(text);
        }
        lines.emit(level, text);
    }

    fn lines(&self) -> MutexGuard<'_, Lines> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lines {
    fn buffer(&mut self, output: StdStream) -> &mut Vec<u8> {
        match output {
            StdStream::Stdout => &mut self.stdout,
            StdStream::Stderr => &mut self.stderr,
        }
    }

    fn flush(&mut self, output: StdStream) {
        let line = std::mem::take(self.buffer(output));
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end();
        if text.is_empty() {
            return;
        }
        match output {
            StdStream::Stdout => self.emit(Level::Info, text),
            StdStream::Stderr => {
                self.remember(text);
                self.emit(Level::Warn, text);
            }
        }
    }

    /// Appends a line to the last words and keeps their end, since a panic comes last.
    fn remember(&mut self, text: &str) {
        self.last_words.push_str(&printable(&bounded(text, LAST_WORDS_BYTES)));
        self.last_words.push('\n');
        let excess = self.last_words.len().saturating_sub(LAST_WORDS_BYTES);
        let start = self.last_words.ceil_char_boundary(excess);
        self.last_words.drain(..start);
    }

    fn emit(&mut self, level: Level, text: &str) {
        let text = printable(&bounded(text, LINE_BYTES_MAX));
        let cost = text.len() + LINE_COST;
        if cost <= self.bytes_left && !self.is_truncated {
            self.bytes_left -= cost;
            self.log(level, &text);
        } else if !self.is_truncated {
            self.is_truncated = true;
            self.log(Level::Warn, "log output truncated");
        }
    }

    fn log(&mut self, level: Level, text: &str) {
        if let Some(kept) = &mut self.kept {
            kept.push(LineRecord { level: name(level), text: text.to_owned() });
        }
        event(level, text);
    }
}

fn name(level: Level) -> &'static str {
    match level {
        Level::Trace => "trace",
        Level::Debug => "debug",
        Level::Info => "info",
        Level::Warn => "warn",
        Level::Error => "error",
    }
}

fn event(level: Level, text: &str) {
    match level {
        Level::Trace => tracing::trace!(target: "handler", "{text}"),
        Level::Debug => tracing::debug!(target: "handler", "{text}"),
        Level::Info => tracing::info!(target: "handler", "{text}"),
        Level::Warn => tracing::warn!(target: "handler", "{text}"),
        Level::Error => tracing::error!(target: "handler", "{text}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_ends_with_one_last_line_and_keeps_the_last_words() {
        let log = HandlerLog::new(1000, false);
        for _ in 0..100 {
            log.write(StdStream::Stderr, b"line\n");
        }
        log.write(StdStream::Stderr, b"the ");
        log.write(StdStream::Stderr, b"end");
        assert!(log.last_words().expect("words").ends_with("the end"));
        let lines = log.lines();
        assert!(
            lines.is_truncated
                && lines.bytes_left < 2 * LINE_COST
                && lines.last_words.len() <= LAST_WORDS_BYTES
        );
    }

    #[test]
    fn a_line_without_end_takes_no_memory() {
        let log = HandlerLog::new(1000, false);
        for _ in 0..100 {
            log.write(StdStream::Stdout, &[b'x'; 10_000]);
        }
        assert_eq!(log.lines().stdout.len(), LINE_BYTES_MAX);
    }

    #[test]
    fn a_line_cannot_pretend_to_be_two() {
        assert_eq!(printable("a\nINFO fake\u{1b}[2J\tb"), "a\\nINFO fake\\u{1b}[2J\tb");
    }
}
