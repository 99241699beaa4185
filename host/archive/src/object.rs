//! Objects that others put into a bucket. One is read as a whole, within bounds of bytes and of
//! time without progress.

use std::{path::PathBuf, time::Duration};

use bytes::Bytes;
use futures::{StreamExt, stream::BoxStream};
use object_store::{
    BackoffConfig, Error, GetOptions, ObjectStore, RetryConfig, aws::AmazonS3, path::Path,
};

use crate::{
    ArchiveError,
    bucket::BucketAccess,
    client::Connector,
    options::{EndpointFault, check_endpoint, is_bucket},
};

/// Most repetitions of a request, such as one on a connection that the server has closed. What
/// fails for longer is left to the caller.
const RETRIES_MAX: usize = 2;
/// Codes of S3 that tell of the host's clock or of the access key as such, and not of the object.
const HOST_CODES: [&str; 3] =
    ["RequestTimeTooSkewed", "InvalidAccessKeyId", "SignatureDoesNotMatch"];
/// Longest pause before a repetition.
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// A bucket, and what access to it needs.
#[derive(Clone)]
pub struct ObjectOptions {
    /// Name of the bucket.
    pub bucket: String,
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
    /// Whether the endpoint may have an address of a private network.
    pub allow_private: bool,
    /// Longest time without progress.
    pub stall: Duration,
}

/// The access key is a secret.
impl std::fmt::Debug for ObjectOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ObjectOptions").field("bucket", &self.bucket).finish_non_exhaustive()
    }
}

/// Reads objects of one bucket. It keeps its connections for the next objects.
#[derive(Debug)]
pub struct ObjectReader {
    bucket: AmazonS3,
}

/// An error of an object that was not read.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    /// A text that cannot be the key of an object.
    #[error("it cannot be the key of an object")]
    BadKey,
    /// An object that is not there.
    #[error("there is no such object")]
    Missing,
    /// A bucket or an object that the access key does not open.
    #[error("the access key is refused")]
    Refused,
    /// A request that the storage refuses whatever its object is: by its time, or by its access
    /// key.
    #[error("every request is refused: {0}")]
    HostRefused(&'static str),
    /// An object with too many bytes.
    #[error("it has {bytes} bytes")]
    TooLarge {
        /// Bytes of the object, as far as they are known.
        bytes: u64,
    },
    /// Storage that does not answer, or not to its end.
    #[error("{0}")]
    Unavailable(String),
}

impl ObjectReader {
    /// Checks the options, and returns the bucket that they name. Opens no connection.
    ///
    /// # Errors
    /// `Settings` with what cannot be used.
    pub fn new(options: &ObjectOptions) -> Result<Self, ArchiveError> {
        if !is_bucket(&options.bucket) {
            return Err(ArchiveError::Settings(format!(
                "`{}` is no name of a bucket; that has 3 to 63 of `a` to `z`, `0` to `9`, `.` and \
                    `-`",
                options.bucket
            )));
        }
        Self::check_endpoint(&options.endpoint, options.allow_http)?;
        let connector = Connector::new(options.ca_file.as_deref())?.stalling_after(options.stall);
        let connector = if options.allow_private { connector } else { connector.public_only() };
        let access = BucketAccess {
            bucket: &options.bucket,
            endpoint: &options.endpoint,
            region: &options.region,
            access_key_id: &options.access_key_id,
            secret_access_key: &options.secret_access_key,
        };
        let retries = RetryConfig {
            backoff: BackoffConfig { max_backoff: PAUSE_MAX, ..BackoffConfig::default() },
            max_retries: RETRIES_MAX,
            retry_timeout: options.stall,
        };
        Ok(Self { bucket: access.open(connector, retries)? })
    }

    /// Checks the URL of a server that speaks S3; an empty one stands for that of AWS.
    ///
    /// # Errors
    /// `Settings` with a text that goes behind the name of the setting. It does not repeat the
    /// value, which may hold a password.
    pub fn check_endpoint(endpoint: &str, allow_http: bool) -> Result<(), ArchiveError> {
        check_endpoint(endpoint, allow_http).map_err(|fault| {
            ArchiveError::Settings(match fault {
                EndpointFault::NoServer => "is no URL of a server; it looks like \
                    `https://s3.example:9000`, without user and password"
                    .to_owned(),
                EndpointFault::InTheClear => "has no TLS, and payloads would cross the network in \
                    the clear; use https, or allow it with `allow_http`"
                    .to_owned(),
            })
        })
    }

