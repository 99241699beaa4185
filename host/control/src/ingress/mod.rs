//! Messages over HTTP: the secrets by which consumers know their senders, and the consumers that
//! take them, opened for requests. Secrets are sealed as a tenant's credentials are, and no answer
//! shows them.

// Set, finish a rotation and remove.
pub(crate) mod secret;
// The consumers that take messages over HTTP.
pub(crate) mod open;
