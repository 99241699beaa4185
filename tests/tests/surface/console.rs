//! The console, as a browser speaks to it: who sees and changes what, and what a page says.

mod masking;
mod visitor;

use std::collections::{BTreeMap, BTreeSet};

use axum::http::StatusCode;
use oncebox_api::{Limits, Mode, wire::Role};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use visitor::{Console, Visitor};

use super::admin_api::{
    fixture::{ApiFixture, sha256},
    steps,
    wire::{Server, request},
};

/// A page with names that are there.
fn fill(template: &str) -> String {
    let (one, two) = (sha256(b"version 1"), sha256(b"version 2"));
    let path = [
        ("{tenant}", "acme"),
        ("{consumer}", "orders"),
        ("{handler}", "ledger"),
        ("{job_id}", "1"),
        ("{deployment_id}", "1"),
    ]
    .iter()
    .fold(template.to_owned(), |path, (name, value)| path.replace(name, value));
    let path = match path.contains("/messages/") {
        true => path.replace("{id}", "m%2F1"),
        false => path.replace("{id}", "o-1"),
    };
    match template.rsplit('/').next() {
        Some("diff") => format!("{path}?before={one}&after={two}"),
        Some("new") => format!("{path}?action=redrive&consumer=orders"),
        _ => path,
    }
}

/// Whether a page is of one tenant.
fn is_of_tenant(template: &str) -> bool {
    template.contains("{tenant}")
}

/// Deployments and a job, which some pages show: the stable 1 with its canary 2, and 3 with 4.
async fn furnish(fixture: &ApiFixture, admin: &Visitor<'_>) {
    let replay = json!({ "token": steps::REPLAY_TOKEN, "reason": "a test" });
    post(fixture, "replays", &replay).await;
    let (one, two) = (sha256(b"version 1"), sha256(b"version 2"));
    for event_type in ["paid", "refunded"] {
        let deployed = [
            ("tenant", "acme"),
            ("consumer", "orders"),
            ("handler", "ledger"),
            ("version", one.as_str()),
            ("event_type", event_type),
        ];
        assert_eq!(admin.act("deploy", &deployed).await.status, StatusCode::SEE_OTHER);
        let canary = json!({
            "event_type": event_type, "handler": "ledger", "version": two, "percent": 10,
        });
        post(fixture, "canaries", &canary).await;
    }
    let job = [
        ("tenant", "acme"),
        ("consumer", "orders"),
        ("action", "discard"),
        ("because", "a test"),
        ("status", "parked"),
    ];
    let started = admin.act("job-start", &job).await;
    assert_eq!(started.location(), "/console/tenants/acme/jobs/1", "{started:?}");
}

/// A request to the API about the consumer, which succeeds.
async fn post(fixture: &ApiFixture, rest: &str, body: &Value) {
    let path = format!("/v1/tenants/acme/consumers/orders/{rest}");
    let token = fixture.token_of("", Role::Admin);
    let body = body.to_string().into_bytes();
    let answer = fixture.send("POST", &path, body, "application/json", Some(&token)).await;
    assert!(answer.status.is_success(), "{rest}: {answer:?}");
}

