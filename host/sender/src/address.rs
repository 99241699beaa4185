//! Addresses that are not of the public Internet.
//!
//! The ranges are those of IANA's registries of special-purpose addresses (RFC 6890 and its
//! updates), with the addresses under which clouds serve credentials to their machines.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr},
};

use crate::address_range::AddressRange;

/// Kind of an address that is not of the public Internet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressKind {
    /// No address at all, or one of "this network": `0.0.0.0/8`, `::`.
    Unspecified,
    /// The machine itself: `127.0.0.0/8`, `::1`.
    Loopback,
    /// A private network: `10.0.0.0/8`, `172.16.0.0/12`, `192.168.0.0/16`.
    Private,
    /// The network segment: `169.254.0.0/16`, `fe80::/10`.
    LinkLocal,
    /// The service of a cloud that gives credentials to machines, such as `169.254.169.254`.
    CloudMetadata,
    /// Shared by the customers of a provider: `100.64.0.0/10`.
    Shared,
    /// Assigned to protocols: `192.0.0.0/24`, `192.88.99.0/24`, `2001::/23`.
    Protocol,
    /// For documentation: `192.0.2.0/24`, `2001:db8::/32` and others.
    Documentation,
    /// For benchmarks of networks: `198.18.0.0/15`, `2001:2::/48`.
    Benchmarking,
    /// A group of machines: `224.0.0.0/4`, `ff00::/8`.
    Multicast,
    /// All machines of a network: `255.255.255.255`.
    Broadcast,
    /// Not assigned: `240.0.0.0/4`, and all of IPv6 outside `2000::/3`.
    Reserved,
    /// An address of IPv4 in IPv6: `::ffff:0:0/96`.
    Ipv4Mapped,
    /// An address of IPv4 in IPv6, in the older form: `::/96`.
    Ipv4Compatible,
    /// An address of IPv4 behind a translator: `64:ff9b::/96`, `64:ff9b:1::/48`.
    Nat64,
    /// An address of IPv4 behind a tunnel: `2002::/16`.
    SixToFour,
    /// An address of IPv4 behind a tunnel through NAT: `2001::/32`.
    Teredo,
    /// A private network of IPv6: `fc00::/7`.
    UniqueLocal,
    /// A private network of IPv6, in the older form: `fec0::/10`.
    SiteLocal,
}

impl AddressKind {
    /// Returns the kind as errors and logs show it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unspecified => "unspecified",
            Self::Loopback => "loopback",
            Self::Private => "private",
            Self::LinkLocal => "link-local",
            Self::CloudMetadata => "cloud metadata",
            Self::Shared => "shared by a provider's customers",
            Self::Protocol => "assigned to a protocol",
            Self::Documentation => "for documentation",
            Self::Benchmarking => "for benchmarks",
            Self::Multicast => "multicast",
            Self::Broadcast => "broadcast",
            Self::Reserved => "reserved",
            Self::Ipv4Mapped => "IPv4-mapped",
            Self::Ipv4Compatible => "IPv4-compatible",
            Self::Nat64 => "NAT64",
            Self::SixToFour => "6to4",
            Self::Teredo => "Teredo",
            Self::UniqueLocal => "unique local",
            Self::SiteLocal => "site-local",
        }
    }
}

