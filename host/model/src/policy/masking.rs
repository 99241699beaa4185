//! The parts of a message that operators see masked.

use serde::{Deserialize, Serialize};

use super::{KeySource, Policy, check::PolicyProblem, explain::listed};
use crate::masking::{Mask, Pointer};

/// Maximum number of fields, and of headers.
const MASKED_MAX: usize = 100;
/// Maximum bytes of a field's JSON pointer, and of the name of a header.
const MASKED_BYTES_MAX: usize = 200;

/// The parts of a message that are masked wherever the host shows it. Handlers get messages whole.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Masking {
    /// JSON pointers (RFC 6901) into the payload, in which a segment `*` stands for every member or
    /// element. A payload that is not JSON is masked whole.
    pub fields: Vec<String>,
    /// Names of headers, regardless of case.
    pub headers: Vec<String>,
    /// Whether the record's key and the ordering key are masked.
    pub key: bool,
    /// Least role that may see a message unmasked.
    pub role: UnmaskRole,
}

/// The least role that may see a message unmasked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UnmaskRole {
    /// Whoever acts on messages.
    Operator,
    /// Whoever may change the policy.
    #[default]
    Admin,
}

impl UnmaskRole {
    /// Returns the name of the role in a policy.
    pub fn name(self) -> &'static str {
        match self {
            Self::Operator => "operator",
            Self::Admin => "admin",
        }
    }
}

impl Masking {
    pub(super) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Checks the number, the length and the form of what is masked.
    pub(super) fn check(&self, found: &mut Vec<PolicyProblem>) {
        for (key, masked) in [("fields", &self.fields), ("headers", &self.headers)] {
            let key = format!("masking.{key}");
            if masked.len() > MASKED_MAX {
                let text = format!(
                    "`{key}` has {} entries; there may be at most {MASKED_MAX}",
                    masked.len()
                );
                found.push(PolicyProblem::new(&key, text));
            }
            for (at, text) in masked.iter().enumerate().take(MASKED_MAX) {
                let key = format!("{key}[{at}]");
                if text.len() > MASKED_BYTES_MAX || text.chars().any(char::is_control) {
                    let rule = format!(
                        "`{key}` has {} bytes; it must have at most {MASKED_BYTES_MAX}, without \
                            control characters",
                        text.len()
                    );
                    found.push(PolicyProblem::new(&key, rule));
                }
            }
        }
        for (at, field) in self.fields.iter().enumerate().take(MASKED_MAX) {
            if Pointer::parse(field).is_none() {
                let key = format!("masking.fields[{at}]");
                let rule = format!(
                    "`{key}` is no JSON pointer: it must be empty or begin with `/`, and `~` must \
                        stand before `0` or `1`"
                );
                found.push(PolicyProblem::new(&key, rule));
            }
        }
        for (at, header) in self.headers.iter().enumerate().take(MASKED_MAX) {
            if header.is_empty() {
                let key = format!("masking.headers[{at}]");
                found.push(PolicyProblem::new(&key, format!("`{key}` is empty; name a header")));
            }
        }
    }

    /// Describes what is masked, where anything is.
    pub(super) fn explain(&self) -> Option<String> {
        let named = |names: &[String]| listed(names.iter().map(|name| format!("`{name}`")), "and");
        let fields = (!self.fields.is_empty()).then(|| {
            format!("{} of the payload, or all of it where it is not JSON", named(&self.fields))
        });
        let headers =
            (!self.headers.is_empty()).then(|| format!("the headers {}", named(&self.headers)));
        let key = self.key.then(|| "the keys".to_owned());
        let masked: Vec<_> = [fields, headers, key].into_iter().flatten().collect();
        (!masked.is_empty()).then(|| {
            format!(
                "Wherever a message is shown, these are masked: {}. With the role `{}` one sees a \
                    single message unmasked, and the audit log says why.",
                masked.join("; "),
                self.role.name()
            )
        })
    }
}

impl Policy {
    /// Returns the mask of the consumer's messages. An ordering key that comes from a masked field
    /// is masked with it.
    pub fn mask(&self) -> Mask {
        let Masking { fields, headers, key, .. } = &self.masking;
        let fields: Vec<_> = fields.iter().filter_map(|field| Pointer::parse(field)).collect();
        let is_of_field = match &self.identity.ordering_key {
            KeySource::RecordKey => false,
            KeySource::JsonPointer(to) => {
                let to = Pointer::parse(to);
                let covers = |field: &Pointer| to.as_ref().is_none_or(|to| field.covers(to));
                fields.iter().any(covers)
            }
        };
        Mask::new(fields, headers.clone(), *key, *key || is_of_field)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(text: &str) -> Vec<String> {
        let text = format!("topics = ['t']\nack = 'after_commit'\nmasking = {text}");
        Policy::read(&text).1.iter().map(ToString::to_string).collect()
    }

    // What could go wrong: a pointer that finds nothing is stored, and what it should mask is
    // shown.
    #[test]
    fn what_cannot_be_masked_is_refused_by_its_name() {
        for good in [
            "{}",
            "{ fields = ['', '/a/*/b~1c~0d', '/0'], headers = ['X-Card'], key = true }",
            "{ role = 'operator' }",
        ] {
            assert_eq!(problems(good), [""; 0], "{good}");
        }
        let many = format!("{{ fields = [{}] }}", vec!["'/a'"; MASKED_MAX + 1].join(", "));
        let long = format!("{{ headers = ['a', '{}'] }}", "x".repeat(MASKED_BYTES_MAX + 1));
        for (bad, said) in [
            ("{ fields = ['/a', 'b'] }", "line 3: `masking.fields[1]` is no JSON pointer"),
            ("{ fields = ['/~2'] }", "line 3: `masking.fields[0]` is no JSON pointer"),
            ("{ fields = ['/a~'] }", "line 3: `masking.fields[0]` is no JSON pointer"),
            ("{ fields = [\"/a\\u0000\"] }", "line 3: `masking.fields[0]` has 3 bytes"),
            ("{ headers = [''] }", "line 3: `masking.headers[0]` is empty"),
            ("{ role = 'viewer' }", "line 3: `masking.role`: unknown variant `viewer`"),
            ("{ field = ['/a'] }", "line 3: unknown key `masking.field`"),
            (&many, "line 3: `masking.fields` has 101 entries"),
            (&long, "line 3: `masking.headers[1]` has 201 bytes"),
        ] {
            let found = problems(bad);
            assert!(found.len() == 1 && found[0].starts_with(said), "{bad}: {found:?}");
        }
    }
}