/// What could go wrong: a page shows something to a visitor whom the API refuses, or to none at all.
#[tokio::test(flavor = "multi_thread")]
async fn a_page_shows_what_its_visitor_may_see() {
    let fixture = ApiFixture::new(Mode::Tokens, Limits::default()).await;
    let console = Console::new(&fixture);
    let admin = console.sign_in(&fixture.token_of("", Role::Admin)).await;
    furnish(&fixture, &admin).await;
    let viewer = console.sign_in(&fixture.token_of("acme", Role::Viewer)).await;
    let other = console.sign_in(&fixture.token_of("other", Role::Admin)).await;
    let strangers = console.strangers(&fixture).await;
    let before = fixture.digest().await;
    for template in oncebox_console::templates() {
        let page = fill(&template);
        let shown = admin.get(&page).await;
        assert_eq!(shown.status, StatusCode::OK, "{page}: {}", shown.body);
        assert!(shown.body.contains("<h1>"), "{page}");
        shown.check_headers(&page);

        // Without a session, and with one that is over or was never there.
        for stranger in &strangers {
            let sent_on = stranger.get(&page).await;
            assert_eq!(sent_on.status, StatusCode::SEE_OTHER, "{page}: {sent_on:?}");
            assert!(sent_on.location().starts_with("/console/login"), "{page}: {sent_on:?}");
        }
        let of_other = other.get(&page).await;
        if is_of_tenant(&template) {
            assert_eq!(of_other.status, StatusCode::FORBIDDEN, "{page}: {}", of_other.body);
            assert!(!of_other.body.contains("m/1"), "{page}: {}", of_other.body);
            let for_viewers = match template.ends_with("/edit") || template.ends_with("/tokens") {
                true => StatusCode::FORBIDDEN,
                false => StatusCode::OK,
            };
            assert_eq!(viewer.get(&page).await.status, for_viewers, "{page}");
        } else if template != "/console" {
            assert_eq!(of_other.status, StatusCode::FORBIDDEN, "{page}: {}", of_other.body);
        }
    }
    assert_eq!(fixture.digest().await, before, "a page changed something");
    // The first page of a tenant's visitor is the tenant's.
    let first = other.get("/console").await;
    assert!(
        first.body.contains("<h1>other</h1>") && !first.body.contains("acme"),
        "{}",
        first.body
    );
    fixture.finish().await;
}

/// What could go wrong: a person cannot see that an event that was produced twice is two messages.
#[tokio::test(flavor = "multi_thread")]
async fn a_page_says_what_a_policy_collapses() {
    let fixture = ApiFixture::new(Mode::Tokens, Limits::default()).await;
    let console = Console::new(&fixture);
    let admin = console.sign_in(&fixture.token_of("", Role::Admin)).await;
    let token = fixture.token_of("", Role::Admin);
    for (name, dedup, identity, collapses, meaning) in [
        (
            "events",
            "inbox",
            json!({}),
            "every delivery of one event, also when it was produced twice",
            "A message's id is CloudEvents `source` and `id` together; that collapses every",
        ),
        (
            "records",
            "inbox",
            json!({ "id": ["position"] }),
            "redeliveries of one record",
            "that collapses redeliveries of one record.",
        ),
        ("all", "off", json!({}), "nothing: each delivery has its effect", "has its effect again"),
    ] {
        let policy = json!({ "topics": ["oncebox.acme.t"], "ack": "after_commit", "dedup": dedup, "identity": identity });
        let body = json!({ "name": name, "policy": policy }).to_string().into_bytes();
        let path = "/v1/tenants/acme/consumers";
        let created = fixture.send("POST", path, body, "application/json", Some(&token)).await;
        assert!(created.status.is_success(), "{created:?}");
        let shown = admin.get(&format!("/console/tenants/acme/consumers/{name}")).await.body;
        // S0-017.
        let fact = format!("<dt>Collapses</dt><dd>{collapses}</dd>");
        assert!(shown.contains(&fact), "{fact}: {shown}");
        assert!(shown.contains(meaning), "{meaning}: {shown}");
    }
    fixture.finish().await;
}

/// What an action ends with for a visitor who may do it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Changes,
    ChangesNothing,
    Refused(StatusCode),
}

/// Key of the token `acme-deployer` of the fixture, which makes its tokens in order.
const ACME_DEPLOYER: &str = "9";

/// An action with its fields and its outcome.
type Tried = (&'static str, Vec<(&'static str, String)>, Outcome);

