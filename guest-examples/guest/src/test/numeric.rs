//! Exact conversion of `numeric` between its decimal text and its binary form.
//!
//! The binary form is a list of base-10,000 digits, the weight of the first, a sign and the
//! number of decimal places to show (`numeric_send` in PostgreSQL's `numeric.c`).

const POSITIVE: u16 = 0x0000;
const NEGATIVE: u16 = 0x4000;
const NAN: u16 = 0xC000;
const INFINITY: u16 = 0xD000;
const NEGATIVE_INFINITY: u16 = 0xF000;

/// Most digits that PostgreSQL takes before the point.
const INTEGER_DIGITS_MAX: usize = 131_072;
/// Most digits that PostgreSQL takes after the point.
const SCALE_MAX: usize = 16_383;

/// Encodes a decimal text, which may have an exponent, in its binary form.
pub(super) fn encode(text: &str, out: &mut Vec<u8>) -> Result<(), &'static str> {
    let sign = match text.to_ascii_lowercase().as_str() {
        "nan" => Some(NAN),
        "infinity" | "+infinity" | "inf" => Some(INFINITY),
        "-infinity" | "-inf" => Some(NEGATIVE_INFINITY),
        _ => None,
    };
    match sign {
        Some(sign) => special(sign, out),
        None => Decimal::parse(text)?.write(out),
    }
    Ok(())
}

fn special(sign: u16, out: &mut Vec<u8>) {
    for field in [0, 0, sign, 0] {
        out.extend_from_slice(&field.to_be_bytes());
    }
}

/// A decimal number, as its digits before and after the point.
struct Decimal {
    is_negative: bool,
    integer: Vec<u8>,
    fraction: Vec<u8>,
}

impl Decimal {
    fn parse(text: &str) -> Result<Self, &'static str> {
        const NOT_DECIMAL: &str = "the text is not a decimal number";
        let (is_negative, unsigned) = match text.as_bytes().first() {
            Some(b'-') => (true, &text[1..]),
            Some(b'+') => (false, &text[1..]),
            _ => (false, text),
        };
        let (mantissa, exponent) = match unsigned.split_once(['e', 'E']) {
            Some((mantissa, exponent)) => {
                (mantissa, exponent.parse::<i32>().map_err(|_| NOT_DECIMAL)?)
            }
            None => (unsigned, 0),
        };
        let (integer, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let is_digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        if integer.len() + fraction.len() == 0 || !is_digits(integer) || !is_digits(fraction) {
            return Err(NOT_DECIMAL);
        }
        let mut decimal = Self { is_negative, integer: integer.into(), fraction: fraction.into() };
        decimal.shift(exponent)?;
        Ok(decimal)
    }

    /// Moves the point, and checks that PostgreSQL takes a number of the resulting size.
    fn shift(&mut self, exponent: i32) -> Result<(), &'static str> {
        const TOO_LONG: &str = "the number has too many digits";
        let places = exponent.unsigned_abs() as usize;
        if places > INTEGER_DIGITS_MAX {
            return Err(TOO_LONG);
        }
        if exponent >= 0 {
            let moved = places.min(self.fraction.len());
            self.integer.extend(self.fraction.drain(..moved));
            self.integer.extend(std::iter::repeat_n(b'0', places - moved));
        } else {
            let kept = self.integer.len().saturating_sub(places);
            let mut fraction = vec![b'0'; places - (self.integer.len() - kept)];
            fraction.extend(self.integer.drain(kept..));
            fraction.append(&mut self.fraction);
            self.fraction = fraction;
        }
        let zeros = self.integer.iter().take_while(|digit| **digit == b'0').count();
        self.integer.drain(..zeros);
        if self.integer.len() > INTEGER_DIGITS_MAX || self.fraction.len() > SCALE_MAX {
            return Err(TOO_LONG);
        }
        Ok(())
    }

    fn write(&self, out: &mut Vec<u8>) {
        let mut digits = groups(&self.integer, true);
        let mut weight = digits.len() as i32 - 1;
        digits.extend(groups(&self.fraction, false));
        let zeros = digits.iter().take_while(|digit| **digit == 0).count();
        digits.drain(..zeros);
        weight -= zeros as i32;
        while digits.last() == Some(&0) {
            digits.pop();
        }
        if digits.is_empty() {
            weight = 0;
        }
        let sign = if self.is_negative && !digits.is_empty() { NEGATIVE } else { POSITIVE };
        // The bounds on integer and fraction keep all of these fields far inside 16 bits.
        for field in [digits.len() as u16, weight as i16 as u16, sign, self.fraction.len() as u16] {
            out.extend_from_slice(&field.to_be_bytes());
        }
        for digit in digits {
            out.extend_from_slice(&digit.to_be_bytes());
        }
    }
}

