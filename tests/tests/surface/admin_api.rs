//! The HTTP API: who may do what, and what becomes of everything else.

pub mod fixture;
pub mod masking;
mod policies;
pub mod steps;
mod strangers;
pub mod wire;

use std::{collections::BTreeSet, time::Duration};

use axum::http::StatusCode;
use fixture::{Answer, ApiFixture};
use oncebox_api::{Limits, Mode, Principal, wire::Role};
use oncebox_tests::host::HostFixture;
use serde_json::{Value, json};
use steps::{Step, operations, steps};
use tokio::io::AsyncWriteExt;
use wire::{Server, request};

/// What could go wrong: an operation asks for less than it says, or changes something before it
/// asks.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_does_more_than_their_token_says() {
    let fixture = ApiFixture::new(Mode::Tokens, Limits::default()).await;
    let all = operations();
    let tried: BTreeSet<_> = steps(&fixture)
        .iter()
        .map(|step| (step.method.to_owned(), step.template.to_owned()))
        .collect();
    let known: BTreeSet<_> = all.keys().cloned().collect();
    assert_eq!(tried, known, "every operation of the document is tried, and nothing else");
    for step in steps(&fixture) {
        let needed = all[&(step.method.to_owned(), step.template.to_owned())].as_str();
        let before = fixture.digest().await;
        refusals(&fixture, &step, needed).await;
        assert_eq!(
            fixture.digest().await,
            before,
            "{} {} changed something for nobody",
            step.method,
            step.template
        );
        let answer = fixture.answer(&step, Some(&fixture.token(needed, step.template))).await;
        assert!(answer.status.is_success(), "{} {}: {answer:?}", step.method, step.template);
        fixture.remember(&answer);
    }
    fixture.finish().await;
}

async fn refusals(fixture: &ApiFixture, step: &Step, needed: &str) {
    let name = format!("{} {}", step.method, step.template);
    if needed == "none" {
        return;
    }
    for (kind, token) in fixture.bad_tokens() {
        let answer = fixture.answer(step, token.as_deref()).await;
        assert_eq!(
            (answer.status, answer.code()),
            (StatusCode::UNAUTHORIZED, "unauthenticated"),
            "{name}, {kind}: {answer:?}"
        );
        assert!(answer.headers["www-authenticate"].to_str().unwrap().starts_with("Bearer"));
        assert_eq!(answer.headers["content-type"], "application/problem+json");
    }
    let is_platform = needed == "platform";
    let Some(needed) = Role::parse(needed).or(is_platform.then_some(Role::Admin)) else { return };
    let mut small = vec![("another tenant's admin", fixture.token_of("other", Role::Admin))];
    if is_platform || !step.template.contains("{tenant}") {
        small.push(("an admin of one tenant", fixture.token_of("acme", Role::Admin)));
    }
    if let Some(smaller) = Role::ALL.into_iter().rfind(|role| *role < needed) {
        small.push(("too small a role", fixture.token_of("", smaller)));
        small.push(("too small a role in the tenant", fixture.token_of("acme", smaller)));
    }
    for (kind, token) in small {
        let answer = fixture.answer(step, Some(&token)).await;
        assert_eq!(
            (answer.status, answer.code()),
            (StatusCode::FORBIDDEN, "forbidden"),
            "{name}, {kind}: {answer:?}"
        );
        assert_eq!(answer.headers["content-type"], "application/problem+json");
    }
}

