//! Values in a JSON text, as places in it. The text beside them stays as it is: numbers keep their
//! digits, and members their order.

use std::{borrow::Cow, ops::Range};

use serde::de::IgnoredAny;

/// Values nested as deep as this, or deeper, are not read; serde_json has the same bound.
const DEPTH_MAX: usize = 128;

/// The rest of a pointer, below the value that was reached.
type Rest<'p> = &'p [String];

/// Finds the values at pointers, in the order of the text. None lies within another. Returns none
/// where the text is not JSON, or is nested too deep.
pub(super) fn places(text: &str, pointers: &[Rest<'_>]) -> Option<Vec<Range<usize>>> {
    serde_json::from_str::<IgnoredAny>(text).ok()?;
    let mut walk = TextWalk { text, at: 0, found: Vec::new() };
    walk.value(pointers, 0)?;
    Some(walk.found)
}

/// Returns a text with another one in each of some places.
pub(super) fn replaced(text: &str, places: &[Range<usize>], by: &str) -> String {
    let (mut result, mut end) = (String::with_capacity(text.len()), 0);
    for place in places {
        result.push_str(&text[end..place.start]);
        result.push_str(by);
        end = place.end;
    }
    result.push_str(&text[end..]);
    result
}

/// A walk over a text that is JSON. Each step returns none where the text is not as expected.
struct TextWalk<'t> {
    text: &'t str,
    at: usize,
    found: Vec<Range<usize>>,
}

impl<'t> TextWalk<'t> {
    fn value(&mut self, left: &[Rest<'_>], depth: usize) -> Option<()> {
        let first = self.next()?;
        let begin = self.at;
        let is_found = left.iter().any(|rest| rest.is_empty());
        let left = if is_found { &[] } else { left };
        match first {
            b'{' => self.members(left, depth + 1)?,
            b'[' => self.elements(left, depth + 1)?,
            b'"' => drop(self.string()?),
            _ => self.scalar()?,
        }
        if is_found {
            self.found.push(begin..self.at);
        }
        Some(())
    }

    fn members(&mut self, left: &[Rest<'_>], depth: usize) -> Option<()> {
        self.enter(depth)?;
        while self.goes_on(b'}')? {
            let name = self.string()?;
            let within = match left.is_empty() {
                true => Vec::new(),
                false => {
                    let name = unescaped(name)?;
                    below(left, |segment| segment == name)
                }
            };
            if self.next()? != b':' {
                return None;
            }
            self.at += 1;
            self.value(&within, depth)?;
        }
        Some(())
    }

    fn elements(&mut self, left: &[Rest<'_>], depth: usize) -> Option<()> {
        self.enter(depth)?;
        let mut index = 0;
        while self.goes_on(b']')? {
            let within = match left.is_empty() {
                true => Vec::new(),
                false => {
                    let index = index.to_string();
                    below(left, |segment| segment == index)
                }
            };
            self.value(&within, depth)?;
            index += 1;
        }
        Some(())
    }

    fn enter(&mut self, depth: usize) -> Option<()> {
        self.at += 1;
        (depth < DEPTH_MAX).then_some(())
    }

    /// Returns whether a member or an element follows; passes the comma before it, or the end.
    fn goes_on(&mut self, end: u8) -> Option<bool> {
        if self.next()? == b',' {
            self.at += 1;
        }
        let is_over = self.next()? == end;
        self.at += usize::from(is_over);
        Some(!is_over)
    }

    /// Passes a string. Returns it with its quotes.
    fn string(&mut self) -> Option<&'t str> {
        let begin = self.at;
        self.at += 1;
        loop {
            match self.text.as_bytes().get(self.at)? {
                b'"' => break,
                b'\\' => self.at += 2,
                _ => self.at += 1,
            }
        }
        self.at += 1;
        self.text.get(begin..self.at)
    }

    /// Passes a number, `true`, `false` or `null`.
    fn scalar(&mut self) -> Option<()> {
        let rest = &self.text.as_bytes()[self.at..];
        let is_over = |byte: &u8| byte.is_ascii_whitespace() || b",:]}".contains(byte);
        let length = rest.iter().position(is_over).unwrap_or(rest.len());
        self.at += length;
        (length > 0).then_some(())
    }

    /// Passes white space. Returns the byte behind it.
    fn next(&mut self) -> Option<u8> {
        let rest = &self.text.as_bytes()[self.at..];
        self.at += rest.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        self.text.as_bytes().get(self.at).copied()
    }
}

/// Returns the rests of pointers below a member or an element.
fn below<'p>(left: &[Rest<'p>], is_it: impl Fn(&str) -> bool) -> Vec<Rest<'p>> {
    let step = |rest: &Rest<'p>| {
        let (segment, rest) = rest.split_first()?;
        (segment == "*" || is_it(segment)).then_some(rest)
    };
    left.iter().filter_map(step).collect()
}

/// Returns the text of a JSON string; none where it has half of a surrogate pair.
pub(super) fn unescaped(string: &str) -> Option<Cow<'_, str>> {
    if string.contains('\\') {
        return serde_json::from_str(string).ok().map(Cow::Owned);
    }
    string.strip_prefix('"')?.strip_suffix('"').map(Cow::Borrowed)
}