/// Groups decimal digits into base-10,000 digits. Before the point the first group may be short,
/// after it the last.
fn groups(decimal: &[u8], is_integer: bool) -> Vec<i16> {
    let value =
        |group: &[u8]| group.iter().fold(0, |value, digit| value * 10 + i16::from(digit - b'0'));
    if is_integer {
        let mut groups: Vec<i16> = decimal.rchunks(4).map(value).collect();
        groups.reverse();
        return groups;
    }
    let padded = |group: &[u8]| value(group) * 10_i16.pow(4 - group.len() as u32);
    decimal.chunks(4).map(padded).collect()
}

/// Decodes a binary form into its decimal text. Returns none for bytes that are not one.
pub(super) fn decode(bytes: &[u8]) -> Option<String> {
    let (header, body) = bytes.split_at_checked(8)?;
    let field = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
    let (count, weight, sign, scale) =
        (field(0) as usize, field(2) as i16 as i32, field(4), field(6) as usize);
    match sign {
        NAN => return Some("NaN".to_owned()),
        INFINITY => return Some("Infinity".to_owned()),
        NEGATIVE_INFINITY => return Some("-Infinity".to_owned()),
        POSITIVE | NEGATIVE => {}
        _ => return None,
    }
    let digits: Vec<u16> =
        body.chunks_exact(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]])).collect();
    if digits.len() != count {
        return None;
    }
    let digit = |weight_of: i32| {
        usize::try_from(weight - weight_of).ok().and_then(|at| digits.get(at)).copied().unwrap_or(0)
    };
    let mut text = String::new();
    if sign == NEGATIVE {
        text.push('-');
    }
    push_integer(&mut text, weight, digit);
    push_fraction(&mut text, scale, digit);
    Some(text)
}

fn push_integer(text: &mut String, weight: i32, digit: impl Fn(i32) -> u16) {
    use std::fmt::Write;
    if weight < 0 {
        text.push('0');
        return;
    }
    let _ = write!(text, "{}", digit(weight));
    for weight in (0..weight).rev() {
        let _ = write!(text, "{:04}", digit(weight));
    }
}

fn push_fraction(text: &mut String, scale: usize, digit: impl Fn(i32) -> u16) {
    use std::fmt::Write;
    if scale == 0 {
        return;
    }
    let end = text.len() + 1 + scale;
    text.push('.');
    let mut weight = -1;
    while text.len() < end {
        let _ = write!(text, "{:04}", digit(weight));
        weight -= 1;
    }
    text.truncate(end);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there_and_back(text: &str) -> String {
        let mut bytes = Vec::new();
        encode(text, &mut bytes).expect("a number");
        decode(&bytes).expect("its own binary form")
    }

    #[test]
    fn decimal_text_survives_exactly() {
        for text in [
            "0",
            "1",
            "-1",
            "9999",
            "10000",
            "10001",
            "123456789012345678901234567890",
            "0.1",
            "0.10",
            "-0.00001",
            "0.0001",
            "0.00010",
            "1.5",
            "1234.5678",
            "12345.67890",
            "100000000",
            "100000000.00",
            "0.00",
            "99999999.99999999",
            "NaN",
            "Infinity",
            "-Infinity",
        ] {
            assert_eq!(there_and_back(text), text);
        }
    }

    #[test]
    fn other_spellings_are_normalised() {
        for (text, expected) in [
            ("+1", "1"),
            ("007", "7"),
            (".5", "0.5"),
            ("5.", "5"),
            ("-0", "0"),
            ("-0.0", "0.0"),
            ("1e3", "1000"),
            ("1.5e1", "15"),
            ("1.25E+1", "12.5"),
            ("12e-3", "0.012"),
            ("1234567e-4", "123.4567"),
            ("nan", "NaN"),
            ("inf", "Infinity"),
            ("-INFINITY", "-Infinity"),
        ] {
            assert_eq!(there_and_back(text), expected, "{text}");
        }
    }

    #[test]
    fn what_is_not_a_number_is_refused() {
        for text in [
            "",
            " ",
            "-",
            ".",
            "1.2.3",
            "1,5",
            "1 ",
            "٣",
            "0x10",
            "1e",
            "e1",
            "1e999999999",
            "--1",
            "1_000",
        ] {
            assert!(encode(text, &mut Vec::new()).is_err(), "{text:?}");
        }
        assert!(encode(&"9".repeat(131_073), &mut Vec::new()).is_err());
        assert!(encode(&format!("0.{}", "1".repeat(16_384)), &mut Vec::new()).is_err());
        assert_eq!(there_and_back(&"9".repeat(131_072)).len(), 131_072);
    }

    #[test]
    fn damaged_bytes_are_no_number() {
        for bytes in [&[][..], &[0; 7], &[0, 1, 0, 0, 0, 0, 0, 0], &[0, 0, 0, 0, 1, 2, 0, 0]] {
            assert_eq!(decode(bytes), None);
        }
    }
}
