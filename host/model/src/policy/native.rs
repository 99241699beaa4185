//! The parts of a policy that reach a native library, and their bounds.
//!
//! librdkafka takes a topic that begins with `^` for a POSIX extended regular expression. It has
//! the C library's `regcomp` compile the expression: in the thread that subscribes, and again for
//! every topic of the brokers. `regcomp` recurses into nested parts and writes out repetitions, so
//! that a pattern without bounds ends the process. The checks here accept a part of that language
//! in which both are bounded.

use regex_syntax::ast::{self, Ast, RepetitionKind, RepetitionRange};

use super::Policy;

/// Maximum number of topics of a policy.
pub const TOPICS_MAX: usize = 100;
/// Maximum bytes of the name of a topic, of a pattern, and of the name of a group.
const NAME_BYTES_MAX: usize = 249;
/// Deepest nesting of parentheses in a pattern.
const DEPTH_MAX: usize = 10;
/// Maximum number of characters of a pattern that each match one of a name, with all repetitions
/// written out.
const POSITIONS_MAX: usize = 1_000;
/// Maximum number of properties of Kafka's client in a policy.
const PROPERTIES_MAX: usize = 64;
/// Maximum bytes of the name of such a property.
const PROPERTY_NAME_BYTES_MAX: usize = 128;
/// Maximum bytes of the value of such a property: a chain of certificates fits.
const PROPERTY_BYTES_MAX: usize = 64 << 10;
/// Maximum number of characters of a wrong text that an error shows.
const SHOWN_MAX: usize = 60;

/// Returns whether a topic of a policy is a pattern of names.
pub fn is_pattern(topic: &str) -> bool {
    topic.starts_with('^')
}

/// Returns whether Kafka accepts a text as the name of a topic.
pub(crate) fn is_topic(name: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&name.len())
        && name.bytes().all(is_of_name)
        && ![".", ".."].contains(&name)
}

fn is_of_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"._-".contains(&byte)
}

/// Formats a text as an error shows it: cut, and on one line.
pub(crate) fn shown(text: &str) -> String {
    let mut shown: String =
        text.chars().take(SHOWN_MAX).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.chars().nth(SHOWN_MAX).is_some() {
        shown.push('…');
    }
    shown
}

/// Returns the fault of a topic to read, which is a name or a pattern of names; none where it is
/// valid.
pub fn topic_fault(topic: &str) -> Option<String> {
    if !is_pattern(topic) {
        let rule = "it must be the name of a topic: 1 to 249 of the characters a-z, A-Z, 0-9, `.`, \
            `_` and `-`, and not `.` or `..`";
        return (!is_topic(topic)).then(|| format!("`{}`: {rule}", shown(topic)));
    }
    pattern_fault(topic).map(|fault| format!("the pattern `{}`: {fault}", shown(topic)))
}

fn pattern_fault(pattern: &str) -> Option<String> {
    if pattern.len() > NAME_BYTES_MAX {
        return Some(format!(
            "it has {} bytes, and may have at most {NAME_BYTES_MAX}",
            pattern.len()
        ));
    }
    if let Err(fault) = scan(pattern.as_bytes()) {
        return Some(fault);
    }
    let parser =
        ast::parse::ParserBuilder::new().nest_limit(4 * DEPTH_MAX as u32).build().parse(pattern);
    match parser.map(|ast| positions(&ast)) {
        Ok(many) if many > POSITIONS_MAX => Some(format!(
            "with what it repeats written out it has more than {POSITIONS_MAX} characters; repeat \
                less"
        )),
        Ok(_) => None,
        Err(error) => Some(format!("it is no regular expression: {}", error.kind())),
    }
}

/// Refuses a pattern that is nested too deep, or that its two readers could understand differently:
/// the parser here and the C library's.
fn scan(pattern: &[u8]) -> Result<(), String> {
    const KNOWN: &[u8] = b"^$*+?|()[]{},\\";
    let (mut depth, mut at) = (0_usize, 0);
    while let Some(&byte) = pattern.get(at) {
        let rest = &pattern[at + 1..];
        at += 1;
        match byte {
            _ if !is_of_name(byte) && !KNOWN.contains(&byte) => {
                return Err(
                    "it may hold letters, digits, `.`, `_`, `-`, `^ $ * + ? | ( ) [ ] { }` \
                    and `\\.`, and nothing else"
                        .to_owned(),
                );
            }
            b'\\' if rest.first() != Some(&b'.') => {
                return Err("after `\\` it may hold a `.` and nothing else".to_owned());
            }
            b'\\' => at += 1,
            b'(' if rest.first() == Some(&b'?') => {
                return Err("`(?` is not known to Kafka's client".to_owned());
            }
            b'(' => depth += 1,
            b')' => depth = depth.saturating_sub(1),
            b'[' => at += 1 + set_end(rest)?,
            b'{' => at += 1 + repetition_end(rest)?,
            b']' | b'}' | b',' => return Err(format!("`{}` stands alone", char::from(byte))),
            _ => {}
        }
        if depth > DEPTH_MAX {
            return Err(format!("its parentheses are nested more than {DEPTH_MAX} deep"));
        }
    }
    Ok(())
}

/// Returns the offset in `rest` of the `]` that ends a set. `rest` begins after the `[`. A set
/// holds letters, digits, `.`, `_`, `-`, and ranges of them.
fn set_end(rest: &[u8]) -> Result<usize, String> {
    let begin = usize::from(rest.first() == Some(&b'^'));
    let end = rest.iter().position(|byte| *byte == b']').filter(|end| *end > begin);
    let end = end.ok_or("a `[` has no `]`, or nothing is between them")?;
    let members = &rest[begin..end];
    match members.iter().all(|byte| is_of_name(*byte))
        && !members.windows(2).any(|two| two == b"--")
    {
        true => Ok(end),
        false => {
            Err("between `[` and `]` it may hold letters, digits, `.`, `_`, `-` and ranges"
                .to_owned())
        }
    }
}

