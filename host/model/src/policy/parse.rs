//! The reading of a policy from its owner's text, with everything that is wrong with it.

use serde_json::Value;
use serde_path_to_error::Segment;
use toml::de::DeTable;

use super::{
    Policy,
    check::{PolicyProblem, refuse},
};
use crate::error::InboxError;

/// Maximum number of problems of one document that are reported; the next ones appear once these
/// are mended.
const PROBLEMS_MAX: usize = 50;

impl Policy {
    /// Reads a policy from TOML.
    ///
    /// # Errors
    ///
    /// [`InboxError::Policy`] with every key that is wrong, and its line.
    pub fn parse(text: &str) -> Result<Self, InboxError> {
        right(Self::read(text))
    }

    /// Reads a policy from JSON.
    ///
    /// # Errors
    ///
    /// [`InboxError::Policy`] with every key that is wrong.
    pub fn of(value: Value) -> Result<Self, InboxError> {
        right(Self::from_value(value))
    }

    /// Reads a policy from TOML, and returns its problems as data. Returns a policy only where
    /// there is no problem.
    pub fn read(text: &str) -> (Option<Self>, Vec<PolicyProblem>) {
        let (document, errors) = DeTable::parse_recoverable(text);
        let problem = |error: &toml::de::Error| PolicyProblem {
            line: error.span().map(|span| line(text, span.start)),
            ..PolicyProblem::new("", without_values(error.message()))
        };
        if !errors.is_empty() {
            return (None, errors.iter().take(PROBLEMS_MAX).map(problem).collect());
        }
        // A document may parse and still hold no value, such as a number that is too large.
        let value = match toml::from_str(text) {
            Ok(value) => value,
            Err(error) => return (None, vec![problem(&error)]),
        };
        let (policy, mut problems) = Self::from_value(value);
        for problem in &mut problems {
            problem.line = place(document.get_ref(), &problem.key).map(|start| line(text, start));
        }
        problems.sort_by_key(|problem| problem.line.unwrap_or(usize::MAX));
        (policy, problems)
    }

    /// Reads a policy from JSON, and returns its problems as data. Returns a policy only where
    /// there is no problem.
    pub fn from_value(mut value: Value) -> (Option<Self>, Vec<PolicyProblem>) {
        let mut problems: Vec<PolicyProblem> = Vec::new();
        // Each wrong part is taken out, and the rest is read again.
        while problems.len() < PROBLEMS_MAX {
            let error = match serde_path_to_error::deserialize::<_, Self>(&value) {
                Ok(policy) => {
                    // A part that was taken out has its default or a stand-in: problems that
                    // concern it are dropped.
                    let mut more = policy.problems();
                    more.retain(|more| !problems.iter().any(|known| is_about(more, &known.key)));
                    problems.extend(more);
                    let policy = problems.is_empty().then_some(policy);
                    return (policy, problems);
                }
                Err(error) => error,
            };
            let text = without_values(&error.inner().to_string());
            let mut path = KeyPath::of(error.path().iter());
            path.extend_by_unknown(&text);
            problems.push(PolicyProblem::new(&path.shown(), path.describe(&text)));
            if !path.take_out(&mut value, &text) {
                break;
            }
        }
        (None, problems)
    }
}

fn right((policy, problems): (Option<Policy>, Vec<PolicyProblem>)) -> Result<Policy, InboxError> {
    refuse(problems)?;
    policy.ok_or_else(|| InboxError::Invalid("the policy cannot be read".to_owned()))
}

fn is_about(problem: &PolicyProblem, key: &str) -> bool {
    !key.is_empty() && (problem.key == key || problem.text.contains(&format!("`{key}`")))
}

/// A path to a part of a document.
struct KeyPath(Vec<KeyStep>);

enum KeyStep {
    Key(String),
    Index(usize),
}

