//! The host's functions as this program makes them, compared with those of a database.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use super::{Finding, Look, Severity};
use crate::database::{
    functions::{Functions, SCHEMA_NUMBER},
    schema::MIGRATIONS,
};

const CHECK: &str = "host_code";

/// A function as this program makes it.
#[derive(Debug, Clone, Default)]
struct Shipped {
    body: String,
    has_owners_rights: bool,
    /// Statement that makes it.
    statement: String,
}

impl Look<'_> {
    /// Checks that every function of the host exists with the text of this program, and that no
    /// other function does.
    pub(super) async fn functions_are_as_shipped(&self) -> Vec<Finding> {
        const IS_NEWER: &str =
            "SELECT coalesce(max(schema_number) > $1, false) FROM oncebox.function";
        const FOUND: &str = "SELECT n.nspname || '.' || p.proname, p.prosrc, p.prosecdef FROM \
            pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace \
            WHERE n.nspname IN ('oncebox', 'oncebox_host')";
        match sqlx::query_scalar(IS_NEWER).bind(SCHEMA_NUMBER).fetch_one(&self.pool).await {
            Ok(false) => {}
            Ok(true) => return vec![self.of_a_newer_release()],
            Err(error) => return vec![self.unknown(CHECK, &error)],
        }
        let found: Vec<(String, String, bool)> =
            match sqlx::query_as(FOUND).fetch_all(&self.pool).await {
                Ok(found) => found,
                Err(error) => return vec![self.unknown(CHECK, &error)],
            };
        let mut shipped = shipped();
        let mut wrong: Vec<_> = found
            .into_iter()
            .filter_map(|found| self.compare(&shipped.remove(&found.0), &found))
            .collect();
        wrong.extend(shipped.iter().map(|(name, function)| {
            let found = self.finding(
                CHECK,
                Severity::Error,
                format!("the host's function `{name}` is missing"),
            );
            found.fix(function.statement.clone()).advise(
                "then run `oncebox migrate`, which gives it its owner's and tenants' grants",
            )
        }));
        if wrong.is_empty() {
            wrong.push(self.finding(
                CHECK,
                Severity::Ok,
                "the host's functions are those that this program came with",
            ));
        }
        wrong
    }

    /// Returns the finding for functions of a newer release. It holds no statement: a statement
    /// would put an older text back.
    fn of_a_newer_release(&self) -> Finding {
        let found = "the host's functions are those of a newer release";
        self.finding(CHECK, Severity::Unknown, found).advise("use that release's `oncebox doctor`")
    }

    fn compare(
        &self,
        shipped: &Option<Shipped>,
        (name, body, has_owners_rights): &(String, String, bool),
    ) -> Option<Finding> {
        let Some(shipped) = shipped else {
            let found = self.finding(
                CHECK,
                Severity::Error,
                format!("the function `{name}` in the host's schema is not of this program"),
            );
            return Some(found.fix(format!("DROP FUNCTION {name}")));
        };
        if shipped.body == *body && shipped.has_owners_rights == *has_owners_rights {
            return None;
        }
        let hash = |text: &str| hex::encode(&Sha256::digest(text)[..6]);
        let found = format!(
            "the host's function `{name}` is not the one of this program: {}, not {}",
            hash(body),
            hash(&shipped.body)
        );
        Some(self.finding(CHECK, Severity::Error, found).fix(shipped.statement.clone()))
    }
}

/// Returns the functions of this program, by name; none of them is overloaded. Trigger functions
/// are in the migrations, beside their tables.
fn shipped() -> BTreeMap<String, Shipped> {
    let functions = Functions::of_this_program();
    let texts = MIGRATIONS
        .iter()
        .map(|migration| migration.sql.as_str())
        .chain(functions.texts.iter().map(|text| &**text));
    texts.flat_map(statements).filter_map(|statement| defined(&statement)).collect()
}

/// Returns the function that a statement makes, if it makes one, with its name.
fn defined(statement: &str) -> Option<(String, Shipped)> {
    let replacing = statement.replacen("CREATE FUNCTION ", "CREATE OR REPLACE FUNCTION ", 1);
    let name = replacing.strip_prefix("CREATE OR REPLACE FUNCTION ")?.split_once('(')?.0.trim();
    let mut parts = replacing.split("$$");
    let (head, body) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let shipped = Shipped {
        body: body.to_owned(),
        has_owners_rights: head.contains("SECURITY DEFINER"),
        statement: replacing.clone(),
    };
    Some((name.to_owned(), shipped))
}

/// Splits an SQL text of this program into statements. Such texts quote with `'` and `$$`, and have
/// no block comments.
fn statements(sql: &str) -> Vec<String> {
    let (mut found, mut current, mut rest) = (Vec::new(), String::new(), sql);
    while let Some(next) = rest.chars().next() {
        let length = match next {
            '-' if rest.starts_with("--") => {
                rest = rest.split_once('\n').map_or("", |(_, after)| after);
                continue;
            }
            '$' if rest.starts_with("$$") => rest[2..].find("$$").map_or(rest.len(), |end| end + 4),
            '\'' => rest[1..].find('\'').map_or(rest.len(), |end| end + 2),
            _ => next.len_utf8(),
        };
        let (taken, after) = rest.split_at(length);
        rest = after;
        if taken == ";" {
            found.push(std::mem::take(&mut current).trim().to_owned());
        } else {
            current.push_str(taken);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::{shipped, statements};

    #[test]
    fn statements_end_where_they_do() {
        let sql = "-- a; b\nCREATE TABLE t (x text DEFAULT 'a;''b'); CREATE FUNCTION f() AS $$ a; \
            -- it's\n b; $$;\nSELECT 1;";
        let expected = [
            "CREATE TABLE t (x text DEFAULT 'a;''b')",
            "CREATE FUNCTION f() AS $$ a; -- it's\n b; $$",
            "SELECT 1",
        ];
        assert_eq!(statements(sql), expected);
    }

    #[test]
    fn every_function_is_known_with_its_text() {
        let functions = shipped();
        assert!(
            functions.len() > 30 && functions.keys().all(|name| name.starts_with("oncebox")),
            "{:?}",
            functions.keys()
        );
        assert!(
            functions.values().all(|function| !function.body.trim().is_empty()),
            "{functions:#?}"
        );
        let claim = &functions["oncebox_host.claim"];
        assert!(claim.body.contains("v_locks") && claim.has_owners_rights);
        assert!(functions["oncebox.guard_check"].has_owners_rights, "it stands beside its table");
    }
}
