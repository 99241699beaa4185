//! The sender: sends an outgoing message to an HTTP endpoint, in one request. A tenant chooses the
//! endpoint, and the request leaves from the operator's network. So the sender takes care that it
//! reaches nothing else there (server-side request forgery).
//!
//! # A request
//!
//! [`Sender::send`] takes these steps, and the first that fails ends it:
//!
//! 1. The host and port of the URL stand in the operator's list and in the tenant's
//!    ([`AllowedHosts`]). `http:` needs a third list, of the operator's.
//! 2. The headers are checked: no line breaks, none of those that the sender sets.
//! 3. The name is looked up, once. Every address that DNS returns is judged. If any of them is not
//!    of the public Internet, nothing is sent, unless the operator has allowed its range
//!    ([`SenderOptions::private_ranges_allowed`]).
//! 4. The sender connects to one of the judged addresses, without a second lookup. A name whose
//!    address changes in between (DNS rebinding) gains nothing. The address at the other end of the
//!    socket is compared once more.
//! 5. TLS checks the certificate against the name of the URL, with the system's authorities.
//! 6. The request is sent, and the answer read up to a bound.
//!
//! One deadline covers all of it, and a second one what precedes the request.
//!
//! # URLs
//!
//! A URL is read by the parser of the WHATWG's standard, as a browser reads it: decimal, octal,
//! hexadecimal and short forms of IPv4, percent-encoding, and names in other scripts all become one
//! normal form, and only that form is judged, looked up and sent. A URL with user or password, with
//! white space, a backslash or a fragment is refused.
//!
//! # What it never does
//!
//! It follows no redirect, reads no proxy settings, and shows no secret: URLs beyond host and port,
//! values of headers and signing secrets are in no error and no `Debug` output.
//!
//! It keeps no connection. A pool, if one is added, must be keyed by tenant, revision of the
//! endpoint and address: a connection that was judged for one is not judged for another.
//!
//! # What it cannot know
//!
//! A network whose NAT64 has a prefix of its own, instead of `64:ff9b::/96`, hides IPv4 addresses
//! in public ones of IPv6. There, and for public addresses that lead back into the operator's own
//! network, a firewall has to do its part.
//!
//! # What the receiver gets
//!
//! | header | value |
//! | --- | --- |
//! | `idempotency-key`, `ce-id` | id of the message, the same with each attempt |
//! | `ce-specversion`, `ce-source`, `ce-type` | CloudEvents 1.0, binary mode |
//! | `content-type`, `traceparent` | those of the message |
//! | `webhook-id`, `webhook-timestamp`, `webhook-signature` | Standard Webhooks ([`SigningKeys`]) |
//!
//! followed by the headers of the endpoint and those of the message.
//!
//! The modules stand in reading order.

#![cfg_attr(test, allow(clippy::unwrap_used))]

// Texts from outside, as errors show them.
mod text;
// Ranges of addresses in CIDR notation.
mod address_range;
// Addresses that are not of the public Internet.
mod address;
// The target of a URL: host, port and path.
mod target;
// Lists of the hosts that may be sent to.
mod allowed_hosts;
// Headers from outside.
mod header;
// Signatures.
mod signing;
// The place to which requests go.
mod endpoint;
// What is sent.
mod request;
// What comes back.
mod response;
// Errors of a request.
mod error;
// What a result means for the message.
mod verdict;
// DNS.
mod resolve;
// The connection to a judged address.
mod connect;
// One request and its answer on a connection.
mod exchange;
// The sender of a process.
mod sender;

#[cfg(test)]
mod tests;

pub use address::AddressKind;
pub use address_range::{AddressRange, AddressRangeFault};
pub use allowed_hosts::{AllowedHostFault, AllowedHosts};
pub use endpoint::{Endpoint, EndpointFault, EndpointMethod, EndpointSettings, UnknownMethod};
pub use error::{HostList, SendError, SendStage};
pub use header::HeaderFault;
pub use request::{Request, percent_encoded};
pub use resolve::{Resolve, SystemResolver};
pub use response::{BodyEnd, RETRY_AFTER_MAX, Response, retry_after};
pub use sender::{Sender, SenderFault, SenderOptions};
pub use signing::{SigningKeyFault, SigningKeys};
pub use verdict::Verdict;
