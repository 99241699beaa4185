//! Endpoints: places outside to which a tenant's handlers send, by the names that the tenant gives
//! them. The operator's settings and the tenant's limits say which hosts are allowed. URL, headers
//! and signing secrets are sealed as a tenant's credentials are, and no answer shows them.

// The settings of an endpoint, as they are given and as they are shown.
pub(crate) mod settings;
// The sealed part of an endpoint.
mod request;
// Set, rotate, list and remove.
pub(crate) mod change;
// An endpoint, opened for a request.
pub(crate) mod open;
// Circuit breakers, as hosts report them.
pub(crate) mod breakers;
