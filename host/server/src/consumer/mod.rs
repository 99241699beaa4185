//! A consumer as one host runs it, and the changes that stop it for longer.

// Its inbox, its Kafka half and its retry workers.
pub(crate) mod runtime;
// Its membership in the Kafka group, which it leaves while it has nothing to read.
pub(crate) mod idle;
// Marks of starts, and the quarantine of a consumer that ends hosts.
pub(crate) mod starts;
// Handlers of its deployments.
pub mod loader;
// The choice of a deployment for each message.
pub mod router;
// Drains, seeks and deletions.
pub(crate) mod operations;
// The worker that copies dead letters.
pub(crate) mod dead_letter_topic;
// The poller that wakes the retry workers of all consumers.
pub(crate) mod wakeups;
// The check that its inbox remembers for long enough.
pub(crate) mod horizon;
// Counts of refused duplicates.
pub(crate) mod duplicates;
