//! Messages over HTTP: `POST /in/<tenant>/<consumer>`. A request is verified by the consumer's
//! secret before anything else is done with its body. Then it becomes a message by the consumer's
//! policy, as a record of Kafka does, and is stored in the inbox under its id. Only then is it
//! answered. A retry worker of the consumer runs it.
//!
//! The modules stand in the order in which a request passes through them.

// Tests expect what the code behind them holds.
#![cfg_attr(test, allow(clippy::unwrap_used))]

// The route, and the steps of a request.
mod route;
// The consumers that take messages over HTTP, as the host's database has them now.
mod directory;
// The verification of a request: of its headers, then of its body.
mod verifier;
// The body of a request, within its bounds.
mod body;
// From a request to a record.
mod request;
// The transaction that stores a message.
mod store;
// The answers.
mod answer;

pub use route::{Ingress, IngressHost};