    /// Asks for an object of at most `bytes_max` bytes, and returns it before its bytes are read.
    ///
    /// # Errors
    /// An [`ObjectError`] where there is no such object to read.
    pub async fn open(&self, key: &str, bytes_max: usize) -> Result<OpenObject, ObjectError> {
        let place = Path::parse(key).map_err(|_| ObjectError::BadKey)?;
        let known: &str = place.as_ref();
        if known != key || key.is_empty() {
            return Err(ObjectError::BadKey); // the path would be another key
        }
        let answer = self.bucket.get_opts(&place, GetOptions::default()).await.map_err(failed)?;
        let bytes = answer.meta.size;
        match usize::try_from(bytes) {
            Ok(size) if size <= bytes_max => Ok(OpenObject { size, parts: answer.into_stream() }),
            _ => Err(ObjectError::TooLarge { bytes }),
        }
    }
}

/// An object that the storage begins to send.
pub struct OpenObject {
    size: usize,
    parts: BoxStream<'static, object_store::Result<Bytes>>,
}

impl OpenObject {
    /// Returns the number of its bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Reads the object into one buffer of its size. Dropping the future ends the reading.
    ///
    /// # Errors
    /// `Unavailable` where not as many bytes come as were announced.
    pub async fn read(mut self) -> Result<Vec<u8>, ObjectError> {
        let mut bytes = Vec::with_capacity(self.size);
        while let Some(part) = self.parts.next().await {
            let part = part.map_err(failed)?;
            if bytes.len() + part.len() > self.size {
                let text = format!("more than {} bytes came", self.size);
                return Err(ObjectError::Unavailable(text));
            }
            bytes.extend_from_slice(&part);
        }
        if bytes.len() != self.size {
            let text = format!("{} of {} bytes came", bytes.len(), self.size);
            return Err(ObjectError::Unavailable(text));
        }
        Ok(bytes)
    }
}

/// Returns the code of S3 in an error that tells of the host and not of the object.
fn host_code(error: &Error) -> Option<&'static str> {
    let text = match error {
        Error::PermissionDenied { source, .. } | Error::Unauthenticated { source, .. } => {
            source.to_string()
        }
        _ => return None,
    };
    HOST_CODES.into_iter().find(|code| text.contains(&format!("<Code>{code}</Code>")))
}

fn failed(error: Error) -> ObjectError {
    if let Some(code) = host_code(&error) {
        return ObjectError::HostRefused(code);
    }
    match error {
        Error::NotFound { .. } => ObjectError::Missing,
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => ObjectError::Refused,
        error => {
            let text = error.to_string();
            ObjectError::Unavailable(text.split_whitespace().collect::<Vec<_>>().join(" "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> ObjectOptions {
        ObjectOptions {
            bucket: "docs".to_owned(),
            endpoint: "http://127.0.0.1:1".to_owned(),
            region: "eu-test-1".to_owned(),
            access_key_id: "id".to_owned(),
            secret_access_key: "hunter2".to_owned(),
            ca_file: None,
            allow_http: false,
            allow_private: false,
            stall: Duration::from_secs(1),
        }
    }

    // What could go wrong: a secret is shown, or a setting that cannot work is found out at the
    // first message.
    #[test]
    fn options_that_cannot_work_are_refused() {
        let in_the_clear = "http://s3.example".to_owned();
        for (options, says) in [
            (ObjectOptions { bucket: "../x".to_owned(), ..options() }, "no name of a bucket"),
            (ObjectOptions { endpoint: in_the_clear.clone(), ..options() }, "in the clear"),
            (ObjectOptions { endpoint: "s3".to_owned(), ..options() }, "is no URL of a server"),
        ] {
            let error = ObjectReader::new(&options).expect_err(says).to_string();
            assert!(error.contains(says), "{error}");
            assert!(!format!("{error}{options:?}").contains("hunter2"), "{error}");
        }
        let open = ObjectOptions { endpoint: in_the_clear, allow_http: true, ..options() };
        ObjectReader::new(&open).expect("it was allowed");
    }

    // What could go wrong: a store leads to a private network although the operator did not say so,
    // or a key is another one than the reference says.
    #[tokio::test]
    async fn a_private_address_and_a_bad_key_are_refused_before_a_request() {
        let reader = ObjectReader::new(&options()).expect("a bucket");
        let error = reader.open("a/b", 10).await.err().expect("it is loopback").to_string();
        assert!(error.contains("no address outside of private networks"), "{error}");
        for key in ["", "/a", "a/", "a//b", "..", "a/../b", "a/./b", "a\u{7}b"] {
            assert!(matches!(reader.open(key, 10).await, Err(ObjectError::BadKey)), "{key}");
        }
    }
}
