//! Texts made for the number that PostgreSQL's `hashtextextended` gives them: its hash is Bob
//! Jenkins' lookup3, every step of which can be undone.
//!
//! A text of 24 bytes is hashed as two blocks. The first is chosen. Of the number that is wanted,
//! the last mixing is undone, with whatever third word, and then that of the second block, which is
//! what that block has to be. About one try in 250,000 is text.

use rand::{Rng, SeedableRng, rngs::StdRng};

type State = (u32, u32, u32);

fn mix((mut a, mut b, mut c): State) -> State {
    for (shift, other) in [(4, 6), (16, 19)] {
        a = a.wrapping_sub(c) ^ c.rotate_left(shift);
        c = c.wrapping_add(b);
        b = b.wrapping_sub(a) ^ a.rotate_left(other);
        a = a.wrapping_add(c);
        c = c.wrapping_sub(b) ^ b.rotate_left(if shift == 4 { 8 } else { 4 });
        b = b.wrapping_add(a);
    }
    (a, b, c)
}

fn unmix((mut a, mut b, mut c): State) -> State {
    for (shift, other) in [(16, 19), (4, 6)] {
        b = b.wrapping_sub(a);
        c = (c ^ b.rotate_left(if shift == 4 { 8 } else { 4 })).wrapping_add(b);
        a = a.wrapping_sub(c);
        b = (b ^ a.rotate_left(other)).wrapping_add(a);
        c = c.wrapping_sub(b);
        a = (a ^ c.rotate_left(shift)).wrapping_add(c);
    }
    (a, b, c)
}

fn last((mut a, mut b, mut c): State) -> State {
    c = (c ^ b).wrapping_sub(b.rotate_left(14));
    a = (a ^ c).wrapping_sub(c.rotate_left(11));
    b = (b ^ a).wrapping_sub(a.rotate_left(25));
    c = (c ^ b).wrapping_sub(b.rotate_left(16));
    a = (a ^ c).wrapping_sub(c.rotate_left(4));
    b = (b ^ a).wrapping_sub(a.rotate_left(14));
    c = (c ^ b).wrapping_sub(b.rotate_left(24));
    (a, b, c)
}

fn unlast((mut a, mut b, mut c): State) -> State {
    c = c.wrapping_add(b.rotate_left(24)) ^ b;
    b = b.wrapping_add(a.rotate_left(14)) ^ a;
    a = a.wrapping_add(c.rotate_left(4)) ^ c;
    c = c.wrapping_add(b.rotate_left(16)) ^ b;
    b = b.wrapping_add(a.rotate_left(25)) ^ a;
    a = a.wrapping_add(c.rotate_left(11)) ^ c;
    c = c.wrapping_add(b.rotate_left(14)) ^ b;
    (a, b, c)
}

fn begin(length: usize, seed: i64) -> State {
    let start = 0x9e37_79b9_u32.wrapping_add(length as u32).wrapping_add(3_923_095);
    match seed {
        0 => (start, start, start),
        seed => {
            mix((start.wrapping_add((seed >> 32) as u32), start.wrapping_add(seed as u32), start))
        }
    }
}

fn words(block: &[u8]) -> State {
    let word = |at: usize| {
        (0..4).fold(0_u32, |word, n| {
            word | u32::from(block.get(at + n).copied().unwrap_or_default()) << (8 * n)
        })
    };
    (word(0), word(4), word(8))
}

fn add((a, b, c): State, (x, y, z): State) -> State {
    (a.wrapping_add(x), b.wrapping_add(y), c.wrapping_add(z))
}

/// What `hashtextextended(text, seed)` answers on a little-endian server.
pub fn hash(text: &str, seed: i64) -> i64 {
    let mut state = begin(text.len(), seed);
    let mut blocks = text.as_bytes().chunks_exact(12);
    for block in &mut blocks {
        state = mix(add(state, words(block)));
    }
    // The lowest byte of the third word is left to the length.
    let (x, y, z) = words(blocks.remainder());
    let (_, b, c) = last(add(state, (x, y, z << 8)));
    (u64::from(b) << 32 | u64::from(c)) as i64
}

/// Texts for numbers, the same ones for the same seed of this generator.
pub struct Forger(StdRng);

impl Forger {
    /// A generator that can be repeated.
    pub fn new(seed: u64) -> Self {
        Self(StdRng::seed_from_u64(seed))
    }

    /// A text of 24 visible characters whose `hashtextextended(text, seed)` is this number; another
    /// one each time.
    pub fn text(&mut self, number: i64, seed: i64) -> String {
        let (b, c) = ((number as u64 >> 32) as u32, number as u32);
        loop {
            let front: [u8; 12] = std::array::from_fn(|_| self.0.random_range(b'a'..=b'z'));
            let behind_front = mix(add(begin(24, seed), words(&front)));
            for _ in 0..4_000_000 {
                let (x, y, z) = unmix(unlast((self.0.random(), b, c)));
                let (p, q, r) = behind_front;
                let back = [x.wrapping_sub(p), y.wrapping_sub(q), z.wrapping_sub(r)]
                    .map(u32::to_le_bytes)
                    .concat();
                if back.iter().all(u8::is_ascii_graphic) {
                    return front.into_iter().chain(back).map(char::from).collect();
                }
            }
        }
    }

    /// A text whose number begins with these 32 bits.
    pub fn text_of_half(&mut self, half: i32, seed: i64) -> String {
        let number = i64::from(half) << 32 | i64::from(self.0.random::<u32>());
        self.text(number, seed)
    }

    /// Any number.
    pub fn number(&mut self) -> i64 {
        self.0.random()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_can_be_undone() {
        let mut random = StdRng::seed_from_u64(1);
        for _ in 0..1_000 {
            let state: State = random.random();
            assert_eq!(unmix(mix(state)), state);
            assert_eq!(unlast(last(state)), state);
        }
    }

    #[test]
    fn texts_have_the_numbers_they_were_made_for() {
        let mut forger = Forger::new(7);
        for seed in [0, 1, 77, i64::from(i32::MAX), -3] {
            let number = forger.number();
            assert_eq!(hash(&forger.text(number, seed), seed), number);
        }
    }
}
