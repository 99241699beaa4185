//! From a plain function to what the host calls.

use serde::{Deserialize, Serialize};

use crate::{Context, Failure, Message, Result, bindings::handler::oncebox::handler::types, log};

/// An argument of a handler, made from the message.
///
/// These are the payload as any [`Deserialize`] type, the [`Message`], by value or by
/// reference, and the [`Context`].
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be an argument of a handler",
    label = "neither a payload that implements `Deserialize`, nor `Message`, `&Message` or `Context`"
)]
pub trait FromMessage<'m>: Sized {
    /// The argument, or why there is none.
    fn from_message(message: &'m Message) -> Result<Self>;
}

/// The payload. What is not the expected JSON can never succeed: it is rejected. A message
/// without a payload is `None` to an `Option`, and rejected otherwise.
impl<'m, T: Deserialize<'m>> FromMessage<'m> for T {
    fn from_message(message: &'m Message) -> Result<Self> {
        message.payload_as()
    }
}

impl<'m> FromMessage<'m> for &'m Message {
    fn from_message(message: &'m Message) -> Result<Self> {
        Ok(message)
    }
}

impl FromMessage<'_> for Message {
    fn from_message(message: &Message) -> Result<Self> {
        Ok(message.clone())
    }
}

impl FromMessage<'_> for Context {
    fn from_message(_: &Message) -> Result<Self> {
        Ok(Self::new())
    }
}

/// What a handler may return: `Result<T>` of any `T` that can be written as JSON.
///
/// The JSON is kept with the message as its result. What is written as `null`, such as `()`
/// and `None`, is no result.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the answer of a handler",
    label = "a handler returns `oncebox_guest::Result<T>`, where `T` is `()` or implements `Serialize`"
)]
pub trait IntoAnswer {
    /// The JSON result, if there is one, or the failure.
    fn into_answer(self) -> Result<Option<String>>;
}

impl<T: Serialize, E: Into<Failure>> IntoAnswer for Result<T, E> {
    fn into_answer(self) -> Result<Option<String>> {
        let value = self.map_err(Into::into)?;
        to_result(&value)
    }
}

/// The JSON that is kept with a message; none for `null`.
pub(crate) fn to_result(value: &impl Serialize) -> Result<Option<String>> {
    let text = serde_json::to_string(value).map_err(|error| {
        Failure::Other(format!("the result cannot be written as JSON: {error}"))
    })?;
    Ok((text != "null").then_some(text))
}

/// A function of at most three arguments that can be a component's handler.
#[diagnostic::on_unimplemented(
    message = "this function cannot be a handler",
    label = "its arguments must implement `FromMessage`, and its answer `IntoAnswer`",
    note = "such as `fn(order: Order) -> oncebox_guest::Result<()>`, where `Order: serde::Deserialize`"
)]
pub trait Handler<'m, Arguments> {
    /// Makes the arguments, and calls the function with them.
    fn call(&self, message: &'m Message) -> Result<Option<String>>;
}

macro_rules! handlers {
    ($(($($argument:ident),+)),+) => {$(
        impl<'m, F, R, $($argument),+> Handler<'m, ($($argument,)+)> for F
        where
            F: Fn($($argument),+) -> R,
            R: IntoAnswer,
            $($argument: FromMessage<'m>),+
        {
            fn call(&self, message: &'m Message) -> Result<Option<String>> {
                self($($argument::from_message(message)?),+).into_answer()
            }
        }
    )+};
}

handlers!((A), (A, B), (A, B, C));

/// What the `handler` attribute exports.
#[doc(hidden)]
pub fn handle<'m, A>(
    handler: impl Handler<'m, A>,
    message: &'m Message,
) -> std::result::Result<Option<String>, types::Failure> {
    log::panics();
    handler.call(message).map_err(Failure::into_wire)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[derive(Deserialize)]
    struct Order<'a> {
        id: &'a str,
        units: i32,
    }

    fn message(payload: Option<&str>) -> Message {
        let mut message = Message::new("m-1", "order.placed", &Value::Null);
        message.payload = payload.map(Into::into);
        message
    }

    /// What a handler answers to a payload.
    fn check<'m, A>(
        handler: impl Handler<'m, A>,
        message: &'m Message,
        expected: Result<Option<&str>, &str>,
    ) {
        let answer = handler.call(message).map_err(|failure| failure.to_string());
        let answer = answer.as_ref().map(|result| result.as_deref());
        assert_eq!(answer.map_err(String::as_str), expected);
    }

    fn ok<T>(value: T) -> Result<T> {
        Ok(value)
    }

    #[test]
    fn arguments_are_found_by_their_types() {
        let order = message(Some(r#"{"id": "o-1", "units": 2}"#));
        check(|_: Order<'_>| ok(()), &order, Ok(None));
        check(|order: Order<'_>| ok(order.units), &order, Ok(Some("2")));
        check(
            |order: Order<'_>| ok(Some(order.id.len())),
            &order,
            Ok(Some("3")),
        );
        fn both(order: Value, message: &Message) -> Result<Value> {
            Ok(serde_json::json!({ "order": order["id"], "message": message.id }))
        }
        check(both, &order, Ok(Some(r#"{"message":"m-1","order":"o-1"}"#)));
        check(
            |message: Message, _: Context| ok(message.id),
            &order,
            Ok(Some("\"m-1\"")),
        );
        let failing = |_: Message| Result::<()>::Err(Failure::park("why"));
        check(failing, &order, Err("park: why"));
    }

    #[test]
    fn what_is_not_the_payload_is_rejected_with_its_place() {
        let handler = |order: Order<'_>| ok(order.units);
        for (payload, reason) in [
            (
                Some(r#"{"id": "o-1"}"#),
                "reject: malformed payload: missing field `units` at line 1 column 13",
            ),
            (
                Some("{"),
                "reject: malformed payload: EOF while parsing an object at line 1 column 1",
            ),
            (None, "reject: the message has no payload"),
        ] {
            check(handler, &message(payload), Err(reason));
        }
        let tombstone = |order: Option<Order<'_>>| ok(order.is_none());
        check(tombstone, &message(None), Ok(Some("true")));
    }
}
