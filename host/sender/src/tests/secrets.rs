//! What could go wrong: a secret of an endpoint stands in a log, or in the error of a message,
//! which others than its owner read.

use super::*;
use crate::{HeaderFault, SendError, SigningKeys};

/// Parts of the secrets below, each of which would give one away.
const SECRETS: [&str; 5] = ["p4th-s3cret", "qu3ry-s3cret", "h3ader-s3cret", "MfKQ9r8G", "AAECAwQF"];

fn secret_endpoint(settings: &mut EndpointSettings) {
    let keys = [
        "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=",
    ];
    settings.headers = vec![("authorization".to_owned(), "Bearer h3ader-s3cret".to_owned())];
    settings.signing_keys = Some(SigningKeys::new(keys[0], Some(keys[1])).unwrap());
    settings.connect_timeout = Duration::from_secs(2);
    settings.total_timeout = Duration::from_secs(2);
}

/// Returns the texts of an error, in all forms.
fn texts(error: &SendError) -> [String; 3] {
    [error.to_string(), format!("{error:?}"), format!("{error:#?}")]
}

#[tokio::test]
async fn no_error_and_no_debug_output_has_a_secret() {
    let mut shown = Vec::new();
    let repeating = answer("500 Oops", "authorization: Bearer h3ader-s3cret");
    let mut signatures = Vec::new();
    for (answering, range) in [
        (Answering::Text(repeating.clone()), "127.0.0.0/8"),
        (Answering::Text(String::new()), "127.0.0.0/8"),
        (Answering::Text("h3ader-s3cret\r\n\r\n".to_owned()), "127.0.0.0/8"),
        (Answering::Text(format!("HTTP/1.1 200 OK\r\nh3ader-s3cret {repeating}")), "127.0.0.0/8"),
        (Answering::Silence, "127.0.0.0/8"),
        (Answering::Silence, "10.0.0.0/8"),
    ] {
        let mut server = CountingServer::start("127.0.0.1:0", answering).await;
        let port = server.address.port();
        let url = format!("http://127.0.0.1:{port}/p4th-s3cret?key=qu3ry-s3cret");
        let endpoint = endpoint_with(&url, secret_endpoint);
        let sender = sender(hosts(&[entry_of(&url)]), &[range], ScriptedResolver::new(&[]));
        match sender.send(&endpoint, &request()).await {
            Ok(response) => shown.push(format!("{response:?}")),
            Err(error) => shown.extend(texts(&error)),
        }
        if range == "127.0.0.0/8" {
            signatures.push(server.request().await);
        }
        let mut settings = EndpointSettings::new(&url, AllowedHosts::default());
        secret_endpoint(&mut settings);
        shown.extend([format!("{endpoint:?}"), format!("{settings:?}"), format!("{sender:?}")]);
        let Err(fault) = Endpoint::new(EndpointSettings {
            headers: vec![("authorization".to_owned(), "h3ader-s3cret\n".to_owned())],
            ..settings
        }) else {
            panic!("a line break is refused");
        };
        shown.extend([fault.to_string(), format!("{fault:?}")]);
    }
    let doubled = HeaderFault::new("authorization", "is one that the endpoint sets");
    shown.extend(texts(&SendError::Header(doubled)));
    for text in &shown {
        assert!(!SECRETS.iter().any(|secret| text.contains(secret)), "{text}");
    }
    // The requests have what they should have, so that the search above would find it.
    assert_eq!(signatures.len(), 5);
    for request in signatures {
        let request = request.to_lowercase();
        assert!(
            request.starts_with("post /p4th-s3cret?key=qu3ry-s3cret http/1.1\r\n"),
            "{request}"
        );
        assert!(request.contains("authorization: bearer h3ader-s3cret\r\n"), "{request}");
        let signature = request.lines().find_map(|line| line.strip_prefix("webhook-signature: "));
        let parts: Vec<_> = signature.unwrap().split(' ').collect();
        assert!(parts.len() == 2 && parts.iter().all(|part| part.starts_with("v1,")), "{parts:?}");
    }
}

#[tokio::test]
async fn a_signature_on_the_wire_is_that_of_what_arrived() {
    let text = Answering::Text(answer("200 OK", ""));
    let mut server = CountingServer::start("127.0.0.1:0", text).await;
    let url = format!("http://127.0.0.1:{}/", server.address.port());
    let sender = sender(hosts(&[entry_of(&url)]), &["127.0.0.1/32"], ScriptedResolver::new(&[]));
    sender.send(&endpoint_with(&url, secret_endpoint), &request()).await.unwrap();
    let request = server.request().await;
    let (head, body) = request.split_once("\r\n\r\n").unwrap();
    let header = |name: &str| {
        let beginning = format!("{name}: ");
        head.lines().find_map(|line| line.strip_prefix(&beginning)).unwrap().to_owned()
    };
    let timestamp: u64 = header("webhook-timestamp").parse().unwrap();
    let mut settings = EndpointSettings::new(&url, AllowedHosts::default());
    secret_endpoint(&mut settings);
    let keys = settings.signing_keys.unwrap();
    let expected = keys.sign(&header("webhook-id"), timestamp, body.as_bytes());
    assert_eq!(header("webhook-signature"), expected);
}