/// What could go wrong: what a stranger sends ends in an error of the host, or changes something.
#[tokio::test(flavor = "multi_thread")]
async fn rubbish_is_refused_and_changes_nothing() {
    let fixture = ApiFixture::new(Mode::Tokens, Limits::default()).await;
    let token = fixture.token_of("", Role::Admin);
    let before = fixture.digest().await;
    for step in steps(&fixture) {
        for body in rubbish(&step) {
            let answer = fixture
                .send(
                    step.method,
                    &step.path(&fixture),
                    body.1.clone(),
                    "application/json",
                    Some(&token),
                )
                .await;
            assert!(
                answer.status.is_client_error(),
                "{} {}, {}: {answer:?}",
                step.method,
                step.template,
                body.0
            );
            assert!(
                matches!(answer.code(), "invalid" | "too_large"),
                "{} {}, {}: {answer:?}",
                step.method,
                step.template,
                body.0
            );
        }
        for path in weird_paths(&step) {
            let body = step.body.clone();
            let answer = fixture
                .send(step.method, &path, body.bytes(), body.media_type(), Some(&token))
                .await;
            assert!(!answer.status.is_server_error(), "{} {path}: {answer:?}", step.method);
            assert!(
                step.method == "GET" || answer.status.is_client_error(),
                "{} {path}: {answer:?}",
                step.method
            );
        }
    }
    let bad = fixture
        .send(
            "POST",
            "/v1/tenants",
            br#"{"name": "x", "colour": 1}"#.to_vec(),
            "application/json",
            Some(&token),
        )
        .await;
    assert!(bad.detail().contains("`colour`"), "{bad:?}");
    let bad = fixture.send("POST", "/v1/tenants", b"{}".to_vec(), "text/plain", Some(&token)).await;
    assert_eq!((bad.status.as_u16(), bad.code()), (415, "unsupported_media_type"));
    let bad = fixture.send("DELETE", "/v1/tenants", Vec::new(), "", Some(&token)).await;
    assert_eq!((bad.status.as_u16(), bad.headers["allow"].to_str().unwrap()), (405, "GET, POST"));
    let versions = "/v1/tenants/acme/handlers/h/versions";
    let bad = fixture
        .send(
            "PUT",
            &format!("{versions}/{}", "0".repeat(64)),
            b"\0asm".to_vec(),
            "application/wasm",
            Some(&token),
        )
        .await;
    assert_eq!((bad.status.as_u16(), bad.code()), (400, "invalid"));
    let bytes = b"not a component".to_vec();
    let bad = fixture
        .send(
            "PUT",
            &format!("{versions}/{}", fixture::sha256(&bytes)),
            bytes,
            "application/wasm",
            Some(&token),
        )
        .await;
    assert_eq!((bad.status.as_u16(), bad.code()), (422, "component_refused"));
    assert!(bad.body["problems"][0]["text"].is_string(), "{bad:?}");
    assert_eq!(fixture.digest().await, before);
    fixture.finish().await;
}

fn rubbish(step: &Step) -> Vec<(String, Vec<u8>)> {
    let steps::Body::Json(good) = &step.body else { return Vec::new() };
    let mut all: Vec<(String, Vec<u8>)> = [
        "",
        "{",
        "[]",
        "null",
        "\"x\"",
        "{\"zzz\": 1}",
        "{}{}",
        "{\"\\ud800\": 1}",
        "\u{0}",
        "{\"a\": 1e999}",
    ]
    .iter()
    .map(|text| ((*text).to_owned(), text.as_bytes().to_vec()))
    .collect();
    all.push(("not UTF-8".to_owned(), b"{\"name\": \"\xff\"}".to_vec()));
    all.push(("deep".to_owned(), ["[".repeat(100_000), "]".repeat(100_000)].concat().into_bytes()));
    all.push(("large".to_owned(), [b"{".to_vec(), vec![b' '; 1 << 20], b"}".to_vec()].concat()));
    for (name, _) in good.as_object().expect("bodies are objects") {
        for (kind, value) in [
            ("a NUL", json!("a\0b")),
            ("a list", json!([1])),
            ("a member of its own", json!({ "zzz\0": 1 })),
        ] {
            let mut bad = good.clone();
            bad[name] = value;
            all.push((format!("{kind} as `{name}`"), serde_json::to_vec(&bad).unwrap()));
        }
    }
    let mut more = good.clone();
    more["zzz"] = json!(1);
    all.push(("an unknown member".to_owned(), serde_json::to_vec(&more).unwrap()));
    all
}