/// Each action with its fields and its outcome, in an order in which each finds what it needs.
fn actions() -> Vec<Tried> {
    use Outcome::{Changes, ChangesNothing, Refused};
    let (one, two) = (sha256(b"version 1"), sha256(b"version 2"));
    let slot = ("event_type", "paid");
    let (job, replay, canary) = (("job_id", "1"), ("replay_id", "1"), ("deployment_id", "2"));
    let edit = [("id", "m/1"), ("payload_base64", "eQ=="), ("because", "a test")];
    let redrive = [("action", "redrive"), ("because", "a test"), ("id", "m/1"), ("rate", "5")];
    let deploy = [slot, ("handler", "ledger"), ("version", two.as_str()), ("emit", "on")];
    let acts: [(_, &[(_, &str)], _); 24] = [
        ("consumer-pause", &[], Changes),
        ("consumer-resume", &[], Changes),
        ("consumer-drain", &[], Changes),
        ("seek-cancel", &[], ChangesNothing),
        ("canary-grow", &[slot, canary, ("percent", "50")], Changes),
        ("canary-promote", &[slot, canary], Changes),
        ("deployment-end", &[("deployment_id", "4"), ("reason", "a test")], Changes),
        ("rollback", &[slot, ("to", &one), ("reason", "a test"), ("redrive", "on")], Changes),
        ("deploy", &deploy, Changes),
        ("message-edit", &edit, Changes),
        ("job-start", &redrive, Changes),
        ("job-pause", &[job], Changes),
        ("job-resume", &[job], Changes),
        ("job-cancel", &[job], Changes),
        ("replay-pause", &[replay], Changes),
        ("replay-resume", &[replay], Changes),
        ("replay-cancel", &[replay], Changes),
        ("endpoint-test", &[("endpoint", "nobody")], Refused(StatusCode::NOT_FOUND)),
        ("retention-run", &[], Changes),
        ("tenant-suspend", &[], Changes),
        ("tenant-resume", &[], Changes),
        ("tenant-rotate-credentials", &[], Changes),
        ("tenant-limits", &[("weight", "7"), ("messages_per_second", "")], Changes),
        ("token-revoke", &[("token_id", ACME_DEPLOYER)], Changes),
    ];
    let names = [("tenant", "acme"), ("consumer", "orders")];
    let filled = |fields: &[(&'static str, &str)]| {
        names.iter().chain(fields).map(|(name, value)| (*name, (*value).to_owned())).collect()
    };
    acts.into_iter().map(|(name, fields, outcome)| (name, filled(fields), outcome)).collect()
}

/// What could go wrong: an action does more than the token of its session may, or is one that a page
/// of another site sent, or is of a session that is over.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_does_more_in_the_console_than_the_api_lets_them() {
    let fixture = ApiFixture::new(Mode::Tokens, Limits::default()).await;
    let console = Console::new(&fixture);
    let admin = console.sign_in(&fixture.token_of("", Role::Admin)).await;
    furnish(&fixture, &admin).await;
    let refused = [
        console.sign_in(&fixture.token_of("acme", Role::Viewer)).await,
        console.sign_in(&fixture.token_of("", Role::Viewer)).await,
        console.sign_in(&fixture.token_of("other", Role::Admin)).await,
    ];
    let strangers = console.strangers(&fixture).await;
    let known: BTreeMap<_, _> =
        oncebox_console::ACTIONS.iter().map(|act| (act.name, act.fields)).collect();
    let actions = actions();
    let tried: BTreeSet<_> = actions.iter().map(|(name, ..)| *name).collect();
    assert_eq!(tried, known.keys().copied().collect(), "every action is tried");
    for (name, fields, outcome) in actions {
        let fields: Vec<_> = fields.iter().map(|(name, value)| (*name, value.as_str())).collect();
        for (field, _) in fields.iter().skip(2) {
            assert!(known[name].contains(field), "{name} has no field {field}");
        }
        let before = fixture.digest().await;
        for visitor in &refused {
            let answer = visitor.act(name, &fields).await;
            assert_eq!(answer.status, StatusCode::FORBIDDEN, "{name}: {answer:?}");
        }
        for stranger in &strangers {
            let answer = stranger.act(name, &fields).await;
            assert_eq!(answer.status, StatusCode::UNAUTHORIZED, "{name}: {answer:?}");
        }
        let path = format!("/console/actions/{name}");
        for (forged, answer) in admin.forged(&path, &fields, Some(&refused[0])).await {
            assert_eq!(answer.status, StatusCode::FORBIDDEN, "{name}, {forged}: {answer:?}");
        }
        assert_eq!(fixture.digest().await, before, "{name} changed something for nobody");
        let answer = admin.act(name, &fields).await;
        let found = match answer.status {
            StatusCode::SEE_OTHER if fixture.digest().await == before => Outcome::ChangesNothing,
            StatusCode::SEE_OTHER => Outcome::Changes,
            status => Outcome::Refused(status),
        };
        assert_eq!(found, outcome, "{name}: {answer:?}");
    }
    fixture.finish().await;
}

