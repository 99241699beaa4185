//! Check of the statements that a guest may send.
//!
//! In PostgreSQL's grammar the first word decides the kind of a statement, and the extended
//! protocol takes exactly one statement. No parser is needed: the text behind the first word cannot
//! turn the statement into another kind.

/// First words of statements that read or change rows. None of these statements can touch the
/// transaction or the session.
const ALLOWED: &[&str] =
    &["SELECT", "INSERT", "UPDATE", "DELETE", "MERGE", "VALUES", "TABLE", "WITH"];

/// Most characters of a refused word in the error.
const WORD_SHOWN: usize = 32;

/// Refuses a statement whose first word is not in the list. The error is the reason.
pub(crate) fn check(text: &str) -> Result<(), String> {
    if text.contains('\0') {
        return Err("the statement contains a NUL character".to_owned());
    }
    let rest = skip_to_first_word(text)?;
    let word = first_word(rest);
    if ALLOWED.iter().any(|allowed| allowed.eq_ignore_ascii_case(word)) {
        return Ok(());
    }
    Err(refusal(word, rest))
}

fn refusal(word: &str, rest: &str) -> String {
    let allowed =
        "a statement begins with SELECT, INSERT, UPDATE, DELETE, MERGE, VALUES, TABLE or WITH";
    match (word, rest.chars().next()) {
        ("", None) => format!("the statement is empty; {allowed}"),
        ("", Some(c)) => {
            format!("a statement cannot begin with `{}`; {allowed}", c.escape_default())
        }
        (word, _) => {
            let shown: String = word.chars().take(WORD_SHOWN).collect();
            format!("`{}` is not allowed; {allowed}", shown.escape_debug())
        }
    }
}

/// Skips white space, comments and opening parentheses. White space is exactly that of PostgreSQL
/// 15: any other character is an error there and starts an unknown word here.
fn skip_to_first_word(text: &str) -> Result<&str, String> {
    let mut rest = text;
    loop {
        rest = rest.trim_start_matches([' ', '\t', '\n', '\r', '\u{c}', '(']);
        if let Some(comment) = rest.strip_prefix("--") {
            rest = comment.find(['\n', '\r']).map_or("", |end| &comment[end..]);
        } else if let Some(comment) = rest.strip_prefix("/*") {
            rest = skip_block_comment(comment)?;
        } else {
            return Ok(rest);
        }
    }
}

/// Skips the rest of a block comment. Block comments nest.
fn skip_block_comment(text: &str) -> Result<&str, String> {
    let bytes = text.as_bytes();
    let (mut depth, mut at) = (1, 0);
    while depth > 0 {
        match bytes.get(at..at + 2) {
            Some(b"/*") => (depth, at) = (depth + 1, at + 2),
            Some(b"*/") => (depth, at) = (depth - 1, at + 2),
            Some(_) => at += 1,
            None => return Err("a comment of the statement is not closed".to_owned()),
        }
    }
    // `at` is behind an ASCII character, so it is a character boundary.
    Ok(&text[at..])
}

/// Returns the identifier at the start of a text. As in PostgreSQL's lexer, it includes `$` and
/// non-ASCII characters.
fn first_word(text: &str) -> &str {
    let end = text
        .find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '$' || !c.is_ascii()))
        .unwrap_or(text.len());
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements_that_read_or_change_rows_are_allowed() {
        for text in [
            "select 1",
            "SELECT 1",
            "  \t\r\n\u{c}Select 1",
            "(((select 1)))",
            "( -- x\n ( /* y */ select 1))",
            "-- COMMIT\nselect 1",
            "-- COMMIT\rselect 1",
            "/* COMMIT */ update t set a = 1",
            "/* /* nested */ still a comment */ insert into t values (1)",
            "/**/delete from t",
            "/***/delete from t",
            "with x as (insert into t values (1) returning *) select * from x",
            "merge into t using s on true when matched then delete",
            "values (1)",
            "table t",
            "select(1)",
            "select'commit'",
            "select/* commit */1",
            "select 1; commit", // one too many for the extended protocol, which refuses it
        ] {
            assert_eq!(check(text), Ok(()), "{text:?}");
        }
    }

    #[test]
    fn everything_else_is_refused() {
        for text in [
            "",
            "   ",
            "()",
            "((",
            "--",
            "-- select 1",
            "/* select 1 */",
            "/* select 1",
            "/* /* */ select 1",
            "/*/select 1",
            ";select 1",
            ";COMMIT",
            "; ; select 1",
            "commit",
            "COMMIT; select 1",
            "/**/commit",
            "/* select */ commit",
            "-- select\ncommit",
            "(commit)",
            "rollback to savepoint x",
            "begin",
            "start transaction",
            "savepoint x",
            "set role x",
            "reset role",
            "do $$ begin commit; end $$",
            "call p()",
            "explain analyze select 1",
            "execute x",
            "prepare x as select 1",
            "deallocate all",
            "declare c cursor for select 1",
            "fetch all from c",
            "copy t from stdin",
            "listen x",
            "notify x",
            "lock table t",
            "create table t (a int)",
            "truncate t",
            "vacuum",
            "selectx 1",
            "select_ 1",
            "select$1",
            "selecté",
            "ſelect 1", // a long s, whose upper case is S
            "ＳＥＬＥＣＴ 1",
            "\u{feff}select 1",
            "\u{a0}select 1",
            "\u{2003}select 1",
            "\u{200b}select 1",
            "\u{b}select 1",
            "\u{85}select 1",
            "\"select\" 1",
            "'select'",
            "$$select$$",
            "\\select",
            "[select 1]",
            "U&\"select\"",
            "select 1\0",
            "\0select 1",
        ] {
            assert!(check(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_refusal_names_the_word_and_what_is_allowed() {
        let refused = check("/* x */ Commit; select 1").expect_err("it is not in the list");
        assert!(
            refused.starts_with("`Commit` is not allowed; a statement begins with SELECT"),
            "{refused}"
        );
        assert!(check(&"x".repeat(10_000)).expect_err("it is not in the list").len() < 200);
    }
}
