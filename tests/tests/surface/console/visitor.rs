//! A browser without JavaScript, as far as the console needs one.

use axum::{
    Router,
    body::{Body, BodyDataStream},
    http::{HeaderMap, Request, StatusCode, header},
};
use futures::StreamExt;
use oncebox_tests::wait::DEADLINE;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use super::ApiFixture;

/// The console over a fixture's API.
pub struct Console {
    router: Router,
    stop: CancellationToken,
}

/// What the console answered.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    /// Empty where the body is no text.
    pub body: String,
    pub length: usize,
}

/// A browser with its cookie.
pub struct Visitor<'a> {
    console: &'a Console,
    cookie: String,
    form_token: String,
}

impl Console {
    pub fn new(fixture: &ApiFixture) -> Self {
        Self::over(fixture, false)
    }

    /// On a connection with TLS.
    pub fn encrypted(fixture: &ApiFixture) -> Self {
        Self::over(fixture, true)
    }

    fn over(fixture: &ApiFixture, is_encrypted: bool) -> Self {
        let stop = CancellationToken::new();
        let api = fixture.api.clone();
        let router = oncebox_console::router(api, is_encrypted, None, stop.clone()).unwrap();
        Self { router, stop }
    }

    pub fn stop(&self) {
        self.stop.cancel();
    }

    async fn send(&self, request: Request<Body>) -> Answer {
        let response = self.router.clone().oneshot(request).await.expect("it always answers");
        let (head, body) = response.into_parts();
        let body = axum::body::to_bytes(body, 64 << 20).await.expect("a body");
        let (length, body) = (body.len(), String::from_utf8(body.to_vec()).unwrap_or_default());
        Answer { status: head.status, headers: head.headers, body, length }
    }

    pub async fn try_sign_in(&self, token: &str) -> Answer {
        self.sign_in_from("http://localhost", token).await
    }

    pub async fn sign_in_from(&self, origin: &str, token: &str) -> Answer {
        self.send(form("/console/login", origin, &[("token", token)]).body_of()).await
    }

    pub async fn login_page(&self) -> Answer {
        let request = Request::get("/console/login").header("host", "localhost");
        self.send(request.body(Body::empty()).unwrap()).await
    }

    pub async fn sign_in(&self, token: &str) -> Visitor<'_> {
        let answer = self.try_sign_in(token).await;
        assert_eq!(answer.status, StatusCode::SEE_OTHER, "{answer:?}");
        let cookie = answer.headers["set-cookie"].to_str().unwrap();
        self.with_cookie(cookie.split(';').next().unwrap().to_owned()).await
    }

    /// A visitor of a host without tokens.
    pub async fn anyone(&self) -> Visitor<'_> {
        self.with_cookie(String::new()).await
    }

    async fn with_cookie(&self, cookie: String) -> Visitor<'_> {
        let visitor = Visitor { console: self, cookie, form_token: String::new() };
        let form_token = visitor.read_form_token().await;
        Visitor { form_token, ..visitor }
    }

    /// Visitors whose session is none, or none any more.
    pub async fn strangers(&self, fixture: &ApiFixture) -> Vec<Visitor<'_>> {
        let token = fixture.token_of("", oncebox_api::wire::Role::Admin);
        let ended = self.sign_in(&token).await;
        ended.sign_out().await;
        let with = |cookie: &str, form_token: &str| Visitor {
            console: self,
            cookie: cookie.to_owned(),
            form_token: form_token.to_owned(),
        };
        vec![
            with("", &ended.form_token),
            with(&format!("oncebox_session={}", "0".repeat(64)), &ended.form_token),
            with(&format!("oncebox_session={token}"), &ended.form_token),
            with("oncebox_session=", ""),
            ended,
        ]
    }
}

/// A form as a browser sends it.
struct Form {
    request: axum::http::request::Builder,
    body: String,
}

fn form(path: &str, origin: &str, fields: &[(&str, &str)]) -> Form {
    let encode = |text: &str| oncebox_api::link::escaped(text);
    let body: Vec<_> =
        fields.iter().map(|(name, value)| format!("{}={}", encode(name), encode(value))).collect();
    let request = Request::post(path)
        .header("host", "localhost")
        .header("origin", origin)
        .header("content-type", "application/x-www-form-urlencoded");
    Form { request, body: body.join("&") }
}