/// What could go wrong: a token or the secret of a session is where a script, a log or another site
/// can read it; a session outlives its token, or its time; or rubbish gets one.
#[tokio::test(flavor = "multi_thread")]
async fn a_session_has_the_rights_of_its_token_and_ends_with_it() {
    let fixture = ApiFixture::new(Mode::Tokens, Limits::default()).await;
    let console = Console::new(&fixture);
    for (kind, token) in fixture.bad_tokens() {
        let answer = console.try_sign_in(token.as_deref().unwrap_or_default()).await;
        assert_eq!(answer.status, StatusCode::UNAUTHORIZED, "{kind}: {answer:?}");
        assert!(!answer.headers.contains_key("set-cookie"), "{kind}");
    }
    let token = fixture.token_of("acme", Role::Operator);
    let answer = console.try_sign_in(&token).await;
    assert_eq!((answer.status, answer.location()), (StatusCode::SEE_OTHER, "/console"));
    let cookie = answer.headers["set-cookie"].to_str().unwrap().to_owned();
    for attribute in ["HttpOnly", "SameSite=Strict", "Path=/console", "Max-Age=43200"] {
        assert!(cookie.contains(attribute), "{cookie}");
    }
    assert!(!cookie.contains("Secure") && !cookie.contains(&token), "{cookie}");
    let secure = Console::encrypted(&fixture).try_sign_in(&token).await;
    assert!(secure.headers["set-cookie"].to_str().unwrap().ends_with("; Secure"));

    // A form of another site signs nobody in.
    let foreign = console.sign_in_from("https://evil.example", &token).await;
    assert_eq!(foreign.status, StatusCode::FORBIDDEN, "{foreign:?}");

    let page = "/console/tenants/acme";
    let one = console.sign_in(&token).await;
    let other = console.sign_in(&token).await;
    assert_eq!(one.get(page).await.status, StatusCode::OK);
    assert_eq!(one.sign_out().await.location(), "/console/login");
    assert_eq!(one.get(page).await.status, StatusCode::SEE_OTHER, "it is over");
    assert_eq!(other.get(page).await.status, StatusCode::OK, "another one of the same token");
    fixture
        .execute("UPDATE oncebox.token SET revoked_at = now() WHERE name = 'acme-operator'")
        .await;
    assert_eq!(other.get(page).await.status, StatusCode::SEE_OTHER, "its token was revoked");
    fixture
        .execute("UPDATE oncebox.token SET revoked_at = NULL WHERE name = 'acme-operator'")
        .await;
    assert_eq!(other.get(page).await.status, StatusCode::OK);
    fixture.execute("UPDATE oncebox.console_session SET expires_at = now()").await;
    assert_eq!(other.get(page).await.status, StatusCode::SEE_OTHER, "its time is over");

    // Sessions of one token do not pile up.
    let first = console.sign_in(&token).await;
    for _ in 0..20 {
        console.sign_in(&token).await;
    }
    assert_eq!(first.get(page).await.status, StatusCode::SEE_OTHER, "the oldest of 21 is over");
    fixture.finish().await;
}

