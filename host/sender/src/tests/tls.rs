//! TLS: the connection goes to the judged address, and the certificate is that of the name.

use std::{path::PathBuf, pin::Pin};

use openssl::{
    asn1::Asn1Time,
    bn::BigNum,
    ec::{EcGroup, EcKey},
    hash::MessageDigest,
    nid::Nid,
    pkey::{PKey, Private},
    ssl::{NameType, Ssl, SslAcceptor, SslMethod},
    x509::{X509, X509NameBuilder, extension::SubjectAlternativeName},
};
use tokio_openssl::SslStream;

use super::*;
use crate::{Response, SendError, SendStage, Verdict};

/// Creates a certificate for a name, signed with its own key.
fn certificate(name: &str) -> (X509, PKey<Private>) {
    let group = EcGroup::from_curve_name(Nid::X9_62_PRIME256V1).unwrap();
    let key = PKey::from_ec_key(EcKey::generate(&group).unwrap()).unwrap();
    let mut subject = X509NameBuilder::new().unwrap();
    subject.append_entry_by_text("CN", name).unwrap();
    let subject = subject.build();
    let mut builder = X509::builder().unwrap();
    builder.set_version(2).unwrap();
    let serial = BigNum::from_u32(17).unwrap().to_asn1_integer().unwrap();
    builder.set_serial_number(&serial).unwrap();
    builder.set_subject_name(&subject).unwrap();
    builder.set_issuer_name(&subject).unwrap();
    builder.set_pubkey(&key).unwrap();
    builder.set_not_before(&Asn1Time::days_from_now(0).unwrap()).unwrap();
    builder.set_not_after(&Asn1Time::days_from_now(1).unwrap()).unwrap();
    let names = SubjectAlternativeName::new().dns(name).build(&builder.x509v3_context(None, None));
    builder.append_extension(names.unwrap()).unwrap();
    builder.sign(&key, MessageDigest::sha256()).unwrap();
    (builder.build(), key)
}

/// A server with TLS, and the name that each client asked for.
struct TlsServer {
    address: SocketAddr,
    names: UnboundedReceiver<Option<String>>,
    requests: UnboundedReceiver<String>,
    /// Its certificate, which a client may trust. The file is removed with the server.
    ca_file: PathBuf,
}

impl Drop for TlsServer {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.ca_file);
    }
}

/// Starts a server on this machine with a certificate for a name.
async fn start(name: &str) -> TlsServer {
    let (certificate, key) = certificate(name);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let file = format!("oncebox-sender-{}-{}.pem", std::process::id(), address.port());
    let ca_file = std::env::temp_dir().join(file);
    std::fs::write(&ca_file, certificate.to_pem().unwrap()).unwrap();
    let mut acceptor = SslAcceptor::mozilla_intermediate_v5(SslMethod::tls_server()).unwrap();
    acceptor.set_certificate(&certificate).unwrap();
    acceptor.set_private_key(&key).unwrap();
    let acceptor = acceptor.build();
    let (asked, names) = unbounded_channel();
    let (received, requests) = unbounded_channel();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let session = Ssl::new(acceptor.context()).unwrap();
            let mut stream = SslStream::new(session, stream).unwrap();
            if Pin::new(&mut stream).accept().await.is_err() {
                continue;
            }
            let name = stream.ssl().servername(NameType::HOST_NAME).map(ToOwned::to_owned);
            let _ = asked.send(name);
            let answering = Arc::new(Answering::Text(answer("200 OK", "private")));
            serve(stream, answering, received.clone()).await;
        }
    });
    TlsServer { address, names, requests, ca_file }
}

/// Sends a message to a host that leads to a server on this machine, with or without trust in the
/// server's certificate.
async fn send_to(server: &TlsServer, host: &str, trusts: bool) -> Result<Response, SendError> {
    let url = format!("https://{host}:{}/in", server.address.port());
    let options = SenderOptions {
        allowed_hosts: hosts(&[entry_of(&url)]),
        private_ranges_allowed: vec!["127.0.0.0/8".parse().unwrap()],
        ca_file: trusts.then(|| server.ca_file.clone()),
        ..SenderOptions::default()
    };
    let resolver = ScriptedResolver::new(&[&["127.0.0.1"]]);
    let sender = Sender::new(options).unwrap().with_resolver(resolver);
    sender.send(&endpoint_with(&url, |_| {}), &request()).await
}

#[tokio::test]
async fn tls_and_the_request_name_the_host_of_the_url() {
    let mut server = start("hooks.example").await;
    let response = send_to(&server, "HOOKS.example.", true).await.unwrap();
    assert_eq!((response.status, response.body), (200, b"private".to_vec()));
    assert_eq!(server.names.recv().await.unwrap().as_deref(), Some("hooks.example"));
    let request = server.requests.recv().await.unwrap().to_lowercase();
    let host = format!("\r\nhost: hooks.example:{}\r\n", server.address.port());
    assert!(request.contains(&host), "{request}");
}

// What could go wrong: whoever answers at the address gets the message, with the endpoint's
// secrets.
#[tokio::test]
async fn a_certificate_of_another_name_or_authority_gets_no_request() {
    let mut server = start("hooks.example").await;
    for (host, trusts, text) in [
        ("other.example", true, "ostname mismatch"),
        ("hooks.example.test", true, "ostname mismatch"),
        ("127.0.0.1", true, "IP address mismatch"),
        ("hooks.example", false, "self"),
    ] {
        let result = send_to(&server, host, trusts).await;
        assert_eq!(Verdict::of(&result), Verdict::Again { after: None }, "{host}");
        let error = result.unwrap_err();
        assert!(matches!(error, SendError::Tls { .. }) && !error.may_have_arrived(), "{error}");
        assert!(error.to_string().contains(text), "{error}");
    }
    assert!(server.requests.try_recv().is_err());
}

#[tokio::test]
async fn a_server_without_tls_is_no_endpoint() {
    let text = Answering::Text(answer("200 OK", ""));
    let plain = CountingServer::start("127.0.0.1:0", text).await;
    let url = format!("https://127.0.0.1:{}/", plain.address.port());
    let sender = sender(hosts(&[entry_of(&url)]), &["127.0.0.0/8"], ScriptedResolver::new(&[]));
    let endpoint = endpoint_with(&url, |it| it.connect_timeout = Duration::from_secs(1));
    let error = sender.send(&endpoint, &request()).await.unwrap_err();
    // It waits for the end of a head, which a client of TLS does not send.
    let is_late = matches!(error, SendError::TimedOut { stage: SendStage::Tls, .. });
    assert!(is_late && !error.may_have_arrived(), "{error}");
}

#[test]
fn a_file_without_certificates_is_refused() {
    let options =
        SenderOptions { ca_file: Some("/nowhere.pem".into()), ..SenderOptions::default() };
    let fault = Sender::new(options).unwrap_err();
    assert_eq!(fault.to_string(), "`/nowhere.pem` is not there or holds no certificates in PEM");
}
