//! Cookies that browsers keep for the console.

use axum::http::{HeaderValue, header, request::Parts};

/// A cookie as a browser is told to keep it. No script reads it.
pub(crate) struct Cookie<'a> {
    /// Name.
    pub(crate) name: &'a str,
    /// Value; without a character that ends a value.
    pub(crate) value: &'a str,
    /// Path below which requests have it.
    pub(crate) path: &'a str,
    /// `Strict` for none of the requests that another site leads to, `Lax` for its links alone.
    pub(crate) same_site: &'a str,
    /// Seconds for which it is kept; 0 removes it.
    pub(crate) age_s: i32,
    /// Whether the browser sends it over encrypted connections only.
    pub(crate) is_encrypted: bool,
}

impl Cookie<'_> {
    /// Returns the value of the header `Set-Cookie`.
    pub(crate) fn header(&self) -> HeaderValue {
        let Self { name, value, path, same_site, age_s, is_encrypted } = self;
        let secure = if *is_encrypted { "; Secure" } else { "" };
        let cookie = format!(
            "{name}={value}; Path={path}; Max-Age={age_s}; HttpOnly; SameSite={same_site}{secure}"
        );
        HeaderValue::from_str(&cookie).unwrap_or_else(|_| HeaderValue::from_static(""))
    }
}

/// Returns the value of a cookie of a request.
pub(crate) fn value(parts: &Parts, wanted: &str) -> Option<String> {
    let cookies = parts.headers.get_all(header::COOKIE).iter();
    let mut pairs = cookies.filter_map(|value| value.to_str().ok()).flat_map(|v| v.split(';'));
    pairs.find_map(|pair| {
        let (name, value) = pair.trim().split_once('=')?;
        (name == wanted).then(|| value.to_owned())
    })
}