impl fmt::Display for AddressKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Ranges with a purpose of their own. The first one that holds an address decides its kind, so
/// that parts stand before the whole.
static SPECIAL: [(AddressRange, AddressKind); 39] = {
    use AddressKind as Kind;
    use AddressRange as Range;
    [
        (Range::v4([169, 254, 169, 254], 32), Kind::CloudMetadata),
        (Range::v4([100, 100, 100, 200], 32), Kind::CloudMetadata), // Alibaba Cloud
        (Range::v4([168, 63, 129, 16], 32), Kind::CloudMetadata),   // Azure
        (Range::v4([192, 0, 0, 192], 32), Kind::CloudMetadata),     // Oracle Cloud
        (Range::v4([0, 0, 0, 0], 8), Kind::Unspecified),
        (Range::v4([127, 0, 0, 0], 8), Kind::Loopback),
        (Range::v4([10, 0, 0, 0], 8), Kind::Private),
        (Range::v4([172, 16, 0, 0], 12), Kind::Private),
        (Range::v4([192, 168, 0, 0], 16), Kind::Private),
        (Range::v4([169, 254, 0, 0], 16), Kind::LinkLocal),
        (Range::v4([100, 64, 0, 0], 10), Kind::Shared),
        (Range::v4([192, 0, 0, 0], 24), Kind::Protocol),
        (Range::v4([192, 88, 99, 0], 24), Kind::Protocol),
        (Range::v4([192, 0, 2, 0], 24), Kind::Documentation),
        (Range::v4([198, 51, 100, 0], 24), Kind::Documentation),
        (Range::v4([203, 0, 113, 0], 24), Kind::Documentation),
        (Range::v4([198, 18, 0, 0], 15), Kind::Benchmarking),
        (Range::v4([224, 0, 0, 0], 4), Kind::Multicast),
        (Range::v4([255, 255, 255, 255], 32), Kind::Broadcast),
        (Range::v4([240, 0, 0, 0], 4), Kind::Reserved),
        (Range::v6([0, 0, 0, 0, 0, 0, 0, 0], 128), Kind::Unspecified),
        (Range::v6([0, 0, 0, 0, 0, 0, 0, 1], 128), Kind::Loopback),
        (Range::v6([0, 0, 0, 0, 0, 0, 0, 0], 96), Kind::Ipv4Compatible),
        (Range::v6([0, 0, 0, 0, 0, 0xffff, 0, 0], 96), Kind::Ipv4Mapped),
        (Range::v6([0x64, 0xff9b, 0, 0, 0, 0, 0, 0], 96), Kind::Nat64),
        (Range::v6([0x64, 0xff9b, 1, 0, 0, 0, 0, 0], 48), Kind::Nat64),
        (Range::v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 32), Kind::Teredo),
        (Range::v6([0x2001, 2, 0, 0, 0, 0, 0, 0], 48), Kind::Benchmarking),
        (Range::v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 23), Kind::Protocol),
        (Range::v6([0x2001, 0xdb8, 0, 0, 0, 0, 0, 0], 32), Kind::Documentation),
        (Range::v6([0x3fff, 0, 0, 0, 0, 0, 0, 0], 20), Kind::Documentation),
        (Range::v6([0x2002, 0, 0, 0, 0, 0, 0, 0], 16), Kind::SixToFour),
        (Range::v6([0x3ffe, 0, 0, 0, 0, 0, 0, 0], 16), Kind::Reserved), // given back
        (Range::v6([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254], 128), Kind::CloudMetadata), // AWS
        (Range::v6([0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254], 128), Kind::CloudMetadata), // Google
        (Range::v6([0xfc00, 0, 0, 0, 0, 0, 0, 0], 7), Kind::UniqueLocal),
        (Range::v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10), Kind::LinkLocal),
        (Range::v6([0xfec0, 0, 0, 0, 0, 0, 0, 0], 10), Kind::SiteLocal),
        (Range::v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8), Kind::Multicast),
    ]
};

/// The addresses of IPv6 that are assigned to the public Internet, but for the parts above.
const GLOBAL_V6: AddressRange = AddressRange::v6([0x2000, 0, 0, 0, 0, 0, 0, 0], 3);

/// Returns the kind of an address that is not of the public Internet; none where it is.
pub(crate) fn kind_of(address: IpAddr) -> Option<AddressKind> {
    if let Some((_, kind)) = SPECIAL.iter().find(|(range, _)| range.contains(address)) {
        return Some(*kind);
    }
    (address.is_ipv6() && !GLOBAL_V6.contains(address)).then_some(AddressKind::Reserved)
}

/// Returns the address of IPv4 to which one of IPv6 leads by way of a translator or a tunnel. Of
/// `64:ff9b:1::/48` it reads the last 32 bits: where the translator reads others, those are zero,
/// and the address is refused as unspecified.
fn embedded(address: IpAddr) -> Option<Ipv4Addr> {
    let IpAddr::V6(v6) = address else { return None };
    let bits = v6.to_bits();
    match kind_of(address)? {
        AddressKind::Ipv4Mapped | AddressKind::Ipv4Compatible | AddressKind::Nat64 => {
            Some(Ipv4Addr::from_bits(bits as u32))
        }
        AddressKind::SixToFour => Some(Ipv4Addr::from_bits((bits >> 80) as u32)),
        AddressKind::Teredo => Some(Ipv4Addr::from_bits(!(bits as u32))),
        _ => None,
    }
}