/// What could go wrong: a text that someone else chose is markup in an operator's browser.
#[tokio::test(flavor = "multi_thread")]
async fn stored_text_is_never_markup() {
    const TEXTS: [&str; 8] = [
        "<script>alert(1)</script>",
        "\"><img src=x onerror=alert(1)>",
        "' onmouseover='alert(1)",
        "</title><svg/onload=alert(1)>",
        "javascript:alert(1)",
        "</pre></td></table><iframe src=//evil.example>",
        "&lt;b&gt;&amp;<!--",
        "\u{202e}<b>\u{0085}x",
    ];
    let fixture = ApiFixture::new(Mode::Tokens, Limits::default()).await;
    let console = Console::new(&fixture);
    let admin = console.sign_in(&fixture.token_of("", Role::Admin)).await;
    furnish(&fixture, &admin).await;
    for (number, text) in TEXTS.iter().enumerate() {
        let quoted = format!("'{}'", text.replace('\'', "''"));
        fixture
            .execute(&format!(
                "INSERT INTO oncebox.inbox (consumer_id, message_id, retention_class, bucket, \
                    topic, partition, \"offset\", record_timestamp_ms, status, reason, processed_at, \
                    headers, payload, last_error, event_type, source, attempts, result, \
                    ordering_key, trace_parent) \
                 SELECT consumer_id, {quoted}, retention_class, bucket, topic, partition, \
                    100 + {number}, 1, 'failed_terminal', 'reject', now(), headers, \
                    convert_to({quoted}, 'UTF8'), {quoted}, {quoted}, {quoted}, 1, \
                    to_jsonb({quoted}::text), convert_to({quoted}, 'UTF8'), NULL \
                 FROM oncebox.inbox WHERE message_id = 'm/1'"
            ))
            .await;
        fixture
            .execute(&format!(
                "INSERT INTO oncebox.audit (actor, action, subject, details, tenant) VALUES \
                    ({quoted}, {quoted}, {quoted}, to_jsonb({quoted}::text), {quoted})"
            ))
            .await;
        fixture
            .execute(&format!(
                "UPDATE oncebox.outgoing SET last_error = {quoted}, destination = {quoted} WHERE \
                    id = 'o-1' AND length({quoted}) > 0"
            ))
            .await;
        let id = oncebox_api::link::escaped(text);
        let message = format!("/console/tenants/acme/consumers/orders/messages/{id}");
        let mut pages: Vec<_> = oncebox_console::templates().iter().map(|it| fill(it)).collect();
        pages.extend([
            message.clone(),
            format!("{message}?payload=true"),
            format!("{message}/edit"),
            format!("/console/tenants/acme/consumers/orders/messages?error={id}&event_type={id}"),
            format!("/console/tenants/acme/jobs/new?action=redrive&consumer=orders&error={id}"),
            format!("/console?name={id}"),
            format!("/console/{id}"),
        ]);
        let mut was_seen = false;
        for page in pages {
            let shown = admin.get(&page).await;
            was_seen |= shown.body.contains(
                &text
                    .replace('&', "&amp;")
                    .replace('<', "&lt;")
                    .replace('>', "&gt;")
                    .replace('"', "&quot;"),
            );
            // What the pages themselves have of these.
            let own = ["&lt;", "&amp;"];
            let is_own = own.iter().any(|own| text.starts_with(own));
            if text.contains(['<', '"']) && !is_own {
                assert!(!shown.body.contains(text), "{page}: {}", shown.body);
            }
            shown.check_markup(&page);
        }
        assert!(was_seen, "no page shows {text}");
    }
    fixture.finish().await;
}

/// What could go wrong: a page names a command that the program does not have, or with an option
/// that it does not know.
#[tokio::test(flavor = "multi_thread")]
async fn every_command_of_a_page_is_one_of_the_program() {
    let fixture = ApiFixture::new(Mode::Tokens, Limits::default()).await;
    let console = Console::new(&fixture);
    let admin = console.sign_in(&fixture.token_of("", Role::Admin)).await;
    furnish(&fixture, &admin).await;
    let mut commands = Vec::new();
    let mut pages: Vec<_> = oncebox_console::templates().iter().map(|it| fill(it)).collect();
    let messages = "/console/tenants/acme/consumers/orders/messages";
    pages.extend([
        format!("{messages}?status=parked&error=-x%27y&since=2026-01-01T00:00:00Z"),
        format!("{messages}?error=--%24%28id%29%3Dx&key=%60id%60%3B%7C%26"),
        "/console/tenants/acme/consumers/orders/deployments/2".to_owned(),
        "/console/tenants/acme/jobs/new?action=outgoing_discard&destination=kafka:x".to_owned(),
        "/console/tenants/acme/jobs/new?action=redrive&consumer=orders&error=a+b".to_owned(),
    ]);
    for page in pages {
        let shown = admin.get(&page).await;
        let found = shown.commands();
        commands.extend(found.into_iter().map(|command| (page.clone(), command)));
    }
    assert!(commands.len() > 40, "{commands:?}");
    for (page, command) in commands {
        let words = shell_words(&command);
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        assert_eq!(words[0], "oncebox", "{page}: {command}");
        if let Err(error) = oncebox_cli::check_command(words[1..].iter().copied()) {
            panic!("{page}: {command}: {error}");
        }
    }
    fixture.finish().await;
}

