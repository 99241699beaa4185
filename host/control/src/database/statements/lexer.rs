//! Lexer that cuts SQL texts into statements as PostgreSQL would. Quotes, escape strings, dollar
//! quotes, nested comments and `BEGIN ATOMIC` bodies hold no ends of statements.
//!
//! <https://www.postgresql.org/docs/current/sql-syntax-lexical.html>; bodies are counted as psql
//! does.

use oncebox_model::problem::Problem;

/// A part of a statement, as far as the checks need it. Comments and spaces are not tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Lexeme {
    /// A keyword or an unquoted name, in lower case.
    Word(String),
    /// A quoted name, a text, a number or a parameter.
    Other,
    /// Any other character.
    Symbol(char),
}

/// One statement of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Statement {
    /// Text of the statement, from its first token to its last.
    pub(crate) text: String,
    /// Line of its first token, from 1.
    pub(crate) line: usize,
    pub(super) tokens: Vec<Lexeme>,
}

/// Returns the statements of a text, in order, without empty ones.
pub(super) fn split(text: &str) -> Result<Vec<Statement>, Problem> {
    let mut lexer = Lexer { text, at: 0 };
    let (mut statements, mut open) = (Vec::new(), Open::default());
    // Lines are counted on from statement to statement: there may be as many statements as lines.
    let mut counted = (0, 1);
    let mut close = |open: Open| {
        counted.1 += text[counted.0..open.from.max(counted.0)].matches('\n').count();
        counted.0 = open.from.max(counted.0);
        open.close(text, counted.1)
    };
    while let Some((from, token)) = lexer.next()? {
        if token == Lexeme::Symbol(';') && open.is_outside() {
            statements.extend(close(std::mem::take(&mut open)));
        } else {
            open.push(from, lexer.at, token);
        }
    }
    statements.extend(close(open));
    Ok(statements)
}

/// A statement whose end is not read yet.
#[derive(Default)]
struct Open {
    from: usize,
    to: usize,
    tokens: Vec<Lexeme>,
    parentheses: usize,
    /// Depth of `BEGIN … END` and `CASE … END` in the body of a routine.
    blocks: usize,
}

impl Open {
    fn is_outside(&self) -> bool {
        self.parentheses == 0 && self.blocks == 0
    }

    fn push(&mut self, from: usize, to: usize, token: Lexeme) {
        if self.tokens.is_empty() {
            self.from = from;
        }
        self.to = to;
        match &token {
            Lexeme::Symbol('(') => self.parentheses += 1,
            Lexeme::Symbol(')') => self.parentheses = self.parentheses.saturating_sub(1),
            Lexeme::Word(word) if self.is_routine() => match word.as_str() {
                "begin" => self.blocks += 1,
                "case" if self.blocks > 0 => self.blocks += 1,
                "end" => self.blocks = self.blocks.saturating_sub(1),
                _ => {}
            },
            _ => {}
        }
        self.tokens.push(token);
    }

    fn is_routine(&self) -> bool {
        let words: Vec<_> = self.tokens.iter().take(4).map_while(Lexeme::word).collect();
        let words = words.strip_prefix(&["create"]).unwrap_or_default();
        matches!(
            words.strip_prefix(&["or", "replace"]).unwrap_or(words),
            ["function" | "procedure", ..]
        )
    }

    fn close(self, text: &str, line: usize) -> Option<Statement> {
        let text = text[self.from..self.to].to_owned();
        (!self.tokens.is_empty()).then_some(Statement { text, line, tokens: self.tokens })
    }
}

impl Lexeme {
    /// Returns the word of a word token.
    pub(super) fn word(&self) -> Option<&str> {
        match self {
            Self::Word(word) => Some(word),
            _ => None,
        }
    }
}

struct Lexer<'a> {
    text: &'a str,
    at: usize,
}

