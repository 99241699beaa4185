//! JSON within bounds, written and looked at.

use std::io::{Error, ErrorKind, Result, Write};

use serde_json::ser::Formatter;

/// Bytes of the JSON of a payload.
pub(crate) const JSON_BYTES_MAX: usize = 16 << 20;
/// Arrays and objects within each other, where no format has a bound of its own. Parsers of JSON
/// stop at 128.
pub(crate) const JSON_DEPTH_MAX: usize = 100;

/// Why a write was refused.
const TOO_LARGE: &str = "as JSON it is larger than 16 MiB";
const TOO_DEEP: &str = "it is nested more than 100 deep";

/// JSON that stops growing.
#[derive(Default)]
pub(crate) struct Bounded(pub(crate) Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        if self.0.len() + bytes.len() > JSON_BYTES_MAX {
            return Err(Error::new(ErrorKind::FileTooLarge, TOO_LARGE));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Compact JSON that is not nested too deep: who serializes recurses only through here.
#[derive(Default)]
pub(crate) struct Shallow {
    depth: usize,
}

impl Shallow {
    fn enter(&mut self) -> Result<()> {
        self.depth += 1;
        if self.depth > JSON_DEPTH_MAX {
            Err(Error::new(ErrorKind::InvalidData, TOO_DEEP))
        } else {
            Ok(())
        }
    }
}

impl Formatter for Shallow {
    fn begin_array<W: Write + ?Sized>(&mut self, writer: &mut W) -> Result<()> {
        self.enter()?;
        writer.write_all(b"[")
    }

    fn end_array<W: Write + ?Sized>(&mut self, writer: &mut W) -> Result<()> {
        self.depth -= 1;
        writer.write_all(b"]")
    }

    fn begin_object<W: Write + ?Sized>(&mut self, writer: &mut W) -> Result<()> {
        self.enter()?;
        writer.write_all(b"{")
    }

    fn end_object<W: Write + ?Sized>(&mut self, writer: &mut W) -> Result<()> {
        self.depth -= 1;
        writer.write_all(b"}")
    }
}

/// What is wrong with a payload that is to be JSON.
pub(crate) fn check(payload: &[u8]) -> std::result::Result<(), String> {
    if payload.len() > JSON_BYTES_MAX {
        return Err(TOO_LARGE.to_owned());
    }
    let text = std::str::from_utf8(payload)
        .map_err(|error| format!("it is not UTF-8 behind byte {}", error.valid_up_to()))?;
    if depth(text) > JSON_DEPTH_MAX {
        return Err(TOO_DEEP.to_owned());
    }
    match serde_json::from_str::<serde::de::IgnoredAny>(text) {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("it is no JSON, in line {} at {}", error.line(), error.column())),
    }
}

/// How deep arrays and objects are within each other, at least if it is JSON.
fn depth(text: &str) -> usize {
    let (mut depth, mut deepest, mut within_string, mut escaped) = (0_usize, 0, false, false);
    for byte in text.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = within_string,
            b'"' => within_string = !within_string,
            b'[' | b'{' if !within_string => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b']' | b'}' if !within_string => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_looked_at_and_not_understood() {
        for sound in [
            "{}",
            " [1, \"\\\"[[\", {\"a\": null}] ",
            "7",
            "12345678901234567890123",
            "\"\\ud83d\\ude00\"",
        ] {
            assert_eq!(check(sound.as_bytes()), Ok(()), "{sound}");
        }
        for (wrong, why) in [
            (&b""[..], "it is no JSON, in line 1 at 0"),
            (b"{\"a\":1,\n\"b\"}", "it is no JSON, in line 2 at 4"),
            (b"{} {}", "it is no JSON, in line 1 at 4"),
            (b"\"\xff\"", "it is not UTF-8 behind byte 1"),
        ] {
            assert_eq!(check(wrong), Err(why.to_owned()));
        }
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert_eq!(check(nested(100).as_bytes()), Ok(()));
        assert_eq!(check(nested(101).as_bytes()), Err(TOO_DEEP.to_owned()));
        assert_eq!(check(&[b'['; 1 << 20]), Err(TOO_DEEP.to_owned()));
        assert_eq!(check(&vec![b' '; JSON_BYTES_MAX + 1]), Err(TOO_LARGE.to_owned()));
        let read: serde_json::Value =
            serde_json::from_str(&nested(100)).expect("what passes is read by others");
        assert!(read.is_array());
    }
}
