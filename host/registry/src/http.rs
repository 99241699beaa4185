//! Client of the REST protocol of Confluent's registry, which other registries speak too.
//!
//! Each request has a connection of its own: a schema is fetched once. The client follows no
//! redirects and reads neither the environment nor proxy settings.

use std::collections::HashSet;
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures::FutureExt;
use futures::future::BoxFuture;
use hyper::body::Body;
use hyper::header::{ACCEPT, AUTHORIZATION, CONNECTION, HOST, HeaderValue, USER_AGENT};
use hyper::{Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use openssl::ssl::{SslConnector, SslMethod};
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_openssl::SslStream;

use crate::registry::{REFERENCES_MAX, TEXT_BYTES_MAX, TEXTS_BYTES_MAX};
use crate::{Format, RegisteredSchema, RegistryError, SchemaLookup, SchemaRegistry};

/// Deadline of one answer, from the connection to its last byte.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// Deadline of a schema with all its references.
const SCHEMA_TIMEOUT: Duration = Duration::from_secs(30);
/// Most bytes of an answer: a text with each character escaped, and the JSON around it.
const ANSWER_BYTES_MAX: usize = 6 * TEXT_BYTES_MAX + (64 << 10);
const ACCEPTED: &str = "application/vnd.schemaregistry.v1+json, application/json";
/// Error codes of the protocol for an unknown subject, version or schema. An unknown path has other
/// codes, or none.
const NOT_FOUND_CODES: std::ops::RangeInclusive<u32> = 40_401..=40_403;

/// Address and credentials of a registry.
#[derive(Clone, Default)]
pub struct HttpRegistryOptions {
    /// URL below which `/schemas/ids/…` lies, such as `https://registry.example/apis/ccompat/v7`.
    pub url: String,
    /// User and password of basic authentication.
    pub credentials: Option<(String, String)>,
    /// File of certificates (PEM) of trusted authorities, beside the system's.
    pub ca_file: Option<PathBuf>,
}

/// A registry over HTTP.
#[derive(Clone)]
pub struct HttpRegistry {
    url: String,
    host: String,
    port: u16,
    /// Path before every route, without a slash at its end.
    prefix: String,
    authority: HeaderValue,
    credentials: Option<HeaderValue>,
    tls: Option<SslConnector>,
    answer_timeout: Duration,
}

impl HttpRegistry {
    /// Checks the options and makes a client of them, without a connection.
    ///
    /// # Errors
    ///
    /// [`RegistryError::Settings`] with the option that cannot be used.
    pub fn new(options: &HttpRegistryOptions) -> Result<Self, RegistryError> {
        let settings = |text: String| RegistryError::Settings(text);
        // The error does not repeat an invalid URL, which may contain a password.
        let wrong = || {
            settings(
                "the URL of the schema registry is none; it looks like \
                https://registry.example/apis/ccompat/v7"
                    .to_owned(),
            )
        };
        if options.url.contains('@') {
            return Err(settings(
                "the URL of the schema registry must not hold user or password; they have settings \
                    of their own".to_owned(),
            ));
        }
        let uri: Uri = options.url.parse().map_err(|_| wrong())?;
        let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
            return Err(wrong());
        };
        if !matches!(scheme, "http" | "https") || uri.query().is_some() || options.url.contains('#')
        {
            return Err(wrong());
        }
        let is_tls = scheme == "https";
        if options.ca_file.is_some() && !is_tls {
            return Err(settings(
                "certificates are of use only where the schema registry has https".to_owned(),
            ));
        }
        let port = authority.port_u16().unwrap_or(if is_tls { 443 } else { 80 });
        Ok(Self {
            url: options.url.trim_end_matches('/').to_owned(),
            host: authority.host().trim_matches(['[', ']']).to_owned(),
            port,
            prefix: uri.path().trim_end_matches('/').to_owned(),
            authority: HeaderValue::from_str(authority.as_str()).map_err(|_| wrong())?,
            credentials: options
                .credentials
                .as_ref()
                .map(|(user, password)| basic(user, password))
                .transpose()?,
            tls: if is_tls { Some(connector(options)?) } else { None },
            answer_timeout: ANSWER_TIMEOUT,
        })
    }

    /// Fetches a schema with its references.
    async fn look_up(&self, id: u32) -> Result<SchemaLookup, RegistryError> {
        let answer = match self.get(&format!("/schemas/ids/{id}")).await? {
            RegistryAnswer::Found(answer) => answer,
            RegistryAnswer::Missing => return Ok(SchemaLookup::Unknown),
            RegistryAnswer::TooLarge => return Ok(SchemaLookup::Unusable(too_large())),
            RegistryAnswer::Refused(status) => return Ok(SchemaLookup::Unusable(refused(status))),
        };
        let format = match answer.schema_type.as_deref() {
            None | Some("AVRO") => Format::Avro,
            Some("PROTOBUF") => Format::Protobuf,
            Some("JSON") => Format::Json,
            Some(_) => {
                return Ok(SchemaLookup::Unusable(
                    "it is of no type that is known: Avro, Protobuf, JSON".to_owned(),
                ));
            }
        };
        // JSON is passed on as it is, so the references of its schema are not needed.
        let referred = if format == Format::Json { Vec::new() } else { answer.references };
        Ok(match self.references(referred, answer.schema.len()).await? {
            Ok(_) if answer.schema.len() > TEXT_BYTES_MAX => SchemaLookup::Unusable(too_large()),
            Ok(references) => {
                SchemaLookup::Found(RegisteredSchema { format, text: answer.schema, references })
            }
            Err(why) => SchemaLookup::Unusable(why),
        })
    }

    /// Fetches all references, direct and indirect. Each stands behind those that it refers to
    /// itself. The inner error is the reason for which the schema cannot be used.
    async fn references(
        &self,
        of: Vec<SchemaReference>,
        mut bytes: usize,
    ) -> Result<Result<Vec<(String, String)>, String>, RegistryError> {
        let mut found = Vec::new();
        let mut seen = HashSet::new();
        let mut open: Vec<ReferenceStep> = of.into_iter().rev().map(ReferenceStep::Fetch).collect();
        while let Some(step) = open.pop() {
            let reference = match step {
                ReferenceStep::Fetch(reference) => reference,
                ReferenceStep::Done(name, text) => {
                    found.push((name, text));
                    continue;
                }
            };
            if !seen.insert((reference.subject.clone(), reference.version)) {
                continue;
            }
            if seen.len() > REFERENCES_MAX {
                return Ok(Err(format!("it refers to more than {REFERENCES_MAX} schemas")));
            }
            let (subject, version) = (encode(&reference.subject), reference.version);
            let answer = match self
                .get(&format!("/subjects/{subject}/versions/{version}?deleted=true"))
                .await?
            {
                RegistryAnswer::Found(answer) => answer,
                RegistryAnswer::Missing => {
                    let (name, subject) = (reference.name, reference.subject);
                    return Ok(Err(format!(
                        "it refers to `{name}`, and subject `{subject}` has no version {version}"
                    )));
                }
                RegistryAnswer::TooLarge => return Ok(Err(too_large())),
                RegistryAnswer::Refused(status) => return Ok(Err(refused(status))),
            };
            bytes += answer.schema.len();
            if answer.schema.len() > TEXT_BYTES_MAX || bytes > TEXTS_BYTES_MAX {
                return Ok(Err(too_large()));
            }
            open.push(ReferenceStep::Done(reference.name, answer.schema));
            open.extend(answer.references.into_iter().rev().map(ReferenceStep::Fetch));
        }
        Ok(Ok(found))
    }

    async fn get(&self, path: &str) -> Result<RegistryAnswer, RegistryError> {
        let late = |_| RegistryError::TimedOut { url: self.url.clone() };
        timeout(self.answer_timeout, self.fetch(path)).await.map_err(late)?
    }

    async fn fetch(&self, path: &str) -> Result<RegistryAnswer, RegistryError> {
        let request = self.request(path)?;
        let stream = TcpStream::connect((self.host.as_str(), self.port))
            .await
            .map_err(|error| self.unreachable(&error))?;
        let (status, body) = match &self.tls {
            None => self.exchange(stream, request).await?,
            Some(tls) => self.exchange(self.secured(tls, stream).await?, request).await?,
        };
        let failed = || RegistryError::Failed { url: self.url.clone(), status: status.as_u16() };
        let no_registry = || RegistryError::NoRegistry { url: self.url.clone() };
        match (status, body) {
            (StatusCode::OK, None) => Ok(RegistryAnswer::TooLarge),
            (StatusCode::OK, Some(body)) => {
                serde_json::from_slice(&body).map(RegistryAnswer::Found).map_err(|_| no_registry())
            }
            (StatusCode::NOT_FOUND, body) => {
                let refusal = serde_json::from_slice::<RefusalBody>(&body.unwrap_or_default());
                let is_missing =
                    refusal.is_ok_and(|refusal| NOT_FOUND_CODES.contains(&refusal.error_code));
                if is_missing { Ok(RegistryAnswer::Missing) } else { Err(no_registry()) }
            }
            (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, _) => {
                Err(RegistryError::Refused { url: self.url.clone(), status: status.as_u16() })
            }
            (StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS, _) => Err(failed()),
            // A repeated request would have this answer again.
            (status, _) if status.is_client_error() => Ok(RegistryAnswer::Refused(status.as_u16())),
            (status, _) if status.is_server_error() => Err(failed()),
            _ => Err(no_registry()),
        }
    }

    fn request(&self, path: &str) -> Result<Request<String>, RegistryError> {
        let mut request = Request::get(format!("{}{path}", self.prefix))
            .header(HOST, self.authority.clone())
            .header(ACCEPT, ACCEPTED)
            .header(USER_AGENT, concat!("oncebox/", env!("CARGO_PKG_VERSION")))
            .header(CONNECTION, "close");
        if let Some(credentials) = &self.credentials {
            request = request.header(AUTHORIZATION, credentials.clone());
        }
        request.body(String::new()).map_err(|error| self.unreachable(&error))
    }

    async fn secured(
        &self,
        tls: &SslConnector,
        stream: TcpStream,
    ) -> Result<SslStream<TcpStream>, RegistryError> {
        let session = tls
            .configure()
            .and_then(|tls| tls.into_ssl(&self.host))
            .and_then(|session| SslStream::new(session, stream));
        let mut stream = session.map_err(|error| self.unreachable(&error))?;
        Pin::new(&mut stream).connect().await.map_err(|error| self.unreachable(&error))?;
        Ok(stream)
    }

    /// Sends a request. Returns the status of the answer and its body, unless that is too large.
    async fn exchange<S>(
        &self,
        stream: S,
        request: Request<String>,
    ) -> Result<(StatusCode, Option<Vec<u8>>), RegistryError>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(|error| self.unreachable(&error))?;
        let answered = async {
            let response = sender.send_request(request).await?;
            read(response).await
        };
        // The connection has no task of its own: this function drives it up to the answer.
        let mut answered = std::pin::pin!(answered);
        let answer = tokio::select! {
            biased;
            answer = &mut answered => answer,
            _ = connection => answered.await,
        };
        answer.map_err(|error| self.unreachable(&error))
    }

    fn unreachable(&self, error: &(dyn std::error::Error + 'static)) -> RegistryError {
        let causes = std::iter::successors(Some(error), |error| error.source());
        let why = causes.map(ToString::to_string).collect::<Vec<_>>().join(": ");
        RegistryError::Unreachable { url: self.url.clone(), why }
    }
}