fn weird_paths(step: &Step) -> Vec<String> {
    let long = "a".repeat(5_000);
    let weird = [
        "%00",
        "a%00b",
        "%FF",
        "%2E%2E",
        "..",
        "%2F",
        "a%2Fb",
        "%20",
        "%E4",
        "%C3%A4",
        "';%20DROP%20TABLE%20x;--",
        "-1",
        "1e9",
        "99999999999999999999",
        "%25",
        "%",
        "%zz",
        long.as_str(),
    ];
    let names: Vec<_> = step.template.split('/').filter(|part| part.starts_with('{')).collect();
    names
        .iter()
        .flat_map(|name| {
            weird.iter().map(move |weird| steps::fill(&step.template.replace(name, weird), 1))
        })
        .collect()
}

/// What could go wrong: the answer to a lost or refused upload says nothing, or half of it is kept;
/// a client that is slow or sends for ever keeps the host busy.
#[tokio::test(flavor = "multi_thread")]
async fn uploads_are_bounded_in_size_and_time() {
    let limits = Limits {
        component_bytes_max: 200_000,
        idle_timeout: Duration::from_millis(400),
        ..Limits::default()
    };
    let fixture = ApiFixture::new(Mode::Tokens, limits).await;
    let server = Server::start(&fixture, None).await;
    let before = fixture.digest().await;
    let token = fixture.token_of("", Role::Admin);
    let head = |length: &str, token: &str| {
        let path = format!("/v1/tenants/acme/handlers/h/versions/{}", "0".repeat(64));
        format!(
            "PUT {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\ncontent-type: \
                application/wasm\r\n{length}\r\n\r\n"
        )
    };
    // By what the head says, with nothing of the body sent.
    let said = server.talk(head("content-length: 200001", &token).as_bytes()).await;
    assert!(said.starts_with("HTTP/1.1 413") && said.contains("\"too_large\""), "{said}");
    // And nobody without a token is waited for.
    let said = server.talk(head("content-length: 1000", "obx_0").as_bytes()).await;
    assert!(said.starts_with("HTTP/1.1 401"), "{said}");
    // A body of no end.
    let mut stream = server.connect().await;
    stream.write_all(head("transfer-encoding: chunked", &token).as_bytes()).await.unwrap();
    let mut sent = 0;
    while sent < 50_000_000
        && stream.write_all(&[b"2710\r\n".as_slice(), &[7; 10_000], b"\r\n"].concat()).await.is_ok()
    {
        sent += 10_000;
    }
    assert!(sent < 50_000_000, "the host went on reading");
    // One that stops.
    let said = server
        .talk([head("content-length: 1000", &token).as_bytes(), b"abc"].concat().as_slice())
        .await;
    assert!(said.starts_with("HTTP/1.1 503") && said.contains("\"timeout\""), "{said}");
    // One whose sender goes away.
    let mut stream = server.connect().await;
    stream
        .write_all([head("content-length: 1000", &token).as_bytes(), b"abc"].concat().as_slice())
        .await
        .unwrap();
    drop(stream);
    // All turns are free again: an upload that is right is kept.
    assert_eq!(fixture.digest().await, before);
    let good = fixture.answer(&steps::upload(&fixture), Some(&token)).await;
    assert_eq!(good.status, StatusCode::CREATED, "{good:?}");
    let again = fixture.answer(&steps::upload(&fixture), Some(&token)).await;
    assert_eq!((again.status, &again.body["digest"]), (StatusCode::OK, &good.body["digest"]));
    server.stop().await;
    fixture.finish().await;
}

/// What could go wrong: a token travels in the clear although a certificate is configured, or a
/// connection that says nothing is kept for ever.
#[tokio::test(flavor = "multi_thread")]
async fn with_a_certificate_everything_is_encrypted() {
    let fixture = ApiFixture::new(Mode::Tokens, Limits::default()).await;
    let certificate = wire::self_signed();
    let server = Server::start(&fixture, Some(&certificate)).await;
    let silent = tokio::spawn(server.silence());
    let whoami = request(
        "GET",
        "/v1/whoami",
        &[("authorization", &format!("Bearer {}", fixture.token_of("acme", Role::Viewer)))],
        "",
    );
    let said = server.talk_tls(&certificate, whoami.as_bytes()).await;
    assert!(said.starts_with("HTTP/1.1 200") && said.contains("\"tenant\":\"acme\""), "{said}");
    assert!(
        !server.talk(whoami.as_bytes()).await.contains("HTTP"),
        "plain text on the port of TLS"
    );
    assert!(silent.await.unwrap() < Duration::from_secs(20), "a silent client is kept for ever");
    let wrong = oncebox_api::listen::Listener::bind_api(
        "127.0.0.1:0".parse().unwrap(),
        Some((&certificate.certificate, &certificate.certificate)),
        Mode::Tokens,
    );
    assert!(
        wrong.await.err().expect("a key is no certificate").to_string().contains("belong together")
    );
    server.stop().await;
    fixture.finish().await;
}

