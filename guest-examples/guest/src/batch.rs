//! Handlers of whole batches: statements that work on sets, and an answer for each message.

use std::{fmt, ops::Deref};

use serde::{Serialize, de::DeserializeOwned};

use crate::{
    Failure, Message, Result, bindings::handler::oncebox::handler::types, handler::to_result, log,
};

/// The messages of one transaction, each with its payload read as `T`.
///
/// A message is open until it fails. A malformed payload fails its message before the handler
/// is called; [`each`](Self::each) fails the messages it finds wrong. Iterators and
/// [`column`](Self::column) show the open ones, and when the handler returns ok, those are ok.
///
/// A failure costs a second run: the host undoes what the call wrote, and calls again without
/// the messages that failed.
///
/// ```no_run
/// use oncebox_guest::{Batch, Result, execute, params};
/// # #[derive(serde::Deserialize)] struct Order { id: String, units: i32 }
///
/// #[oncebox_guest::batch_handler]
/// fn place(batch: &mut Batch<Order>) -> Result<()> {
///     batch.each(|order| {
///         if order.units < 1 {
///             oncebox_guest::reject!("`units` must be positive");
///         }
///         Ok(())
///     });
///     execute(
///         "INSERT INTO orders (id, units) SELECT * FROM unnest($1::text[], $2::int[])",
///         params![batch.column(|order| &order.id), batch.column(|order| order.units)],
///     )?;
///     Ok(())
/// }
/// ```
#[derive(Debug)]
pub struct Batch<T> {
    entries: Vec<Entry<T>>,
}

/// A message's place in the answer.
#[derive(Debug)]
enum Entry<T> {
    Open {
        item: Item<T>,
        result: Option<String>,
    },
    Failed(Failure),
}

/// A message of a batch. It dereferences to its payload.
pub struct Item<T> {
    /// The message as it came.
    pub message: Message,
    /// Its payload.
    pub payload: T,
}

impl<T> Deref for Item<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.payload
    }
}

impl<T: fmt::Debug> fmt::Debug for Item<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut item = f.debug_struct("Item");
        item.field("id", &self.message.id)
            .field("payload", &self.payload)
            .finish()
    }
}

impl<T> Batch<T> {
    /// The open messages, in the order of their partition.
    pub fn iter(&self) -> impl Iterator<Item = &Item<T>> {
        self.entries.iter().filter_map(|entry| match entry {
            Entry::Open { item, .. } => Some(item),
            Entry::Failed(_) => None,
        })
    }

    /// How many messages are open.
    pub fn len(&self) -> usize {
        self.iter().count()
    }

    /// Whether no message is open.
    pub fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }

    /// One value of each open message, in one order for all columns: what `unnest` wants.
    pub fn column<'a, C>(&'a self, value: impl Fn(&'a Item<T>) -> C) -> Vec<C> {
        self.iter().map(value).collect()
    }

    /// Asks about each open message: an error fails this message alone, and a value is kept as
    /// its result, unless it is `()` or `None`.
    pub fn each<R: Serialize>(&mut self, mut ask: impl FnMut(&Item<T>) -> Result<R>) {
        for entry in &mut self.entries {
            let Entry::Open { item, result } = entry else {
                continue;
            };
            match ask(item).and_then(|value| to_result(&value)) {
                Ok(None) => {}
                Ok(some) => *result = some,
                Err(failure) => *entry = Entry::Failed(failure),
            }
        }
    }

    fn answers(self) -> Vec<Answer> {
        let answer = |entry| match entry {
            Entry::Open { result, .. } => Ok(result),
            Entry::Failed(failure) => Err(failure.into_wire()),
        };
        self.entries.into_iter().map(answer).collect()
    }
}

impl<T: DeserializeOwned> Batch<T> {
    /// Reads the payloads; the malformed fail alone.
    fn of(messages: Vec<Message>) -> Self {
        let entry = |message: Message| match message.payload_as() {
            Ok(payload) => Entry::Open {
                item: Item { message, payload },
                result: None,
            },
            Err(failure) => Entry::Failed(failure),
        };
        Self {
            entries: messages.into_iter().map(entry).collect(),
        }
    }
}

/// A function that can be a component's handler of batches.
#[diagnostic::on_unimplemented(
    message = "this function cannot be a handler of batches",
    label = "its type must be `fn(&mut Batch<T>) -> oncebox_guest::Result<()>`, where `T: serde::de::DeserializeOwned`"
)]
pub trait BatchHandler<T> {
    /// Handles the open messages.
    fn call(&self, batch: &mut Batch<T>) -> Result<()>;
}

impl<T, F: Fn(&mut Batch<T>) -> Result<()>> BatchHandler<T> for F {
    fn call(&self, batch: &mut Batch<T>) -> Result<()> {
        self(batch)
    }
}

type Answer = std::result::Result<Option<String>, types::Failure>;

/// What the `batch_handler` attribute exports: an answer for each message, in their order.
///
/// An error of the function is nobody's in particular, so it is the answer for each.
#[doc(hidden)]
pub fn handle_batch<T: DeserializeOwned>(
    handler: &impl BatchHandler<T>,
    messages: Vec<Message>,
) -> Vec<Answer> {
    log::panics();
    let mut batch = Batch::of(messages);
    if !batch.is_empty()
        && let Err(failure) = handler.call(&mut batch)
    {
        batch.each(|_| Result::<()>::Err(failure.clone()));
    }
    batch.answers()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn answers(handler: impl BatchHandler<i32>, payloads: &[Value]) -> Vec<Answer> {
        let message = |(at, payload)| Message::new(&format!("m-{at}"), "n", payload);
        handle_batch(&handler, payloads.iter().enumerate().map(message).collect())
    }

    fn rejected(reason: &str) -> Answer {
        Err(types::Failure::Reject(reason.into()))
    }

    #[test]
    fn each_message_has_the_answer_at_its_place() {
        let handler = |batch: &mut Batch<i32>| {
            batch.each(|n| {
                if **n < 0 {
                    Err(Failure::reject("negative"))
                } else {
                    Ok(**n * 2)
                }
            });
            assert_eq!(batch.column(|n| **n), [1, 3]);
            assert_eq!(batch.len(), 2);
            batch.each(|n| Ok((**n == 3).then_some("three")));
            Ok(())
        };
        let answers = answers(handler, &[json!(1), json!("two"), json!(3), json!(-4)]);
        let malformed =
            "malformed payload: invalid type: string \"two\", expected i32 at line 1 column 5";
        let expected = [
            Ok(Some("2".to_owned())),
            rejected(malformed),
            Ok(Some("\"three\"".to_owned())),
            rejected("negative"),
        ];
        assert_eq!(answers, expected);
    }

    #[test]
    fn an_error_of_the_handler_is_the_answer_for_every_open_message() {
        let failing = |_: &mut Batch<i32>| Err(Failure::other("no rate"));
        let answers = answers(failing, &[json!(1), json!(null)]);
        assert_eq!(answers[0], Err(types::Failure::Other("no rate".into())));
        assert!(
            matches!(&answers[1], Err(types::Failure::Reject(_))),
            "{answers:?}"
        );
    }

    #[test]
    fn a_batch_of_malformed_messages_calls_no_handler() {
        let handler = |_: &mut Batch<i32>| -> Result<()> { panic!("it was called") };
        assert_eq!(answers(handler, &[json!(true)]).len(), 1);
    }
}