impl Lexer<'_> {
    /// Reads the next token, and returns it with its offset.
    fn next(&mut self) -> Result<Option<(usize, Lexeme)>, Problem> {
        self.skip_blank()?;
        let from = self.at;
        let Some(first) = self.peek() else { return Ok(None) };
        let token = match first {
            '\'' => self.quoted('\'', false)?,
            '"' => self.quoted('"', false)?,
            '$' if self.dollar_tag().is_some() => self.dollar_quoted()?,
            '0'..='9' => self.while_in(|c| c.is_ascii_digit() || c == '.'),
            c if begins_word(c) => self.word()?,
            c => {
                self.at += c.len_utf8();
                Lexeme::Symbol(c)
            }
        };
        Ok(Some((from, token)))
    }

    fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn skip_blank(&mut self) -> Result<(), Problem> {
        loop {
            let before = self.at;
            self.while_in(is_space);
            if self.rest().starts_with("--") {
                self.while_in(|c| c != '\n' && c != '\r');
            } else if self.rest().starts_with("/*") {
                self.comment()?;
            }
            if self.at == before {
                return Ok(());
            }
        }
    }

    fn while_in(&mut self, is_in: impl Fn(char) -> bool) -> Lexeme {
        let rest = self.rest();
        self.at += rest.find(|c| !is_in(c)).unwrap_or(rest.len());
        Lexeme::Other
    }

    /// Skips a block comment, in which comments may be nested.
    fn comment(&mut self) -> Result<(), Problem> {
        let from = self.at;
        let mut depth = 0;
        loop {
            if self.rest().starts_with("/*") {
                (depth, self.at) = (depth + 1, self.at + 2);
            } else if self.rest().starts_with("*/") {
                (depth, self.at) = (depth - 1, self.at + 2);
            } else {
                self.at += self.peek().ok_or_else(|| self.endless("a comment", from))?.len_utf8();
            }
            if depth == 0 {
                return Ok(());
            }
        }
    }

    /// Reads a quoted text or name. Two quotes stand for one, and with escapes a backslash hides
    /// the next character.
    fn quoted(&mut self, quote: char, escapes: bool) -> Result<Lexeme, Problem> {
        let from = self.at;
        self.at += 1;
        loop {
            let c = self.peek().ok_or_else(|| self.endless("a quoted text or name", from))?;
            self.at += c.len_utf8();
            if escapes && c == '\\' {
                self.at += self.peek().map_or(0, char::len_utf8);
            } else if c == quote {
                if self.peek() == Some(quote) {
                    self.at += 1;
                } else if !(quote == '\'' && self.goes_on()) {
                    return Ok(Lexeme::Other);
                }
            }
        }
    }

    /// Returns whether the text continues on the next line, as in standard SQL, and then skips to
    /// it. The continuation has the escapes of the first part.
    fn goes_on(&mut self) -> bool {
        let before = self.at;
        loop {
            let here = self.at;
            self.while_in(is_space);
            if self.rest().starts_with("--") {
                self.while_in(|c| c != '\n' && c != '\r');
            }
            if self.at == here {
                break;
            }
        }
        let goes_on =
            self.peek() == Some('\'') && self.text[before..self.at].contains(['\n', '\r']);
        self.at = if goes_on { self.at + 1 } else { before };
        goes_on
    }

    /// Returns the `$$` or `$tag$` at the present offset.
    fn dollar_tag(&self) -> Option<&str> {
        let rest = self.rest().strip_prefix('$')?;
        let tag = &rest[..rest.find('$')?];
        let sound = tag.is_empty()
            || tag.starts_with(begins_word) && tag.chars().all(|c| c != '$' && goes_on_word(c));
        sound.then(|| &self.rest()[..tag.len() + 2])
    }

    fn dollar_quoted(&mut self) -> Result<Lexeme, Problem> {
        let from = self.at;
        let Some(tag) = self.dollar_tag() else { return Ok(Lexeme::Other) };
        let length = tag.len();
        let end = self.rest()[length..]
            .find(tag)
            .ok_or_else(|| self.endless("a text between dollars", from))?;
        self.at += end + 2 * length;
        Ok(Lexeme::Other)
    }

    fn word(&mut self) -> Result<Lexeme, Problem> {
        let from = self.at;
        self.while_in(goes_on_word);
        let word = self.text[from..self.at].to_ascii_lowercase();
        match (word.as_str(), self.rest().as_bytes()) {
            ("e", [b'\'', ..]) => self.quoted('\'', true),
            ("b" | "x" | "n", [b'\'', ..]) => self.quoted('\'', false),
            ("u", [b'&', quote @ (b'\'' | b'"'), ..]) => {
                let quote = char::from(*quote);
                self.at += 1;
                self.quoted(quote, false)
            }
            _ => Ok(Lexeme::Word(word)),
        }
    }

    fn endless(&self, what: &str, from: usize) -> Problem {
        let line = 1 + self.text[..from].matches('\n').count();
        Problem::new(
            "statement_endless",
            format!("line {line}: {what} that begins here has no end"),
        )
    }
}

