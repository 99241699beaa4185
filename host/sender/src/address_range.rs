//! Ranges of addresses in CIDR notation.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

use crate::text::shown;

/// Range of IP addresses in CIDR notation, such as `10.0.0.0/8`. A range of IPv4 holds no address
/// of IPv6, and the other way round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressRange {
    /// Lowest address.
    first: IpAddr,
    /// Bits that all addresses of the range share with the lowest.
    prefix_bits: u32,
}

/// A text that is no range of addresses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no range of addresses; one looks like `10.0.0.0/8` or `fd00::/8`, with zeros behind \
     the prefix"
)]
pub struct AddressRangeFault(String);

impl AddressRange {
    /// Creates a range of IPv4.
    pub(crate) const fn v4(first: [u8; 4], prefix_bits: u32) -> Self {
        let [a, b, c, d] = first;
        Self { first: IpAddr::V4(Ipv4Addr::new(a, b, c, d)), prefix_bits }
    }

    /// Creates a range of IPv6.
    pub(crate) const fn v6(first: [u16; 8], prefix_bits: u32) -> Self {
        let [a, b, c, d, e, f, g, h] = first;
        Self { first: IpAddr::V6(Ipv6Addr::new(a, b, c, d, e, f, g, h)), prefix_bits }
    }

    /// Returns whether an address is in the range.
    pub fn contains(&self, address: IpAddr) -> bool {
        let difference = match (self.first, address) {
            (IpAddr::V4(first), IpAddr::V4(other)) => u128::from(first.to_bits() ^ other.to_bits()),
            (IpAddr::V6(first), IpAddr::V6(other)) => first.to_bits() ^ other.to_bits(),
            _ => return false,
        };
        // An empty prefix of IPv6 would shift by all 128 bits, which is no shift.
        difference.checked_shr(width(address) - self.prefix_bits).unwrap_or(0) == 0
    }

    /// Returns whether the lowest address has zeros behind the prefix.
    fn begins_at_its_prefix(&self) -> bool {
        let suffix_bits = width(self.first) - self.prefix_bits;
        let prefix = u128::MAX.checked_shl(suffix_bits).unwrap_or(0);
        let first = match self.first {
            IpAddr::V4(first) => u128::from(first.to_bits()),
            IpAddr::V6(first) => first.to_bits(),
        };
        first & !prefix == 0
    }
}

/// Returns the bits of an address of this version of IP.
const fn width(address: IpAddr) -> u32 {
    match address {
        IpAddr::V4(_) => 32,
        IpAddr::V6(_) => 128,
    }
}

impl FromStr for AddressRange {
    type Err = AddressRangeFault;

    fn from_str(text: &str) -> Result<Self, AddressRangeFault> {
        let fault = || AddressRangeFault(shown(text));
        let (first, prefix) = text.split_once('/').ok_or_else(fault)?;
        let first: IpAddr = first.parse().map_err(|_| fault())?;
        if !prefix.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(fault());
        }
        let prefix_bits: u32 = prefix.parse().map_err(|_| fault())?;
        if prefix_bits > width(first) {
            return Err(fault());
        }
        let range = Self { first, prefix_bits };
        if range.begins_at_its_prefix() { Ok(range) } else { Err(fault()) }
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.prefix_bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: a range holds one address too many at either end, or those of the other
    // version of IP.
    #[test]
    fn a_range_holds_its_first_and_last_address_and_none_beside_them() {
        for (range, inside, outside) in [
            ("10.0.0.0/8", ["10.0.0.0", "10.255.255.255"], ["9.255.255.255", "11.0.0.0"]),
            ("100.64.0.0/10", ["100.64.0.0", "100.127.255.255"], ["100.63.255.255", "100.128.0.0"]),
            ("127.0.0.1/32", ["127.0.0.1", "127.0.0.1"], ["127.0.0.0", "127.0.0.2"]),
            ("0.0.0.0/0", ["0.0.0.0", "255.255.255.255"], ["::", "::ffff:1.2.3.4"]),
            ("::/0", ["::", "ffff::"], ["0.0.0.0", "255.255.255.255"]),
            ("fc00::/7", ["fc00::", "fdff:ffff::1"], ["fbff::", "fe00::"]),
            ("::1/128", ["::1", "::1"], ["::", "::2"]),
        ] {
            let parsed: AddressRange = range.parse().unwrap();
            assert_eq!(parsed.to_string(), range);
            for address in inside {
                assert!(parsed.contains(address.parse().unwrap()), "{range} {address}");
            }
            for address in outside {
                assert!(!parsed.contains(address.parse().unwrap()), "{range} {address}");
            }
        }
    }

    #[test]
    fn what_is_no_range_is_refused() {
        for text in [
            "",
            "10.0.0.0",
            "10.0.0.0/",
            "10.0.0.0/33",
            "10.0.0.0/+8",
            "10.0.0.0/-1",
            "10.0.0.1/8",
            "10/8",
            "fd00::/129",
            "fd00::1/8",
            "localhost/8",
            "10.0.0.0/8/8",
        ] {
            let fault = text.parse::<AddressRange>().unwrap_err();
            assert!(fault.to_string().starts_with(&format!("`{text}` is no range")), "{fault}");
        }
    }
}
