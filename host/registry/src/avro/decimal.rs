//! Decimal digits of numbers of any size.

/// Most bytes of a decimal. The time to write one grows with their square.
pub(super) const DECIMAL_BYTES_MAX: usize = 256;
/// Most digits after the decimal point.
pub(super) const SCALE_MAX: usize = 1_000;

/// Returns the digits of a big-endian two's complement number, `scale` of them after the point.
pub(super) fn digits(bytes: &[u8], scale: usize) -> String {
    let is_negative = bytes.first().is_some_and(|first| first & 0x80 != 0);
    let mut whole = magnitude(bytes, is_negative);
    if whole.len() <= scale {
        whole.insert_str(0, &"0".repeat(scale + 1 - whole.len()));
    }
    if scale > 0 {
        whole.insert(whole.len() - scale, '.');
    }
    if is_negative {
        whole.insert(0, '-');
    }
    whole
}

fn magnitude(bytes: &[u8], is_negative: bool) -> String {
    let mut limbs: Vec<u32> = bytes
        .rchunks(4)
        .map(|chunk| chunk.iter().fold(0, |limb, byte| limb << 8 | u32::from(*byte)))
        .collect();
    if is_negative {
        let missing = (4 - bytes.len() % 4) % 4;
        if let Some(last) = limbs.last_mut() {
            *last |= !(u32::MAX >> (8 * missing));
        }
        let mut carry = true;
        for limb in &mut limbs {
            (*limb, carry) = (!*limb).overflowing_add(u32::from(carry));
        }
    }
    let mut groups = Vec::new();
    while limbs.pop_if(|last| *last == 0).is_some() {}
    while !limbs.is_empty() {
        groups.push(divide(&mut limbs));
        while limbs.pop_if(|last| *last == 0).is_some() {}
    }
    let mut text = groups.pop().unwrap_or(0).to_string();
    groups.iter().rev().for_each(|group| text.push_str(&format!("{group:09}")));
    text
}

/// Divides the number by 10^9 and returns the remainder, its last nine digits.
fn divide(limbs: &mut [u32]) -> u64 {
    limbs.iter_mut().rev().fold(0, |rest, limb| {
        let dividend = rest << 32 | u64::from(*limb);
        *limb = (dividend / 1_000_000_000) as u32;
        dividend % 1_000_000_000
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decimals_are_exact() {
        for (bytes, scale, text) in [
            (&[0xfb, 0x32][..], 2, "-12.30"),
            (&[0x04, 0xce], 2, "12.30"),
            (&[0], 0, "0"),
            (&[0], 2, "0.00"),
            (&[0xff], 0, "-1"),
            (&[0xff, 0xff, 0xff, 0xff], 3, "-0.001"),
            (&[0x80], 0, "-128"),
            (&[0x80, 0, 0, 0], 0, "-2147483648"),
            (&[0x80, 0, 0, 0, 0], 0, "-549755813888"),
            (&[0, 0, 0, 0, 7], 1, "0.7"),
            (&[0x0d, 0xe0, 0xb6, 0xb3, 0xa7, 0x64, 0x00, 0x00], 9, "1000000000.000000000"),
        ] {
            assert_eq!(digits(bytes, scale), text, "{bytes:?}");
        }
        for number in
            [i128::MIN, i128::MIN + 1, -1_000_000_000, -1, 0, 999_999_999, 1 << 96, i128::MAX]
        {
            assert_eq!(digits(&number.to_be_bytes(), 0), number.to_string());
        }
        assert_eq!(digits(&[0x7f; DECIMAL_BYTES_MAX], 0).len(), 617);
    }
}
