//! What could go wrong: a tenant's URL reaches a service of the operator's network, under whatever
//! spelling of its address. Each test counts the connections to a server that listens on all
//! addresses of this machine.

use super::*;
use crate::{HostList, SendError, Verdict};

/// Hosts whose address is not of the public Internet, as a URL may spell them.
const HOSTS: [&str; 106] = [
    // This machine.
    "127.0.0.1",
    "127.0.0.1.",
    "127.1",
    "127.0.1",
    "127.255.255.254",
    "2130706433",
    "0x7f000001",
    "0X7F000001",
    "0x7f.0x0.0x0.0x1",
    "0x7f.1",
    "0177.0.0.1",
    "0177.0.0.01",
    "00000177.0.0.1",
    "017700000001",
    "127.0.0.0x1",
    "127.0x1",
    "127.0.0.1%2e",
    "%31%32%37.0.0.1",
    "127%2e0%2e0%2e1",
    "%30%78%37%66.1",
    "１２７.0.0.1",
    "127。0。0。1",
    "127．0．0．1",
    "127｡0｡0｡1",
    "①②⑦.0.0.1",
    "0",
    "0x0",
    "00",
    "0.0.0.0",
    "0.0.0.0.",
    "0.1.2.3",
    "[::]",
    "[0:0:0:0:0:0:0:0]",
    "[::1]",
    "[0000:0000:0000:0000:0000:0000:0000:0001]",
    "[0::0:1]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[::FFFF:7F00:0001]",
    "[::ffff:0.0.0.0]",
    "[::127.0.0.1]",
    "[::ffff:0:127.0.0.1]",
    "[64:ff9b::127.0.0.1]",
    "[64:ff9b::7f00:1]",
    "[64:ff9b:1::127.0.0.1]",
    "[2002:7f00:1::]",
    "[2002:7f00:1::7f00:1]",
    "[2001:0:7f00:1::]",
    "[2001::80ff:fffe]",
    // Credentials of a cloud.
    "169.254.169.254",
    "169.254.169.254.",
    "169.254.43518",
    "169.16689662",
    "2852039166",
    "0xa9fea9fe",
    "0xA9.0xFE.0xA9.0xFE",
    "0251.0376.0251.0376",
    "0251.254.0xa9.254",
    "１６９.２５４.１６９.２５４",
    "[::ffff:169.254.169.254]",
    "[::ffff:a9fe:a9fe]",
    "[64:ff9b::169.254.169.254]",
    "[2002:a9fe:a9fe::]",
    "[fd00:ec2::254]",
    "[fd20:ce::254]",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    // Private networks.
    "10.0.0.1",
    "10.1",
    "012.0.0.1",
    "0xa.0.0.1",
    "167772161",
    "10.255.255.255",
    "172.16.0.1",
    "172.31.255.255",
    "0xac.0x10.0.1",
    "192.168.0.1",
    "192.168.257",
    "0xc0a80101",
    "3232235777",
    "100.64.0.1",
    "100.127.255.255",
    "169.254.0.1",
    "[::ffff:10.0.0.1]",
    "[64:ff9b::a00:1]",
    "[2002:c0a8:101::]",
    "[fc00::1]",
    "[fdff:ffff::1]",
    "[fe80::1]",
    "[febf::1]",
    "[fec0::1]",
    // Ranges with a purpose of their own.
    "192.0.0.1",
    "192.0.2.1",
    "192.88.99.1",
    "198.18.0.1",
    "198.19.255.255",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "4294967295",
    "[ff02::1]",
    "[2001:db8::1]",
    "[3fff::1]",
];

// The operator and the tenant allow each of these hosts, so that nothing but its address refuses
// it.
#[tokio::test]
async fn an_address_of_another_network_is_refused_in_every_spelling() {
    let mut server = CountingServer::start_everywhere().await;
    let url = |host: &str| format!("http://{host}:{}/", server.address.port());
    let entries: Vec<_> = HOSTS.iter().map(|host| entry_of(&url(host))).collect();
    let resolver = ScriptedResolver::new(&[]);
    let sender = sender(hosts(&entries), &[], resolver.clone());
    for host in HOSTS {
        let result = sender.send(&endpoint_with(&url(host), |_| {}), &request()).await;
        assert!(matches!(result, Err(SendError::AddressRefused { .. })), "{host} {result:?}");
        assert_eq!(Verdict::of(&result), Verdict::Refused, "{host}");
    }
    assert_eq!(server.accepted().await, 0);
    assert!(resolver.asked().is_empty(), "an address is not looked up");
}

#[tokio::test]
async fn a_name_with_such_an_address_is_refused() {
    let mut server = CountingServer::start_everywhere().await;
    let url = format!("http://hooks.example:{}/", server.address.port());
    let addresses: Vec<String> = HOSTS
        .iter()
        .map(|host| {
            let target = Target::parse(&format!("https://{host}/")).unwrap();
            target.server_name()
        })
        .collect();
    let answers: Vec<_> = addresses.iter().map(|address| vec![address.as_str()]).collect();
    let answers: Vec<&[&str]> = answers.iter().map(Vec::as_slice).collect();
    let sender = sender(hosts(&[entry_of(&url)]), &[], ScriptedResolver::new(&answers));
    let endpoint = endpoint_with(&url, |_| {});
    for address in &addresses {
        let result = sender.send(&endpoint, &request()).await;
        let refused = match result {
            Err(SendError::AddressRefused { address, .. }) => Some(address.to_string()),
            _ => None,
        };
        assert_eq!(refused.as_ref(), Some(address));
    }
    assert_eq!(server.accepted().await, 0);
}

