//! JSON within bounds: a writer, a formatter and a check.

use std::io::{Error, ErrorKind, Result, Write};

use serde_json::ser::Formatter;

/// Most bytes of the JSON of a payload.
pub(crate) const JSON_BYTES_MAX: usize = 16 << 20;
/// Deepest nesting of arrays and objects, for formats without a bound of their own. JSON parsers
/// stop at 128.
pub(crate) const JSON_DEPTH_MAX: usize = 100;

/// Reason of a refused write beyond [`JSON_BYTES_MAX`].
const TOO_LARGE: &str = "as JSON it is larger than 16 MiB";
/// Reason of a refused value beyond [`JSON_DEPTH_MAX`].
const TOO_DEEP: &str = "it is nested more than 100 deep";

/// A buffer of JSON that refuses to grow beyond [`JSON_BYTES_MAX`].
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

/// A formatter of compact JSON that bounds its depth. A serializer recurses only through it.
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

/// Checks that a payload is JSON within the bounds. The error is the reason.
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

/// Returns the depth of arrays and objects in a text. The result has no meaning for other text
/// than JSON.
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