impl SchemaRegistry for HttpRegistry {
    fn schema(&self, id: u32) -> BoxFuture<'_, Result<SchemaLookup, RegistryError>> {
        let late = |_| Err(RegistryError::TimedOut { url: self.url.clone() });
        timeout(SCHEMA_TIMEOUT, self.look_up(id))
            .map(move |found| found.unwrap_or_else(late))
            .boxed()
    }
}

impl std::fmt::Debug for HttpRegistry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HttpRegistry").field("url", &self.url).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for HttpRegistryOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The output shows neither the password nor the URL, which may contain one.
        f.debug_struct("HttpRegistryOptions")
            .field("ca_file", &self.ca_file)
            .finish_non_exhaustive()
    }
}

/// A step that remains for the references of a schema.
enum ReferenceStep {
    Fetch(SchemaReference),
    /// Name and text of a reference whose own references are fetched.
    Done(String, String),
}

/// An answer of the registry to one request.
enum RegistryAnswer {
    Found(Registered),
    Missing,
    TooLarge,
    /// A permanent refusal with this status.
    Refused(u16),
}

/// A schema in the registry's JSON.
#[derive(Deserialize)]
struct Registered {
    schema: String,
    #[serde(rename = "schemaType")]
    schema_type: Option<String>,
    #[serde(default, deserialize_with = "none_is_empty")]
    references: Vec<SchemaReference>,
}

