//! Errors of a request.

use std::{fmt, net::IpAddr};

use crate::{address::AddressKind, header::HeaderFault};

/// Owner of a list of hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostList {
    /// The operator, for all tenants.
    Operator,
    /// The tenant's limits.
    Tenant,
}

impl fmt::Display for HostList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Operator => "the operator's settings",
            Self::Tenant => "the tenant's limits",
        })
    }
}

/// Step of a request, for an error of its deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendStage {
    /// The lookup of the name.
    Lookup,
    /// The connection.
    Connect,
    /// The handshake of TLS.
    Tls,
    /// The request and the head of its answer.
    Answer,
}

impl fmt::Display for SendStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lookup => "the lookup of its name",
            Self::Connect => "the connection",
            Self::Tls => "the handshake of TLS",
            Self::Answer => "the answer",
        })
    }
}

/// Error of a request: it was refused before it was sent, or has no answer. `endpoint` is host and
/// port. No text has the path of the URL, a header's value or a secret, and none has an address
/// that DNS gave: tenants read these texts, and must not learn the operator's network from them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// A list of hosts does not have the endpoint.
    #[error("`{endpoint}` is not among the hosts and ports that {list} allow")]
    HostNotAllowed {
        /// Host and port.
        endpoint: String,
        /// List that lacks it.
        list: HostList,
    },
    /// The endpoint has `http:`, which the operator does not allow for it.
    #[error("`{endpoint}` has `http:`, which the operator does not allow there; use `https:`")]
    PlainHttp {
        /// Host and port.
        endpoint: String,
    },
    /// An address of the host is not of the public Internet. Nothing was sent.
    #[error(
        "`{endpoint}` has an address that is not of the public Internet ({kind}); an operator may \
         allow its range"
    )]
    AddressRefused {
        /// Host and port.
        endpoint: String,
        /// The address, for the operator's log.
        address: IpAddr,
        /// Why it is refused.
        kind: AddressKind,
    },
    /// A part of the message cannot be sent as a header.
    #[error("{0}; change what the handler emits")]
    Header(#[from] HeaderFault),
    /// The name could not be looked up, or has no address.
    #[error("the name of `{endpoint}` cannot be looked up: {why}")]
    Lookup {
        /// Host and port.
        endpoint: String,
        /// Text of the resolver.
        why: String,
    },
    /// No connection could be made.
    #[error("`{endpoint}` cannot be reached: {why}")]
    Unreachable {
        /// Host and port.
        endpoint: String,
        /// Text of the operating system.
        why: String,
    },
    /// The socket is connected to another address than the judged one. Nothing was sent.
    #[error("the connection to `{endpoint}` leads to another address than the one that was judged")]
    PeerDiffers {
        /// Host and port.
        endpoint: String,
    },
    /// TLS failed, such as by a certificate for another name. Nothing was sent.
    #[error("no TLS with `{endpoint}`: {why}")]
    Tls {
        /// Host and port.
        endpoint: String,
        /// Text of OpenSSL.
        why: String,
    },
    /// A deadline passed.
    #[error("`{endpoint}` took too long for {stage}")]
    TimedOut {
        /// Host and port.
        endpoint: String,
        /// Step in which it passed.
        stage: SendStage,
    },
    /// The connection broke before the head of an answer was there.
    #[error("the connection to `{endpoint}` broke before the answer: {why}")]
    Broken {
        /// Host and port.
        endpoint: String,
        /// Text of the connection.
        why: String,
    },
    /// The answer is not HTTP/1, or its head is too large.
    #[error("the answer of `{endpoint}` cannot be read: {why}")]
    BadAnswer {
        /// Host and port.
        endpoint: String,
        /// Text of the parser.
        why: String,
    },
}

impl SendError {
    /// Returns whether the endpoint may have got the request, and acted on it, although there is no
    /// answer. Of all other errors the request was not sent.
    pub fn may_have_arrived(&self) -> bool {
        match self {
            Self::TimedOut { stage, .. } => *stage == SendStage::Answer,
            Self::Broken { .. } | Self::BadAnswer { .. } => true,
            Self::HostNotAllowed { .. }
            | Self::PlainHttp { .. }
            | Self::AddressRefused { .. }
            | Self::Header(_)
            | Self::Lookup { .. }
            | Self::Unreachable { .. }
            | Self::PeerDiffers { .. }
            | Self::Tls { .. } => false,
        }
    }

    /// Returns whether a rule refused the request, and would again, whatever the network does.
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::HostNotAllowed { .. }
            | Self::PlainHttp { .. }
            | Self::AddressRefused { .. }
            | Self::Header(_)
            | Self::PeerDiffers { .. } => true,
            Self::Lookup { .. }
            | Self::Unreachable { .. }
            | Self::Tls { .. }
            | Self::TimedOut { .. }
            | Self::Broken { .. }
            | Self::BadAnswer { .. } => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: a handler that chose the name reads in the error where it leads in the
    // operator's network.
    #[test]
    fn a_text_has_no_address_that_dns_gave() {
        let error = SendError::AddressRefused {
            endpoint: "hooks.example".to_owned(),
            address: "10.1.2.3".parse().unwrap(),
            kind: AddressKind::Private,
        };
        assert!(!error.to_string().contains("10.1.2.3"), "{error}");
        assert!(error.to_string().contains("(private)"), "{error}");
    }

    #[test]
    fn only_a_request_that_was_begun_may_have_arrived() {
        let timed_out = |stage| SendError::TimedOut { endpoint: String::new(), stage };
        let text = String::new;
        for (error, may_have_arrived) in [
            (timed_out(SendStage::Lookup), false),
            (timed_out(SendStage::Connect), false),
            (timed_out(SendStage::Tls), false),
            (timed_out(SendStage::Answer), true),
            (SendError::Broken { endpoint: text(), why: text() }, true),
            (SendError::BadAnswer { endpoint: text(), why: text() }, true),
            (SendError::Tls { endpoint: text(), why: text() }, false),
            (SendError::Unreachable { endpoint: text(), why: text() }, false),
        ] {
            assert_eq!(error.may_have_arrived(), may_have_arrived, "{error:?}");
            assert!(!error.is_refusal(), "{error:?}");
        }
    }
}
