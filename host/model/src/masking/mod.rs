//! The mask of a consumer's messages: what of a record is shown, and what `***` stands for.

// Values of a JSON text, by their places.
mod json;

use std::ops::Range;

/// The text in the place of what is masked.
pub const MASKED: &str = "***";
/// The same as a value of JSON.
const MASKED_JSON: &str = "\"***\"";

/// A JSON pointer (RFC 6901), in which a segment `*` stands for every member or element.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pointer(Vec<String>);

impl Pointer {
    /// Parses a pointer; none where the text is none.
    pub fn parse(text: &str) -> Option<Self> {
        if text.is_empty() {
            return Some(Self(Vec::new()));
        }
        let segments = text.strip_prefix('/')?.split('/');
        segments.map(segment).collect::<Option<_>>().map(Self)
    }

    /// Returns whether this pointer leads to what another one leads to, or to something around it.
    pub fn covers(&self, other: &Self) -> bool {
        let is_on_the_way = |(own, other): (&String, &String)| own == "*" || own == other;
        self.0.len() <= other.0.len() && self.0.iter().zip(&other.0).all(is_on_the_way)
    }
}

fn segment(text: &str) -> Option<String> {
    let mut escapes = text.split('~').skip(1);
    let is_escaped = escapes.all(|rest| rest.starts_with(['0', '1']));
    is_escaped.then(|| text.replace("~1", "/").replace("~0", "~"))
}

/// What of a record is masked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mask {
    fields: Vec<Pointer>,
    headers: Vec<String>,
    has_key: bool,
    has_ordering_key: bool,
    is_of_everything: bool,
}

impl Mask {
    /// Creates a mask of fields of the payload, of headers by their names, and of the keys.
    pub fn new(
        fields: Vec<Pointer>,
        headers: Vec<String>,
        has_key: bool,
        has_ordering_key: bool,
    ) -> Self {
        Self { fields, headers, has_key, has_ordering_key, is_of_everything: false }
    }

    /// Returns the mask that leaves everything as it is.
    pub fn nothing() -> Self {
        Self::default()
    }

    /// Returns the mask of a message whose policy is not known.
    pub fn everything() -> Self {
        Self { is_of_everything: true, ..Self::default() }
    }

    /// Returns whether the key of a record is masked.
    pub fn has_key(&self) -> bool {
        self.has_key || self.is_of_everything
    }

    /// Returns whether the ordering key is masked.
    pub fn has_ordering_key(&self) -> bool {
        self.has_ordering_key || self.is_of_everything
    }

    /// Returns whether the value of a header is masked.
    pub fn has_header(&self, name: &str) -> bool {
        self.is_of_everything || self.headers.iter().any(|own| own.eq_ignore_ascii_case(name))
    }

    /// Returns whether the payload of a record that was never understood is masked: it may have
    /// fields and headers in other places than a message has them.
    pub fn has_raw_payload(&self) -> bool {
        self.is_of_everything || !self.fields.is_empty() || !self.headers.is_empty()
    }

    /// Returns a payload with each masked value as the string `***`; none where the payload has no
    /// such value. A payload that is not JSON is `***` as a whole, where the mask has fields.
    pub fn payload(&self, payload: &[u8]) -> Option<String> {
        if self.is_of_everything {
            return Some(MASKED.to_owned());
        }
        if self.fields.is_empty() {
            return None;
        }
        match self.places(payload) {
            Some((_, places)) if places.is_empty() => None,
            Some((text, places)) => Some(json::replaced(text, &places, MASKED_JSON)),
            None => Some(MASKED.to_owned()),
        }
    }

    /// Returns whether a payload has `***` where this mask puts it: it was masked, and is not what
    /// anybody means to store.
    pub fn is_left_in(&self, payload: &[u8]) -> bool {
        if self.fields.is_empty() {
            return false;
        }
        match self.places(payload) {
            Some((text, places)) => {
                let is_masked = |place: Range<usize>| {
                    json::unescaped(&text[place]).is_some_and(|value| value == MASKED)
                };
                places.into_iter().any(is_masked)
            }
            None => payload.trim_ascii() == MASKED.as_bytes(),
        }
    }

    /// Finds the masked values of a payload; none where the payload is not JSON.
    fn places<'p>(&self, payload: &'p [u8]) -> Option<(&'p str, Vec<Range<usize>>)> {
        let text = std::str::from_utf8(payload).ok()?;
        let pointers: Vec<_> = self.fields.iter().map(|pointer| &*pointer.0).collect();
        Some((text, json::places(text, &pointers)?))
    }
}

#[cfg(test)]
mod tests;
