//! The place of an archive, as the settings name it.

use std::{net::IpAddr, path::PathBuf};

use hyper::Uri;

use crate::ArchiveError;

/// The place of an archive, and what access to it needs.
#[derive(Clone, Default)]
pub struct ArchiveOptions {
    /// `file://` and an absolute path, or `s3://`, a bucket and perhaps a prefix.
    pub location: String,
    /// URL of a server that speaks S3; empty for that of AWS in the region.
    pub endpoint: String,
    /// Region of the bucket.
    pub region: String,
    /// Id of the access key.
    pub access_key_id: String,
    /// The access key itself.
    pub secret_access_key: String,
    /// Certificates (PEM) of authorities to trust, beside the system's.
    pub ca_file: Option<PathBuf>,
    /// Whether an endpoint on another machine may be without TLS.
    pub allow_http: bool,
}

/// A location, in its parts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ArchiveLocation {
    Folder(PathBuf),
    Bucket { bucket: String, prefix: String },
}

/// The access key is a secret.
impl std::fmt::Debug for ArchiveOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ArchiveOptions").field("location", &self.location).finish_non_exhaustive()
    }
}

impl ArchiveOptions {
    /// Returns the location in its parts, after a check of all options.
    pub(crate) fn parse(&self) -> Result<ArchiveLocation, ArchiveError> {
        if let Some(path) = self.location.strip_prefix("file://") {
            if !path.starts_with('/') {
                return Err(self.unusable("the path of a folder begins with `/`"));
            }
            return Ok(ArchiveLocation::Folder(PathBuf::from(path)));
        }
        let Some(rest) = self.location.strip_prefix("s3://") else {
            return Err(self.unusable(
                "it looks like `file:///var/lib/oncebox/archive` or `s3://bucket/prefix`",
            ));
        };
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if !is_bucket(bucket) {
            return Err(self.unusable(
                "the name of a bucket has 3 to 63 of `a` to `z`, `0` to `9`, `.` and `-`",
            ));
        }
        if self.access_key_id.is_empty() || self.secret_access_key.is_empty() {
            return Err(settings(
                "an archive on S3 needs `archive.access_key_id`, and \
                    `archive.secret_access_key_file` or ONCEBOX_ARCHIVE_SECRET_ACCESS_KEY",
            ));
        }
        self.check_endpoint()?;
        let prefix = prefix.trim_matches('/').to_owned();
        Ok(ArchiveLocation::Bucket { bucket: bucket.to_owned(), prefix })
    }

    fn check_endpoint(&self) -> Result<(), ArchiveError> {
        check_endpoint(&self.endpoint, self.allow_http).map_err(|fault| {
            // The text does not repeat the value, which may hold a password.
            settings(match fault {
                EndpointFault::NoServer => {
                    "`archive.endpoint` is no URL of a server; it looks like \
                        `https://s3.example:9000`, without user and password"
                }
                EndpointFault::InTheClear => {
                    "`archive.endpoint` has no TLS, and messages would cross the network in the \
                        clear; use https, or allow it with `archive.allow_http`"
                }
            })
        })
    }

    fn unusable(&self, why: &str) -> ArchiveError {
        ArchiveError::Settings(format!("`{}` is no location of an archive; {why}", self.location))
    }
}

/// The fault of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EndpointFault {
    /// It is no URL of a server, or has more than that.
    NoServer,
    /// It is on another machine, has no TLS, and that is not allowed.
    InTheClear,
}

/// Checks the URL of a server; an empty one stands for that of AWS.
pub(crate) fn check_endpoint(endpoint: &str, allow_http: bool) -> Result<(), EndpointFault> {
    if endpoint.is_empty() {
        return Ok(());
    }
    let uri: Uri = endpoint.parse().map_err(|_| EndpointFault::NoServer)?;
    let host = uri.host().unwrap_or_default();
    let is_whole = !host.is_empty() && uri.query().is_none() && !endpoint.contains('@');
    match uri.scheme_str() {
        Some("https") if is_whole => Ok(()),
        Some("http") if is_whole && (allow_http || is_loopback(host)) => Ok(()),
        Some("http") if is_whole => Err(EndpointFault::InTheClear),
        _ => Err(EndpointFault::NoServer),
    }
}

/// Returns whether a text can be the name of a bucket.
pub(crate) fn is_bucket(text: &str) -> bool {
    let is_of_bucket = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || ".-".contains(c);
    (3..=63).contains(&text.len()) && text.chars().all(is_of_bucket)
}

fn settings(text: &str) -> ArchiveError {
    ArchiveError::Settings(text.to_owned())
}

fn is_loopback(host: &str) -> bool {
    let address = host.trim_matches(['[', ']']).parse::<IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bucket(endpoint: &str) -> ArchiveOptions {
        ArchiveOptions {
            location: "s3://kept/here/and/there/".to_owned(),
            endpoint: endpoint.to_owned(),
            access_key_id: "id".to_owned(),
            secret_access_key: "hunter2".to_owned(),
            ..ArchiveOptions::default()
        }
    }

    // What could go wrong: messages cross a network in the clear, or a secret stands in an error.
    #[test]
    fn options_that_cannot_work_are_refused() {
        let folder = |location: &str| ArchiveOptions {
            location: location.to_owned(),
            ..ArchiveOptions::default()
        };
        let at = |path: &str| ArchiveLocation::Folder(PathBuf::from(path));
        assert_eq!(folder("file:///var/a b").parse().expect("a folder"), at("/var/a b"));
        let prefix = "here/and/there".to_owned();
        let expected = ArchiveLocation::Bucket { bucket: "kept".to_owned(), prefix };
        for endpoint in ["", "https://s3.example", "http://127.0.0.1:9000", "http://[::1]:1"] {
            assert_eq!(bucket(endpoint).parse().expect(endpoint), expected);
        }
        let without_key = ArchiveOptions { access_key_id: String::new(), ..bucket("") };
        let open = ArchiveOptions { allow_http: true, ..bucket("http://s3.example") };
        assert_eq!(open.parse().expect("it was allowed"), expected);
        for (options, says) in [
            (folder("/var/archive"), "it looks like `file:///var/lib/oncebox/archive`"),
            (folder("file://var/archive"), "begins with `/`"),
            (folder("s3://"), "the name of a bucket"),
            (folder("s3://UPPER/x"), "the name of a bucket"),
            (without_key, "needs `archive.access_key_id`"),
            (bucket("http://s3.example:9000"), "in the clear"),
            (bucket("https://me:hunter2@s3.example"), "is no URL of a server"),
            (bucket("s3.example"), "is no URL of a server"),
            (bucket("https://s3.example/?a"), "is no URL of a server"),
        ] {
            let error = options.parse().expect_err(says).to_string();
            assert!(error.contains(says), "{error}");
            assert!(!format!("{error}{options:?}").contains("hunter2"), "{error}");
        }
    }
}