/// What could go wrong: a page in a browser of this machine deploys through a host that asks for no
/// token.
#[tokio::test(flavor = "multi_thread")]
async fn without_tokens_only_this_machine_is_answered() {
    let fixture = ApiFixture::new(Mode::Open, Limits::default()).await;
    let server = Server::start(&fixture, None).await;
    let before = fixture.digest().await;
    let own = format!("127.0.0.1:{}", server.address.port());
    let body = r#"{"name": "evil"}"#;
    for headers in [
        &[("host", "evil.example")][..],
        &[("host", &own), ("origin", "http://evil.example")],
        &[("host", &own), ("origin", "null")],
        &[("host", &own), ("origin", "http://127.0.0.1:1")],
        &[("host", &own), ("sec-fetch-site", "cross-site")],
    ] {
        let headers = [headers, &[("content-type", "application/json")]].concat();
        let said = server.talk(request("POST", "/v1/tenants", &headers, body).as_bytes()).await;
        assert!(
            said.starts_with("HTTP/1.1 403") && said.contains("\"forbidden\""),
            "{headers:?}: {said}"
        );
    }
    assert_eq!(fixture.digest().await, before);
    let said = server.talk(request("GET", "/v1/whoami", &[("host", &own)], "").as_bytes()).await;
    assert!(said.starts_with("HTTP/1.1 200") && said.contains("\"admin\""), "{said}");
    let others =
        oncebox_api::listen::Listener::bind_api("0.0.0.0:0".parse().unwrap(), None, Mode::Open)
            .await;
    assert!(others.err().expect("not for others").to_string().contains("loopback"));
    server.stop().await;
    fixture.finish().await;
}

