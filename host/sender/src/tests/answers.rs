//! Requests that arrive, and answers of all kinds, hostile ones among them.

use std::time::Instant;

use super::*;
use crate::{BodyEnd, EndpointMethod, Response, SendError, SendStage, Verdict};

/// Sends a message to a server on this machine, with these settings of the endpoint.
async fn send_to(
    server: &CountingServer,
    change: impl FnOnce(&mut EndpointSettings),
) -> Result<Response, SendError> {
    let url =
        format!("http://hooks.example:{}/in/%0d%0aHost:%20evil.test?a=%0a", server.address.port());
    let resolver = ScriptedResolver::new(&[&["127.0.0.1"]]);
    let sender = sender(hosts(&[entry_of(&url)]), &["127.0.0.0/8"], resolver);
    sender.send(&endpoint_with(&url, change), &request()).await
}

/// Starts a server that answers with a text, and sends it a message.
async fn answered(text: String) -> Result<Response, SendError> {
    let server = CountingServer::start("127.0.0.1:0", Answering::Text(text)).await;
    send_to(&server, |_| {}).await
}

#[tokio::test]
async fn a_request_arrives_as_one_request_to_its_host() {
    let text =
        answer("202 Accepted", "thanks").replace("\r\n\r\n", "\r\ncontent-type: a/b\r\n\r\n");
    let mut server = CountingServer::start("127.0.0.1:0", Answering::Text(text)).await;
    let result = send_to(&server, |settings| settings.method = EndpointMethod::Put).await;
    assert_eq!(Verdict::of(&result), Verdict::Delivered);
    let response = result.unwrap();
    let expected = Response {
        status: 202,
        content_type: Some("a/b".to_owned()),
        body: b"thanks".to_vec(),
        body_end: BodyEnd::Whole,
        retry_after: None,
    };
    assert_eq!(response, expected);
    let request = server.request().await;
    let (head, body) = request.split_once("\r\n\r\n").unwrap();
    assert_eq!(body, r#"{"order":17}"#);
    assert!(head.starts_with("PUT /in/%0d%0aHost:%20evil.test?a=%0a HTTP/1.1\r\n"), "{head}");
    let with = |name: &str| -> Vec<String> {
        let lines = head.lines().map(str::to_lowercase);
        lines.filter(|line| line.starts_with(&format!("{name}:"))).collect()
    };
    assert_eq!(with("host"), [format!("host: hooks.example:{}", server.address.port())]);
    assert_eq!(with("content-length"), ["content-length: 12"]);
    let id = "0f1e2d3c-0000-8000-8000-000000000001";
    assert_eq!(with("idempotency-key"), [format!("idempotency-key: {id}")]);
    assert_eq!(with("x-mine"), ["x-mine: 1"]);
    assert!(with("transfer-encoding").is_empty());
    assert_eq!(server.accepted().await, 1);
}

// What could go wrong: a receiver sends the request on to a host that nobody has allowed.
#[tokio::test]
async fn a_redirect_is_not_followed() {
    let mut target = CountingServer::start_everywhere().await;
    for status in ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"] {
        let location = format!("location: http://127.0.0.1:{}/\r\n", target.address.port());
        let text = format!("HTTP/1.1 {status}\r\n{location}content-length: 0\r\n\r\n");
        let result = answered(text).await;
        assert_eq!(Verdict::of(&result), Verdict::Refused, "{status}");
        assert_eq!(result.unwrap().status.to_string(), &status[..3]);
    }
    assert_eq!(target.accepted().await, 0);
}

#[tokio::test]
async fn an_answer_may_ask_to_wait() {
    let after = Some(Duration::from_secs(7));
    let text = answer("503 Busy", "").replace("\r\n\r\n", "\r\nretry-after: 7\r\n\r\n");
    assert_eq!(Verdict::of(&answered(text).await), Verdict::RateLimited { after });
    let busy = answered(answer("503 Busy", "")).await;
    assert_eq!(Verdict::of(&busy), Verdict::Again { after: None });
}

