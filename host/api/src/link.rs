//! Paths and queries of the API, for its clients.

/// Returns a path of segments, each as it stands.
pub fn path(segments: &[&str]) -> String {
    segments.iter().fold("/v1".to_owned(), |path, segment| path + "/" + &escaped(segment))
}

/// Returns a path with a query of the parameters that have a value.
pub fn with_query(path: &str, parameters: &[(&str, Option<String>)]) -> String {
    let given = parameters
        .iter()
        .filter_map(|(name, value)| Some(format!("{name}={}", escaped(value.as_ref()?))));
    let query = given.collect::<Vec<_>>().join("&");
    if query.is_empty() { path.to_owned() } else { format!("{path}?{query}") }
}

/// Returns a text as a segment of a path, or as a value of a query. Escapes everything but unreserved characters (RFC 3986). A segment of dots is escaped too, since
/// a proxy would take it for a step in the path. An empty segment stays empty, and a proxy would
/// take it for none.
pub fn escaped(text: &str) -> String {
    let is_plain = |byte: u8| {
        byte.is_ascii_alphanumeric()
            || b"-_~".contains(&byte)
            || byte == b'.' && text.bytes().any(|b| b != b'.')
    };
    text.bytes()
        .map(
            |byte| {
                if is_plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }
            },
        )
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_stay_what_they_are() {
        for (segment, in_path) in [
            ("acme", "/v1/acme"),
            ("a/b?c#d e", "/v1/a%2Fb%3Fc%23d%20e"),
            ("ä%", "/v1/%C3%A4%25"),
            ("..", "/v1/%2E%2E"),
            ("a.b", "/v1/a.b"),
        ] {
            assert_eq!(path(&[segment]), in_path);
        }
        assert_eq!(
            with_query(
                "/v1/x",
                &[("a", None), ("b", Some("1&2".to_owned())), ("c", Some(String::new()))]
            ),
            "/v1/x?b=1%262&c="
        );
        assert_eq!(with_query("/v1/x", &[("a", None)]), "/v1/x");
    }
}