/// What could go wrong: a request over the network is taken for one of this process; what changes
/// is not audited under the name of who asked.
#[tokio::test(flavor = "multi_thread")]
async fn changes_bear_the_name_of_who_made_them() {
    let fixture = ApiFixture::new(Mode::Tokens, Limits::default()).await;
    let made = fixture
        .as_local(Principal::local("ada"), "POST", "/v1/tenants", r#"{"name": "fresh"}"#)
        .await;
    assert_eq!(made.status, StatusCode::CREATED, "{made:?}");
    let token = fixture.token_of("acme", Role::Admin);
    let new = json!({ "name": "ci@example.org", "role": "viewer" }).to_string().into_bytes();
    let made = fixture
        .send("POST", "/v1/tenants/acme/tokens", new, "application/json", Some(&token))
        .await;
    let secret = made.body["token"].as_str().unwrap_or_else(|| panic!("{made:?}")).to_owned();
    assert_eq!((secret.len(), made.headers["cache-control"].to_str().unwrap()), (68, "no-store"));
    let listed = fixture.send("GET", "/v1/tenants/acme/tokens", Vec::new(), "", Some(&token)).await;
    assert!(!listed.body.to_string().contains(&secret[4..]), "it is shown once");
    let audit = fixture
        .send("GET", "/v1/audit", Vec::new(), "", Some(&fixture.token_of("", Role::Viewer)))
        .await;
    let told = |n: usize| {
        (audit.body[n]["actor"].as_str().unwrap(), audit.body[n]["action"].as_str().unwrap())
    };
    assert_eq!(told(0), ("acme-admin", "token.create"));
    assert_eq!(told(1), ("ada", "tenant.create"));
    // From the moment it is revoked it is no token.
    let whoami = async || fixture.send("GET", "/v1/whoami", Vec::new(), "", Some(&secret)).await;
    assert_eq!(whoami().await.body["name"], "ci@example.org");
    let path = format!("/v1/tenants/acme/tokens/{}", made.body["token_id"]);
    assert_eq!(
        fixture
            .send("DELETE", &path, Vec::new(), "", Some(&fixture.token_of("other", Role::Admin)))
            .await
            .status,
        StatusCode::FORBIDDEN
    );
    assert_eq!(
        fixture.send("DELETE", &path, Vec::new(), "", Some(&token)).await.status,
        StatusCode::OK
    );
    assert_eq!(whoami().await.status, StatusCode::UNAUTHORIZED);
    // A tenant's admin ends its own tokens and no others.
    let platform =
        fixture.send("DELETE", "/v1/tenants/acme/tokens/3", Vec::new(), "", Some(&token)).await;
    assert_eq!(platform.status, StatusCode::NOT_FOUND, "{platform:?}");
    // A consumer of a tenant's admin does not speak to the brokers as somebody else.
    let policy = json!({ "topics": ["t"], "ack": "after_commit", "kafka": { "properties": { "sasl.username": "root" } } });
    let new = json!({ "name": "spy", "policy": policy }).to_string().into_bytes();
    let spy = fixture
        .send("POST", "/v1/tenants/acme/consumers", new, "application/json", Some(&token))
        .await;
    assert_eq!(spy.status, StatusCode::FORBIDDEN, "{spy:?}");
    fixture.finish().await;
}

/// What could go wrong: a tenant learns how large another's inbox is; each request reads the inbox
/// again; or a change of the budget shows only with the next measurement.
#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_sees_the_size_of_its_own_inbox() {
    let fixture = ApiFixture::new(Mode::Tokens, Limits::default()).await;
    let viewer = |tenant: &str| fixture.token_of(tenant, Role::Viewer);
    let get = async |path: &str, token: String| {
        fixture.send("GET", path, Vec::new(), "", Some(&token)).await
    };
    let all = get("/v1/storage", viewer("")).await;
    let tenants = all.body["tenants"].as_array().unwrap();
    assert_eq!((&tenants[0]["tenant"], &tenants[1]["tenant"]), (&json!("acme"), &json!("other")));
    let partitions = all.body["databases"][0]["partitions"].as_array().unwrap();
    let sizes: i64 = partitions.iter().map(|partition| partition["bytes"].as_i64().unwrap()).sum();
    let bytes = tenants[0]["bytes"].as_i64().unwrap();
    assert!(bytes > 0 && bytes < sizes, "{all:?}");
    assert_eq!(tenants[0]["messages"], json!(1));

    let own = get("/v1/tenants/acme/storage", viewer("acme")).await;
    assert_eq!(own.body, tenants[0], "the measurement of before, with its time");
    let other = get("/v1/tenants/other/storage", viewer("other")).await;
    assert_eq!((&other.body["messages"], &other.body["bytes"]), (&json!(0), &json!(0)));
    let refused = get("/v1/tenants/other/storage", viewer("acme")).await;
    assert_eq!(refused.status, StatusCode::FORBIDDEN, "{refused:?}");
    let unknown = get("/v1/tenants/nobody/storage", viewer("")).await;
    assert_eq!((unknown.status.as_u16(), unknown.code()), (404, "not_found"));

    for (budget, exceeded) in [
        (json!(bytes - 1), json!("now")),
        (json!(bytes), json!("in_30_days")),
        (json!(1_000 * bytes), Value::Null),
        (Value::Null, Value::Null),
    ] {
        let limits = json!({ "storage_budget_bytes": budget }).to_string().into_bytes();
        let operator = fixture.token_of("", Role::Admin);
        let path = "/v1/tenants/acme/limits";
        let set = fixture.send("PATCH", path, limits, "application/json", Some(&operator)).await;
        assert_eq!(set.status, StatusCode::OK, "{set:?}");
        let own = get("/v1/tenants/acme/storage", viewer("acme")).await;
        assert_eq!((&own.body["budget_bytes"], &own.body["budget_exceeded"]), (&budget, &exceeded));
    }
    fixture.finish().await;
}

