//! A server on this machine that speaks as much S3 as the archive does: objects are put, deleted,
//! and read as a whole or in part. It computes each request's signature (SigV4) from AWS's
//! description of it, and refuses a request that is signed otherwise. It counts what it serves, and
//! breaks on demand. Objects that messages refer to can be put beside those of the archive, denied,
//! and held in the middle.

use std::{
    collections::{HashMap, HashSet},
    convert::Infallible,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use axum::{
    Router,
    body::{Body, Bytes, to_bytes},
    extract::{Request, State},
    http::{HeaderMap, Method, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
};
use futures::{StreamExt, stream};
use hmac::{Hmac, KeyInit, Mac};
use oncebox_control::{ArchiveOptions, StoreSettings};
use sha2::{Digest, Sha256};
use tokio::{net::TcpListener, sync::watch, task::JoinHandle};

/// Id of the only access key.
pub const ACCESS_KEY_ID: &str = "AKIAOFTHETESTS";
/// The access key.
pub const SECRET_ACCESS_KEY: &str = "hunter2/of+the+archive";
/// The only bucket.
pub const BUCKET: &str = "kept";
/// Region of the bucket.
pub const REGION: &str = "eu-test-1";

/// Largest object, bytes.
const OBJECT_MAX: usize = 256 << 20;

/// The server. It ends with this value.
pub struct S3Server {
    address: SocketAddr,
    shared: Arc<Shared>,
    serving: JoinHandle<()>,
}

/// A fault that strikes once, at the put of a file of Parquet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum S3Fault {
    /// The object keeps the first half of its bytes.
    Cut,
    /// The put is refused.
    Refuse,
}

#[derive(Default)]
struct Shared(Mutex<Bucket>);

#[derive(Default)]
struct Bucket {
    objects: HashMap<String, Bytes>,
    /// Paths of the puts that were accepted, in order.
    puts: Vec<String>,
    /// Bytes of objects that were served.
    served: usize,
    /// Why requests were refused.
    refusals: Vec<String>,
    fault: Option<(usize, S3Fault)>,
    /// Whether nothing is deleted.
    is_locked: bool,
    /// Paths that were asked for, in order.
    gets: Vec<String>,
    /// Code with which every request is refused.
    refusal: Option<&'static str>,
    /// Paths that the access key may not read.
    denied: HashSet<String>,
    /// Paths whose objects stop in the middle, until the value is true.
    held: HashMap<String, watch::Sender<bool>>,
    /// Whether a deletion hides an object, and its version stays.
    keeps_versions: bool,
    /// Paths and bytes of versions that were hidden.
    versions: Vec<(String, Bytes)>,
    /// Whether nothing is there for readers.
    is_unmounted: bool,
    /// Whether that begins with the next request for the length of an object.
    unmounts_at_look: bool,
}

impl Shared {
    fn bucket(&self) -> MutexGuard<'_, Bucket> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl S3Server {
    /// Starts a server with an empty bucket.
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let shared = Arc::<Shared>::default();
        let router = Router::new().fallback(answer).with_state(shared.clone());
        let serving = tokio::spawn(async move {
            axum::serve(listener, router).await.expect("it serves until it is aborted");
        });
        Self { address, shared, serving }
    }

    /// Options of an archive in the bucket.
    pub fn options(&self) -> ArchiveOptions {
        ArchiveOptions {
            location: format!("s3://{BUCKET}/below/here"),
            endpoint: format!("http://{}", self.address),
            region: REGION.to_owned(),
            access_key_id: ACCESS_KEY_ID.to_owned(),
            secret_access_key: SECRET_ACCESS_KEY.to_owned(),
            ..ArchiveOptions::default()
        }
    }

    /// The same as variables of a host.
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        let options = self.options();
        vec![
            ("ONCEBOX_ARCHIVE_LOCATION", options.location),
            ("ONCEBOX_ARCHIVE_ENDPOINT", options.endpoint),
            ("ONCEBOX_ARCHIVE_REGION", options.region),
            ("ONCEBOX_ARCHIVE_ACCESS_KEY_ID", options.access_key_id),
            ("ONCEBOX_ARCHIVE_SECRET_ACCESS_KEY", options.secret_access_key),
        ]
    }

    /// Bytes of objects that were served so far.
    pub fn served(&self) -> usize {
        self.shared.bucket().served
    }

    /// Paths of the files of Parquet that were put so far, in order.
    pub fn puts(&self) -> Vec<String> {
        let bucket = self.shared.bucket();
        bucket.puts.iter().filter(|path| path.ends_with(".parquet")).cloned().collect()
    }

    /// Number of puts that were accepted so far, of whatever file.
    pub fn all_puts(&self) -> usize {
        self.shared.bucket().puts.len()
    }

    /// Why requests were refused so far.
    pub fn refusals(&self) -> Vec<String> {
        self.shared.bucket().refusals.clone()
    }

    /// The object at a path of the archive.
    pub fn object(&self, path: &str) -> Option<Bytes> {
        self.shared.bucket().objects.get(&key(path)).cloned()
    }

    /// Replaces the object at a path of the archive, or takes it away.
    pub fn set_object(&self, path: &str, bytes: Option<Bytes>) {
        let mut bucket = self.shared.bucket();
        match bytes {
            Some(bytes) => drop(bucket.objects.insert(key(path), bytes)),
            None => drop(bucket.objects.remove(&key(path))),
        }
    }

    /// Paths of the files of Parquet that are there.
    pub fn paths(&self) -> Vec<String> {
        let bucket = self.shared.bucket();
        bucket.objects.keys().filter(|path| path.ends_with(".parquet")).cloned().collect()
    }

    /// The server as the settings of hosts name it.
    pub fn store(&self) -> StoreSettings {
        StoreSettings {
            endpoint: format!("http://{}", self.address),
            region: REGION.to_owned(),
            allow_private: true,
            ..StoreSettings::default()
        }
    }

    /// The same as a host's configuration, as the store `docs`.
    pub fn store_config(&self) -> String {
        let StoreSettings { endpoint, region, .. } = self.store();
        format!(
            "[references.stores.docs]\nendpoint = '{endpoint}'\nregion = '{region}'\n\
             allow_private = true\n"
        )
    }

    /// Puts an object under a key of the bucket, or takes it away.
    pub fn put_key(&self, key: &str, bytes: Option<&str>) {
        let (path, mut bucket) = (path_of(key), self.shared.bucket());
        match bytes {
            Some(bytes) => {
                drop(bucket.objects.insert(path, Bytes::copy_from_slice(bytes.as_bytes())))
            }
            None => drop(bucket.objects.remove(&path)),
        }
    }

    /// Lets the access key read a key of the bucket no longer.
    pub fn deny(&self, key: &str) {
        self.shared.bucket().denied.insert(path_of(key));
    }

    /// Refuses every request with a code from now on, or no longer.
    pub fn refuse(&self, code: Option<&'static str>) {
        self.shared.bucket().refusal = code;
    }

    /// Lets the object under a key stop in the middle, from the next request on.
    pub fn hold(&self, key: &str) {
        self.shared.bucket().held.insert(path_of(key), watch::Sender::new(false));
    }

    /// Lets the object under a key go on, also where it was asked for before.
    pub fn release(&self, key: &str) {
        if let Some(held) = self.shared.bucket().held.remove(&path_of(key)) {
            held.send_replace(true);
        }
    }

    /// Number of times that a key of the bucket was asked for.
    pub fn asked(&self, key: &str) -> usize {
        let path = path_of(key);
        self.shared.bucket().gets.iter().filter(|asked| **asked == path).count()
    }

    /// Paths that were asked for so far, in order.
    pub fn gets(&self) -> Vec<String> {
        self.shared.bucket().gets.clone()
    }

    /// Refuses deletions from now on, or no longer, as for a key that may not delete.
    pub fn lock(&self, is_locked: bool) {
        self.shared.bucket().is_locked = is_locked;
    }

    /// Keeps versions from now on, or no longer, as a bucket with a lock against deletion does: a
    /// deletion succeeds, and puts a delete marker over the object.
    pub fn keep_versions(&self, keeps_versions: bool) {
        self.shared.bucket().keeps_versions = keeps_versions;
    }

    /// Paths of the objects that were hidden, and whose versions are there.
    pub fn versions(&self) -> Vec<String> {
        let bucket = self.shared.bucket();
        bucket.versions.iter().map(|(path, _)| path.clone()).collect()
    }

    /// Hides all objects from the next request for the length of one, until they are shown again.
    pub fn unmount_at_look(&self) {
        self.shared.bucket().unmounts_at_look = true;
    }

    /// Shows the objects again.
    pub fn mount(&self) {
        let mut bucket = self.shared.bucket();
        (bucket.is_unmounted, bucket.unmounts_at_look) = (false, false);
    }

    /// Lets a fault strike the nth next put of a file of Parquet, from 1.
    pub fn break_put(&self, nth: usize, fault: S3Fault) {
        self.shared.bucket().fault = Some((nth, fault));
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

fn path_of(key: &str) -> String {
    format!("/{BUCKET}/{key}")
}

fn key(path: &str) -> String {
    format!("/{BUCKET}/below/here/{path}")
}

async fn answer(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let body = to_bytes(body, OBJECT_MAX).await.expect("a body");
    if let Err(why) = check(&head, &body) {
        shared.bucket().refusals.push(why);
        return refusal(StatusCode::FORBIDDEN, "SignatureDoesNotMatch");
    }
    let path = head.uri.path().to_owned();
    let refused = shared.bucket().refusal;
    if let Some(code) = refused {
        return refusal(StatusCode::FORBIDDEN, code);
    }
    match head.method {
        Method::PUT => put(&shared, path, body),
        Method::DELETE => delete(&shared, &path),
        Method::GET | Method::HEAD => {
            let (object, is_denied) = {
                let mut bucket = shared.bucket();
                bucket.gets.push(path.clone());
                (bucket.look(&head.method, &path), bucket.denied.contains(&path))
            };
            match object {
                _ if is_denied => refusal(StatusCode::FORBIDDEN, "AccessDenied"),
                None => refusal(StatusCode::NOT_FOUND, "NoSuchKey"),
                Some(object) => get(&shared, &head, object),
            }
        }
        _ => refusal(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed"),
    }
}

impl Bucket {
    /// The object that a reader sees.
    fn look(&mut self, method: &Method, path: &str) -> Option<Bytes> {
        self.is_unmounted |= self.unmounts_at_look && *method == Method::HEAD;
        self.objects.get(path).filter(|_| !self.is_unmounted).cloned()
    }
}

fn put(shared: &Shared, path: String, body: Bytes) -> Response {
    let mut bucket = shared.bucket();
    let tag = tag(&body);
    let mut kept = body;
    let is_counted = path.ends_with(".parquet");
    if let Some((left, fault)) = bucket.fault.as_mut().filter(|_| is_counted) {
        *left -= 1;
        let (left, fault) = (*left, *fault);
        if left == 0 {
            bucket.fault = None;
            match fault {
                S3Fault::Cut => kept.truncate(kept.len() / 2),
                S3Fault::Refuse => return refusal(StatusCode::FORBIDDEN, "AccessDenied"),
            }
        }
    }
    bucket.objects.insert(path.clone(), kept);
    bucket.puts.push(path);
    (StatusCode::OK, [(header::ETAG, tag)]).into_response()
}

fn delete(shared: &Shared, path: &str) -> Response {
    let mut bucket = shared.bucket();
    if bucket.is_locked {
        return refusal(StatusCode::FORBIDDEN, "AccessDenied");
    }
    let object = bucket.objects.remove(path);
    if !bucket.keeps_versions {
        return StatusCode::NO_CONTENT.into_response();
    }
    bucket.versions.extend(object.map(|object| (path.to_owned(), object)));
    (StatusCode::NO_CONTENT, [("x-amz-delete-marker", "true")]).into_response()
}

fn get(shared: &Shared, head: &Parts, object: Bytes) -> Response {
    let length = object.len();
    let range = head.headers.get(header::RANGE).and_then(|range| range.to_str().ok());
    let range = range.map(|range| {
        let ends = range.strip_prefix("bytes=").and_then(|ends| ends.split_once('-'));
        let (first, last) = ends.expect("a range with both ends");
        let [first, last] = [first, last].map(|end| end.parse().expect("an offset"));
        (first, usize::min(last, length - 1))
    });
    let (status, part) = match range {
        None => (StatusCode::OK, object.clone()),
        Some((first, _)) if first >= length => {
            return refusal(StatusCode::RANGE_NOT_SATISFIABLE, "InvalidRange");
        }
        Some((first, last)) => (StatusCode::PARTIAL_CONTENT, object.slice(first..=last)),
    };
    let mut response = Response::builder()
        .status(status)
        .header(header::ETAG, tag(&object))
        .header(header::LAST_MODIFIED, "Fri, 20 Nov 2026 00:00:00 GMT")
        .header(header::CONTENT_LENGTH, part.len());
    if let Some((first, last)) = range {
        response = response.header(header::CONTENT_RANGE, format!("bytes {first}-{last}/{length}"));
    }
    let mut bucket = shared.bucket();
    if head.method == Method::GET {
        bucket.served += part.len();
    }
    let held = bucket.held.get(head.uri.path()).map(watch::Sender::subscribe);
    let body = match held {
        None => Body::from(part),
        Some(goes_on) => in_halves(part, goes_on),
    };
    response.body(body).expect("a response")
}

/// Sends the first half of an object, and the second one when it goes on.
fn in_halves(object: Bytes, mut goes_on: watch::Receiver<bool>) -> Body {
    let mut first = object;
    let second = first.split_off(first.len() / 2);
    let second = async move {
        let _ = goes_on.wait_for(|goes_on| *goes_on).await;
        Ok::<_, Infallible>(second)
    };
    let first = stream::once(async move { Ok::<_, Infallible>(first) });
    Body::from_stream(first.chain(stream::once(second)))
}

fn tag(object: &[u8]) -> String {
    format!("\"{}\"", &hex::encode(Sha256::digest(object))[..32])
}

fn refusal(status: StatusCode, code: &str) -> Response {
    (status, format!("<Error><Code>{code}</Code></Error>")).into_response()
}

/// Checks the signature of a request, and that the body is the one that was signed.
fn check(head: &Parts, body: &Bytes) -> Result<(), String> {
    let authorization = text(&head.headers, "authorization")?;
    let fields = authorization
        .strip_prefix("AWS4-HMAC-SHA256 ")
        .ok_or_else(|| format!("not signed by SigV4: {authorization}"))?;
    let field = |name: &str| {
        let field = fields.split(", ").find_map(|field| field.strip_prefix(&format!("{name}=")));
        field.ok_or_else(|| format!("`{name}` is missing: {authorization}"))
    };
    let (credential, signed) = (field("Credential")?, field("SignedHeaders")?);
    let (id, scope) = credential.split_once('/').ok_or("a credential without a scope")?;
    let date = scope.split('/').next().unwrap_or_default();
    if id != ACCESS_KEY_ID || scope != format!("{date}/{REGION}/s3/aws4_request") {
        return Err(format!("another credential: {credential}"));
    }
    if head.method == Method::PUT
        && text(&head.headers, "content-length")? != body.len().to_string()
    {
        return Err("another length of the body".to_owned());
    }
    // A bucket with a lock against deletion refuses a put without it.
    if head.method == Method::PUT {
        let sum = openssl::base64::encode_block(&Sha256::digest(body));
        if text(&head.headers, "x-amz-checksum-sha256")? != sum {
            return Err("another checksum of the body".to_owned());
        }
    }
    let digest = text(&head.headers, "x-amz-content-sha256")?;
    if digest != hex::encode(Sha256::digest(body)) {
        return Err("another digest of the body".to_owned());
    }
    if !signed.split(';').any(|name| name == "host") {
        return Err("the name of the server is not signed".to_owned());
    }
    let mut headers = String::new();
    for name in signed.split(';') {
        let words: Vec<_> = text(&head.headers, name)?.split_whitespace().collect();
        headers += &format!("{name}:{}\n", words.join(" "));
    }
    let (path, query) = (head.uri.path(), head.uri.query().unwrap_or_default());
    let request = format!("{}\n{path}\n{query}\n{headers}\n{signed}\n{digest}", head.method);
    let at = text(&head.headers, "x-amz-date")?;
    let to_sign =
        format!("AWS4-HMAC-SHA256\n{at}\n{scope}\n{}", hex::encode(Sha256::digest(request)));
    let key = [date, REGION, "s3", "aws4_request"]
        .iter()
        .fold(format!("AWS4{SECRET_ACCESS_KEY}").into_bytes(), |key, part| mac(&key, part));
    match field("Signature")? == hex::encode(mac(&key, &to_sign)) && at.starts_with(date) {
        true => Ok(()),
        false => Err("another signature".to_owned()),
    }
}

fn text<'h>(headers: &'h HeaderMap, name: &str) -> Result<&'h str, String> {
    let value = headers.get(name).and_then(|value| value.to_str().ok());
    value.ok_or_else(|| format!("the header `{name}` is missing"))
}

fn mac(key: &[u8], text: &str) -> Vec<u8> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes a key of any length");
    mac.update(text.as_bytes());
    mac.finalize().into_bytes().to_vec()
}