/// The operator's decision on addresses: those of the public Internet, and the ranges below.
#[derive(Debug, Clone, Default)]
pub(crate) struct AddressPolicy {
    /// Ranges that are allowed although they are not of the public Internet.
    pub(crate) private_ranges_allowed: Vec<AddressRange>,
}

impl AddressPolicy {
    /// Returns the kind for which an address is refused; none where it may be connected to. An
    /// address of IPv4 inside one of IPv6 is judged too: a range that is allowed for its translator
    /// does not allow all that lies behind it.
    pub(crate) fn refused_as(&self, address: IpAddr) -> Option<AddressKind> {
        let is_allowed = self.private_ranges_allowed.iter().any(|range| range.contains(address));
        let refused = kind_of(address).filter(|_| !is_allowed);
        refused.or_else(|| self.refused_as(embedded(address)?.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(ranges: &[&str]) -> AddressPolicy {
        let private_ranges_allowed = ranges.iter().map(|range| range.parse().unwrap()).collect();
        AddressPolicy { private_ranges_allowed }
    }

    fn refused(ranges: &[&str], address: &str) -> Option<AddressKind> {
        policy(ranges).refused_as(address.parse().unwrap())
    }

    // What could go wrong: a public address beside a special range is refused with it.
    #[test]
    fn public_addresses_pass() {
        for address in [
            "1.1.1.1",
            "8.8.8.8",
            "9.255.255.255",
            "11.0.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "126.255.255.255",
            "128.0.0.0",
            "169.253.255.255",
            "169.255.0.0",
            "172.15.255.255",
            "172.32.0.0",
            "192.0.1.0",
            "192.0.3.0",
            "192.167.255.255",
            "192.169.0.0",
            "198.17.255.255",
            "198.20.0.0",
            "223.255.255.255",
            "2001:200::1",
            "2001:4860:4860::8888",
            "2606:4700::1111",
            "2a00:1450:4001::1",
        ] {
            assert_eq!(refused(&[], address), None, "{address}");
        }
    }

    // What could go wrong: the end of a range is taken for the public Internet.
    #[test]
    fn special_addresses_are_refused_by_their_kind() {
        use AddressKind as Kind;
        for (address, kind) in [
            ("0.0.0.0", Kind::Unspecified),
            ("0.255.255.255", Kind::Unspecified),
            ("10.0.0.0", Kind::Private),
            ("10.255.255.255", Kind::Private),
            ("100.64.0.0", Kind::Shared),
            ("100.127.255.255", Kind::Shared),
            ("100.100.100.200", Kind::CloudMetadata),
            ("127.0.0.1", Kind::Loopback),
            ("127.255.255.255", Kind::Loopback),
            ("168.63.129.16", Kind::CloudMetadata),
            ("169.254.0.0", Kind::LinkLocal),
            ("169.254.169.254", Kind::CloudMetadata),
            ("169.254.255.255", Kind::LinkLocal),
            ("172.16.0.0", Kind::Private),
            ("172.31.255.255", Kind::Private),
            ("192.0.0.0", Kind::Protocol),
            ("192.0.0.192", Kind::CloudMetadata),
            ("192.0.0.255", Kind::Protocol),
            ("192.0.2.255", Kind::Documentation),
            ("192.88.99.1", Kind::Protocol),
            ("192.168.255.255", Kind::Private),
            ("198.18.0.0", Kind::Benchmarking),
            ("198.19.255.255", Kind::Benchmarking),
            ("198.51.100.1", Kind::Documentation),
            ("203.0.113.255", Kind::Documentation),
            ("224.0.0.0", Kind::Multicast),
            ("239.255.255.255", Kind::Multicast),
            ("240.0.0.0", Kind::Reserved),
            ("255.255.255.254", Kind::Reserved),
            ("255.255.255.255", Kind::Broadcast),
            ("::", Kind::Unspecified),
            ("::1", Kind::Loopback),
            ("::2", Kind::Ipv4Compatible),
            ("::8.8.8.8", Kind::Ipv4Compatible),
            ("::ffff:8.8.8.8", Kind::Ipv4Mapped),
            ("::ffff:0:8.8.8.8", Kind::Reserved),
            ("64:ff9b::8.8.8.8", Kind::Nat64),
            ("64:ff9b:1:ffff::1", Kind::Nat64),
            ("64:ff9b:2::1", Kind::Reserved),
            ("100::1", Kind::Reserved),
            ("1fff:ffff::1", Kind::Reserved),
            ("2001::1", Kind::Teredo),
            ("2001:0:ffff::1", Kind::Teredo),
            ("2001:2::1", Kind::Benchmarking),
            ("2001:10::1", Kind::Protocol),
            ("2001:1ff:ffff::1", Kind::Protocol),
            ("2001:db8:ffff::1", Kind::Documentation),
            ("2002:808:808::1", Kind::SixToFour),
            ("3ffe::1", Kind::Reserved),
            ("3fff:fff::1", Kind::Documentation),
            ("4000::1", Kind::Reserved),
            ("5f00::1", Kind::Reserved),
            ("fbff::1", Kind::Reserved),
            ("fc00::1", Kind::UniqueLocal),
            ("fd00:ec2::254", Kind::CloudMetadata),
            ("fdff:ffff::1", Kind::UniqueLocal),
            ("fe00::1", Kind::Reserved),
            ("fe80::1", Kind::LinkLocal),
            ("febf:ffff::1", Kind::LinkLocal),
            ("fec0::1", Kind::SiteLocal),
            ("feff:ffff::1", Kind::SiteLocal),
            ("ff02::1", Kind::Multicast),
        ] {
            assert_eq!(refused(&[], address), Some(kind), "{address}");
        }
    }

    // What could go wrong: the operator allows a translator, and with it the whole private network
    // that lies behind it.
    #[test]
    fn an_allowed_range_does_not_allow_what_is_embedded() {
        use AddressKind as Kind;
        for (range, address, expected) in [
            ("64:ff9b::/96", "64:ff9b::8.8.8.8", None),
            ("64:ff9b::/96", "64:ff9b::10.0.0.1", Some(Kind::Private)),
            ("64:ff9b:1::/48", "64:ff9b:1::127.0.0.1", Some(Kind::Loopback)),
            ("64:ff9b:1::/48", "64:ff9b:1:7f00:0:100::", Some(Kind::Unspecified)),
            ("::/96", "::169.254.169.254", Some(Kind::CloudMetadata)),
            ("::ffff:0:0/96", "::ffff:192.168.0.1", Some(Kind::Private)),
            ("::ffff:0:0/96", "::ffff:8.8.8.8", None),
            ("2002::/16", "2002:a00:1::1", Some(Kind::Private)),
            ("2002::/16", "2002:808:808::1", None),
            // The client of Teredo is 192.0.2.45, with its bits inverted (RFC 4380, section 4).
            ("2001::/32", "2001:0:4136:e378:8000:63bf:3fff:fdd2", Some(Kind::Documentation)),
            ("2001::/32", "2001::f7f7:f7f7", None),
        ] {
            assert_eq!(refused(&[range], address), expected, "{address}");
        }
        assert_eq!(refused(&["64:ff9b::/96", "10.0.0.0/8"], "64:ff9b::10.0.0.1"), None);
    }

    #[test]
    fn an_allowed_range_allows_its_own_addresses_alone() {
        assert_eq!(refused(&["127.0.0.0/8"], "127.0.0.1"), None);
        assert_eq!(refused(&["127.0.0.0/8"], "10.0.0.1"), Some(AddressKind::Private));
        assert_eq!(refused(&["127.0.0.0/8"], "::1"), Some(AddressKind::Loopback));
        let mapped = refused(&["127.0.0.0/8"], "::ffff:127.0.0.1");
        assert_eq!(mapped, Some(AddressKind::Ipv4Mapped));
    }
}