/// What could go wrong: the document that is committed is not the one that is served.
#[test]
fn the_document_is_the_committed_one() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/openapi.json");
    let committed = std::fs::read_to_string(path).unwrap_or_default();
    let document = oncebox_api::document().to_pretty_json().unwrap() + "\n";
    assert!(committed == document, "write it anew: `oncebox openapi > docs/openapi.json`");
}

/// What could go wrong: a token stands in a log, wherever a client put it.
#[tokio::test(flavor = "multi_thread")]
async fn no_token_is_in_any_log() {
    let fixture = HostFixture::new().await.unwrap();
    let address = format!("127.0.0.1:{}", oncebox_devkit::local::free_port().unwrap());
    let variables = [
        ("ONCEBOX_LOG_LEVEL", "debug,sqlx=debug,hyper=trace"),
        ("ONCEBOX_API_LISTEN", address.as_str()),
    ];
    let host = fixture.start_ready("host", &variables).await.unwrap();
    let new = oncebox_api_token(&fixture).await;
    let server = wire::Plain(address.parse().unwrap());
    let wrong = format!("obx_{}", "ab".repeat(32));
    let mut secrets = vec![new.clone(), wrong.clone()];
    let bearer = format!("Bearer {new}");
    let body = json!({ "name": "made", "role": "admin" }).to_string();
    let made = server
        .talk(
            request(
                "POST",
                "/v1/tokens",
                &[("authorization", &bearer), ("content-type", "application/json")],
                &body,
            )
            .as_bytes(),
        )
        .await;
    let made: Value = serde_json::from_str(made.split("\r\n\r\n").nth(1).unwrap()).unwrap();
    secrets.push(made["token"].as_str().expect("a token").to_owned());
    for secret in &secrets {
        for (path, headers) in [
            ("/v1/whoami".to_owned(), vec![("authorization", format!("Bearer {secret}"))]),
            ("/v1/whoami".to_owned(), vec![("authorization", format!("Basic {secret}"))]),
            (
                "/v1/whoami".to_owned(),
                vec![("authorization", secret.clone()), ("x-request-id", secret.clone())],
            ),
            (format!("/v1/tokens/{secret}"), vec![("authorization", bearer.clone())]),
            (format!("/v1/{secret}"), vec![("authorization", bearer.clone())]),
            (format!("/v1/audit?token={secret}"), vec![("authorization", bearer.clone())]),
            (format!("/v1/tenants/{secret}"), vec![("authorization", bearer.clone())]),
        ] {
            let headers: Vec<_> =
                headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
            let said = server.talk(request("GET", &path, &headers, "").as_bytes()).await;
            assert!(said.starts_with("HTTP/1.1 "), "{said}");
        }
        let body = json!({ "name": secret, "role": secret }).to_string();
        server
            .talk(
                request(
                    "POST",
                    "/v1/tokens",
                    &[("authorization", &bearer), ("content-type", "application/json")],
                    &body,
                )
                .as_bytes(),
            )
            .await;
        server
            .talk(request(secret, "/v1/tokens", &[("authorization", &bearer)], "").as_bytes())
            .await;
    }
    host.stop().await.unwrap();
    let log = std::fs::read_to_string(host.log()).unwrap();
    assert!(
        log.contains("/v1/tokens/{token_id}") && log.contains("principal=\"first\""),
        "requests are logged:\n{log}"
    );
    for secret in &secrets {
        assert!(
            !log.contains(&secret[4..]),
            "the log holds a token:\n{}",
            log.lines().find(|line| line.contains(&secret[4..])).unwrap()
        );
    }
}

async fn oncebox_api_token(fixture: &HostFixture) -> String {
    let new = oncebox_control::NewToken {
        name: "first",
        role: oncebox_control::TokenRole::Admin,
        tenant: None,
        expires_at: None,
    };
    fixture.control.tokens().create(&new).await.unwrap().1.reveal().to_owned()
}

impl Answer {
    fn code(&self) -> &str {
        self.body["code"].as_str().unwrap_or_default()
    }

    fn detail(&self) -> &str {
        self.body["detail"].as_str().unwrap_or_default()
    }
}
