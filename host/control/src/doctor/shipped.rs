//! The host's functions as the migrations of this program leave them, compared with those of a
//! database.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use super::{Finding, Look, Severity};
use crate::database::schema::MIGRATIONS;

const CHECK: &str = "host_code";

/// A function as it was shipped.
#[derive(Debug, Clone, Default)]
struct Shipped {
    body: String,
    has_owners_rights: bool,
    /// What makes it so: its definition, and what was said of it afterwards.
    statements: Vec<String>,
}

impl Shipped {
    fn sql(&self) -> String {
        self.statements.join(";\n")
    }
}

impl Look<'_> {
    /// Every function of the host is there, with the text that this program came with, and no other
    /// is.
    pub(super) async fn functions_are_as_shipped(&self) -> Vec<Finding> {
        const FOUND: &str = "SELECT n.nspname || '.' || p.proname, p.prosrc, p.prosecdef FROM \
            pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace \
            WHERE n.nspname IN ('oncebox', 'oncebox_host')";
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
            found.fix(function.sql()).advise(
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
            let drop = found.fix(format!("DROP FUNCTION {name}"));
            return Some(drop.advise(
                "where the database was migrated by a newer version, use that \
                version's `oncebox doctor`",
            ));
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
        Some(self.finding(CHECK, Severity::Error, found).fix(shipped.sql()))
    }
}

/// By name; none of ours is overloaded.
fn shipped() -> BTreeMap<String, Shipped> {
    let mut functions = BTreeMap::<String, Shipped>::new();
    for statement in MIGRATIONS.iter().flat_map(|migration| statements(migration.sql.as_str())) {
        let after = |words: &str| {
            statement
                .strip_prefix(words)
                .and_then(|rest| Some(rest.split_once('(')?.0.trim().to_owned()))
        };
        if let Some(name) =
            after("CREATE FUNCTION ").or_else(|| after("CREATE OR REPLACE FUNCTION "))
        {
            functions.insert(name, defined(&statement));
        } else if let Some(function) =
            after("ALTER FUNCTION ").and_then(|name| functions.get_mut(&name))
        {
            function.statements.push(statement);
        } else if let Some(name) = after("DROP FUNCTION ") {
            functions.remove(&name);
        }
    }
    functions
}

fn defined(statement: &str) -> Shipped {
    let mut parts = statement.split("$$");
    let (head, body) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let replacing = statement.replacen("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1);
    Shipped {
        body: body.to_owned(),
        has_owners_rights: head.contains("SECURITY DEFINER"),
        statements: vec![replacing],
    }
}

/// The statements of a migration of ours, which quotes with `'` and `$$` and has no block comments.
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
    fn every_function_of_the_migrations_is_known_with_its_last_text() {
        let functions = shipped();
        assert!(
            functions.len() > 15 && functions.keys().all(|name| name.starts_with("oncebox")),
            "{:?}",
            functions.keys()
        );
        assert!(
            functions.values().all(|function| !function.body.trim().is_empty()),
            "{functions:#?}"
        );
        assert!(
            functions["oncebox_host.claim_messages"].body.contains("v_locks")
                && functions["oncebox_host.claim"].has_owners_rights
        );
        assert!(
            functions["oncebox_host.release"].statements.len() == 3,
            "its plan's settings came later"
        );
        assert!(!functions.contains_key("oncebox.message_lock"), "it was dropped");
    }
}
