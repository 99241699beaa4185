//! Commands of the program `oncebox` that do what a form does.

/// Returns a command line for a shell, from its words.
pub(crate) fn line<'a>(words: impl IntoIterator<Item = &'a str>) -> String {
    words.into_iter().fold("oncebox".to_owned(), |line, word| line + " " + &quoted(word))
}

/// Returns the words of an option with its value. A value that begins with a dash would be another
/// option, so that it stands in one word with its own.
pub(crate) fn option(name: &str, value: &str) -> Vec<String> {
    let name = format!("--{}", name.replace('_', "-"));
    match value.starts_with('-') {
        true => vec![format!("{name}={value}")],
        false => vec![name, value.to_owned()],
    }
}

/// Quotes a word for a POSIX shell where it needs it.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_./:=@%+,-".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_stay_words() {
        assert_eq!(line(["why", "a/b"]), "oncebox why a/b");
        assert_eq!(line(["why", "a b;$(x) it's", ""]), r"oncebox why 'a b;$(x) it'\''s' ''");
        // An id that looks like an option of a shell's making.
        assert_eq!(line(["why", "--", "--$(x)=1"]), "oncebox why -- '--$(x)=1'");
    }

    #[test]
    fn a_value_is_no_option() {
        assert_eq!(option("event_type", "x y"), ["--event-type", "x y"]);
        assert_eq!(option("error", "--$(x)=y"), ["--error=--$(x)=y"]);
        let words = option("error", "--$(x)=y");
        assert_eq!(line(words.iter().map(String::as_str)), "oncebox '--error=--$(x)=y'");
    }
}
