//! Lists of the hosts that may be sent to.

use url::Host;

use crate::{
    target::{Target, normal_host},
    text::shown,
};

/// List of hosts with their ports. An empty list allows nothing.
///
/// An entry is a name (`hooks.example`), all names below one (`*.example.com`, which is not
/// `example.com` itself), or an address (`192.0.2.1`, `[2001:db8::1]`). A port may follow
/// (`hooks.example:8443`); without one the entry stands for the port of the URL's scheme: 443, or
/// 80 for `http:`. A listed address is still judged.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AllowedHosts {
    entries: Vec<AllowedHost>,
}

/// One entry of the list.
#[derive(Debug, Clone, PartialEq, Eq)]
struct AllowedHost {
    pattern: HostPattern,
    /// Port; none is that of the scheme.
    port: Option<u16>,
}

/// The hosts of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
enum HostPattern {
    /// This host.
    Exact(Host<String>),
    /// All names that end with a dot and this name.
    Below(String),
}

/// An entry that is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no entry of a list of hosts; one looks like `hooks.example`, `hooks.example:8443` or \
     `*.example.com`"
)]
pub struct AllowedHostFault(String);

impl AllowedHosts {
    /// Reads the entries of a list.
    ///
    /// # Errors
    ///
    /// The first entry that is none.
    pub fn parse<I>(entries: I) -> Result<Self, AllowedHostFault>
    where
        I: IntoIterator,
        I::Item: AsRef<str>,
    {
        let read = |entry: I::Item| {
            let entry = entry.as_ref();
            AllowedHost::parse(entry).ok_or_else(|| AllowedHostFault(shown(entry)))
        };
        Ok(Self { entries: entries.into_iter().map(read).collect::<Result<_, _>>()? })
    }

    /// Returns whether the list has a target.
    pub(crate) fn allows(&self, target: &Target) -> bool {
        self.entries.iter().any(|entry| entry.allows(target))
    }
}

impl AllowedHost {
    fn parse(entry: &str) -> Option<Self> {
        let (name, port) = split_port(entry)?;
        let below = name.strip_prefix("*.");
        let host = normal_host(Host::parse(below.unwrap_or(name)).ok()?)?;
        let pattern = match (below, host) {
            (None, host) => HostPattern::Exact(host),
            // `*.com` would allow half of the world.
            (Some(_), Host::Domain(name)) if name.contains('.') => HostPattern::Below(name),
            (Some(_), _) => return None,
        };
        Some(Self { pattern, port })
    }

    fn allows(&self, target: &Target) -> bool {
        let is_host = match (&self.pattern, &target.host) {
            (HostPattern::Exact(host), other) => host == other,
            (HostPattern::Below(base), Host::Domain(name)) => {
                name.strip_suffix(base.as_str()).is_some_and(|labels| labels.ends_with('.'))
            }
            (HostPattern::Below(_), _) => false,
        };
        is_host && self.port.unwrap_or(target.default_port()) == target.port
    }
}

/// Splits an entry into its host and its port.
fn split_port(entry: &str) -> Option<(&str, Option<u16>)> {
    match entry.rsplit_once(':') {
        // The colons of an IPv6 address stand in brackets.
        Some((host, port)) if !port.ends_with(']') => {
            let is_number = port.bytes().all(|byte| byte.is_ascii_digit());
            let port = port.parse::<u16>().ok().filter(|port| is_number && *port != 0)?;
            Some((host, Some(port)))
        }
        _ => Some((entry, None)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allows(entry: &str, url: &str) -> bool {
        let hosts = AllowedHosts::parse([entry]).unwrap();
        hosts.allows(&Target::parse(url).unwrap_or_else(|why| panic!("{url} {why}")))
    }

    // What could go wrong: an entry stands for a host that looks like it, or for another port.
    #[test]
    fn an_entry_stands_for_its_hosts_and_port() {
        for (entry, url, expected) in [
            ("hooks.example", "https://hooks.example/x", true),
            ("Hooks.Example.", "https://HOOKS.example./x", true),
            ("hooks.example", "http://hooks.example/", true),
            ("hooks.example", "https://hooks.example:8443/", false),
            ("hooks.example", "https://hooks.example:80/", false),
            ("hooks.example", "http://hooks.example:443/", false),
            ("hooks.example:443", "http://hooks.example:443/", true),
            ("hooks.example:8443", "https://hooks.example:8443/", true),
            ("hooks.example:8443", "https://hooks.example/", false),
            ("hooks.example", "https://a.hooks.example/", false),
            ("hooks.example", "https://ahooks.example/", false),
            ("hooks.example", "https://hooks.example.evil.test/", false),
            ("*.example.com", "https://a.example.com/", true),
            ("*.example.com", "https://a.b.example.com/", true),
            ("*.example.com", "https://example.com/", false),
            ("*.example.com", "https://evilexample.com/", false),
            ("*.example.com", "https://a.example.com.evil.test/", false),
            ("*.example.com:8443", "https://a.example.com:8443/", true),
            ("*.example.com:8443", "https://a.example.com/", false),
            ("bücher.example", "https://xn--bcher-kva.example/", true),
            ("127.0.0.1", "https://2130706433/", true),
            ("[::1]:8443", "https://[0::1]:8443/", true),
            ("[::1]", "https://[::1]:8443/", false),
            ("127.0.0.1", "https://[::ffff:127.0.0.1]/", false),
        ] {
            assert_eq!(allows(entry, url), expected, "{entry} {url}");
        }
    }

    #[test]
    fn an_empty_list_allows_nothing() {
        let target = Target::parse("https://hooks.example").unwrap();
        assert!(!AllowedHosts::default().allows(&target));
    }

    #[test]
    fn what_is_no_entry_is_refused() {
        for entry in [
            "",
            "*",
            "*.",
            "*.com",
            "*.127.0.0.1",
            "a.*.example",
            "*a.example",
            "hooks.example:",
            "hooks.example:0",
            "hooks.example:65536",
            "hooks.example:+80",
            "hooks.example:*",
            "https://hooks.example",
            "hooks.example/x",
            "user@hooks.example",
            "hooks..example",
            "hooks example",
            "::1",
            "[::1",
            "[::1]:",
        ] {
            let fault = AllowedHosts::parse([entry]).unwrap_err();
            assert!(fault.to_string().starts_with(&format!("`{entry}` is no entry")), "{fault}");
        }
    }
}
