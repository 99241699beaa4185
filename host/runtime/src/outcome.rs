//! Translation of every answer and every trap of a guest into an outcome of the inbox.

use std::time::Duration;

use oncebox_model::{
    handler::Answer,
    outcome::{Failure, FailureKind},
    outgoing::Output,
};
use serde_json::Value;
use wasmtime::{Trap, WasmBacktrace};
use wasmtime_wasi::I32Exit;

use crate::{
    bindings::oncebox::handler::types,
    host::sql::ConnectionLost,
    state::StoreState,
    text::{FAILURE_BYTES, bounded},
};

/// Longest delay of a retry that a handler may ask for.
const RETRY_DELAY_MAX: Duration = Duration::from_secs(366 * 24 * 3600);
/// Most functions of a trap's stack in the text of a failure.
const FRAMES: usize = 3;

/// The end of a call of the guest.
pub(crate) enum CallEnd<T> {
    /// A return with an answer.
    Answered(T),
    /// A trap, or another error of wasmtime.
    Trapped(wasmtime::Error),
}

impl<T> CallEnd<T> {
    pub(crate) fn of(answer: wasmtime::Result<T>) -> Self {
        match answer {
            Ok(answer) => Self::Answered(answer),
            Err(error) => Self::Trapped(error),
        }
    }

    /// Maps the answer by a function that may fail.
    pub(crate) fn and_then<U>(
        self,
        read: impl FnOnce(T) -> Result<U, Failure>,
    ) -> Result<CallEnd<U>, Failure> {
        match self {
            Self::Answered(answer) => read(answer).map(CallEnd::Answered),
            Self::Trapped(error) => Ok(CallEnd::Trapped(error)),
        }
    }
}

/// The answer of a guest for one message.
pub(crate) type GuestAnswer = Result<Option<String>, types::Failure>;

/// Returns the outcome of a call for one message. An explicit decision of the handler stands.
/// Everything else gives way to a failure in the transaction, which a handler may not have noticed.
pub(crate) async fn of_message(mut state: StoreState, end: CallEnd<GuestAnswer>) -> Answer {
    state.end_statements(matches!(end, CallEnd::Answered(Ok(_)))).await;
    let (result, guest_text) = match end {
        CallEnd::Answered(Err(answer)) => match decided(&answer) {
            Some(failure) => return Err(failure),
            None => (Err(other(&answer)), other(&answer).text),
        },
        CallEnd::Answered(Ok(result)) => (Ok(result), String::new()),
        CallEnd::Trapped(error) => return Err(failure_of_trap(&mut state, &error).await),
    };
    if let Some(failure) = transaction_failure(&mut state, &guest_text).await {
        return Err(failure);
    }
    let result = match checked(result?, state.limits.outcome_bytes_max) {
        Ok(result) => result,
        Err(failure) => {
            state.wait_for_enqueued().await;
            return Err(failure);
        }
    };
    forget_savepoints(&mut state).await?;
    Ok(Output { result, outgoing: state.take_outgoing().remove(&0).unwrap_or_default() })
}

/// Returns the outcomes of a call for a batch. A failure in the transaction fails the whole call,
/// since its message is not known. Otherwise each answer counts for its own message.
pub(crate) async fn of_batch(
    mut state: StoreState,
    end: CallEnd<Vec<GuestAnswer>>,
) -> Result<Vec<Answer>, Failure> {
    state.end_statements(false).await;
    let answers = match end {
        CallEnd::Answered(answers) => answers,
        CallEnd::Trapped(error) => return Err(failure_of_trap(&mut state, &error).await),
    };
    if let Some(failure) = transaction_failure(&mut state, "").await {
        return Err(failure);
    }
    forget_savepoints(&mut state).await?;
    let bytes_max = state.limits.outcome_bytes_max;
    let mut outgoing = state.take_outgoing();
    let outcome = |(at, answer): (usize, GuestAnswer)| -> Answer {
        let result = answer.map_err(|answer| failure_of(&answer))?;
        let result = checked(result, bytes_max)?;
        Ok(Output { result, outgoing: outgoing.remove(&at).unwrap_or_default() })
    };
    Ok(answers.into_iter().enumerate().map(outcome).collect())
}

/// Returns the failure of a trapped call. A failure in the transaction before the trap comes first.
async fn failure_of_trap(state: &mut StoreState, error: &wasmtime::Error) -> Failure {
    if error.downcast_ref::<ConnectionLost>().is_some() {
        return Failure::new(FailureKind::Crashed, ConnectionLost.to_string());
    }
    let failure = trapped(state, error);
    transaction_failure(state, &failure.text).await.unwrap_or(failure)
}

async fn forget_savepoints(state: &mut StoreState) -> Result<(), Failure> {
    state
        .forget_savepoints()
        .await
        .map_err(|lost| Failure::new(FailureKind::Crashed, lost.to_string()))
}

/// Returns the failure that a guest means.
pub(crate) fn failure_of(answer: &types::Failure) -> Failure {
    decided(answer).unwrap_or_else(|| other(answer))
}

/// Returns the failure of an answer that decides on the message: retry, reject or park.
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

/// Returns the transaction's first failure, if there is one: a failed statement, a refusal or a
/// cap. Its text ends with the guest's own.
async fn transaction_failure(state: &mut StoreState, guest_text: &str) -> Option<Failure> {
    let (kind, text) = match (state.tx_error().await, state.session.fault()) {
        (Some(error), _) => (
            FailureKind::Sql { sqlstate: error.sqlstate.clone() },
            format!("{}: {}", error.sqlstate, error.message),
        ),
        (None, Some(fault)) => (fault.kind.clone(), fault.text.clone()),
        (None, None) => return None,
    };
    let text = match guest_text.is_empty() {
        true => text,
        false => format!("{text}; the handler: {guest_text}"),
    };
    Some(Failure::new(kind, bounded(&text, FAILURE_BYTES)))
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

/// Checks that a result can be stored as jsonb. Otherwise the completion would fail, without the
/// reason.
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

/// Returns whether a value contains a NUL character. The parser's limit on nesting bounds the
/// recursion.
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