fn is_space(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\r' | '\x0b' | '\x0c')
}

fn begins_word(c: char) -> bool {
    c.is_ascii_alphabetic() || c == '_' || !c.is_ascii()
}

fn goes_on_word(c: char) -> bool {
    begins_word(c) || c.is_ascii_digit() || c == '$'
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, statements: &[&str]) {
        let found: Vec<_> = split(text)
            .expect("it can be cut")
            .into_iter()
            .map(|statement| statement.text)
            .collect();
        assert_eq!(found, statements, "{text}");
    }

    #[test]
    fn ends_stand_outside_of_quotes_comments_and_bodies() {
        check("", &[]);
        check(" ; -- nothing\n;/* ; /* ; */ ; */", &[]);
        check("SELECT 1; SELECT 2", &["SELECT 1", "SELECT 2"]);
        check(
            "SELECT ';', \";\"\"\" -- ;\n; SELECT 'it''s;'",
            &["SELECT ';', \";\"\"\"", "SELECT 'it''s;'"],
        );
        check("/* a; */ SELECT 1 /* /* ; */ */ ;", &["SELECT 1"]);
        check(
            "SELECT $$;$$; SELECT $a$;$b$;$$;$a$, $1;",
            &["SELECT $$;$$", "SELECT $a$;$b$;$$;$a$, $1"],
        );
        check("SELECT a$b$; SELECT $c$d;$c$", &["SELECT a$b$", "SELECT $c$d;$c$"]);
        check(
            "SELECT 'a\\'; SELECT E'\\';'; SELECT e'\\\\'; SELECT 2",
            &["SELECT 'a\\'", "SELECT E'\\';'", "SELECT e'\\\\'", "SELECT 2"],
        );
        check("SELECT namee'\\';", &["SELECT namee'\\'"]);
        check(
            "SELECT U&'\\0041;', U&\";\", b'1', x'f;'; SELECT 1",
            &["SELECT U&'\\0041;', U&\";\", b'1', x'f;'", "SELECT 1"],
        );
        check(
            "INSERT INTO t VALUES (1); COMMENT ON TABLE ä IS 'ö;'",
            &["INSERT INTO t VALUES (1)", "COMMENT ON TABLE ä IS 'ö;'"],
        );
    }

    // The part on the next line has the escapes of the first: its end is after `b;`.
    #[test]
    fn a_text_goes_on_in_the_next_line_with_its_escapes() {
        check("SELECT E'a'\n '\\' ; b;' ; SELECT 2", &["SELECT E'a'\n '\\' ; b;'", "SELECT 2"]);
        check("SELECT E'a' -- c\n '\\';'", &["SELECT E'a' -- c\n '\\';'"]);
        check("SELECT E'a' '\\'; SELECT 2", &["SELECT E'a' '\\'", "SELECT 2"]);
        check("SELECT 'a'\n'\\'; SELECT 2", &["SELECT 'a'\n'\\'", "SELECT 2"]);
    }

    #[test]
    fn bodies_in_standard_sql_are_one_statement() {
        const BODY: &str = "CREATE OR REPLACE FUNCTION f(a int) RETURNS int LANGUAGE sql BEGIN \
            ATOMIC \
            INSERT INTO t VALUES (CASE WHEN a > 1 THEN 2 END); SELECT 1; END";
        check(&format!("{BODY}; SELECT 2;"), &[BODY, "SELECT 2"]);
        check(
            "SELECT CASE WHEN true THEN 1 END; BEGIN; SELECT 1; END",
            &["SELECT CASE WHEN true THEN 1 END", "BEGIN", "SELECT 1", "END"],
        );
    }

    #[test]
    fn lines_are_those_of_the_first_word() {
        let lines: Vec<_> = split("-- one\n\nSELECT 1;\n/* \n */ SELECT\n 2")
            .expect("statements")
            .iter()
            .map(|s| s.line)
            .collect();
        assert_eq!(lines, [3, 5]);
    }

    #[test]
    fn what_has_no_end_is_named_with_its_line() {
        for (text, said) in [
            ("SELECT 1;\n'a", "line 2: a quoted text or name"),
            ("SELECT E'\\'", "line 1: a quoted"),
            ("\n\n/* /* */", "line 3: a comment"),
            ("SELECT $x$ $X$", "line 1: a text between dollars"),
        ] {
            let problem = split(text).expect_err("no end");
            assert!(problem.text.starts_with(said), "{problem}");
        }
    }
}
