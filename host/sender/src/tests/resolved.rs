//! What could go wrong: the address that was judged is not the one that gets the request.

use super::*;
use crate::{AddressKind, SendError, SendStage, Verdict};

/// Starts two servers on one port: that of an allowed address, 127.0.0.2, and that of one which is
/// not allowed, 127.0.0.1.
async fn two_servers() -> (CountingServer, CountingServer) {
    let text = || Answering::Text(answer("200 OK", "judged"));
    loop {
        let allowed = CountingServer::start("127.0.0.2:0", text()).await;
        // Another process may have that port on the other address.
        let other = SocketAddr::new("127.0.0.1".parse().unwrap(), allowed.address.port());
        if let Ok(listener) = TcpListener::bind(other).await {
            return (allowed, CountingServer::of(listener, text()));
        }
    }
}

fn url_of(server: &CountingServer) -> String {
    format!("http://hooks.example:{}/", server.address.port())
}

#[tokio::test]
async fn a_name_is_looked_up_once_and_its_judged_address_is_used() {
    let (mut allowed, mut other) = two_servers().await;
    let url = url_of(&allowed);
    let resolver = ScriptedResolver::new(&[&["127.0.0.2"], &["127.0.0.1"]]);
    let sender = sender(hosts(&[entry_of(&url)]), &["127.0.0.2/32"], resolver.clone());
    let endpoint = endpoint_with(&url, |_| {});
    let response = sender.send(&endpoint, &request()).await.unwrap();
    assert_eq!(response.body, b"judged");
    assert_eq!(resolver.asked(), ["hooks.example"], "one lookup");
    assert_eq!((allowed.accepted().await, other.accepted().await), (1, 0));
    // The name leads elsewhere now. The next request notices.
    let error = sender.send(&endpoint, &request()).await.unwrap_err();
    assert!(matches!(error, SendError::AddressRefused { kind: AddressKind::Loopback, .. }));
    assert_eq!(resolver.asked().len(), 2);
    assert_eq!((allowed.accepted().await, other.accepted().await), (0, 0));
}

#[tokio::test]
async fn one_bad_address_refuses_the_good_ones_beside_it() {
    let (mut allowed, mut other) = two_servers().await;
    let url = url_of(&allowed);
    let answers: [&[&str]; 5] = [
        &["127.0.0.2", "127.0.0.1"],
        &["127.0.0.1", "127.0.0.2"],
        &["127.0.0.2", "127.0.0.2", "127.0.0.2", "127.0.0.2", "127.0.0.2", "10.0.0.1"],
        &["127.0.0.2", "::1"],
        &["127.0.0.2", "::ffff:127.0.0.2"],
    ];
    let resolver = ScriptedResolver::new(&answers);
    let sender = sender(hosts(&[entry_of(&url)]), &["127.0.0.2/32"], resolver);
    for answer in answers {
        let result = sender.send(&endpoint_with(&url, |_| {}), &request()).await;
        assert!(matches!(result, Err(SendError::AddressRefused { .. })), "{answer:?} {result:?}");
    }
    assert_eq!((allowed.accepted().await, other.accepted().await), (0, 0));
}

#[tokio::test]
async fn a_name_without_an_address_is_tried_again() {
    let url = "http://hooks.example:9/";
    let resolver = ScriptedResolver::new(&[&[]]);
    let sender = sender(hosts(&[entry_of(url)]), &[], resolver);
    for text in ["it has no address", "there is no such name"] {
        let result = sender.send(&endpoint_with(url, |_| {}), &request()).await;
        assert_eq!(Verdict::of(&result), Verdict::Again { after: None });
        let error = result.unwrap_err();
        assert!(matches!(error, SendError::Lookup { .. }) && !error.may_have_arrived(), "{error}");
        assert!(error.to_string().ends_with(text), "{error}");
    }
}

/// A resolver that never answers.
struct SilentResolver;

impl Resolve for SilentResolver {
    fn resolve<'a>(&'a self, _: &'a str) -> BoxFuture<'a, io::Result<Vec<IpAddr>>> {
        Box::pin(std::future::pending())
    }
}

#[tokio::test]
async fn a_lookup_has_a_deadline() {
    let url = "http://hooks.example:9/";
    let sender = sender(hosts(&[entry_of(url)]), &[], Arc::new(SilentResolver));
    let endpoint = endpoint_with(url, |it| it.connect_timeout = Duration::from_millis(50));
    let error = sender.send(&endpoint, &request()).await.unwrap_err();
    let expected =
        SendError::TimedOut { endpoint: "hooks.example:9".to_owned(), stage: SendStage::Lookup };
    assert_eq!(error, expected);
}
