//! Generated documents beside cases that are easily forgotten.

use rand::{Rng, SeedableRng, rngs::StdRng};

use super::*;
use crate::policy::Policy;

fn mask(fields: &[&str]) -> Mask {
    let pointers = fields.iter().map(|field| Pointer::parse(field).expect("a pointer"));
    Mask::new(pointers.collect(), Vec::new(), false, false)
}

/// A value of a generated document.
enum Node {
    /// A text, a number or a word, as it is written.
    Leaf(String),
    /// Names, as they are and as they are written, with their values.
    Object(Vec<(String, String, Node)>),
    Array(Vec<Node>),
}

const NAMES: [&str; 9] = ["a", "b", "", "a/b", "m~n", "ü", "0", "1", "\"\\"];

impl Node {
    fn random(random: &mut StdRng, depth: usize) -> Self {
        match random.random_range(0..if depth < 5 { 10 } else { 6 }) {
            0..6 => Self::Leaf(leaf(random)),
            6..9 => {
                let count = random.random_range(0..5);
                Self::Object((0..count).map(|_| Self::member(random, depth)).collect())
            }
            _ => {
                let count = random.random_range(0..4);
                Self::Array((0..count).map(|_| Self::random(random, depth + 1)).collect())
            }
        }
    }

    fn member(random: &mut StdRng, depth: usize) -> (String, String, Self) {
        let name = NAMES[random.random_range(0..NAMES.len())];
        let written = match random.random_range(0..3) {
            0 => format!(
                "\"{}\"",
                name.encode_utf16().map(|unit| format!("\\u{unit:04x}")).collect::<String>()
            ),
            _ => serde_json::to_string(name).expect("a text"),
        };
        (name.to_owned(), written, Self::random(random, depth + 1))
    }

    /// The text of the value, and the same with what is masked.
    fn texts(&self, at: &[String], pointers: &[Vec<String>], random: &mut StdRng) -> [String; 2] {
        let mut texts = match self {
            Self::Leaf(text) => [text.clone(), text.clone()],
            Self::Object(members) => {
                let members = members.iter().map(|(name, written, value)| {
                    let space = space(random);
                    let at = [at, std::slice::from_ref(name)].concat();
                    let texts = value.texts(&at, pointers, random);
                    texts.map(|text| format!("{space}{written}{space}:{space}{text}{space}"))
                });
                enclosed("{", &members.collect::<Vec<_>>(), "}")
            }
            Self::Array(elements) => {
                let elements = elements.iter().enumerate().map(|(index, value)| {
                    let space = space(random);
                    let at = [at, &[index.to_string()]].concat();
                    let texts = value.texts(&at, pointers, random);
                    texts.map(|text| format!("{space}{text}{space}"))
                });
                enclosed("[", &elements.collect::<Vec<_>>(), "]")
            }
        };
        if pointers.iter().any(|pointer| leads_to(pointer, at)) {
            texts[1] = "\"***\"".to_owned();
        }
        texts
    }

    /// A path to a value within.
    fn path(&self, random: &mut StdRng) -> Vec<String> {
        let (step, value) = match self {
            Self::Object(members) if !members.is_empty() => {
                let (name, _, value) = &members[random.random_range(0..members.len())];
                (name.clone(), value)
            }
            Self::Array(elements) if !elements.is_empty() => {
                let index = random.random_range(0..elements.len());
                (index.to_string(), &elements[index])
            }
            _ => return Vec::new(),
        };
        let step = if random.random_bool(0.2) { "*".to_owned() } else { step };
        if random.random_bool(0.3) {
            return vec![step];
        }
        [vec![step], value.path(random)].concat()
    }
}

fn leaf(random: &mut StdRng) -> String {
    let n: u32 = random.random();
    let all = [
        format!("\"secret {n} \\\"\\\\\\u00e9 }}],:\""),
        format!("{n}e400"),
        format!("1234567890123456789012345{n}"),
        format!("-0.{n}00"),
        "true".to_owned(),
        "null".to_owned(),
    ];
    all[random.random_range(0..all.len())].clone()
}

fn space(random: &mut StdRng) -> &'static str {
    ["", "", " ", "\n\t", "\r\n"][random.random_range(0..5)]
}

fn enclosed(begin: &str, inner: &[[String; 2]], end: &str) -> [String; 2] {
    [0, 1].map(|of| {
        let inner: Vec<_> = inner.iter().map(|texts| texts[of].as_str()).collect();
        format!("{begin}{}{end}", inner.join(","))
    })
}

fn leads_to(pointer: &[String], at: &[String]) -> bool {
    pointer.len() == at.len()
        && pointer.iter().zip(at).all(|(segment, at)| segment == "*" || segment == at)
}

