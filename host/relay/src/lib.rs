//! The relay: sends outgoing messages to their destinations, after the transaction that wrote them
//! has committed. One [`Relay`] in each host process serves all databases with an inbox.
//!
//! # A message
//!
//! A row of `oncebox.outgoing` becomes due. The relay hears of its tenant and destination from the
//! host that committed it, or finds them (`database.rs`), leases the row
//! (`oncebox.lease_outgoing`), commits, sends it (`kafka.rs`), and marks it
//! (`oncebox.mark_outgoing`). A tenant and a destination together are a *pair*. Each pair is worked
//! by a task of its own (`pair.rs`) with its own bounds and its own pauses, so that a dead
//! destination delays no other.
//!
//! A relay looks for what is unsent, and keeps no position. A transaction that began early and
//! committed late is found like any other.
//!
//! # A crash between two steps
//!
//! | the process dies | what the row says | what follows |
//! | --- | --- | --- |
//! | before the lease commits | `received` or `failed_retryable` | any relay leases it |
//! | after the lease, before the send | `in_progress` | the lease runs out (30 s), and it is sent |
//! | while the send is under way | `in_progress` | the same; it may arrive a second time |
//! | after the confirmation, before the mark | `in_progress` | it arrives again, with the same id |
//! | after the mark | `completed` | nothing |
//!
//! So a message reaches Kafka at least once, under one id, which receivers deduplicate by; an inbox
//! does. A message to an inbox is inserted there and marked in one transaction: it is delivered
//! exactly once (`inbox.rs`).
//!
//! An endpoint gets a message at least once too (`http.rs`), under one `Idempotency-Key`, the id.
//! Its answer may be kept, with the mark, or become a message of an inbox: that is inserted and the
//! outgoing message marked in one transaction, under an id derived from the message's
//! (`answer.rs`). So an answer is kept or delivered once, however often the request is repeated.
//!
//! # Two hosts
//!
//! All hosts work on all pairs. Leases pass over rows that are locked (`SKIP LOCKED`), and a leased
//! row is not due. So of two hosts each leases other rows, and neither waits.
//!
//! # A lease that runs out
//!
//! No send begins unless it must end before its lease does: librdkafka gives a record up within 15
//! seconds. Only a process that stood still, or a broker that answers very late, has a message
//! under way after its lease. Each lease has a number, the row's `epoch`. A mark with an old number
//! changes nothing, with one exception: a confirmation counts as long as nobody has leased the row
//! since, for it is true.
//!
//! # Order
//!
//! A lane is what must keep its order: a tenant, a destination and a key. A message is leased only
//! while no earlier one of its lane is open, and one that failed is open until its retry. So one
//! message of a lane is under way at a time, over all hosts, in the order of due times, then of
//! emits. Order is that of what is committed: a transaction that began before another and commits
//! after it may find that the other's message has gone. Messages without a key have no order.
//!
//! The price is that a lane sends one message in the time of a lease, a send, a mark and the rest of
//! the pause between two leases. Lanes are independent of each other, and a pair has up to 500
//! messages under way.
//!
//! A parked message lets its lane go on, unless its consumer's policy says `[outgoing] on_parked =
//! "stop"`. Then the lane waits until an operator redrives or discards it. When the lane goes on, a
//! redriven message comes after those that have passed it.
//!
//! # Pauses
//!
//! After a lease of messages to Kafka that took fewer than it may, or of any that found none, a pair
//! pauses three times as long as the lease took, 50 ms at most. What is committed and what is
//! answered meanwhile is leased and marked together. So a database that is busy has fewer leases,
//! each of more messages, and where it is not, a message is under way a few milliseconds after its
//! commit. Before its task ends, a pair of any destination pauses as long: the next commit that
//! names it makes another task.
//!
//! # Cancel against lease
//!
//! A handler's cancel and a lease each lock the row, and each passes over a row that the other has
//! locked. The lease commits before anything is sent. An attempt that ends without an answer, with
//! the reason `unconfirmed`, `failed` or `lease_expired`, sets `may_have_arrived` in the row for
//! good, and no cancel takes such a row. So a message is cancelled or sent, never both.
//!
//! # What is away
//!
//! A database that is away pauses the loop of that database; leases that this host held there run
//! out, or are marked when it answers in time. Brokers that are away pause the pair and cost no
//! attempt: a message waits for them however long they are away. A failure of the message alone
//! counts, is repeated after 1 s to 5 min, and parks it as `expired` once it has failed ten times
//! and is a day past its due time.
//!
//! A tenant's own database has its own loop. Tenants, limits and policies are read in the host's
//! database, which is their source: while that is away, nothing is sent anywhere, since nobody
//! knows whether it is still allowed.
//!
//! # Memory
//!
//! What a process has leased takes 256 MiB at most, over all pairs, but for the last message of
//! each lease. A pair with nothing under way waits for its part of that before it leases.
//!
//! # Endpoints
//!
//! An endpoint has bounds of its own, on each host for itself: requests at a time, and requests a
//! second (`rate.rs`). Its circuit breaker (`breaker.rs`) opens after failures in a row; nothing is
//! leased while it is open, and one message probes after its pause. All requests of a tenant
//! together have a bound too, so that one tenant does not take the host's sockets. An endpoint that
//! asks for fewer requests is left alone for the time that it asks for, and that costs no attempt. A
//! lease lasts longer than the longest request. The lists of hosts are compared before each request.
//!
//! # States of tenants and consumers
//!
//! A suspended tenant sends nothing. The messages of a paused or draining consumer are sent, since
//! what caused them is committed. A consumer in quarantine, or one that is being deleted, sends
//! nothing. Before each send the destination is compared with the tenant's limits again. Changes
//! take effect within a second.
//!
//! # The end of a host
//!
//! A host that stops leases nothing more, gives back what it has leased and not begun to send, and
//! waits for the answers of the rest, for 25 s at most. A request that an endpoint has not answered
//! by then is repeated by another host when its lease has run out.

#![cfg_attr(test, allow(clippy::unwrap_used))]

// The host, as the relay needs it.
mod host;
// The relay of a process.
mod relay;
// The loop of one database.
mod database;
// The messages of one tenant for one destination.
mod pair;
// Attempts that have ended.
mod attempt;
// What a pair's task may lease now.
mod turn;
// The state of a pair between two of its tasks.
mod pair_state;
// Statements of the relay.
mod store;
// An outgoing message as its row holds it.
mod row;
// The span of an attempt to send.
mod span;
// The results of sending, and what they make of the row.
mod outcome;
// The reasons of a status.
mod reason;
// Delays and pauses.
mod backoff;
// The headers of a record.
mod record_headers;
// Sending to Kafka.
mod kafka;
// Delivering to the inbox of a consumer.
mod inbox;
// Sending to an endpoint over HTTP.
mod http;
// The answers of endpoints.
mod answer;
// The endpoints that this host sends to.
mod endpoints;
// Circuit breakers of endpoints.
mod breaker;
// The tenants and consumers, as the host's database has them now.
mod directory;
// Metrics.
mod metric;

pub use host::{EndpointBreakerState, RelayDatabase, RelayEndpoint, RelayHost};
pub use reason::OutgoingReason;
pub use relay::Relay;
