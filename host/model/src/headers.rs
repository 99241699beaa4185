//! Headers as bytes of an inbox row: never JSON, since names repeat and values hold any byte.
//!
//! Each header is the length of its name (u16), the name, the length of its value (u32) and the
//! value; big-endian.

use crate::record::Headers;

/// Encodes headers as the row keeps them.
pub fn encode(headers: &Headers) -> Vec<u8> {
    let mut bytes =
        Vec::with_capacity(headers.iter().map(|(name, value)| name.len() + value.len() + 6).sum());
    for (name, value) in headers {
        // Kafka bounds a name by i16 and a value by i32.
        bytes.extend((name.len() as u16).to_be_bytes());
        bytes.extend(name.as_bytes());
        bytes.extend((value.len() as u32).to_be_bytes());
        bytes.extend(value);
    }
    bytes
}

/// Decodes the headers of a row; stops at the first byte that does not fit the encoding.
pub fn decode(mut bytes: &[u8]) -> Headers {
    let mut headers = Vec::new();
    while let Some((header, rest)) = decode_one(bytes) {
        headers.push(header);
        bytes = rest;
    }
    headers
}

type Header = (String, Vec<u8>);

fn decode_one(bytes: &[u8]) -> Option<(Header, &[u8])> {
    let (length, rest) = bytes.split_first_chunk::<2>()?;
    let (name, rest) = rest.split_at_checked(u16::from_be_bytes(*length).into())?;
    let (length, rest) = rest.split_first_chunk::<4>()?;
    let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*length) as usize)?;
    Some(((String::from_utf8_lossy(name).into_owned(), value.to_vec()), rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(headers: &[(&str, &[u8])]) {
        let headers: Headers =
            headers.iter().map(|(name, value)| ((*name).to_owned(), value.to_vec())).collect();
        assert_eq!(decode(&encode(&headers)), headers);
    }

    #[test]
    fn headers_survive_the_row() {
        check(&[]);
        check(&[("a", b""), ("a", b"\0\xff"), ("", b"x"), ("ce_id", "é".as_bytes())]);
    }

    #[test]
    fn cut_bytes_yield_what_is_whole() {
        let bytes = encode(&vec![("a".into(), b"1".to_vec()), ("b".into(), b"2".to_vec())]);
        assert_eq!(decode(&bytes[..bytes.len() - 1]).len(), 1);
    }
}