/// A reference to a version of a subject, in the registry's JSON.
#[derive(Deserialize)]
struct SchemaReference {
    name: String,
    subject: String,
    version: i64,
}

/// An error answer in the registry's JSON.
#[derive(Deserialize)]
struct RefusalBody {
    error_code: u32,
}

fn none_is_empty<'de, D: serde::Deserializer<'de>>(
    references: D,
) -> Result<Vec<SchemaReference>, D::Error> {
    Ok(Option::deserialize(references)?.unwrap_or_default())
}

async fn read(
    response: Response<hyper::body::Incoming>,
) -> hyper::Result<(StatusCode, Option<Vec<u8>>)> {
    let (head, mut body) = response.into_parts();
    let mut bytes = Vec::new();
    while let Some(frame) = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
        if let Some(data) = frame?.data_ref() {
            bytes.extend_from_slice(data);
        }
        if bytes.len() > ANSWER_BYTES_MAX {
            return Ok((head.status, None));
        }
    }
    Ok((head.status, Some(bytes)))
}

fn refused(status: u16) -> String {
    format!("the registry answers {status}")
}

fn too_large() -> String {
    format!(
        "it is larger than {} KiB, or {} KiB with all that it refers to",
        TEXT_BYTES_MAX >> 10,
        TEXTS_BYTES_MAX >> 10
    )
}

