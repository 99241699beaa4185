//! Strangers and slow clients at the API's connections. Loopback has many addresses, so that each
//! connection may come from one of its own.

use std::{
    io::ErrorKind,
    net::{Ipv4Addr, SocketAddr},
    time::Duration,
};

use oncebox_api::{Limits, Mode, wire::Role};
use oncebox_tests::wait::DEADLINE;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    time::{Instant, sleep, timeout},
};

use super::{
    fixture::ApiFixture,
    wire::{self, Server, request},
};

/// Connections that the API has at a time.
const PLACES: usize = 256;

/// Connect from an address of this machine, and say something.
async fn come(from: Ipv4Addr, to: SocketAddr, bytes: &str) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind((from, 0).into()).unwrap();
    let mut stream = socket.connect(to).await.expect("it listens");
    let _ = stream.write_all(bytes.as_bytes()).await; // it may have been closed already
    stream
}

/// Whether a connection has not ended, whatever came over it.
fn is_open(stream: &TcpStream) -> bool {
    loop {
        match stream.try_read(&mut [0; 4096]) {
            Ok(0) => return false,
            Ok(_) => {}
            Err(error) => return error.kind() == ErrorKind::WouldBlock,
        }
    }
}

/// Wait until of these connections so many have not ended, as is `right`.
async fn until_open(streams: &[TcpStream], right: impl Fn(usize) -> bool) {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let open = streams.iter().filter(|stream| is_open(stream)).count();
        if right(open) {
            return;
        }
        assert!(Instant::now() < deadline, "{open} connections are open");
        sleep(Duration::from_millis(5)).await;
    }
}

/// The status of an answer, and none where the connection ends without.
async fn status(stream: &mut TcpStream) -> Option<u16> {
    let mut head = [0; 12];
    let read =
        timeout(DEADLINE, stream.read_exact(&mut head)).await.expect("it is answered, or ends");
    read.ok()?;
    std::str::from_utf8(&head[9..]).ok()?.parse().ok()
}

/// Requests with a token that are answered, of twenty.
async fn answered(server: &Server, token: &str) -> usize {
    let whoami = request("GET", "/v1/whoami", &[("authorization", &format!("Bearer {token}"))], "");
    let mut answered = 0;
    for _ in 0..20 {
        answered += usize::from(server.talk(whoami.as_bytes()).await.starts_with("HTTP/1.1 200"));
    }
    answered
}

const HALF_A_HEAD: &str = "GET /v1/whoami HTTP/1.1\r\nhost: x\r\n";

fn slow_body(token: &str) -> String {
    format!(
        "POST /v1/tenants/acme/tokens HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: \
            Bearer {token}\r\n\
         content-type: application/json\r\ncontent-length: 2\r\n\r\n{{"
    )
}

/// What could go wrong: whoever sends halves of heads, from one address or from hundreds, keeps
/// those out who have a token, and the halves pile up without a bound.
#[tokio::test(flavor = "multi_thread")]
async fn half_heads_keep_nobody_out() {
    let fixture = ApiFixture::new(Mode::Tokens, Limits::default()).await;
    let server = Server::start(&fixture, None).await;
    let token = fixture.token_of("acme", Role::Viewer);
    let mut halves = Vec::new();
    for _ in 0..300 {
        halves.push(come(Ipv4Addr::new(127, 0, 0, 2), server.address, HALF_A_HEAD).await);
    }
    // The oldest give way. The others end by themselves after a while, so they are looked at before
    // anything else.
    let (older, newer) = halves.split_at(300 - PLACES / 2);
    until_open(older, |open| open == 0).await;
    until_open(newer, |open| open == PLACES / 2).await;
    assert_eq!(answered(&server, &token).await, 20, "beside 300 from one address");

    // A client that is in the middle of its head, as all are for a while, is not who gives way.
    let head = request("GET", "/v1/whoami", &[("authorization", &format!("Bearer {token}"))], "");
    let (first, rest) = head.split_at(30);
    let mut slow = come(Ipv4Addr::LOCALHOST, server.address, first).await;
    for n in 0..2 * PLACES {
        halves.push(
            come(
                Ipv4Addr::new(127, 0, 1, if n % 2 == 0 { 1 } else { 2 }),
                server.address,
                HALF_A_HEAD,
            )
            .await,
        );
        if halves.len() > 400 {
            drop(halves.drain(..200));
        }
    }
    slow.write_all(rest.as_bytes()).await.unwrap();
    assert_eq!(status(&mut slow).await, Some(200));
    drop(halves);

    // From hundreds of addresses, one each.
    let mut halves = Vec::new();
    for n in 0..300_u16 {
        let [high, low] = n.to_be_bytes();
        halves.push(come(Ipv4Addr::new(127, 1, high, low), server.address, HALF_A_HEAD).await);
    }
    assert_eq!(answered(&server, &token).await, 20, "beside 300 from an address each");
    until_open(&halves, |open| open <= PLACES).await;
    drop(halves);
    server.stop().await;
    fixture.finish().await;
}

