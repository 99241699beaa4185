//! How a run ended: every answer and every trap becomes an outcome of the inbox.

use std::time::Duration;

use oncebox_model::{
    handler::Answer,
    outcome::{Failure, FailureKind},
};
use serde_json::Value;
use wasmtime::{Trap, WasmBacktrace};
use wasmtime_wasi::I32Exit;

use crate::{
    bindings::oncebox::handler::types,
    host::sql::ConnectionLost,
    state::State,
    text::{FAILURE_BYTES, bounded},
};

/// The longest delay a handler may ask for.
const RETRY_DELAY_MAX: Duration = Duration::from_secs(366 * 24 * 3600);
/// Functions of a trap's stack that are named.
const FRAMES: usize = 3;

/// What came back from the guest.
pub(crate) enum Ending<T> {
    Answered(T),
    Trapped(wasmtime::Error),
}

impl<T> Ending<T> {
    pub(crate) fn of(answer: wasmtime::Result<T>) -> Self {
        match answer {
            Ok(answer) => Self::Answered(answer),
            Err(error) => Self::Trapped(error),
        }
    }

    /// Another reading of the answer, which may fail.
    pub(crate) fn and_then<U>(
        self,
        read: impl FnOnce(T) -> Result<U, Failure>,
    ) -> Result<Ending<U>, Failure> {
        match self {
            Self::Answered(answer) => read(answer).map(Ending::Answered),
            Self::Trapped(error) => Ok(Ending::Trapped(error)),
        }
    }
}

/// What a guest says of one message.
pub(crate) type Said = Result<Option<String>, types::Failure>;

/// An explicit answer of the handler stands. Everything else gives way to what went wrong
/// in the transaction, which a handler may not have noticed.
pub(crate) async fn settle(mut state: State, ending: Ending<Said>) -> Answer {
    let (result, said) = match ending {
        Ending::Answered(Err(answer)) => match decided(&answer) {
            Some(failure) => return Err(failure),
            None => (Err(other(&answer)), other(&answer).text),
        },
        Ending::Answered(Ok(result)) => (Ok(result), String::new()),
        Ending::Trapped(error) => return Err(stopped(&mut state, &error).await),
    };
    if let Some(failure) = unnoticed(&mut state, &said).await {
        return Err(failure);
    }
    let result = checked(result?, state.limits.outcome_bytes_max)?;
    forget_savepoints(&mut state).await?;
    Ok(result)
}

/// What went wrong in the transaction speaks for the whole call, since nobody knows which message
/// it belongs to; otherwise each answer stands for itself.
pub(crate) async fn settle_batch(
    mut state: State,
    ending: Ending<Vec<Said>>,
) -> Result<Vec<Answer>, Failure> {
    let answers = match ending {
        Ending::Answered(answers) => answers,
        Ending::Trapped(error) => return Err(stopped(&mut state, &error).await),
    };
    if let Some(failure) = unnoticed(&mut state, "").await {
        return Err(failure);
    }
    forget_savepoints(&mut state).await?;
    let bytes_max = state.limits.outcome_bytes_max;
    let judge = |said: Said| match said {
        Ok(result) => checked(result, bytes_max),
        Err(answer) => Err(decided(&answer).unwrap_or_else(|| other(&answer))),
    };
    Ok(answers.into_iter().map(judge).collect())
}

/// A trap gives way to what went wrong before it.
async fn stopped(state: &mut State, error: &wasmtime::Error) -> Failure {
    if error.downcast_ref::<ConnectionLost>().is_some() {
        return Failure::new(FailureKind::Crashed, ConnectionLost.to_string());
    }
    let failure = trapped(state, error);
    unnoticed(state, &failure.text).await.unwrap_or(failure)
}

async fn forget_savepoints(state: &mut State) -> Result<(), Failure> {
    state
        .forget_savepoints()
        .await
        .map_err(|lost| Failure::new(FailureKind::Crashed, lost.to_string()))
}

/// The answers that decide what becomes of the message.
fn decided(answer: &types::Failure) -> Option<Failure> {
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

fn other(answer: &types::Failure) -> Failure {
    match answer {
        types::Failure::Other(text) => {
            Failure::new(FailureKind::Other, bounded(text, FAILURE_BYTES))
        }
        _ => Failure::new(FailureKind::Other, String::new()),
    }
}

/// A failed statement, a refusal or a cap, with what the guest made of it.
async fn unnoticed(state: &mut State, said: &str) -> Option<Failure> {
    let (kind, text) = match (state.tx_error().await, state.session.fault()) {
        (Some(error), _) => (
            FailureKind::Sql { sqlstate: error.sqlstate.clone() },
            format!("{}: {}", error.sqlstate, error.message),
        ),
        (None, Some(fault)) => (fault.kind.clone(), fault.text.clone()),
        (None, None) => return None,
    };
    let text = match said.is_empty() {
        true => text,
        false => format!("{text}; the handler: {said}"),
    };
    Some(Failure::new(kind, bounded(&text, FAILURE_BYTES)))
}

pub(crate) fn trapped(state: &State, error: &wasmtime::Error) -> Failure {
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

/// Whether the result can be kept as jsonb, so that it fails here, with its reason, and
/// not in the completion.
fn checked(result: Option<String>, bytes_max: usize) -> Result<Option<String>, Failure> {
    let bad = |text: String| Err(Failure::new(FailureKind::BadResult, text));
    let Some(text) = &result else { return Ok(None) };
    if text.len() > bytes_max {
        return bad(format!(
            "the result has {} bytes, more than the {bytes_max} of `outcome_bytes_max`",
            text.len()
        ));
    }
    match serde_json::from_str::<Value>(text) {
        Err(error) => bad(format!("the result is not JSON: {error}")),
        Ok(value) if has_nul(&value) => {
            bad("the result contains `\\u0000`, which PostgreSQL cannot store".to_owned())
        }
        Ok(_) => Ok(result),
    }
}

/// Recursion is bounded by the parser's own limit on nesting.
fn has_nul(value: &Value) -> bool {
    match value {
        Value::String(text) => text.contains('\0'),
        Value::Array(values) => values.iter().any(has_nul),
        Value::Object(members) => {
            members.iter().any(|(name, value)| name.contains('\0') || has_nul(value))
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_that_jsonb_takes_are_kept() {
        assert_eq!(checked(None, 0), Ok(None));
        for text in
            ["null", "{}", "\"a\\u00e9\"", "[1, 2.5, {\"a\": null}]", " 1 ", "\"\\ud83d\\ude00\""]
        {
            assert_eq!(checked(Some(text.to_owned()), 100), Ok(Some(text.to_owned())));
        }
    }

    #[test]
    fn results_that_jsonb_refuses_are_the_handlers_failure() {
        let deep = format!("{}{}", "[".repeat(1000), "]".repeat(1000));
        for text in [
            "",
            "{",
            "undefined",
            "'a'",
            "\"\\u0000\"",
            "{\"\\u0000\": 1}",
            "[[\"a\\u0000\"]]",
            "\"\\ud800\"",
            "1 2",
            "NaN",
            &deep,
        ] {
            let failure = checked(Some(text.to_owned()), 10_000).expect_err(text);
            assert_eq!(failure.kind, FailureKind::BadResult, "{text}");
        }
        assert!(checked(Some("\"long\"".to_owned()), 3).is_err());
    }

    #[test]
    fn an_endless_delay_is_cut() {
        let failure = decided(&types::Failure::Retry(Some(u64::MAX))).expect("it decides");
        assert_eq!(failure.kind, FailureKind::Retry { delay: Some(RETRY_DELAY_MAX) });
    }
}