fn basic(user: &str, password: &str) -> Result<HeaderValue, RegistryError> {
    if user.contains(':') {
        return Err(RegistryError::Settings(
            "the user of the schema registry has a colon, which basic authentication cannot say"
                .to_owned(),
        ));
    }
    let text = format!("Basic {}", STANDARD.encode(format!("{user}:{password}")));
    let mut value = HeaderValue::from_str(&text)
        .map_err(|_| RegistryError::Settings("the credentials cannot be sent".to_owned()))?;
    value.set_sensitive(true);
    Ok(value)
}

/// Makes a TLS connector that trusts the system's authorities and those of `ca_file`. It checks the
/// server's name.
fn connector(options: &HttpRegistryOptions) -> Result<SslConnector, RegistryError> {
    let failed = |error| RegistryError::Settings(format!("failed to prepare TLS: {error}"));
    let mut builder = SslConnector::builder(SslMethod::tls_client()).map_err(failed)?;
    if let Some(path) = &options.ca_file {
        let refused = |_| {
            RegistryError::Settings(format!(
                "`{}` is not there or holds no certificates in PEM",
                path.display()
            ))
        };
        builder.set_ca_file(path).map_err(refused)?;
    }
    Ok(builder.build())
}

/// Encodes a text as one segment of a path.
fn encode(segment: &str) -> String {
    let byte = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'~' | b'.' => {
            char::from(byte).to_string()
        }
        byte => format!("%{byte:02X}"),
    };
    match segment {
        // A server would resolve a segment of one or two dots as a step of the path.
        "." | ".." => segment.replace('.', "%2E"),
        _ => segment.bytes().map(byte).collect(),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    /// Starts a registry on this machine that answers each path by `answer`. Returns its client
    /// and the heads of the requests.
    async fn serve(
        answer: impl Fn(&str) -> String + Send + 'static,
    ) -> (HttpRegistry, tokio::sync::mpsc::UnboundedReceiver<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (heads, received) = tokio::sync::mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut head = vec![0; 4_096];
                let length = stream.read(&mut head).await.expect("a request");
                let head = String::from_utf8_lossy(&head[..length]).into_owned();
                let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
                let _ = heads.send(head);
                match answer(&path).as_str() {
                    "silence" => std::future::pending().await,
                    // The client stops reading an answer that is too large.
                    answer => drop(stream.write_all(answer.as_bytes()).await),
                }
            }
        });
        let credentials = Some(("reader".to_owned(), "hunter2".to_owned()));
        let options = HttpRegistryOptions {
            url: format!("http://{address}/ccompat/v7/"),
            credentials,
            ca_file: None,
        };
        (HttpRegistry::new(&options).expect("sound settings"), received)
    }

    fn http(status: &str, body: &str) -> String {
        format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
    }

    #[tokio::test]
    async fn a_schema_comes_with_all_that_it_refers_to() {
        let (registry, mut heads) = serve(|path| {
            let referring = |name: &str, to: &[&str]| {
                let references: Vec<_> = to
                    .iter()
                    .map(|to| serde_json::json!({ "name": format!("{to}.proto"), "subject": format!("{to}/ä"), "version": 3 }))
                    .collect();
                http("200 OK", &serde_json::json!({ "schema": name, "schemaType": "PROTOBUF", "references": references }).to_string())
            };
            match path {
                "/ccompat/v7/schemas/ids/7" => referring("main", &["a", "b"]),
                "/ccompat/v7/subjects/a%2F%C3%A4/versions/3?deleted=true" => referring("A", &["c", "b"]),
                "/ccompat/v7/subjects/b%2F%C3%A4/versions/3?deleted=true" => referring("B", &["c", "a"]),
                "/ccompat/v7/subjects/c%2F%C3%A4/versions/3?deleted=true" => referring("C", &[]),
                _ => http("500 Oops", ""),
            }
        })
        .await;
        let found = registry.schema(7).await.expect("an answer");
        let references = [("c.proto", "C"), ("b.proto", "B"), ("a.proto", "A")]
            .map(|(name, text)| (name.to_owned(), text.to_owned()));
        let expected = RegisteredSchema {
            format: Format::Protobuf,
            text: "main".to_owned(),
            references: references.to_vec(),
        };
        assert_eq!(found, SchemaLookup::Found(expected));
        let head = heads.recv().await.expect("a request").to_lowercase();
        assert!(head.contains("authorization: basic cmvhzgvyomh1bnrlcji=\r\n"), "{head}");
        assert!(head.contains("accept: application/vnd.schemaregistry.v1+json"), "{head}");
        let all = format!("{registry:?}");
        assert!(!all.contains("hunter2") && !all.contains("cmVh"), "{all}");
    }

    #[tokio::test]
    async fn answers_have_their_meaning() {
        for (answer, expected) in [
            (
                http("200 OK", r#"{"schema":"\"int\"","references":null}"#),
                "Ok(Found(RegisteredSchema { format: Avro",
            ),
            (
                http(
                    "200 OK",
                    r#"{"schema":"{}","schemaType":"JSON","references":[{"name":"x","subject":"x","version":1}]}"#,
                ),
                "Ok(Found(RegisteredSchema { format: Json",
            ),
            (
                http("200 OK", r#"{"schema":"x","schemaType":"XML"}"#),
                "Ok(Unusable(\"it is of no type that is known",
            ),
            (
                http("404 Not Found", r#"{"error_code":40403,"message":"Schema not found"}"#),
                "Ok(Unknown)",
            ),
            (
                http("404 Not Found", r#"{"error_code":404,"message":"HTTP 404 Not Found"}"#),
                "Err(NoRegistry",
            ),
            (http("404 Not Found", "<html>"), "Err(NoRegistry"),
            (http("200 OK", "<html>"), "Err(NoRegistry"),
            (http("302 Found\r\nlocation: http://127.0.0.1:1/", ""), "Err(NoRegistry"),
            (http("401 Unauthorized", "{}"), "Err(Refused"),
            (http("403 Forbidden", ""), "Err(Refused"),
            (http("422 Unprocessable Entity", ""), r#"Ok(Unusable("the registry answers 422"#),
            (http("429 Too Many Requests", ""), "Err(Failed"),
            (http("500 Internal Server Error", "{}"), "Err(Failed"),
            (http("503 Service Unavailable", ""), "Err(Failed"),
            ("nonsense\r\n\r\n".to_owned(), "Err(Unreachable"),
            (String::new(), "Err(Unreachable"),
            ("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{".to_owned(), "Err(Unreachable"),
            (http("200 OK", &" ".repeat(ANSWER_BYTES_MAX + 1)), "Ok(Unusable(\"it is larger than"),
            (
                http(
                    "200 OK",
                    &serde_json::json!({ "schema": "x".repeat(TEXT_BYTES_MAX + 1) }).to_string(),
                ),
                "Ok(Unusable(\"it is larger than",
            ),
        ] {
            let head: String = answer.chars().take(80).collect();
            let (registry, _heads) = serve(move |_| answer.clone()).await;
            let found = registry.schema(7).await;
            if let Err(error) = &found {
                assert!(
                    !error.to_string().contains("hunter2")
                        && error.to_string().contains("/ccompat/v7"),
                    "{error}"
                );
            }
            let found = format!("{found:?}");
            assert!(found.starts_with(expected), "{head}: {found}");
        }
    }

    #[tokio::test]
    async fn references_are_bounded() {
        let number = |path: &str| path.rsplit('/').next()?.split('?').next()?.parse::<u64>().ok();
        let next = move |path: &str| number(path).unwrap_or_default() + 1;
        let (registry, mut heads) = serve(move |path| {
            let references =
                [serde_json::json!({ "name": "x", "subject": "x", "version": next(path) })];
            http(
                "200 OK",
                &serde_json::json!({ "schema": "x", "references": references }).to_string(),
            )
        })
        .await;
        assert_eq!(
            registry.schema(7).await.expect("an answer"),
            SchemaLookup::Unusable("it refers to more than 32 schemas".to_owned())
        );
        let mut asked = 0;
        while heads.try_recv().is_ok() {
            asked += 1;
        }
        assert_eq!(asked, 33);
        let (registry, _heads) = serve(|path| match path {
            "/ccompat/v7/schemas/ids/7" => http(
                "200 OK",
                r#"{"schema":"x","references":[{"name":"y","subject":"z","version":1}]}"#,
            ),
            _ => http("404 Not Found", r#"{"error_code":40401,"message":"Subject not found"}"#),
        })
        .await;
        let why = "it refers to `y`, and subject `z` has no version 1".to_owned();
        assert_eq!(registry.schema(7).await.expect("an answer"), SchemaLookup::Unusable(why));
    }

    #[tokio::test]
    async fn silence_has_an_end() {
        let (mut registry, _heads) = serve(|_| "silence".to_owned()).await;
        registry.answer_timeout = Duration::from_millis(50);
        assert!(matches!(registry.schema(7).await, Err(RegistryError::TimedOut { .. })));
        let refused = HttpRegistryOptions {
            url: "http://127.0.0.1:1".to_owned(),
            ..HttpRegistryOptions::default()
        };
        let refused = HttpRegistry::new(&refused)
            .expect("sound settings")
            .schema(7)
            .await
            .expect_err("no server listens");
        assert_eq!(
            refused.to_string(),
            "the schema registry at `http://127.0.0.1:1` is not reachable: Connection refused (os \
                error 111)"
        );
    }

    #[test]
    fn settings_are_checked_and_passwords_not_repeated() {
        let new = |url: &str| {
            HttpRegistry::new(&HttpRegistryOptions {
                url: url.to_owned(),
                ..HttpRegistryOptions::default()
            })
        };
        for (url, host, port, prefix) in [
            ("http://127.0.0.1:8081", "127.0.0.1", 8081, ""),
            (
                "https://registry.example/apis/ccompat/v7/",
                "registry.example",
                443,
                "/apis/ccompat/v7",
            ),
            ("http://[::1]/", "::1", 80, ""),
        ] {
            let registry = new(url).expect("sound settings");
            assert_eq!(
                (registry.host.as_str(), registry.port, registry.prefix.as_str()),
                (host, port, prefix),
                "{url}"
            );
        }
        for url in [
            "",
            "registry.example",
            "ftp://h",
            "http://",
            "/x",
            "http://h/?q=1",
            "http://h/#x",
            "http://u:hunter2@h",
            "http://h h",
        ] {
            let error = new(url).expect_err(url).to_string();
            assert!(
                error.starts_with("the URL of the schema registry") && !error.contains("hunter2"),
                "{error}"
            );
        }
        let with = |url: &str, user: &str, ca_file: Option<&str>| {
            let credentials = Some((user.to_owned(), "hunter2".to_owned()));
            let options = HttpRegistryOptions {
                url: url.to_owned(),
                credentials,
                ca_file: ca_file.map(PathBuf::from),
            };
            assert!(!format!("{options:?}").contains("hunter2"));
            HttpRegistry::new(&options).expect_err("wrong settings").to_string()
        };
        assert!(with("http://h", "a:b", None).contains("has a colon"));
        assert!(
            with("http://h", "a", Some("/x")).contains("only where the schema registry has https")
        );
        assert_eq!(
            with("https://h", "a", Some("/x")),
            "`/x` is not there or holds no certificates in PEM"
        );
    }

    #[test]
    fn subjects_are_one_segment_of_a_path() {
        for (subject, segment) in [
            ("orders-value", "orders-value"),
            ("a/b c?", "a%2Fb%20c%3F"),
            ("..", "%2E%2E"),
            ("a.b", "a.b"),
            ("%", "%25"),
        ] {
            assert_eq!(encode(subject), segment);
        }
    }
}
