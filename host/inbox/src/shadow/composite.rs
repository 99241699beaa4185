//! Rows as PostgreSQL writes them: `(1,"a ""b""",)`.

/// Parses the text form of a row into its columns; none where the text is not a row. A column that
/// is null is none.
pub(super) fn parse(text: &str) -> Option<Vec<Option<String>>> {
    let inner = text.strip_prefix('(')?.strip_suffix(')')?;
    let mut columns = Vec::new();
    let mut rest = inner.chars().peekable();
    loop {
        let (mut value, mut is_null, mut in_quotes) = (String::new(), true, false);
        loop {
            match rest.peek().copied() {
                None if in_quotes => return None,
                None => break,
                Some(',') if !in_quotes => break,
                Some('"') => {
                    rest.next();
                    is_null = false;
                    // Two quotes within quotes are one; the first opens, the last closes.
                    if in_quotes && rest.peek() == Some(&'"') {
                        value.push('"');
                        rest.next();
                    } else {
                        in_quotes = !in_quotes;
                    }
                }
                Some('\\') => {
                    rest.next();
                    value.push(rest.next()?);
                    is_null = false;
                }
                Some(other) => {
                    rest.next();
                    value.push(other);
                    is_null = false;
                }
            }
        }
        columns.push((!is_null).then_some(value));
        if rest.next().is_none() {
            return Some(columns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &[Option<&str>]) {
        let expected: Vec<_> = expected.iter().map(|column| column.map(str::to_owned)).collect();
        assert_eq!(parse(text), Some(expected), "{text}");
    }

    #[test]
    fn a_row_is_read_as_it_was_written() {
        check("()", &[None]);
        check("(,)", &[None, None]);
        check("(1,abc,)", &[Some("1"), Some("abc"), None]);
        check(r#"("",",",")")"#, &[Some(""), Some(","), Some(")")]);
        check(r#"(1,"a ""q"", \\ é",x)"#, &[Some("1"), Some("a \"q\", \\ é"), Some("x")]);
        check("(\"two\nlines\")", &[Some("two\nlines")]);
        check(r#"("(""(1,2)"",)",{NULL})"#, &[Some(r#"("(1,2)",)"#), Some("{NULL}")]);
    }

    #[test]
    fn what_is_no_row_is_refused() {
        for text in ["", "(", "1,2", r#"("open)"#, r"(\)"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
