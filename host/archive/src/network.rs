//! Addresses that are those of the public Internet, and no others.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Returns whether an address is of the public Internet: of no private network, no machine's own,
/// and no range with a purpose of its own (IANA's registries of special-purpose addresses).
pub(crate) fn is_public(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [first, second, third, _] = address.octets();
    let is_special = first == 0
        || first >= 240
        || (first, second & 0b1100_0000) == (100, 64) // shared by a provider's customers
        || (first, second, third) == (192, 0, 0)
        || (first, second & 0b1111_1110) == (198, 18); // benchmarks of networks
    !(is_special
        || address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_multicast()
        || address.is_documentation())
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let [first, second, ..] = address.segments();
    // Of the global range, without those that stand for addresses of IPv4, which would pass by the
    // judgement of these, and those of documentation.
    let is_global = first & 0xe000 == 0x2000;
    let is_special = first == 0x2002 || first == 0x2001 && (second < 0x200 || second == 0xdb8);
    is_global && !is_special
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: a name leads to a service of the host's own network, under whatever form
    // of its address.
    #[test]
    fn private_addresses_are_known_in_all_their_forms() {
        let is_public = |text: &str| is_public(text.parse().expect(text));
        for text in ["52.216.0.1", "8.8.8.8", "100.63.0.1", "198.20.0.1", "2a00:1450:4001::1"] {
            assert!(is_public(text), "{text}");
        }
        for text in [
            "0.0.0.0",
            "10.0.0.1",
            "100.64.0.1",
            "127.0.0.1",
            "169.254.169.254",
            "172.16.0.1",
            "192.0.0.8",
            "192.0.2.1",
            "192.168.1.1",
            "198.18.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:10.0.0.1",
            "64:ff9b::a00:1",
            "2001::1",
            "2001:db8::1",
            "2002:a00:1::1",
            "fc00::1",
            "fe80::1",
            "ff02::1",
        ] {
            assert!(!is_public(text), "{text}");
        }
    }
}
