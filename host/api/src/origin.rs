//! The check of requests to a host without tokens. The host answers programs of its own machine,
//! and no pages that a browser on it shows. A page could reach the host through a name that was
//! bound to loopback (DNS rebinding), or by requests from another site.

use axum::http::{HeaderMap, Method, header, request::Parts, uri::Authority};

use crate::error::{ApiError, Code};

/// Refuses every request that a page of another site can send.
pub(crate) fn check(parts: &Parts) -> Result<(), ApiError> {
    check_loopback(parts)?;
    check_site(parts).map_err(|why| foreign(&why))
}

/// Refuses a request whose `host` is not a loopback address.
pub(crate) fn check_loopback(parts: &Parts) -> Result<(), ApiError> {
    match host(parts) {
        None => Err(foreign("`host` is missing")),
        Some(host) if !is_loopback(&host) => Err(foreign("`host` names no loopback address")),
        Some(_) => Ok(()),
    }
}

/// Checks that no page of another site sent a request. The error names the header that says so.
pub(crate) fn check_site(parts: &Parts) -> Result<(), String> {
    let host = host(parts).ok_or_else(|| "`host` is missing".to_owned())?;
    match one(&parts.headers, header::ORIGIN) {
        Ok(None) => {}
        // Another port is another site. A proxy may end TLS before this host.
        Ok(Some(origin))
            if origin
                .strip_prefix("http://")
                .or_else(|| origin.strip_prefix("https://"))
                .is_some_and(|rest| rest == host.as_str()) => {}
        _ => return Err("`origin` is another site".to_owned()),
    }
    let site = parts.headers.get("sec-fetch-site").map(|site| site.as_bytes());
    match site {
        None | Some(b"same-origin" | b"none") => Ok(()),
        Some(_) => Err("`sec-fetch-site` is another site".to_owned()),
    }
}

/// Returns whether a request opens a page in a tab of a browser, by a link of any site. The page
/// that it gets is not readable for that site.
pub(crate) fn is_navigation(parts: &Parts) -> bool {
    let is = |name: &str, value: &str| {
        parts.headers.get(name).is_some_and(|given| given.as_bytes() == value.as_bytes())
    };
    parts.method == Method::GET
        && is("sec-fetch-mode", "navigate")
        && is("sec-fetch-dest", "document")
}

fn foreign(why: &str) -> ApiError {
    let text = format!(
        "{why}; without tokens, only programs of this machine are answered, at 127.0.0.1 or \
            localhost"
    );
    ApiError::new(Code::Forbidden, text)
}

/// Returns the authority of the `host` header; `None` where the request's target names another one.
fn host(parts: &Parts) -> Option<Authority> {
    let header: Authority = one(&parts.headers, header::HOST).ok()??.parse().ok()?;
    match parts.uri.authority() {
        Some(target) if *target != header => None,
        _ => Some(header),
    }
}

fn one(headers: &HeaderMap, name: header::HeaderName) -> Result<Option<&str>, ()> {
    let mut values = headers.get_all(name).iter();
    let value = values.next().map(|value| value.to_str().map_err(drop)).transpose()?;
    if values.next().is_some() { Err(()) } else { Ok(value) }
}

fn is_loopback(host: &Authority) -> bool {
    let name = host.host().trim_start_matches('[').trim_end_matches(']');
    let is_address = name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
    !host.as_str().contains('@') && (name.eq_ignore_ascii_case("localhost") || is_address)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_one(headers: &[(&str, &str)], is_taken: bool) {
        let mut request = axum::http::Request::get("/v1/whoami");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let (parts, ()) = request.body(()).expect("a request").into_parts();
        assert_eq!(check(&parts).is_ok(), is_taken, "{headers:?}");
    }

    #[test]
    fn only_this_machine_is_answered() {
        check_one(&[("host", "127.0.0.1:9465")], true);
        check_one(&[("host", "localhost")], true);
        check_one(&[("host", "[::1]:9465")], true);
        check_one(&[("host", "127.0.0.1:9465"), ("origin", "http://127.0.0.1:9465")], true);
        check_one(&[("host", "127.0.0.1:9465"), ("sec-fetch-site", "none")], true);
        check_one(&[], false);
        check_one(&[("host", "evil.example:9465")], false);
        check_one(&[("host", "localhost.evil.example")], false);
        check_one(&[("host", "127.0.0.1.evil.example")], false);
        check_one(&[("host", "user@localhost")], false);
        check_one(&[("host", "localhost"), ("host", "evil.example")], false);
        check_one(&[("host", "127.0.0.1:9465"), ("origin", "http://evil.example")], false);
        check_one(&[("host", "127.0.0.1:9465"), ("origin", "http://127.0.0.1:3000")], false);
        check_one(&[("host", "127.0.0.1:9465"), ("origin", "null")], false);
        check_one(&[("host", "127.0.0.1:9465"), ("sec-fetch-site", "cross-site")], false);
    }
}
