//! The connection to a judged address, and TLS on it.

use std::{io, net::SocketAddr, pin::Pin};

use openssl::{ssl::SslConnector, x509::X509VerifyResult};
use tokio::{
    net::TcpStream,
    time::{Instant, timeout, timeout_at},
};
use tokio_openssl::SslStream;

use crate::{
    error::{SendError, SendStage},
    target::Target,
};

/// Most addresses of a name that are tried.
const ADDRESSES_TRIED_MAX: usize = 4;

/// Connects to the first of the judged addresses that answers. Each has an equal share of the time
/// that is left, so that a dead one leaves time for the next. No name is looked up here.
pub(crate) async fn connect(
    endpoint: &str,
    addresses: &[SocketAddr],
    deadline: Instant,
) -> Result<TcpStream, SendError> {
    let mut error =
        SendError::Lookup { endpoint: endpoint.to_owned(), why: "it has no address".to_owned() };
    let mut left = addresses.len().min(ADDRESSES_TRIED_MAX) as u32;
    for address in addresses.iter().take(ADDRESSES_TRIED_MAX) {
        let share = deadline.saturating_duration_since(Instant::now()) / left;
        left -= 1;
        error = match timeout(share, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => {
                check_peer(endpoint, stream.peer_addr(), *address)?;
                let _ = stream.set_nodelay(true); // only faster
                return Ok(stream);
            }
            Ok(Err(error)) => unreachable(endpoint, &error),
            Err(_) => timed_out(endpoint, SendStage::Connect),
        };
    }
    Err(error)
}

/// Compares the address at the other end of a socket with the judged one.
fn check_peer(
    endpoint: &str,
    peer: io::Result<SocketAddr>,
    judged: SocketAddr,
) -> Result<(), SendError> {
    let peer = peer.map_err(|error| unreachable(endpoint, &error))?;
    if (peer.ip(), peer.port()) == (judged.ip(), judged.port()) {
        return Ok(());
    }
    Err(SendError::PeerDiffers { endpoint: endpoint.to_owned() })
}

/// Begins TLS on a connection. The certificate must be one for the name of the URL.
pub(crate) async fn secure(
    endpoint: &str,
    tls: &SslConnector,
    target: &Target,
    stream: TcpStream,
    deadline: Instant,
) -> Result<SslStream<TcpStream>, SendError> {
    let failed = |why| SendError::Tls { endpoint: endpoint.to_owned(), why };
    let session = tls
        .configure()
        .and_then(|tls| tls.into_ssl(&target.server_name()))
        .and_then(|session| SslStream::new(session, stream));
    let mut stream = session.map_err(|error| failed(error.to_string()))?;
    let handshake = timeout_at(deadline, Pin::new(&mut stream).connect()).await;
    let handshake = handshake.map_err(|_| timed_out(endpoint, SendStage::Tls))?;
    match (handshake, stream.ssl().verify_result()) {
        (Ok(()), _) => Ok(stream),
        (Err(error), X509VerifyResult::OK) => Err(failed(error.to_string())),
        (Err(_), verified) => Err(failed(format!("its certificate is refused: {verified}"))),
    }
}

fn unreachable(endpoint: &str, error: &io::Error) -> SendError {
    SendError::Unreachable { endpoint: endpoint.to_owned(), why: error.to_string() }
}

/// Creates the error of a deadline.
pub(crate) fn timed_out(endpoint: &str, stage: SendStage) -> SendError {
    SendError::TimedOut { endpoint: endpoint.to_owned(), stage }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::net::TcpListener;

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    // What could go wrong: a socket that leads elsewhere than to the judged address is used.
    #[test]
    fn a_peer_is_the_judged_address() {
        let judged: SocketAddr = "192.0.2.1:443".parse().unwrap();
        assert_eq!(check_peer("h", Ok(judged), judged), Ok(()));
        for other in ["127.0.0.1:443", "192.0.2.1:80", "[::ffff:192.0.2.1]:443"] {
            let error = check_peer("h", Ok(other.parse().unwrap()), judged).unwrap_err();
            assert_eq!(error, SendError::PeerDiffers { endpoint: "h".to_owned() }, "{other}");
        }
        let error = check_peer("h", Err(io::Error::other("gone")), judged).unwrap_err();
        assert!(matches!(error, SendError::Unreachable { .. }), "{error}");
    }

    #[tokio::test]
    async fn an_address_that_refuses_leaves_its_turn_to_the_next() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let live = listener.local_addr().unwrap();
        // Nothing listens there: the port is that of a socket of another address.
        let dead = SocketAddr::new("127.0.0.9".parse().unwrap(), live.port());
        let stream = connect("h", &[dead, live], soon()).await.unwrap();
        assert_eq!(stream.peer_addr().unwrap(), live);
        let error = connect("h", &[dead], soon()).await.unwrap_err();
        assert!(matches!(error, SendError::Unreachable { .. }), "{error}");
        let many = [dead, dead, dead, dead, live];
        assert!(connect("h", &many, soon()).await.is_err(), "only four are tried");
        let error = connect("h", &[], soon()).await.unwrap_err();
        assert!(error.to_string().contains("has no address"), "{error}");
    }
}
