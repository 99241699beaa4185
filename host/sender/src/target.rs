//! The target of a URL: host, port and path, in their normal form.

use std::net::IpAddr;

use hyper::Uri;
use url::{Host, Position, Url};

/// Maximum bytes of a URL.
const URL_BYTES_MAX: usize = 2_048;
/// Maximum bytes of a name in DNS, and of one of its labels.
const NAME_BYTES_MAX: usize = 253;
const LABEL_BYTES_MAX: usize = 63;

/// The place that a URL names. Its path may be a secret, so that this is never shown.
#[derive(Clone)]
pub(crate) struct Target {
    /// Whether the scheme is `https`.
    pub(crate) is_tls: bool,
    /// Name in lower case and Punycode, without a dot at its end, or address.
    pub(crate) host: Host<String>,
    /// Port; never 0.
    pub(crate) port: u16,
    /// Path and query.
    pub(crate) path: Uri,
}

impl Target {
    /// Reads a URL.
    ///
    /// # Errors
    ///
    /// What is wrong with the URL, without repeating it: it may hold a password.
    pub(crate) fn parse(text: &str) -> Result<Self, &'static str> {
        if text.len() > URL_BYTES_MAX {
            return Err("is longer than 2048 bytes");
        }
        // The parser would drop them, or take a backslash for a slash.
        if text.chars().any(|c| c.is_control() || c.is_whitespace() || c == '\\') {
            return Err("must hold no white space, control characters or backslashes");
        }
        let authority = written_authority(text).ok_or("must begin with `https://` and a host")?;
        let url = Url::parse(text).map_err(|_| "has no host, port or path that can be read")?;
        let has_user = !url.username().is_empty() || url.password().is_some();
        if has_user || authority.contains('@') {
            return Err("must hold no user or password; a header of the endpoint may");
        }
        if url.fragment().is_some() {
            return Err("must hold no fragment (`#`)");
        }
        let host = url.host().and_then(|host| normal_host(host.to_owned()));
        let path = &url[Position::BeforePath..Position::AfterQuery];
        Ok(Self {
            is_tls: url.scheme() == "https",
            host: host.ok_or("has a host that is neither a name nor an address")?,
            port: url.port_or_known_default().filter(|port| *port != 0).ok_or("has port 0")?,
            path: Uri::builder()
                .path_and_query(path)
                .build()
                .map_err(|_| "has a path or query that cannot be sent")?,
        })
    }

    /// Returns host and port as the `host` header has them: without the port of the scheme.
    pub(crate) fn authority(&self) -> String {
        if self.port == self.default_port() {
            self.host.to_string()
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    /// Returns the port of the scheme.
    pub(crate) fn default_port(&self) -> u16 {
        if self.is_tls { 443 } else { 80 }
    }

    /// Returns the name that DNS and TLS know, or the address, without brackets.
    pub(crate) fn server_name(&self) -> String {
        self.address().map_or_else(|| self.host.to_string(), |address| address.to_string())
    }

    /// Returns the address; none where the URL has a name.
    pub(crate) fn address(&self) -> Option<IpAddr> {
        match self.host {
            Host::Domain(_) => None,
            Host::Ipv4(address) => Some(address.into()),
            Host::Ipv6(address) => Some(address.into()),
        }
    }
}

/// Returns the part between `http://` or `https://` and the path. The parser also reads URLs with
/// fewer slashes or more of them, which no endpoint needs.
fn written_authority(text: &str) -> Option<&str> {
    let (scheme, rest) = text.split_once("://")?;
    let is_known = ["http", "https"].iter().any(|known| scheme.eq_ignore_ascii_case(known));
    let authority = rest.split(['/', '?', '#']).next()?;
    (is_known && !authority.is_empty()).then_some(authority)
}

/// Returns a parsed host without the dot at its end; none where a name has characters or lengths
/// that DNS names of servers do not have.
pub(crate) fn normal_host(host: Host<String>) -> Option<Host<String>> {
    let name = match &host {
        Host::Domain(name) => name.strip_suffix('.').unwrap_or(name),
        Host::Ipv4(_) | Host::Ipv6(_) => return Some(host),
    };
    let is_name = name.len() <= NAME_BYTES_MAX && name.split('.').all(is_label);
    is_name.then(|| Host::Domain(name.to_owned()))
}

fn is_label(label: &str) -> bool {
    let is_of_label =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_".contains(&byte);
    (1..=LABEL_BYTES_MAX).contains(&label.len()) && label.bytes().all(is_of_label)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(url: &str) -> Target {
        Target::parse(url).unwrap_or_else(|why| panic!("{url} {why}"))
    }

    // What could go wrong: two spellings of one host are judged differently, or the header names
    // another host than the one that was judged.
    #[test]
    fn a_url_has_one_form() {
        for (url, authority, server_name, path) in [
            ("https://hooks.example", "hooks.example", "hooks.example", "/"),
            ("HTTPS://HOOKS.Example:443/A?b=C", "hooks.example", "hooks.example", "/A?b=C"),
            ("https://hooks.example:8443/", "hooks.example:8443", "hooks.example", "/"),
            ("http://hooks.example:80", "hooks.example", "hooks.example", "/"),
            ("http://hooks.example:443", "hooks.example:443", "hooks.example", "/"),
            ("https://hooks.example./a/../b", "hooks.example", "hooks.example", "/b"),
            ("https://%68ooks.example//x", "hooks.example", "hooks.example", "//x"),
            (
                "https://bücher.example/ü",
                "xn--bcher-kva.example",
                "xn--bcher-kva.example",
                "/%C3%BC",
            ),
            ("https://2130706433/", "127.0.0.1", "127.0.0.1", "/"),
            ("https://0x7f.1/", "127.0.0.1", "127.0.0.1", "/"),
            ("https://0177.0.0.1./", "127.0.0.1", "127.0.0.1", "/"),
            ("https://127。0。0。1:8443/", "127.0.0.1:8443", "127.0.0.1", "/"),
            ("https://[0:0::0:1]:8443/", "[::1]:8443", "::1", "/"),
            ("https://[::ffff:127.0.0.1]/", "[::ffff:7f00:1]", "::ffff:127.0.0.1", "/"),
        ] {
            let target = parsed(url);
            assert_eq!(target.authority(), authority, "{url}");
            assert_eq!(target.server_name(), server_name, "{url}");
            assert_eq!(target.path.to_string(), path, "{url}");
        }
        assert!(!parsed("http://h.example").is_tls && parsed("https://h.example").is_tls);
    }

    #[test]
    fn a_name_fits_dns() {
        let label = "a".repeat(LABEL_BYTES_MAX);
        let name = |label: &str| format!("https://{label}.example");
        assert!(Target::parse(&name(&label)).is_ok());
        assert!(Target::parse(&name(&format!("{label}a"))).is_err());
        assert!(Target::parse(&format!("https://{}", [label.as_str(); 5].join("."))).is_err());
        assert!(
            Target::parse(&format!("https://h.example/{}", "a".repeat(URL_BYTES_MAX))).is_err()
        );
    }
}