/// The words of a command as a POSIX shell reads them.
fn shell_words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut is_quoted, mut chars) = (Vec::new(), None, false, line.chars());
    while let Some(c) = chars.next() {
        match c {
            '\'' => {
                is_quoted = !is_quoted;
                word.get_or_insert_with(String::new);
            }
            '\\' if !is_quoted => word.get_or_insert_with(String::new).extend(chars.next()),
            // A shell would do something with these.
            '$' | '`' | ';' | '|' | '&' | '(' | '<' | '>' | '*' | '?' | '~' if !is_quoted => {
                panic!("{c} is not quoted: {line}")
            }
            ' ' if !is_quoted => words.extend(word.take()),
            c => word.get_or_insert_with(String::new).push(c),
        }
    }
    words.extend(word);
    words
}

/// What could go wrong: a page is so large that a slow line waits for it.
#[tokio::test(flavor = "multi_thread")]
async fn a_page_is_small() {
    const COLD_BYTES_MAX: usize = 50 << 10;
    let fixture = ApiFixture::new(Mode::Tokens, Limits::default()).await;
    let console = Console::new(&fixture);
    let admin = console.sign_in(&fixture.token_of("", Role::Admin)).await;
    furnish(&fixture, &admin).await;
    fixture
        .execute(
            "INSERT INTO oncebox.inbox (consumer_id, message_id, retention_class, bucket, topic, \
                partition, \"offset\", record_timestamp_ms, status, reason, processed_at, headers, \
                payload, last_error, event_type) \
             SELECT consumer_id, md5(n::text), retention_class, bucket, topic, n % 8, n, 1, status, \
                reason, processed_at, headers, payload, repeat(md5(n::text), 10), 'order.placed' \
             FROM oncebox.inbox, generate_series(100, 700) n WHERE message_id = 'm/1'",
        )
        .await;
    let mut assets = BTreeMap::new();
    for template in oncebox_console::templates() {
        let page = fill(&template);
        let shown = admin.get_compressed(&page).await;
        let mut cold = shown.length;
        for asset in shown.assets() {
            if !assets.contains_key(&asset) {
                assets.insert(asset.clone(), admin.get_compressed(&asset).await.length);
            }
            cold += assets[&asset];
        }
        assert!(cold <= COLD_BYTES_MAX, "{page}: {cold} bytes");
    }
    assert_eq!(assets.len(), 5, "{assets:?}");
    fixture.finish().await;
}

/// What could go wrong: an open page does not see a change, or goes on when its session is over.
#[tokio::test(flavor = "multi_thread")]
async fn an_open_page_follows_what_changes_until_its_session_ends() {
    let fixture = ApiFixture::new(Mode::Tokens, Limits::default()).await;
    let console = Console::new(&fixture);
    let admin = console.sign_in(&fixture.token_of("", Role::Admin)).await;
    let watcher = console.sign_in(&fixture.token_of("", Role::Viewer)).await;
    let page = "/console/tenants/acme/consumers/orders";
    let mut events = watcher.follow(page).await;
    let first = events.next().await.expect("the page as it is");
    assert!(first.starts_with("data: ") && first.contains("running"), "{first}");
    let names = [("tenant", "acme"), ("consumer", "orders")];
    assert_eq!(admin.act("consumer-pause", &names).await.status, StatusCode::SEE_OTHER);
    let second = events.next().await.expect("the change");
    assert!(second.contains("paused"), "{second}");
    watcher.sign_out().await;
    let last = events.next().await.expect("that it is over");
    assert!(last.contains("The session is over") && last.contains("event: end"), "{last}");
    assert_eq!(events.next().await, None, "the session is over");
    let again = watcher.follow(page).await.next().await.expect("that it is over");
    assert_eq!(again, last, "without a session it is told at once");

    // A page that does not change is not made again and again.
    let mut events = admin.follow("/console/tokens").await;
    assert_eq!(events.next().await.as_deref(), Some("event: end\ndata: end\n\n"));
    // The checks of the databases take long. They go on without the page, which shows them then.
    let mut events = admin.follow("/console/doctor").await;
    let mut shown = Vec::new();
    while shown.len() < 60 && !shown.last().is_some_and(|it: &String| it.contains("Checked ")) {
        shown.push(events.next().await.expect("the page as it is"));
    }
    assert!(shown.last().is_some_and(|it| it.contains("Checked ")), "{shown:?}");
    // A token has room for eight; a page without room stays as it is.
    let mut open = Vec::new();
    for _ in 0..8 {
        let mut events = admin.follow(page).await;
        events.next().await.expect("the page as it is");
        open.push(events);
    }
    let ninth = admin.follow(page).await.next().await;
    assert_eq!(ninth.as_deref(), Some("event: end\ndata: end\n\n"));
    open.clear();

    // At the end of the host, too.
    let mut events = admin.follow(page).await;
    events.next().await.expect("the page as it is");
    console.stop();
    assert_eq!(events.next().await, None, "the host ends");
    fixture.finish().await;
}