/// What could go wrong: the same before there is a head, while TLS is agreed on.
#[tokio::test(flavor = "multi_thread")]
async fn half_handshakes_keep_nobody_out() {
    let fixture = ApiFixture::new(Mode::Tokens, Limits::default()).await;
    let certificate = wire::self_signed();
    let server = Server::start(&fixture, Some(&certificate)).await;
    let mut halves = Vec::new();
    for _ in 0..300 {
        halves.push(come(Ipv4Addr::new(127, 0, 0, 2), server.address, "\x16\x03\x01").await);
    }
    // They end by themselves after a while, so they are looked at before anything else.
    until_open(&halves, |open| open == PLACES / 2).await;
    let whoami = request(
        "GET",
        "/v1/whoami",
        &[("authorization", &format!("Bearer {}", fixture.token_of("acme", Role::Viewer)))],
        "",
    );
    for _ in 0..5 {
        let said = server.talk_tls(&certificate, whoami.as_bytes()).await;
        assert!(said.starts_with("HTTP/1.1 200"), "{said}");
    }
    drop(halves);
    server.stop().await;
    fixture.finish().await;
}

/// What could go wrong: a body that never comes is waited for although its sender has no token; one
/// that has a token is cut off for a stranger, or takes all places.
#[tokio::test(flavor = "multi_thread")]
async fn slow_bodies_need_a_token_and_take_half_of_the_places() {
    let fixture = ApiFixture::new(Mode::Tokens, Limits::default()).await;
    let server = Server::start(&fixture, None).await;
    let token = fixture.token_of("acme", Role::Viewer);
    let mut strangers = Vec::new();
    for _ in 0..300 {
        strangers
            .push(come(Ipv4Addr::new(127, 0, 0, 2), server.address, &slow_body("obx_0")).await);
    }
    assert_eq!(answered(&server, &token).await, 20, "beside 300 bodies of strangers");
    let mut refused = 0;
    for stranger in &mut strangers {
        // What waits for room may be closed for others before it is answered.
        refused += usize::from(status(stranger).await.is_none_or(|status| status == 401));
    }
    assert_eq!(refused, 300, "nobody without a token is waited for");
    until_open(&strangers, |open| open == 0).await;

    // Slow ones with a token, from one address: half of the places, and the rest is for others.
    let body = slow_body(&fixture.token_of("acme", Role::Admin));
    let (one, other) = (Ipv4Addr::new(127, 0, 0, 3), Ipv4Addr::new(127, 0, 0, 4));
    let mut slow = fill(&server, one, &body).await;
    assert_eq!((slow.len(), answered(&server, &token).await), (PLACES / 2, 20));
    // From a second address: all places are used by requests that are authenticated, and whoever
    // comes then is refused.
    slow.append(&mut fill(&server, other, &body).await);
    assert_eq!((slow.len(), answered(&server, &token).await), (PLACES, 0));
    // None of them was cut off for anybody.
    let mut answers = 0;
    for slow in &mut slow {
        slow.write_all(b"}").await.unwrap();
        answers += usize::from(status(slow).await == Some(400));
    }
    assert_eq!(answers, PLACES, "each has its answer");
    drop(slow);
    assert_eq!(answered(&server, &token).await, 20);
    server.stop().await;
    fixture.finish().await;
}

/// As many requests with a slow body as an address may have, each of them authenticated; one more
/// is refused.
async fn fill(server: &Server, from: Ipv4Addr, body: &str) -> Vec<TcpStream> {
    let mut slow = Vec::new();
    let deadline = Instant::now() + DEADLINE;
    loop {
        assert!(
            Instant::now() < deadline && slow.len() <= PLACES,
            "{} slow bodies, and no end",
            slow.len()
        );
        slow.push(come(from, server.address, body).await);
        if slow.len() <= PLACES / 2 {
            continue;
        }
        // One that is not authenticated yet is closed for the next; when the next itself is, all
        // are authenticated.
        sleep(Duration::from_millis(100)).await;
        let newest_is_refused = slow.last().is_some_and(|newest| !is_open(newest));
        slow.retain(is_open);
        if newest_is_refused {
            return slow;
        }
    }
}
