//! What of a policy reaches a native library, and how much of it that library is handed.
//!
//! librdkafka takes a topic that begins with `^` for a POSIX extended regular expression, and has
//! the C library's `regcomp` compile it: in the thread that subscribes, and again for every topic
//! of the brokers. `regcomp` calls itself for what is nested and writes out what is repeated, so
//! that a pattern without bounds ends the process. What is accepted here is a part of that language
//! in which both are bounded.

use regex_syntax::ast::{self, Ast, RepetitionKind, RepetitionRange};

use super::Policy;

/// Topics of a policy.
pub const TOPICS_MAX: usize = 100;
/// Bytes of the name of a topic, of a pattern, and of the name of a group.
const NAME_BYTES_MAX: usize = 249;
/// Parentheses of a pattern within each other.
const DEPTH_MAX: usize = 10;
/// Characters of a pattern that stand for one of a name, with everything that is repeated written
/// out.
const POSITIONS_MAX: usize = 1_000;
/// Properties of Kafka's client in a policy.
const PROPERTIES_MAX: usize = 64;
/// Bytes of the name of such a property.
const PROPERTY_NAME_BYTES_MAX: usize = 128;
/// Bytes of the value of such a property: a chain of certificates fits.
const PROPERTY_BYTES_MAX: usize = 64 << 10;
/// Characters of what is wrong that are shown.
const SHOWN_MAX: usize = 60;

/// Whether a topic of a policy is a pattern of names.
pub fn is_pattern(topic: &str) -> bool {
    topic.starts_with('^')
}

/// Whether Kafka takes a text for the name of a topic.
pub(crate) fn is_topic(name: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&name.len())
        && name.bytes().all(is_of_name)
        && ![".", ".."].contains(&name)
}

fn is_of_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"._-".contains(&byte)
}

/// A text as an error shows it: cut, and on one line.
fn shown(text: &str) -> String {
    let mut shown: String =
        text.chars().take(SHOWN_MAX).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.chars().nth(SHOWN_MAX).is_some() {
        shown.push('…');
    }
    shown
}

/// What is wrong with a topic to read: a name, or a pattern of names.
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

/// Refuse what the two readers of a pattern, the one here and the C library's, could read in two
/// ways, and what is nested too deep.
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

/// Where a set ends that began: letters, digits and what else is in names, and ranges of them.
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

/// Where a number of repetitions ends that began: `3}`, `3,}` or `3,5}`.
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

/// How many nodes a compiler makes of it that writes out what is repeated.
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

/// What is wrong with the topics to read, all of them together.
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

/// What is wrong with the name of a group.
pub fn group_fault(group: &str) -> Option<String> {
    let fits = group.len() <= NAME_BYTES_MAX && !group.chars().any(char::is_control);
    (!fits).then(|| {
        format!("`kafka.group` must have at most {NAME_BYTES_MAX} bytes and no control characters")
    })
}

/// What is wrong with properties of Kafka's client. Values may be passwords, and are not shown.
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
    /// What of this policy a native library must not be handed, with its key. Hosts ask before each
    /// start, too: a row may be older than a rule.
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