/// Texts that are no URL of an endpoint.
const NO_URLS: [&str; 58] = [
    "",
    "127.0.0.1",
    "//127.0.0.1/",
    "https:",
    "https:127.0.0.1",
    "https:/127.0.0.1/",
    "https:///127.0.0.1/",
    "https:\\\\127.0.0.1\\",
    "https://",
    "https:///",
    "https://?x",
    "https://#x",
    "file:///etc/passwd",
    "file://127.0.0.1/etc/passwd",
    "ftp://127.0.0.1/",
    "gopher://127.0.0.1:6379/_FLUSHALL",
    "dict://127.0.0.1:11211/stats",
    "ws://127.0.0.1/",
    "unix:///run/docker.sock",
    "data:text/plain,x",
    "jar:https://127.0.0.1!/",
    "https://user@127.0.0.1/",
    "https://user:password@hooks.example/",
    "https://@127.0.0.1/",
    "https://:@127.0.0.1/",
    "https://hooks.example@127.0.0.1/",
    "https://hooks.example:443@127.0.0.1/",
    "https://hooks.example%40@127.0.0.1/",
    "https://hooks.example\\@127.0.0.1/",
    "https://127.0.0.1\\@hooks.example/",
    "https://hooks.example#@127.0.0.1/",
    "https://hooks.example/#x",
    "https://hooks.example:0/",
    "https://hooks.example:65536/",
    "https://hooks.example:-1/",
    "https://hooks.example:80:80/",
    "https://hooks.example:٨٠/",
    "https://[::1/",
    "https://::1/",
    "https://[127.0.0.1]/",
    "https://[::1]hooks.example/",
    "https://[fe80::1%eth0]/",
    "https://[fe80::1%25eth0]/",
    "https://[::1%00]/",
    "https://127.0.0.256/",
    "https://1.2.3.4.5/",
    "https://09.0.0.1/",
    "https://0x100000000/",
    "https://hooks..example/",
    "https://.hooks.example/",
    "https://hooks.example../",
    "https://*.example/",
    "https://hooks.example%00.test/",
    "https://hooks%2fexample/",
    "https://hooks.example%0d%0ahost:x/",
    "https://hooks.example/\r\nhost: 127.0.0.1",
    " https://hooks.example/",
    "https://hooks.example/\tx",
];

#[test]
fn what_is_no_plain_url_is_no_endpoint() {
    for url in NO_URLS {
        let endpoint = Endpoint::new(EndpointSettings::new(url, AllowedHosts::default()));
        assert!(endpoint.is_err(), "{url:?} {endpoint:?}");
    }
}

// Addresses of this machine are allowed here: nothing but the lists of hosts refuses.
#[tokio::test]
async fn a_host_that_no_list_has_is_refused_before_any_lookup() {
    let mut server = CountingServer::start_everywhere().await;
    let port = server.address.port();
    let entries = [format!("hooks.example:{port}"), format!("*.wild.example:{port}")];
    let resolver = ScriptedResolver::new(&[&["127.0.0.1"][..]; 20]);
    let ranges = ["127.0.0.0/8", "::1/128"];
    let sender = sender(hosts(&entries), &ranges, resolver.clone());
    for host in [
        "hooks.example.evil.test",
        "evilhooks.example",
        "a.hooks.example",
        "example",
        "wild.example",
        "evilwild.example",
        "a.wild.example.evil.test",
        "hооks.example", // with two letters of Cyrillic
        "hooks.examp1e",
        "localhost",
        "127.0.0.1",
        "2130706433",
        "[::1]",
    ] {
        let url = format!("http://{host}:{port}/");
        // The tenant's limits allow it, and the operator's settings do not; then the reverse.
        let allowed_by_tenant = endpoint_with(&url, |_| {});
        let error = sender.send(&allowed_by_tenant, &request()).await.unwrap_err();
        let refused_by = |error| match error {
            SendError::HostNotAllowed { list, .. } => Some(list),
            _ => None,
        };
        assert_eq!(refused_by(error), Some(HostList::Operator), "{host}");
        let ours = endpoint_with(&format!("http://hooks.example:{port}/"), |settings| {
            settings.tenant_hosts = hosts(&[entry_of(&url)]);
        });
        let error = sender.send(&ours, &request()).await.unwrap_err();
        assert_eq!(refused_by(error), Some(HostList::Tenant), "{host}");
    }
    let other_port = endpoint_with("http://hooks.example/", |_| {});
    assert!(sender.send(&other_port, &request()).await.is_err());
    assert!(resolver.asked().is_empty());
    assert_eq!(server.accepted().await, 0);
    for host in ["hooks.example", "HOOKS.Example.", "%68ooks.example", "ｈooks.example"] {
        let url = format!("http://{host}:{port}/");
        let response = sender.send(&endpoint_with(&url, |_| {}), &request()).await.unwrap();
        assert_eq!(response.status, 200, "{host}");
    }
    assert_eq!(resolver.asked(), ["hooks.example"; 4]);
    assert_eq!(server.accepted().await, 4, "the server counts");
}

#[tokio::test]
async fn plain_http_needs_the_operator() {
    let mut server = CountingServer::start_everywhere().await;
    let url = format!("http://127.0.0.1:{}/", server.address.port());
    let options = SenderOptions {
        allowed_hosts: hosts(&[entry_of(&url)]),
        private_ranges_allowed: vec!["127.0.0.0/8".parse().unwrap()],
        ..SenderOptions::default()
    };
    let sender = Sender::new(options).unwrap();
    let error = sender.send(&endpoint_with(&url, |_| {}), &request()).await.unwrap_err();
    assert!(matches!(error, SendError::PlainHttp { .. }), "{error}");
    assert_eq!(server.accepted().await, 0);
}