/// What could go wrong: a page of another site reads or changes something through the browser of a
/// developer, whose host asks for no token.
#[tokio::test(flavor = "multi_thread")]
async fn without_tokens_only_pages_of_this_host_are_answered() {
    let fixture = ApiFixture::new(Mode::Open, Limits::default()).await;
    let console = Console::new(&fixture);
    let developer = console.anyone().await;
    assert_eq!(developer.get("/console").await.status, StatusCode::OK);
    assert_eq!(
        console.login_page().await.location(),
        "/console",
        "there is nothing to sign in for"
    );
    let names = [("tenant", "acme"), ("consumer", "orders")];
    let before = fixture.digest().await;
    for (forged, answer) in developer.forged("/console/actions/consumer-pause", &names, None).await
    {
        assert_eq!(answer.status, StatusCode::FORBIDDEN, "{forged}: {answer:?}");
    }
    for (header, value, status) in [
        ("host", "evil.example", StatusCode::FORBIDDEN),
        ("sec-fetch-site", "cross-site", StatusCode::FORBIDDEN),
        ("origin", "https://evil.example", StatusCode::FORBIDDEN),
    ] {
        let answer = developer.get_with("/console", &[(header, value)]).await;
        assert_eq!(answer.status, status, "{header}: {answer:?}");
    }
    // A link of another site may lead here.
    let link = [
        ("sec-fetch-site", "cross-site"),
        ("sec-fetch-mode", "navigate"),
        ("sec-fetch-dest", "document"),
    ];
    assert_eq!(developer.get_with("/console", &link).await.status, StatusCode::OK);
    assert_eq!(fixture.digest().await, before);
    assert_eq!(developer.act("consumer-pause", &names).await.status, StatusCode::SEE_OTHER);
    fixture.finish().await;
}

/// What could go wrong: a form beside the actions is taken from another session or site, or a viewer
/// makes the host work.
#[tokio::test(flavor = "multi_thread")]
async fn the_other_forms_are_of_their_session_too() {
    let fixture = ApiFixture::new(Mode::Tokens, Limits::default()).await;
    let console = Console::new(&fixture);
    let admin = console.sign_in(&fixture.token_of("", Role::Admin)).await;
    let viewer = console.sign_in(&fixture.token_of("acme", Role::Viewer)).await;
    let other = console.sign_in(&fixture.token_of("other", Role::Admin)).await;
    let strangers = console.strangers(&fixture).await;
    let edit = "/console/tenants/acme/consumers/orders/messages/m%2F1/edit";
    let payload = [("payload", "one\r\ntwo"), ("because", "a test")];
    let before = fixture.digest().await;
    for visitor in [&viewer, &other] {
        let unmasked = visitor.post(edit.trim_end_matches("/edit"), &payload).await;
        assert_eq!(unmasked.status, StatusCode::FORBIDDEN, "{unmasked:?}");
    }
    for (forged, answer) in admin.forged(edit, &payload, Some(&viewer)).await {
        assert_eq!(answer.status, StatusCode::FORBIDDEN, "{forged}: {answer:?}");
    }
    for (forged, answer) in admin.forged("/console/logout", &[], Some(&viewer)).await {
        assert_eq!(answer.status, StatusCode::FORBIDDEN, "{forged}: {answer:?}");
    }
    for visitor in [&viewer, &other] {
        assert_eq!(visitor.post(edit, &payload).await.status, StatusCode::FORBIDDEN);
        assert_eq!(visitor.get(edit).await.status, StatusCode::FORBIDDEN);
    }
    for stranger in &strangers {
        assert_eq!(stranger.post(edit, &payload).await.status, StatusCode::UNAUTHORIZED);
    }
    let shown = admin.post(edit, &payload).await;
    assert!(shown.body.contains("+ two") && shown.body.contains("- x"), "{}", shown.body);
    // "one\ntwo": what the page showed, and not what a browser would make of it.
    assert!(shown.body.contains("value=\"b25lCnR3bw==\""), "{}", shown.body);
    assert_eq!(fixture.digest().await, before, "a look changed something");
    fixture.finish().await;
}