impl Form {
    fn with(mut self, name: &str, value: &str) -> Self {
        self.request = self.request.header(name, value);
        self
    }

    fn body_of(self) -> Request<Body> {
        self.request.body(Body::from(self.body)).expect("a request")
    }
}

impl Visitor<'_> {
    pub async fn get(&self, path: &str) -> Answer {
        self.get_with(path, &[]).await
    }

    pub async fn get_compressed(&self, path: &str) -> Answer {
        let mut answer = self.get(path).await;
        let compressed = self.get_with(path, &[("accept-encoding", "br, gzip;q=1.0")]).await;
        assert_eq!(compressed.headers[header::CONTENT_ENCODING], "gzip", "{path}");
        answer.length = compressed.length;
        answer
    }

    pub async fn get_with(&self, path: &str, headers: &[(&str, &str)]) -> Answer {
        let mut request = Request::get(path);
        if !headers.iter().any(|(name, _)| *name == "host") {
            request = request.header("host", "localhost");
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.header("cookie", &self.cookie).body(Body::empty());
        self.console.send(request.unwrap_or_else(|error| panic!("{path}: {error}"))).await
    }

    /// The token of this session's forms, as a page has it.
    async fn read_form_token(&self) -> String {
        let page = if self.cookie.is_empty() { "/console/retention" } else { "/console" };
        self.get(page).await.form_token()
    }

    /// Send the form of an action.
    pub async fn act(&self, name: &str, fields: &[(&str, &str)]) -> Answer {
        self.post(&format!("/console/actions/{name}"), fields).await
    }

    /// Send a form.
    pub async fn post(&self, path: &str, fields: &[(&str, &str)]) -> Answer {
        let fields = [&[("form_token", self.form_token.as_str())], fields].concat();
        let form = form(path, "http://localhost", &fields);
        self.console.send(form.with("cookie", &self.cookie).body_of()).await
    }

    /// The same form as another site would send it, and with a token that is not this session's.
    pub async fn forged(
        &self,
        path: &str,
        fields: &[(&str, &str)],
        other: Option<&Visitor<'_>>,
    ) -> Vec<(&'static str, Answer)> {
        let mut answers = Vec::new();
        let mut send = async |kind: &'static str, form: Form| {
            let request = form.with("cookie", &self.cookie).body_of();
            answers.push((kind, self.console.send(request).await));
        };
        let own = [&[("form_token", self.form_token.as_str())], fields].concat();
        send("another origin", form(path, "https://evil.example", &own)).await;
        send("another port", form(path, "http://localhost:81", &own)).await;
        send("no origin", form(path, "null", &own)).await;
        let from_site = form(path, "http://localhost", &own).with("sec-fetch-site", "same-site");
        send("another host of the site", from_site).await;
        send("no token", form(path, "http://localhost", fields)).await;
        let zeros = "0".repeat(64);
        let zeros = [&[("form_token", zeros.as_str())], fields].concat();
        send("a token of zeros", form(path, "http://localhost", &zeros)).await;
        if let Some(other) = other {
            let foreign = [&[("form_token", other.form_token.as_str())], fields].concat();
            send("the token of another session", form(path, "http://localhost", &foreign)).await;
        }
        answers
    }

    /// Upload a component, from a page of some origin.
    pub async fn upload(&self, origin: &str, fields: &[(&str, &str)], file: &[u8]) -> Answer {
        const BOUNDARY: &str = "between";
        let fields = [&[("form_token", self.form_token.as_str())], fields].concat();
        let mut body = Vec::new();
        for (name, value) in fields {
            let head = format!("content-disposition: form-data; name=\"{name}\"");
            body.extend(format!("--{BOUNDARY}\r\n{head}\r\n\r\n{value}\r\n").bytes());
        }
        let head = "content-disposition: form-data; name=\"file\"; filename=\"ledger.wasm\"";
        body.extend(format!("--{BOUNDARY}\r\n{head}\r\n\r\n").bytes());
        body.extend(file);
        body.extend(format!("\r\n--{BOUNDARY}--\r\n").bytes());
        let request = Request::post("/console/upload")
            .header("host", "localhost")
            .header("origin", origin)
            .header("cookie", &self.cookie)
            .header("content-type", format!("multipart/form-data; boundary={BOUNDARY}"));
        self.console.send(request.body(Body::from(body)).expect("a request")).await
    }

    pub async fn sign_out(&self) -> Answer {
        self.post("/console/logout", &[]).await
    }

    /// The changes of a page, as a browser asks for them.
    pub async fn follow(&self, path: &str) -> Events {
        let request = Request::get(path)
            .header("host", "localhost")
            .header("accept", "text/event-stream")
            .header("cookie", &self.cookie)
            .body(Body::empty())
            .unwrap();
        let response = self.console.router.clone().oneshot(request).await.expect("an answer");
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Events(response.into_body().into_data_stream())
    }
}