/// What could go wrong: a value is shown that a pointer leads to, or one beside it is changed: a
/// number loses digits, members change places.
#[test]
fn what_a_pointer_leads_to_is_masked_and_nothing_else_changes() {
    let mut masked = 0;
    for seed in 0..3_000 {
        let random = &mut StdRng::seed_from_u64(seed);
        let document = Node::random(random, 0);
        let pointers: Vec<_> =
            (0..random.random_range(1..4)).map(|_| document.path(random)).collect();
        let [plain, expected] = document.texts(&[], &pointers, random);
        let written = |path: &Vec<String>| {
            let escaped =
                |step: &String| format!("/{}", step.replace('~', "~0").replace('/', "~1"));
            path.iter().map(escaped).collect::<String>()
        };
        let fields: Vec<_> = pointers.iter().map(written).collect();
        let fields: Vec<_> = fields.iter().map(String::as_str).collect();
        let found = mask(&fields).payload(plain.as_bytes());
        masked += usize::from(found.is_some());
        let found = found.unwrap_or_else(|| plain.clone());
        assert_eq!(found, expected, "seed {seed}: {fields:?} in {plain}");
        serde_json::from_str::<serde::de::IgnoredAny>(&found).expect("it is JSON still");
    }
    assert!(masked > 1_000, "{masked} documents had something to mask");
}

fn check(fields: &[&str], payload: &str, expected: Option<&str>) {
    let found = mask(fields).payload(payload.as_bytes());
    assert_eq!(found.as_deref(), expected, "{fields:?} in {payload}");
}

#[test]
fn what_is_easily_forgotten_is_masked_too() {
    check(&["/a"], r#"{"a":1,"b":2,"a":{"c":3}}"#, Some(r#"{"a":"***","b":2,"a":"***"}"#));
    check(&["/a"], r#"{"\u0061":null}"#, Some(r#"{"\u0061":"***"}"#));
    check(&["/*/x"], r#"{"l":[{"x":1}],"m":{"x":2}}"#, Some(r#"{"l":[{"x":1}],"m":{"x":"***"}}"#));
    check(&["/*/*/x", "/l"], r#"{"l":[{"x":1}]}"#, Some(r#"{"l":"***"}"#));
    check(&["/l/-", "/l/01", "/l/2"], r#"{"l":[1,2]}"#, None);
    check(&[""], " [1] ", Some(" \"***\" "));
    check(&["/a"], "7", None);
    check(&["/a"], r#"{"b":1e999,"c":{}}"#, None);
    check(&[], "no JSON", None);
}

#[test]
fn what_cannot_be_read_is_masked_whole() {
    let deep = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    check(&["/a"], &deep(127), None);
    for payload in [
        "",
        "secret",
        "{\"b\":\"secret\"",
        "{\"b\":\"secret\"} x",
        "{'b':'secret'}",
        "{\"b\":\"secret\",}",
        "\u{feff}{\"b\":\"secret\"}",
        // A name that is no text may be any name.
        r#"{"\ud800":"secret"}"#,
        &deep(128),
        &deep(200_000),
    ] {
        check(&["/a"], payload, Some("***"));
    }
    assert_eq!(mask(&["/a"]).payload(b"{\"b\":\"\xff\"}").as_deref(), Some("***"));
    assert_eq!(Mask::everything().payload(b"{}").as_deref(), Some("***"));
    assert!(Mask::everything().has_key() && Mask::everything().has_header("x"));
}

#[test]
fn a_payload_that_was_masked_is_known_again() {
    let of = |fields: &[&str], payload: &str| mask(fields).is_left_in(payload.as_bytes());
    assert!(of(&["/a"], r#"{"a":"***"}"#) && of(&["/a"], r#"{"a":"\u002a**"}"#));
    assert!(of(&["/l/*"], r#"{"l":[1,"***"]}"#) && of(&["/a"], " ***\n") && of(&[""], "\"***\""));
    assert!(!of(&["/a"], r#"{"b":"***"}"#) && !of(&["/a"], r#"{"a":"****"}"#));
    assert!(!of(&["/a"], "no JSON") && !of(&[], "***"));
}

#[test]
fn an_ordering_key_of_a_masked_field_is_masked() {
    let of = |masking: &str| {
        let text = format!(
            "topics = ['t']\nack = 'after_commit'\nidentity = {{ ordering_key = {{ json_pointer = \
                '/who/card' }} }}\nmasking = {masking}"
        );
        Policy::parse(&text).expect("a policy").mask()
    };
    for masking in ["{ fields = ['/who'] }", "{ fields = ['/*/card'] }", "{ fields = [''] }"] {
        assert!(of(masking).has_ordering_key() && !of(masking).has_key(), "{masking}");
    }
    assert!(of("{ key = true }").has_ordering_key() && of("{ key = true }").has_key());
    for masking in ["{ fields = ['/who/card/x'] }", "{ fields = ['/card'] }", "{}"] {
        assert!(!of(masking).has_ordering_key(), "{masking}");
    }
    assert!(of("{ headers = ['X-Card'] }").has_header("x-card"));
}