/// Returns the offset in `rest` of the `}` that ends a number of repetitions: `3}`, `3,}` or
/// `3,5}`. `rest` begins after the `{`.
fn repetition_end(rest: &[u8]) -> Result<usize, String> {
    let wrong = "between `{` and `}` it must hold one number or two, of at most three digits: \
        `{3}`, `{3,}`, `{3,5}`";
    let end = rest.iter().position(|byte| *byte == b'}').ok_or(wrong)?;
    let is_number =
        |digits: &&[u8]| (1..=3).contains(&digits.len()) && digits.iter().all(u8::is_ascii_digit);
    let mut numbers = rest[..end].split(|byte| *byte == b',');
    let least = numbers.next().is_some_and(|least| is_number(&least));
    let most = numbers.next().is_none_or(|most| most.is_empty() || is_number(&most));
    if least && most && numbers.next().is_none() { Ok(end) } else { Err(wrong.to_owned()) }
}

/// Counts the nodes that a compiler makes of a pattern, where it writes out what is repeated.
fn positions(ast: &Ast) -> usize {
    match ast {
        Ast::Repetition(repetition) => {
            let times = match &repetition.op.kind {
                RepetitionKind::Range(
                    RepetitionRange::Exactly(times) | RepetitionRange::Bounded(_, times),
                ) => *times,
                RepetitionKind::Range(RepetitionRange::AtLeast(times)) => times.saturating_add(1),
                _ => 1,
            };
            positions(&repetition.ast).saturating_mul(times.max(1) as usize).saturating_add(1)
        }
        Ast::Group(group) => positions(&group.ast).saturating_add(1),
        Ast::Alternation(branches) => {
            branches.asts.iter().map(positions).fold(branches.asts.len(), usize::saturating_add)
        }
        Ast::Concat(parts) => parts.asts.iter().map(positions).fold(0, usize::saturating_add),
        _ => 1,
    }
}

/// Returns the fault of the topics to read, all of them together; none where they are valid.
pub fn topics_fault(topics: &[String]) -> Option<String> {
    if topics.is_empty() {
        return Some("`topics` must name at least one topic".to_owned());
    }
    if topics.len() > TOPICS_MAX {
        return Some(format!(
            "`topics` has {}; a consumer reads at most {TOPICS_MAX}, or a pattern",
            topics.len()
        ));
    }
    let mut known = std::collections::BTreeSet::new();
    topics.iter().find_map(|topic| match topic_fault(topic) {
        Some(fault) => Some(format!("`topics` has {fault}")),
        None => (!known.insert(topic)).then(|| format!("`topics` has `{topic}` twice")),
    })
}

/// Returns the fault of the name of a group; none where it is valid.
pub fn group_fault(group: &str) -> Option<String> {
    let fits = group.len() <= NAME_BYTES_MAX && !group.chars().any(char::is_control);
    (!fits).then(|| {
        format!("`kafka.group` must have at most {NAME_BYTES_MAX} bytes and no control characters")
    })
}

/// Returns the first fault of properties of Kafka's client, with its key; none where they are
/// valid. Values may be passwords, and are not shown.
pub fn properties_fault<'a>(
    properties: impl ExactSizeIterator<Item = (&'a String, &'a String)>,
) -> Option<(String, String)> {
    if properties.len() > PROPERTIES_MAX {
        let text = format!(
            "`kafka.properties` has {}; there may be at most {PROPERTIES_MAX}",
            properties.len()
        );
        return Some(("kafka.properties".to_owned(), text));
    }
    let mut properties = properties;
    properties.find_map(|(name, value)| {
        let key = format!("kafka.properties.{}", shown(name));
        let is_name =
            (1..=PROPERTY_NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(is_of_name);
        if !is_name {
            let text = format!(
                "`{key}` is no name of a property: letters, digits, `.`, `_` and \
                `-`, at most {PROPERTY_NAME_BYTES_MAX}"
            );
            return Some((key, text));
        }
        let fits = value.len() <= PROPERTY_BYTES_MAX && !value.contains('\0');
        (!fits).then(|| {
            (
                key.clone(),
                format!(
                    "`{key}` must have at most {PROPERTY_BYTES_MAX} \
            bytes, and none of them NUL"
                ),
            )
        })
    })
}

impl Policy {
    /// Returns the first part of this policy that a native library must not get, with its key.
    /// Hosts also ask before each start: a row may be older than a rule.
    pub fn native_fault(&self) -> Option<(String, String)> {
        let of = |key: &'static str| move |fault: String| (key.to_owned(), fault);
        let copies = self.dead_letters.topic.as_ref().filter(|topic| !is_topic(topic));
        topics_fault(&self.topics)
            .map(of("topics"))
            .or_else(|| group_fault(&self.kafka.group).map(of("kafka.group")))
            .or_else(|| properties_fault(self.kafka.properties.iter()))
            .or_else(|| {
                let rule = "must be the name of one topic: 1 to 249 of the characters a-z, A-Z, \
                    0-9, `.`, `_` and `-`";
                copies.map(|_| {
                    (
                        "dead_letters.topic".to_owned(),
                        format!(
                            "`dead_letters.topic` \
                    {rule}"
                        ),
                    )
                })
            })
    }
}
