//! SQL as words, literals and symbols. Enough to find the parts of a statement that PostgreSQL has
//! accepted already; it does not check syntax.

/// A piece of a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SqlToken<'a> {
    pub(super) kind: TokenKind,
    pub(super) text: &'a str,
    /// Offset in the statement, bytes.
    pub(super) at: usize,
    /// Number of parentheses around it.
    pub(super) depth: usize,
}

/// Kind of a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenKind {
    /// A key word or a name.
    Word,
    /// A name in double quotes, which belong to the text.
    Quoted,
    /// A string, a number or a parameter.
    Value,
    /// One character of anything else.
    Symbol,
}

impl SqlToken<'_> {
    /// Returns whether the token is this key word.
    pub(super) fn is(&self, word: &str) -> bool {
        self.kind == TokenKind::Word && self.text.eq_ignore_ascii_case(word)
    }

    /// Returns whether the token is this character.
    pub(super) fn is_symbol(&self, symbol: char) -> bool {
        self.kind == TokenKind::Symbol && self.text.starts_with(symbol)
    }

    /// Returns the name that the token denotes, as the catalog has it.
    pub(super) fn name(&self) -> Option<String> {
        match self.kind {
            TokenKind::Word => Some(self.text.to_lowercase()),
            TokenKind::Quoted => Some(self.text.trim_matches('"').replace("\"\"", "\"")),
            TokenKind::Value | TokenKind::Symbol => None,
        }
    }
}

/// Splits a statement into its pieces, without comments and white space.
pub(super) fn tokens(text: &str) -> Vec<SqlToken<'_>> {
    let (mut found, mut at, mut depth) = (Vec::new(), 0, 0_usize);
    while let Some(first) = text[at..].chars().next() {
        let rest = &text[at..];
        let (kind, length) = match first {
            c if c.is_whitespace() => (None, c.len_utf8()),
            '-' if rest.starts_with("--") => (None, rest.find('\n').unwrap_or(rest.len())),
            '/' if rest.starts_with("/*") => (None, comment(rest)),
            '\'' => (Some(TokenKind::Value), string(rest, 1, false)),
            'e' | 'E' if rest[1..].starts_with('\'') => {
                (Some(TokenKind::Value), string(rest, 2, true))
            }
            '"' => (Some(TokenKind::Quoted), quoted(rest)),
            '$' => dollar(rest),
            c if c.is_ascii_digit() => (
                Some(TokenKind::Value),
                rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '.').unwrap_or(rest.len()),
            ),
            c if is_word(c) => (
                Some(TokenKind::Word),
                rest.find(|c: char| !is_word(c) && c != '$').unwrap_or(rest.len()),
            ),
            c => (Some(TokenKind::Symbol), c.len_utf8()),
        };
        if let Some(kind) = kind {
            let token = SqlToken { kind, text: &rest[..length], at, depth };
            let closes = token.is_symbol(')');
            depth = if closes {
                depth.saturating_sub(1)
            } else {
                depth + usize::from(token.is_symbol('('))
            };
            found.push(SqlToken { depth: if closes { depth } else { token.depth }, ..token });
        }
        at += length;
    }
    found
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || !c.is_ascii()
}

/// Returns the length of a comment, bytes. Comments nest.
fn comment(rest: &str) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    while at < rest.len() {
        match rest.as_bytes().get(at..at + 2) {
            Some(b"/*") => (depth, at) = (depth + 1, at + 2),
            Some(b"*/") => (depth, at) = (depth.saturating_sub(1), at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    rest.len()
}

/// Returns the length in bytes of a string whose text begins at `from`. A doubled quote does not
/// end the string.
fn string(rest: &str, from: usize, has_escapes: bool) -> usize {
    let bytes = rest.as_bytes();
    let mut at = from;
    while at < bytes.len() {
        match (bytes[at], bytes.get(at + 1)) {
            (b'\\', _) if has_escapes => at += 2,
            (b'\'', Some(b'\'')) => at += 2,
            (b'\'', _) => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

fn quoted(rest: &str) -> usize {
    let bytes = rest.as_bytes();
    let mut at = 1;
    while at < bytes.len() {
        match (bytes[at], bytes.get(at + 1)) {
            (b'"', Some(b'"')) => at += 2,
            (b'"', _) => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// Reads a parameter or a string in dollars. Returns its kind and its length in bytes.
fn dollar(rest: &str) -> (Option<TokenKind>, usize) {
    let digits = rest[1..].find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len() - 1);
    if digits > 0 {
        return (Some(TokenKind::Value), 1 + digits);
    }
    let Some(end) =
        rest[1..].find('$').map(|end| end + 2).filter(|end| rest[1..end - 1].chars().all(is_word))
    else {
        return (Some(TokenKind::Symbol), 1);
    };
    let close = rest[end..].find(&rest[..end]).map_or(rest.len(), |at| end + at + end);
    (Some(TokenKind::Value), close)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expected: &[&str]) {
        assert_eq!(
            tokens(text).iter().map(|token| token.text).collect::<Vec<_>>(),
            expected,
            "{text}"
        );
    }

    #[test]
    fn what_looks_like_sql_inside_literals_and_comments_is_none() {
        check(
            "SELECT 'a; -- b''c', $1 -- UPDATE\n/* /* DELETE */ */ FROM \"Or\"\"ders\"",
            &["SELECT", "'a; -- b''c'", ",", "$1", "FROM", "\"Or\"\"ders\""],
        );
        check("E'\\'x' $$ now() $$ $a$ $$ $a$ $", &["E'\\'x'", "$$ now() $$", "$a$ $$ $a$", "$"]);
        check("n=n+1.5e3", &["n", "=", "n", "+", "1.5e3"]);
        check("größe->'x'", &["größe", "-", ">", "'x'"]);
        check("'open", &["'open"]);
        check("/* open", &[]);
    }

    #[test]
    fn parentheses_are_counted() {
        let depths: Vec<_> =
            tokens("a (b (c)) d").iter().map(|token| (token.text, token.depth)).collect();
        assert_eq!(
            depths,
            [("a", 0), ("(", 0), ("b", 1), ("(", 1), ("c", 2), (")", 1), (")", 0), ("d", 0)]
        );
    }
}