impl KeyPath {
    fn of<'a>(segments: impl Iterator<Item = &'a Segment>) -> Self {
        // A variant has no position of its own: its position is the element that holds it.
        let steps = segments.map_while(|segment| match segment {
            Segment::Map { key } => Some(KeyStep::Key(key.clone())),
            Segment::Seq { index } => Some(KeyStep::Index(*index)),
            Segment::Enum { .. } | Segment::Unknown => None,
        });
        Self(steps.collect())
    }

    /// Extends the path by an unknown key that an error names.
    fn extend_by_unknown(&mut self, text: &str) {
        let unknown = text.strip_prefix("unknown field `").and_then(|rest| rest.split('`').next());
        if let Some(unknown) = unknown
            && !matches!(self.0.last(), Some(KeyStep::Key(last)) if last == unknown)
        {
            self.0.push(KeyStep::Key(unknown.to_owned()));
        }
    }

    fn shown(&self) -> String {
        let mut shown = String::new();
        for step in &self.0 {
            match step {
                KeyStep::Key(key) if shown.is_empty() => shown.push_str(key),
                KeyStep::Key(key) => shown.extend([".", key]),
                KeyStep::Index(index) => shown.push_str(&format!("[{index}]")),
            }
        }
        shown
    }

    /// Describes a problem, with the key that it is about.
    fn describe(&self, text: &str) -> String {
        let shown = self.shown();
        match text.strip_prefix("unknown field `").and_then(|rest| rest.split_once('`')) {
            Some((_, rest)) => format!("unknown key `{shown}`{rest}"),
            None if shown.is_empty() => text.to_owned(),
            None => format!("`{shown}`: {text}"),
        }
    }

    /// Takes the part at this path out of the document, or gives the document what is missing, so
    /// that the rest can be read. Returns whether the document changed.
    fn take_out(&self, value: &mut Value, text: &str) -> bool {
        let Some((last, before)) = self.0.split_last() else {
            return give(value, text).is_some();
        };
        // A required key gets a valid value in the place of a wrong one.
        if let ([], KeyStep::Key(key), Some(members)) = (before, last, value.as_object_mut())
            && let (Some(value), Some(present)) = (stand_in(key), members.get_mut(key))
        {
            let is_new = *present != value;
            *present = value;
            return is_new;
        }
        let inner = before.iter().try_fold(value, |value, step| match step {
            KeyStep::Key(key) => value.get_mut(key),
            KeyStep::Index(index) => value.get_mut(index),
        });
        match (inner, last) {
            (Some(Value::Object(members)), KeyStep::Key(key)) => members.remove(key).is_some(),
            (Some(Value::Array(elements)), KeyStep::Index(index)) if *index < elements.len() => {
                elements.remove(*index);
                true
            }
            _ => false,
        }
    }
}

/// Adds the key that a document lacks. Returns none where no missing key is the problem.
fn give(document: &mut Value, text: &str) -> Option<()> {
    let missing = text.strip_prefix("missing field `")?.split('`').next()?;
    let value = stand_in(missing)?;
    document.as_object_mut()?.insert(missing.to_owned(), value);
    Some(())
}

/// Returns a valid value for a required key, so that the rest of the document is checked too.
fn stand_in(key: &str) -> Option<Value> {
    match key {
        "topics" => Some(serde_json::json!(["t"])),
        "ack" => Some(serde_json::json!("after_commit")),
        _ => None,
    }
}

/// Returns the offset in a text of a key, or of its nearest ancestor in the document. For an
/// element of a list, returns the offset of the element.
fn place(document: &DeTable<'_>, key: &str) -> Option<usize> {
    let mut steps = key.split(['.', '[']).map(|step| step.trim_end_matches(']'));
    let (name, value) =
        document.iter().find(|(name, _)| Some(name.get_ref().as_ref()) == steps.clone().next())?;
    steps.next();
    let (mut start, mut value) = (name.span().start, value);
    for step in steps {
        let next =
            match (value.get_ref().as_table(), value.get_ref().as_array(), step.parse::<usize>()) {
                (Some(table), ..) => table
                    .iter()
                    .find(|(name, _)| name.get_ref() == step)
                    .map(|(name, value)| (name.span().start, value)),
                (_, Some(array), Ok(index)) => {
                    array.get(index).map(|value| (value.span().start, value))
                }
                _ => None,
            };
        let Some(next) = next else { break };
        (start, value) = next;
    }
    Some(start)
}

fn line(text: &str, start: usize) -> usize {
    text.get(..start).map_or(1, |before| before.matches('\n').count() + 1)
}

/// Formats an error of TOML in one line, without the text in which it was found: that may hold a
/// password.
pub fn toml_error(text: &str, error: &toml::de::Error) -> String {
    let message = without_values(error.message());
    match error.span() {
        Some(span) => format!("line {}: {message}", line(text, span.start)),
        None => message,
    }
}

/// Replaces the names of Rust types, which mean nothing to the author of a file.
fn in_words_of_toml(message: &str) -> String {
    const KINDS: [(&str, &str); 5] = [
        ("tuple struct ", "a value"),
        ("newtype struct ", "a value"),
        ("struct ", "a table"),
        (
            "data did not match any variant of untagged enum ",
            "it has none of the forms that are known",
        ),
        ("enum ", "one of its words"),
    ];
    let found = KINDS.iter().find_map(|(kind, plain)| Some((message.split_once(kind)?, plain)));
    match found {
        Some(((before, name), plain)) => {
            let rest =
                name.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_' || c == ':');
            format!("{before}{plain}{rest}")
        }
        None => message.to_owned(),
    }
}

