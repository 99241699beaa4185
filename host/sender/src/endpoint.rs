//! The place to which requests go.

use std::{fmt, str::FromStr, time::Duration};

use hyper::{
    Method,
    header::{HeaderMap, HeaderValue},
};

use crate::{
    allowed_hosts::AllowedHosts,
    header::{HeaderFault, header_value, outside_header},
    signing::SigningKeys,
    target::Target,
    text::shown,
};

/// Longest total deadline of a request.
const TIMEOUT_MAX: Duration = Duration::from_secs(300);
/// Most bytes that are kept of the body of an answer.
const RESPONSE_BYTES_MAX: usize = 16 << 20;
/// Most headers of an endpoint.
const HEADERS_MAX: usize = 50;
/// Headers that each message has of its own, beside those that the sender sets.
const MESSAGE_HEADERS: [&str; 3] = ["ce-causationid", "ce-correlationid", "ce-time"];

/// Method of the requests to an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EndpointMethod {
    /// `POST`.
    #[default]
    Post,
    /// `PUT`.
    Put,
    /// `PATCH`.
    Patch,
    /// `DELETE`.
    Delete,
}

/// A text that is no method of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no method of an endpoint; there are POST, PUT, PATCH and DELETE")]
pub struct UnknownMethod(String);

impl EndpointMethod {
    /// Returns the method as HTTP has it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Post => "POST",
            Self::Put => "PUT",
            Self::Patch => "PATCH",
            Self::Delete => "DELETE",
        }
    }

    /// Returns the method for a request.
    pub(crate) fn as_http(self) -> Method {
        match self {
            Self::Post => Method::POST,
            Self::Put => Method::PUT,
            Self::Patch => Method::PATCH,
            Self::Delete => Method::DELETE,
        }
    }
}

impl FromStr for EndpointMethod {
    type Err = UnknownMethod;

    fn from_str(text: &str) -> Result<Self, UnknownMethod> {
        let all = [Self::Post, Self::Put, Self::Patch, Self::Delete];
        let named = all.into_iter().find(|method| method.as_str() == text);
        named.ok_or_else(|| UnknownMethod(shown(text)))
    }
}

/// Settings of an endpoint, not checked yet.
#[derive(Clone)]
pub struct EndpointSettings {
    /// URL, with `https:` or, where the operator allows it, `http:`. Its path may be a secret.
    pub url: String,
    /// Method of its requests.
    pub method: EndpointMethod,
    /// Names and values of headers that each request has. The values may be secrets.
    pub headers: Vec<(String, String)>,
    /// Secrets with which requests are signed; none for requests without a signature.
    pub signing_keys: Option<SigningKeys>,
    /// Hosts that the tenant's limits allow.
    pub tenant_hosts: AllowedHosts,
    /// Longest time for what precedes a request: DNS, connection and TLS. At most the total.
    pub connect_timeout: Duration,
    /// Longest time for all of a request, to the last byte of the answer. At most 300 s.
    pub total_timeout: Duration,
    /// Most bytes that are kept of the body of an answer. At most 16 MiB.
    pub response_bytes_max: usize,
}

impl EndpointSettings {
    /// Creates the settings of an endpoint for `POST`, without headers of its own and without
    /// signature: 5 s for the connection, 15 s in total, and 64 KiB of an answer.
    pub fn new(url: impl Into<String>, tenant_hosts: AllowedHosts) -> Self {
        Self {
            url: url.into(),
            method: EndpointMethod::Post,
            headers: Vec::new(),
            signing_keys: None,
            tenant_hosts,
            connect_timeout: Duration::from_secs(5),
            total_timeout: Duration::from_secs(15),
            response_bytes_max: 64 << 10,
        }
    }
}

impl fmt::Debug for EndpointSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The output shows neither the URL, which may hold a secret, nor the values of headers.
        let names: Vec<_> = self.headers.iter().map(|(name, _)| shown(name)).collect();
        f.debug_struct("EndpointSettings")
            .field("method", &self.method)
            .field("headers", &names)
            .field("tenant_hosts", &self.tenant_hosts)
            .field("connect_timeout", &self.connect_timeout)
            .field("total_timeout", &self.total_timeout)
            .field("response_bytes_max", &self.response_bytes_max)
            .finish_non_exhaustive()
    }
}

/// A setting of an endpoint that cannot be used. Its text shows no URL and no value of a header.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EndpointFault {
    /// The URL.
    #[error("the URL of the endpoint {0}")]
    Url(&'static str),
    /// A header.
    #[error("{0}; change it in the endpoint")]
    Header(#[from] HeaderFault),
    /// The number of headers.
    #[error("the endpoint has more than 50 headers")]
    TooManyHeaders,
    /// The timeouts.
    #[error(
        "the timeouts of an endpoint are greater than 0, for the connection at most the total, and \
         in total at most 300 s"
    )]
    Timeouts,
    /// The bound of the answer's body.
    #[error("an endpoint keeps at most 16 MiB of an answer")]
    ResponseBytes,
}

