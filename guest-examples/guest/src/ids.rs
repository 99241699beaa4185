//! Ids for what a message brings forth.

use sha1_smol::Sha1;

/// `uuid5(NAMESPACE_URL, "oncebox:handler")`.
const NAMESPACE: [u8; 16] = [
    0x17, 0xe9, 0xa4, 0x45, 0x6f, 0xb6, 0x5c, 0x50, 0x83, 0x84, 0x95, 0x82, 0xa1, 0xb9, 0xca, 0x7b,
];

/// An id that depends on a message and a purpose alone, so that each run and each delivery of
/// the message derives the same one.
///
/// Give it to what the message brings forth and others see: the row or the message it writes,
/// or the idempotency key of a call that someone makes for it. `purpose` tells the outputs of
/// one message apart: `"receipt"`, or the recipient, or an index.
///
/// It is a UUID of version 5 (RFC 9562) in a namespace of the message's own, so any language
/// computes it: in Python
/// `uuid5(uuid5(uuid5(NAMESPACE_URL, "oncebox:handler"), message_id), purpose)`. That recipe
/// is fixed for good. Ids are not secrets: who knows the message's id can compute them. Two
/// consumers that derive from one message id for one purpose derive the same id.
///
/// ```
/// let id = oncebox_guest::derive_id("msg-abc-123", "receipt");
/// assert_eq!(id, "6af55233-0359-5995-8660-4a139239afa7");
/// ```
pub fn derive_id(message_id: &str, purpose: &str) -> String {
    text(&uuid5(&uuid5(&NAMESPACE, message_id), purpose))
}

fn uuid5(namespace: &[u8; 16], name: &str) -> [u8; 16] {
    let mut hash = Sha1::from(namespace);
    hash.update(name.as_bytes());
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&hash.digest().bytes()[..16]);
    uuid[6] = uuid[6] & 0x0f | 0x50;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    uuid
}

fn text(uuid: &[u8; 16]) -> String {
    let mut text = String::with_capacity(36);
    for (at, byte) in uuid.iter().enumerate() {
        if matches!(at, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 9562, appendix A.4, and Python's `uuid` for the rest.
    #[test]
    fn ids_are_those_that_other_languages_compute() {
        let dns = [
            0x6b, 0xa7, 0xb8, 0x10, 0x9d, 0xad, 0x11, 0xd1, 0x80, 0xb4, 0, 0xc0, 0x4f, 0xd4, 0x30,
            0xc8,
        ];
        let url = {
            let mut url = dns;
            url[3] = 0x11;
            url
        };
        assert_eq!(
            text(&uuid5(&dns, "www.example.com")),
            "2ed6657d-e927-568b-95e1-2665a8aea6a2"
        );
        assert_eq!(uuid5(&url, "oncebox:handler"), NAMESPACE);
        for (message_id, purpose, id) in VECTORS {
            // S1-018, S1-039.
            assert_eq!(
                derive_id(message_id, purpose),
                *id,
                "{message_id} {purpose}"
            );
        }
    }

    const VECTORS: &[(&str, &str, &str)] = &[
        (
            "msg-abc-123",
            "receipt",
            "6af55233-0359-5995-8660-4a139239afa7",
        ),
        (
            "msg-abc-123",
            "ann@example.org",
            "08815a99-bb1c-510f-b110-16949eea9e99",
        ),
        ("", "", "59831e5f-3ea7-5afa-94e2-7694de8aa1ca"),
        ("a", "bc", "90feee4e-1e5b-5eb9-8866-2d6deccf83b8"),
        ("ab", "c", "619b5f56-d802-5e9b-a6e1-9d449b52bc31"),
        ("é", "漢字", "b68b7dc5-4aa4-5347-a430-7356a7520544"),
    ];
}
