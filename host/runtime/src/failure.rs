//! The failures and traps of a guest, as failures of the inbox.

use std::time::Duration;

use oncebox_model::outcome::{Failure, FailureKind};
use wasmtime::{Trap, WasmBacktrace};
use wasmtime_wasi::I32Exit;

use crate::{
    bindings::oncebox::handler::types,
    state::StoreState,
    text::{FAILURE_BYTES, bounded},
};

/// Longest delay of a retry that a handler may ask for.
const RETRY_DELAY_MAX: Duration = Duration::from_secs(366 * 24 * 3600);
/// Most functions of a trap's stack in the text of a failure.
const FRAMES: usize = 3;

/// The answer of a guest for one message.
pub(crate) type GuestAnswer = Result<Option<String>, types::Failure>;

/// Returns the failure that a guest means.
pub(crate) fn failure_of(answer: &types::Failure) -> Failure {
    decided(answer).unwrap_or_else(|| other(answer))
}

/// Returns the failure of an answer that decides on the message: retry, reject or park.
pub(crate) fn decided(answer: &types::Failure) -> Option<Failure> {
    Some(match answer {
        types::Failure::Retry(delay) => {
            let delay = delay.map(|ms| Duration::from_millis(ms).min(RETRY_DELAY_MAX));
            Failure::new(FailureKind::Retry { delay }, "the handler asked to be run again")
        }
        types::Failure::Reject(reason) => {
            Failure::new(FailureKind::Reject, bounded(reason, FAILURE_BYTES))
        }
        types::Failure::Park(reason) => {
            Failure::new(FailureKind::Park, bounded(reason, FAILURE_BYTES))
        }
        types::Failure::Other(_) => return None,
    })
}

/// Returns the failure of an answer that decides nothing, with its text.
pub(crate) fn other(answer: &types::Failure) -> Failure {
    match answer {
        types::Failure::Other(text) => {
            Failure::new(FailureKind::Other, bounded(text, FAILURE_BYTES))
        }
        _ => Failure::new(FailureKind::Other, String::new()),
    }
}

/// Returns the failure of a trap, with its stack and the guest's last error lines.
pub(crate) fn trapped(state: &StoreState, error: &wasmtime::Error) -> Failure {
    let mut text = trap_text(error);
    if let Some(words) = state.log.last_words() {
        text = format!("{text}: {words}");
    }
    if state.memory.is_exceeded() {
        let text = format!(
            "the handler asked for more than its {} bytes of memory (`memory_bytes`); {text}",
            state.memory.max()
        );
        return Failure::new(FailureKind::OutOfMemory, bounded(&text, FAILURE_BYTES));
    }
    Failure::new(FailureKind::Trap, bounded(&text, FAILURE_BYTES))
}

fn trap_text(error: &wasmtime::Error) -> String {
    if let Some(I32Exit(status)) = error.downcast_ref::<I32Exit>() {
        return format!("the component exited with status {status}");
    }
    let cause = match error.downcast_ref::<Trap>() {
        Some(trap) => trap.to_string(),
        None => error.root_cause().to_string(),
    };
    let frames: Vec<String> = error.downcast_ref::<WasmBacktrace>().map(frames).unwrap_or_default();
    match frames.is_empty() {
        true => cause,
        false => format!("{cause} in {}", frames.join(" < ")),
    }
}

fn frames(backtrace: &WasmBacktrace) -> Vec<String> {
    backtrace
        .frames()
        .iter()
        .filter_map(|frame| frame.func_name())
        .take(FRAMES)
        .map(|name| format!("`{name}`"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endless_delay_is_cut() {
        let failure = decided(&types::Failure::Retry(Some(u64::MAX))).expect("it decides");
        assert_eq!(failure.kind, FailureKind::Retry { delay: Some(RETRY_DELAY_MAX) });
    }
}