/// A place to which requests go, with its checked settings.
#[derive(Clone)]
pub struct Endpoint {
    /// Host, port and path.
    pub(crate) target: Target,
    /// Value of the `host` header.
    pub(crate) authority: HeaderValue,
    /// Method.
    pub(crate) method: EndpointMethod,
    /// Its own headers.
    pub(crate) headers: HeaderMap,
    /// Secrets of signatures.
    pub(crate) signing_keys: Option<SigningKeys>,
    /// Hosts that the tenant's limits allow.
    pub(crate) tenant_hosts: AllowedHosts,
    /// Longest time for DNS, connection and TLS.
    pub(crate) connect_timeout: Duration,
    /// Longest time for all of a request.
    pub(crate) total_timeout: Duration,
    /// Most bytes of the answer's body.
    pub(crate) response_bytes_max: usize,
}

impl Endpoint {
    /// Checks the settings of an endpoint. Whether its host is allowed is checked with each
    /// request, and by [`Sender::check`](crate::Sender::check).
    ///
    /// # Errors
    ///
    /// An [`EndpointFault`] with the setting that cannot be used.
    pub fn new(settings: EndpointSettings) -> Result<Self, EndpointFault> {
        let target = Target::parse(&settings.url).map_err(EndpointFault::Url)?;
        let (connect, total) = (settings.connect_timeout, settings.total_timeout);
        if connect.is_zero() || connect > total || total > TIMEOUT_MAX {
            return Err(EndpointFault::Timeouts);
        }
        if settings.response_bytes_max > RESPONSE_BYTES_MAX {
            return Err(EndpointFault::ResponseBytes);
        }
        if settings.headers.len() > HEADERS_MAX {
            return Err(EndpointFault::TooManyHeaders);
        }
        Ok(Self {
            authority: header_value("host", target.authority().as_bytes())?,
            target,
            method: settings.method,
            headers: own_headers(&settings.headers)?,
            signing_keys: settings.signing_keys,
            tenant_hosts: settings.tenant_hosts,
            connect_timeout: connect,
            total_timeout: total,
            response_bytes_max: settings.response_bytes_max,
        })
    }

    /// Returns host and port of the URL, without the port of its scheme, as errors show them.
    pub fn authority(&self) -> String {
        self.target.authority()
    }
}

/// Checks the headers of an endpoint and marks their values as secret.
fn own_headers(headers: &[(String, String)]) -> Result<HeaderMap, HeaderFault> {
    let mut own = HeaderMap::new();
    for (name, value) in headers {
        let (known, mut value) = outside_header(name, value.as_bytes())?;
        if MESSAGE_HEADERS.contains(&known.as_str()) {
            return Err(HeaderFault::new(name, "is one that each message has of its own"));
        }
        value.set_sensitive(true);
        own.append(known, value);
    }
    Ok(own)
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("authority", &self.authority())
            .field("method", &self.method)
            .field("headers", &self.headers)
            .field("signing_keys", &self.signing_keys)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(change: impl FnOnce(&mut EndpointSettings)) -> String {
        let mut settings = EndpointSettings::new("https://hooks.example", AllowedHosts::default());
        change(&mut settings);
        Endpoint::new(settings).unwrap_err().to_string()
    }

    #[test]
    fn settings_are_checked() {
        let second = Duration::from_secs(1);
        assert!(fault(|it| it.connect_timeout = Duration::ZERO).starts_with("the timeouts"));
        assert!(fault(|it| it.total_timeout = second).starts_with("the timeouts"));
        assert!(fault(|it| it.total_timeout = 301 * second).starts_with("the timeouts"));
        assert!(fault(|it| it.response_bytes_max = (16 << 20) + 1).contains("16 MiB"));
        let many = vec![("x".to_owned(), "y".to_owned()); 51];
        assert!(fault(|it| it.headers = many).contains("50 headers"));
        let time = vec![("Ce-Time".to_owned(), "now".to_owned())];
        assert!(fault(|it| it.headers = time).contains("is one that each message has"));
    }

    // What could go wrong: the text of an error, which a tenant reads, holds a secret that only the
    // endpoint's owner knows.
    #[test]
    fn a_fault_repeats_no_secret() {
        let secret = "s3cr3t";
        for url in [
            format!("https://user:{secret}@hooks.example/"),
            format!("https://hooks.example/{secret}#x"),
            format!("https://hooks.example:0/{secret}"),
            format!("ftp://hooks.example/{secret}"),
            format!("https://hooks .example/{secret}"),
        ] {
            let text = fault(|it| it.url = url.clone());
            assert!(
                text.starts_with("the URL of the endpoint ") && !text.contains(secret),
                "{text}"
            );
        }
        for (name, value) in [("host", secret.to_owned()), ("x-key", format!("{secret}\r\nx: y"))] {
            let text = fault(|it| it.headers = vec![(name.to_owned(), value.clone())]);
            assert!(text.starts_with(&format!("header `{name}`")), "{text}");
            assert!(!text.contains(secret), "{text}");
        }
    }

    #[test]
    fn methods_are_those_that_have_an_effect() {
        for text in ["POST", "PUT", "PATCH", "DELETE"] {
            let method: EndpointMethod = text.parse().unwrap();
            assert_eq!(method.as_http().as_str(), text);
        }
        for text in ["GET", "post", "CONNECT", "TRACE", "POST / HTTP/1.1\r\n", ""] {
            assert!(text.parse::<EndpointMethod>().is_err(), "{text}");
        }
    }
}
