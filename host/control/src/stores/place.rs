//! The place that a reference names: `s3://`, a bucket, `/` and the key of an object. A key is
//! written as it is. What a server, or a program between, could read as another key is refused.

use oncebox_model::{
    hooks::{self, Defect},
    reference::{ReferenceError, ReferenceFault},
};

/// Longest key, bytes, as S3 has it.
const KEY_BYTES_MAX: usize = 1_024;
/// Most characters of a reference that an error repeats.
const SHOWN_MAX: usize = 200;

/// The object that a reference names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ObjectPlace<'a> {
    /// Name of the bucket.
    pub(super) bucket: &'a str,
    /// Key of the object in it.
    pub(super) key: &'a str,
}

impl<'a> ObjectPlace<'a> {
    /// Reads a reference.
    ///
    /// # Errors
    /// `Malformed` where it names no object. `NotAllowed` where its key has a form that may stand
    /// for another key.
    pub(super) fn of(reference: &'a str) -> Result<Self, ReferenceError> {
        let malformed = |why: &str| {
            let text = format!(
                "`{}` {why}; a reference is `s3://bucket/key`, with at most {KEY_BYTES_MAX} bytes \
                    of key: have the producer write one, under another id",
                shown(reference)
            );
            ReferenceError::new(ReferenceFault::Malformed, text)
        };
        let rest = reference.strip_prefix("s3://").ok_or_else(|| malformed("is no reference"))?;
        let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() || key.is_empty() || key.len() > KEY_BYTES_MAX {
            return Err(malformed("names no object"));
        }
        if reference.chars().any(char::is_control) {
            return Err(malformed("has a control character"));
        }
        let place = Self { bucket, key };
        if is_plain(key) { Ok(place) } else { Err(place.refused(EVASIVE)) }
    }

    /// Checks that the place is in a bucket and below a prefix.
    ///
    /// # Errors
    /// `NotAllowed` where it is not.
    pub(super) fn check(&self, bucket: &str, prefix: &str) -> Result<(), ReferenceError> {
        if hooks::sabotage(Defect::ReferencesUnjudged) {
            return Ok(());
        }
        if self.bucket != bucket {
            return Err(self.refused("it is not in the bucket of the tenant's store"));
        }
        let below = match prefix {
            "" => Some(self.key),
            prefix => self.key.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('/')),
        };
        if below.is_none_or(str::is_empty) {
            return Err(self.refused("it is not below the prefix of the tenant's store"));
        }
        Ok(())
    }

    /// Returns the error of a place that the tenant may not read.
    pub(super) fn refused(&self, why: &str) -> ReferenceError {
        let text = format!(
            "`{}` may not be fetched: {why}. Have the producer put the object where the tenant's \
                store is, or change that with `oncebox tenant store set`; then redrive",
            shown(&format!("s3://{}/{}", self.bucket, self.key))
        );
        ReferenceError::new(ReferenceFault::NotAllowed, text)
    }
}

const EVASIVE: &str = "its key has an empty part, `.`, `..`, `%`, `\\`, `?` or `#`";

/// Returns whether a key cannot be read as another one.
pub(super) fn is_plain(key: &str) -> bool {
    let is_plain_part = |part: &str| !matches!(part, "" | "." | "..");
    let is_evasive = |c: char| c.is_control() || "%\\?#".contains(c);
    !key.contains(is_evasive) && key.split('/').all(is_plain_part)
}

/// Returns the beginning of a reference, for an error.
pub(super) fn shown(reference: &str) -> String {
    let plain = |c: char| if c.is_control() { '\u{fffd}' } else { c };
    let mut shown: String = reference.chars().take(SHOWN_MAX).map(plain).collect();
    if reference.chars().nth(SHOWN_MAX).is_some() {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(reference: &str) -> Result<(), ReferenceFault> {
        let place = ObjectPlace::of(reference).map_err(|error| error.fault)?;
        place.check("docs", "acme/in").map_err(|error| error.fault)
    }

    #[test]
    fn an_object_below_the_prefix_is_allowed() {
        for key in ["acme/in/a", "acme/in/2026/11/é ü+~.json", "acme/in/..a/b..", "acme/in/a:b@c"]
        {
            assert_eq!(judged(&format!("s3://docs/{key}")), Ok(()), "{key}");
        }
        let whole = ObjectPlace::of("s3://docs/a").expect("a place");
        assert_eq!(whole.check("docs", ""), Ok(()));
    }

    // What could go wrong: a reference leaves the prefix or the bucket by some spelling of a step
    // back. Each way out is tried at each place of the key, and every spelling in each way out.
    #[test]
    fn no_spelling_leaves_the_prefix() {
        let dots = ["..", "%2e%2e", "%2E.", ".%2e", "%252e%252e", "%c0%ae%c0%ae", "\\.."];
        let slashes = ["/", "%2f", "%2F", "%5c", "\\", "%252f", "//", "/./"];
        let mut tried = 0;
        for depth in 0..3 {
            for dots in dots {
                for slash in slashes {
                    let inside = "x/".repeat(depth);
                    for out in 1..4 {
                        let steps = format!("{dots}{slash}").repeat(out);
                        for start in ["acme/in/", "acme/in", "", "/", "acme/"] {
                            let key = format!("{start}{inside}{steps}other/secret");
                            let reference = format!("s3://docs/{key}");
                            assert_eq!(
                                judged(&reference),
                                Err(ReferenceFault::NotAllowed),
                                "{reference}"
                            );
                            tried += 1;
                        }
                    }
                }
            }
        }
        assert!(tried > 2_000, "{tried}");
        for other in [
            "s3://other/acme/in/a",
            "s3://docs.other/acme/in/a",
            "s3://docs:9000/acme/in/a",
            "s3://docs@other/acme/in/a",
            "s3://docs/acme/inside/a",
            "s3://docs/acme/in",
            "s3://docs/acme/in/",
            "s3://docs/acme/in/a?versionId=1",
            "s3://docs/acme/in/a#b",
            "s3://docs/ACME/in/a",
        ] {
            assert_eq!(judged(other), Err(ReferenceFault::NotAllowed), "{other}");
        }
    }

    #[test]
    fn what_names_no_object_is_malformed() {
        let long = format!("s3://docs/{}", "x".repeat(1_025));
        for text in [
            "",
            "acme/in/a",
            "S3://docs/acme/in/a",
            "https://docs/acme/in/a",
            "file:///etc/passwd",
            "s3:/docs/a",
            "s3://",
            "s3://docs",
            "s3://docs/",
            "s3:///acme/in/a",
            "s3://docs/acme/in/a\0",
            "s3://docs/acme/in/a\r\nb",
            " s3://docs/acme/in/a",
            &long,
        ] {
            assert_eq!(judged(text), Err(ReferenceFault::Malformed), "{text}");
        }
        let error = ObjectPlace::of(&long).expect_err("it is long").to_string();
        assert!(error.len() < 600, "{error}");
    }
}
