//! The `oncebox:handler` bindings, generated once for all examples, and the few lines that
//! make them pleasant: values from Rust types, rows with typed columns, errors for `?`.

mod sql;
mod value;

/// What `wit-bindgen` makes of the contract in `wit/`.
mod generated {
    wit_bindgen::generate!({
        path: "../../wit",
        world: "handler",
        pub_export_macro: true,
        export_macro_name: "export_handler",
        default_bindings_module: "oncebox_guest_bindings",
    });
}

/// The same for the world of whole batches, with the types of the first.
#[doc(hidden)]
pub mod generated_batch {
    wit_bindgen::generate!({
        path: "../../wit",
        world: "batch-handler",
        pub_export_macro: true,
        export_macro_name: "export_batch_handler",
        default_bindings_module: "oncebox_guest_bindings",
        with: {
            "oncebox:handler/types@0.1.0": crate::generated::oncebox::handler::types,
            "oncebox:handler/sql@0.1.0": crate::generated::oncebox::handler::sql,
            "oncebox:handler/log@0.1.0": crate::generated::oncebox::handler::log,
            "oncebox:handler/config@0.1.0": crate::generated::oncebox::handler::config,
        },
    });
}

use std::panic::PanicHookInfo;

use generated::oncebox::handler::log::{Level, log};
use serde::Deserialize;

pub use generated::oncebox::handler::sql::{Element, Error as SqlError, Savepoint, Value};
pub use generated::oncebox::handler::types::{Failure, Message};
#[doc(hidden)]
pub use generated::{export_handler, exports};
#[doc(hidden)]
pub use generated_batch::export_batch_handler;
pub use sql::{Row, execute, query};
pub use value::FromValue;

/// What a handler answers: an optional JSON result, which is kept with the message.
pub type Answer = Result<Option<String>, Failure>;

/// Makes the given `fn(Message) -> Answer` the component's handler.
#[macro_export]
macro_rules! handler {
    ($handle:path) => {
        struct Component;

        impl $crate::exports::oncebox::handler::incoming_handler::Guest for Component {
            fn handle(message: $crate::Message) -> $crate::Answer {
                $crate::log_panics();
                $handle(message)
            }
        }

        $crate::export_handler!(Component with_types_in $crate);
    };
}

/// Makes the given `fn(Vec<Message>) -> Vec<Answer>` the component's handler of whole batches.
#[macro_export]
macro_rules! batch_handler {
    ($handle:path) => {
        struct Component;

        impl $crate::generated_batch::exports::oncebox::handler::incoming_batch_handler::Guest for Component {
            fn handle_batch(messages: Vec<$crate::Message>) -> Vec<$crate::Answer> {
                $crate::log_panics();
                $handle(messages)
            }
        }

        $crate::export_batch_handler!(Component with_types_in $crate::generated_batch);
    };
}

/// Reads the payload as JSON. What is not the expected JSON can never succeed: rejected.
pub fn parse<'a, T: Deserialize<'a>>(message: &'a Message) -> Result<T, Failure> {
    let Some(payload) = &message.payload else {
        return Err(Failure::Reject("the message has no payload".into()));
    };
    serde_json::from_slice(payload)
        .map_err(|error| Failure::Reject(format!("malformed payload: {error}")))
}

/// Answers ok with a JSON document.
pub fn done(result: impl Into<String>) -> Answer {
    Ok(Some(result.into()))
}

/// A panic is a trap, which carries no text out of the guest; so its text goes to the log.
#[doc(hidden)]
pub fn log_panics() {
    fn report(panic: &PanicHookInfo<'_>) {
        log(Level::Error, &panic.to_string());
    }
    std::panic::set_hook(Box::new(report));
}