/// The events of a page.
pub struct Events(BodyDataStream);

impl Events {
    /// The next change; none at the end.
    pub async fn next(&mut self) -> Option<String> {
        loop {
            let next = tokio::time::timeout(DEADLINE, self.0.next()).await.expect("an event");
            let event = String::from_utf8(next?.expect("a chunk").to_vec()).expect("text");
            if !event.starts_with(':') {
                return Some(event);
            }
        }
    }
}

impl Answer {
    pub fn location(&self) -> &str {
        self.headers.get("location").map_or("", |location| location.to_str().unwrap())
    }

    pub fn form_token(&self) -> String {
        let (_, rest) = self.body.split_once("name=\"form_token\" value=\"").expect("a form");
        rest.split('"').next().unwrap().to_owned()
    }

    /// What every page says to the browser.
    pub fn check_headers(&self, page: &str) {
        let policy = self.headers["content-security-policy"].to_str().unwrap();
        for rule in [
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "frame-ancestors 'none'",
        ] {
            assert!(policy.contains(rule), "{page}: {policy}");
        }
        assert!(!policy.contains("unsafe"), "{page}: {policy}");
        assert_eq!(self.headers["cache-control"], "no-store", "{page}");
        assert_eq!(self.headers["referrer-policy"], "same-origin", "{page}");
        assert_eq!(self.headers["x-content-type-options"], "nosniff", "{page}");
        self.check_markup(page);
    }

    /// What no page has, wherever its texts come from.
    pub fn check_markup(&self, page: &str) {
        for (_, tag) in self.body.match_indices('<').map(|(at, _)| (at, &self.body[at..])) {
            let tag = &tag[..tag.find('>').map_or(tag.len(), |end| end + 1)];
            for foreign in ["<iframe", "<img", "<svg", "<object", "<style", "<base", "<embed"] {
                assert!(!tag.starts_with(foreign), "{page}: {tag}");
            }
            let is_script = tag.starts_with("<script");
            assert!(!is_script || tag.contains("src=\"/console/assets/"), "{page}: {tag}");
            // Attributes with code, outside of quotes.
            let outside: String = tag.split('"').step_by(2).collect();
            for code in [" onerror", " onload", " onmouseover", " onclick", " style="] {
                assert!(!outside.contains(code), "{page}: {tag}");
            }
            assert!(!tag.contains("href=\"javascript:"), "{page}: {tag}");
        }
    }

    /// The commands that a page names.
    pub fn commands(&self) -> Vec<String> {
        let parts = self.body.split("<p class=\"command\"><code>").skip(1);
        let unescape = |text: &str| {
            text.replace("&lt;", "<")
                .replace("&gt;", ">")
                .replace("&quot;", "\"")
                .replace("&amp;", "&")
        };
        parts.map(|part| unescape(part.split("</code>").next().unwrap())).collect()
    }

    /// The files that a page loads.
    pub fn assets(&self) -> Vec<String> {
        let parts = self.body.split("\"/console/assets/").skip(1);
        parts.map(|part| format!("/console/assets/{}", part.split('"').next().unwrap())).collect()
    }
}