#[tokio::test]
async fn a_large_body_is_cut() {
    let server = CountingServer::start("127.0.0.1:0", Answering::Endless).await;
    let response = send_to(&server, |it| it.response_bytes_max = 100_000).await.unwrap();
    assert_eq!((response.body.len(), response.body_end), (100_000, BodyEnd::Cut));
    let server = CountingServer::start("127.0.0.1:0", Answering::Endless).await;
    let response = send_to(&server, |it| it.response_bytes_max = 0).await.unwrap();
    assert_eq!((response.body.len(), response.body_end), (0, BodyEnd::Cut));
    for (length, body_end) in [(9, BodyEnd::Whole), (10, BodyEnd::Whole), (11, BodyEnd::Cut)] {
        let text = Answering::Text(answer("200 OK", &"x".repeat(length)));
        let server = CountingServer::start("127.0.0.1:0", text).await;
        let response = send_to(&server, |it| it.response_bytes_max = 10).await.unwrap();
        assert_eq!((response.body.len(), response.body_end), (length.min(10), body_end));
    }
}

// The status of the answer is known, and with it whether the endpoint has taken the message.
#[tokio::test]
async fn a_slow_body_ends_with_the_deadline() {
    let server = CountingServer::start("127.0.0.1:0", Answering::Slow).await;
    let begin = Instant::now();
    let result = send_to(&server, |settings| {
        settings.connect_timeout = Duration::from_secs(2);
        settings.total_timeout = Duration::from_secs(2);
    })
    .await;
    assert_eq!(Verdict::of(&result), Verdict::Delivered);
    let response = result.unwrap();
    assert_eq!((response.status, response.body_end), (200, BodyEnd::Late));
    assert!(!response.body.is_empty() && begin.elapsed() < Duration::from_secs(20));
}

#[tokio::test]
async fn a_silent_endpoint_ends_with_the_deadline() {
    let server = CountingServer::start("127.0.0.1:0", Answering::Silence).await;
    let result = send_to(&server, |settings| {
        settings.connect_timeout = Duration::from_secs(2);
        settings.total_timeout = Duration::from_secs(2);
    })
    .await;
    assert_eq!(Verdict::of(&result), Verdict::Again { after: None });
    let error = result.unwrap_err();
    assert!(matches!(error, SendError::TimedOut { stage: SendStage::Answer, .. }), "{error}");
    assert!(error.may_have_arrived());
}

#[tokio::test]
async fn a_body_that_breaks_off_leaves_the_status() {
    let whole = answer("200 OK", "0123456789");
    let response = answered(whole[..whole.len() - 3].to_owned()).await.unwrap();
    assert_eq!(response.body_end, BodyEnd::Broken);
    assert_eq!((response.status, response.body), (200, b"0123456".to_vec()));
}

// What could go wrong: a receiver fills the host's memory with the head of its answer.
#[tokio::test]
async fn a_large_head_is_refused() {
    let long = format!("HTTP/1.1 200 OK\r\nx-long: {}\r\n\r\n", "x".repeat(200 << 10));
    let endless = "x".repeat(200 << 10);
    let many = format!("HTTP/1.1 200 OK\r\n{}\r\n", "x-many: 1\r\n".repeat(101));
    for text in [long, format!("HTTP/1.1 200 OK\r\n{endless}"), many] {
        let result = answered(text).await;
        assert_eq!(Verdict::of(&result), Verdict::Again { after: None });
        let error = result.unwrap_err();
        assert!(matches!(error, SendError::BadAnswer { .. }), "{error}");
        assert!(error.may_have_arrived() && error.to_string().len() < 300, "{error}");
    }
    let fitting = format!("HTTP/1.1 200 OK\r\nx-long: {}\r\n\r\n", "x".repeat(30 << 10));
    assert_eq!(answered(fitting).await.unwrap().status, 200);
}

#[tokio::test]
async fn what_is_not_http_is_no_answer() {
    let result = answered("SSH-2.0-OpenSSH_9.6\r\n\r\n".to_owned()).await;
    assert!(matches!(result, Err(SendError::BadAnswer { .. })), "{result:?}");
    let result = answered(String::new()).await;
    assert!(matches!(result, Err(SendError::Broken { .. })), "{result:?}");
}

// What could go wrong: two tenants share a connection.
#[tokio::test]
async fn each_request_has_a_connection_of_its_own() {
    let text = Answering::Text(answer("200 OK", ""));
    let mut server = CountingServer::start("127.0.0.1:0", text).await;
    let url = format!("http://127.0.0.1:{}/", server.address.port());
    let sender = sender(hosts(&[entry_of(&url)]), &["127.0.0.1/32"], ScriptedResolver::new(&[]));
    let endpoint = endpoint_with(&url, |_| {});
    for _ in 0..3 {
        assert_eq!(sender.send(&endpoint, &request()).await.unwrap().status, 200);
    }
    assert_eq!(server.accepted().await, 3);
}
