//! `wasi:random`: a stream that repeats in every run of a message. It cannot be predicted without
//! the tenant's key.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use wasmtime_wasi::p2::bindings::random::{insecure, insecure_seed, random};

type HmacSha256 = Hmac<Sha256>;

/// Most bytes of one call.
const BYTES_MAX: u64 = 1 << 20;

/// A stream of HMAC-SHA256 in counter mode, keyed by HMAC(tenant key, consumer, message id).
pub(crate) struct Random {
    key: [u8; 32],
    blocks: u64,
    /// Bytes that are left of the last block.
    rest: Vec<u8>,
}

impl Random {
    pub(crate) fn new(tenant_key: &[u8; 32], consumer: &str, message_id: &str) -> Self {
        // The length keeps (`a`, `bc`) and (`ab`, `c`) apart.
        let length = (consumer.len() as u64).to_be_bytes();
        let key =
            mac(tenant_key, &[b"wasi:random", &length, consumer.as_bytes(), message_id.as_bytes()]);
        Self { key, blocks: 0, rest: Vec::new() }
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Vec<u8> {
        while self.rest.len() < count {
            self.blocks += 1;
            self.rest.extend_from_slice(&mac(&self.key, &[&self.blocks.to_be_bytes()]));
        }
        let left = self.rest.split_off(count);
        std::mem::replace(&mut self.rest, left)
    }

    fn number(&mut self) -> u64 {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&self.bytes(8));
        u64::from_be_bytes(bytes)
    }

    fn checked(&mut self, count: u64) -> wasmtime::Result<Vec<u8>> {
        if count > BYTES_MAX {
            wasmtime::bail!("asked for {count} random bytes in one call, more than {BYTES_MAX}");
        }
        Ok(self.bytes(count as usize))
    }
}

fn mac(key: &[u8; 32], parts: &[&[u8]]) -> [u8; 32] {
    let mut mac = HmacSha256::new_from_slice(key).expect("HMAC takes a key of any length");
    for part in parts {
        mac.update(part);
    }
    mac.finalize().into_bytes().into()
}

impl random::Host for Random {
    fn get_random_bytes(&mut self, len: u64) -> wasmtime::Result<Vec<u8>> {
        self.checked(len)
    }

    fn get_random_u64(&mut self) -> wasmtime::Result<u64> {
        Ok(self.number())
    }
}

impl insecure::Host for Random {
    fn get_insecure_random_bytes(&mut self, len: u64) -> wasmtime::Result<Vec<u8>> {
        self.checked(len)
    }

    fn get_insecure_random_u64(&mut self) -> wasmtime::Result<u64> {
        Ok(self.number())
    }
}

impl insecure_seed::Host for Random {
    fn insecure_seed(&mut self) -> wasmtime::Result<(u64, u64)> {
        Ok((self.number(), self.number()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_depends_on_key_consumer_and_message_alone() {
        let stream = |key: u8, consumer, id| Random::new(&[key; 32], consumer, id).bytes(100);
        assert_eq!(stream(1, "a", "bc"), stream(1, "a", "bc"));
        for other in [stream(2, "a", "bc"), stream(1, "ab", "c"), stream(1, "a", "bd")] {
            assert_ne!(stream(1, "a", "bc"), other);
        }
    }

    #[test]
    fn small_reads_and_one_large_read_give_the_same_bytes() {
        let mut one = Random::new(&[7; 32], "c", "m");
        let mut two = Random::new(&[7; 32], "c", "m");
        let pieces: Vec<u8> =
            [1, 31, 32, 33, 3].into_iter().flat_map(|count| one.bytes(count)).collect();
        assert_eq!(pieces, two.bytes(100));
    }
}