/// What could go wrong: an upload is larger than the host takes, or is none of its page's, or the
/// form takes less than the API.
#[tokio::test(flavor = "multi_thread")]
async fn an_upload_is_bounded_and_of_its_session() {
    const MIB: usize = 1 << 20;
    let limits = Limits { component_bytes_max: 4 * MIB, ..Limits::default() };
    let fixture = ApiFixture::new(Mode::Tokens, limits).await;
    let console = Console::new(&fixture);
    let deployer = console.sign_in(&fixture.token_of("acme", Role::Deployer)).await;
    let operator = console.sign_in(&fixture.token_of("acme", Role::Operator)).await;
    let other = console.sign_in(&fixture.token_of("other", Role::Admin)).await;
    let strangers = console.strangers(&fixture).await;
    let component = include_bytes!("../../../guest-examples/components/ledger.wasm");
    let (own, fields) = ("http://localhost", [("tenant", "acme"), ("handler", "")]);
    let before = fixture.digest().await;
    for visitor in [&operator, &other] {
        let answer = visitor.upload(own, &fields, component).await;
        assert_eq!(answer.status, StatusCode::FORBIDDEN, "{answer:?}");
    }
    for stranger in &strangers {
        let answer = stranger.upload(own, &fields, component).await;
        assert_eq!(answer.status, StatusCode::UNAUTHORIZED, "{answer:?}");
    }
    let answer = deployer.upload("https://evil.example", &fields, component).await;
    assert_eq!(answer.status, StatusCode::FORBIDDEN, "{answer:?}");
    let answer = deployer.upload(own, &fields, &vec![0; 4 * MIB + 1]).await;
    assert_eq!(answer.status, StatusCode::PAYLOAD_TOO_LARGE, "{answer:?}");
    // As large as the API takes, and no component.
    let answer = deployer.upload(own, &fields, &vec![0; 4 * MIB]).await;
    assert_eq!(answer.status, StatusCode::UNPROCESSABLE_ENTITY, "{answer:?}");
    let many = vec![("tenant", "acme"); 20];
    assert_eq!(deployer.upload(own, &many, component).await.status, StatusCode::BAD_REQUEST);
    assert_eq!(fixture.digest().await, before, "an upload that was refused left something");
    let answer = deployer.upload(own, &fields, component).await;
    assert_eq!(answer.location(), "/console/tenants/acme/handlers/ledger", "{answer:?}");
    fixture.finish().await;
}

/// What could go wrong: with pages beside it, the API does not answer for its own unknown paths: it
/// tells strangers which there are, or has no line in the log.
#[tokio::test(flavor = "multi_thread")]
async fn beside_the_console_the_api_is_as_ever() {
    let fixture = ApiFixture::new(Mode::Tokens, Limits::default()).await;
    let token = format!("Bearer {}", fixture.token_of("", Role::Viewer));
    for is_served in [false, true] {
        let stop = CancellationToken::new();
        let pages = match is_served {
            true => {
                oncebox_console::router(fixture.api.clone(), false, None, stop.clone()).unwrap()
            }
            false => axum::Router::new(),
        };
        let server = Server::with_pages(&fixture, None, pages).await;
        let with_token = request("GET", "/v1/nothing", &[("authorization", &token)], "");
        let answer = server.talk(with_token.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 404") && answer.contains("x-request-id"), "{answer}");
        assert!(answer.contains("there is nothing at this path"), "{answer}");
        let stranger = request("GET", "/v1/nothing", &[], "");
        let answer = server.talk(stranger.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 401") && answer.contains("x-request-id"), "{answer}");
        let page = server.talk(request("GET", "/console", &[], "").as_bytes()).await;
        let expected = if is_served { "HTTP/1.1 303" } else { "HTTP/1.1 401" };
        assert!(page.starts_with(expected), "{page}");
        server.stop().await;
    }
    fixture.finish().await;
}