/// Returns a message without the string values that it quotes.
fn without_values(message: &str) -> String {
    let message = &in_words_of_toml(message);
    match message.split_once(" string \"") {
        Some((before, value)) => {
            format!("{before} string{}", value.rfind("\", ").map_or("", |end| &value[end + 1..]))
        }
        None => message.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(text: &str) -> Vec<String> {
        let (policy, problems) = Policy::read(text);
        assert_eq!(policy.is_some(), problems.is_empty(), "{problems:?}");
        problems.iter().map(ToString::to_string).collect()
    }

    const GOOD: &str = "topics = ['t']\nack = 'after_commit'\n";

    // What could go wrong: an error names a Rust type where a table got a word.
    #[test]
    fn no_type_of_rust_is_named() {
        let keys = [
            "identity",
            "batch",
            "retry",
            "limits",
            "breaker",
            "alerts",
            "dead_letters",
            "replay",
            "sequence",
            "kafka",
            "schemas",
            "reference",
            "outgoing",
            "order",
            "dedup",
            "inbox",
            "light",
            "retention",
            "factors",
            "effects",
            "payload",
            "masking",
            "collision",
            "no_route",
            "wire_format",
        ];
        for key in keys {
            for value in ["5", "'word'", "[1]", "{ nothing = 1 }", "true", "1.5", "[[1]]"] {
                for problem in problems(&format!("{GOOD}{key} = {value}\n")) {
                    assert!(
                        !["struct", "enum", "::", "newtype", "variant index"]
                            .iter()
                            .any(|word| problem.contains(word)),
                        "{key} = {value}: {problem}"
                    );
                }
            }
        }
    }

    // What could go wrong: errors are reported one at a time, each after the one before it is
    // mended.
    #[test]
    fn everything_that_is_wrong_is_said_at_once() {
        let text = "\
topics = 't'
dedupe = 'off'
[retry]
backof_min_ms = 5
attempts_max = -1
lease_ms = 0
[identity]
id = ['cloudevents', { heder = 'x' }, 'position']
[limits]
deadline_ms = 'long'
[batch]
messages_max = 0
[kafka]
properties = { 'a.b' = 5 }
";
        let found = problems(text);
        let starts = [
            "line 1: `topics`: invalid type: string, expected a sequence",
            "line 2: unknown key `dedupe`, expected one of `topics`, `ack`",
            "line 4: unknown key `retry.backof_min_ms`, expected one of `preset`",
            "line 5: `retry.attempts_max`: invalid value: integer `-1`, expected u32",
            "line 6: `retry.lease_ms` is 0; it must be at least 1",
            "line 8: ",
            "line 10: `limits.deadline_ms`: invalid type: string, expected u64",
            "line 12: `batch.messages_max` is 0; it must be at least 1",
            "line 14: ",
            "missing field `ack`",
        ];
        assert_eq!(found.len(), starts.len(), "{found:#?}");
        for (found, start) in found.iter().zip(starts) {
            assert!(found.starts_with(start), "`{found}` should start with `{start}`");
        }
    }

    #[test]
    fn a_text_that_is_no_toml_is_refused_by_its_lines() {
        let found = problems("topics = [\nack = after_commit\n");
        assert!(
            !found.is_empty() && found.iter().all(|found| found.starts_with("line ")),
            "{found:#?}"
        );
        let found = problems(&format!("{GOOD}limits = {{ deadline_ms = 99999999999999999999 }}"));
        assert!(
            found.len() == 1 && found[0].starts_with("line 3: ") && !found[0].contains("null"),
            "{found:#?}"
        );
    }

    #[test]
    fn no_value_is_told() {
        for text in [
            "ack = 'hunter2",
            "limits = 'hunter2'",
            "kafka = { properties = { 'sasl.password' = ['hunter2'] } }",
            "payload = ['hunter2']",
        ] {
            let found = problems(&format!("{GOOD}{text}"));
            assert!(
                !found.is_empty() && found.iter().all(|found| !found.contains("hunter2")),
                "{found:#?}"
            );
        }
    }

    #[test]
    fn what_is_right_has_no_problem() {
        assert_eq!(problems(GOOD), [""; 0]);
        assert_eq!(
            problems(&format!("{GOOD}retry = {{ preset = 'seed-002', workers = 1 }}")),
            [""; 0]
        );
    }

    #[test]
    fn json_is_read_as_toml_is() {
        let (policy, found) = Policy::from_value(
            serde_json::json!({ "topics": ["t"], "ack": "never", "batch": { "x": 1 } }),
        );
        let found: Vec<_> = found.iter().map(|found| found.key.as_str()).collect();
        assert_eq!((policy, found), (None, vec!["ack", "batch.x"]));
        let (policy, found) = Policy::from_value(serde_json::json!(5));
        assert!(policy.is_none() && found.len() == 1, "{found:?}");
    }
}
