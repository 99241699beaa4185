//! Kinds of statements by their leading words: those that belong to a schema, and advice for all
//! others.

use oncebox_model::problem::Problem;

use crate::database::statements::lexer::{Lexeme, Statement};

/// First words of data statements, which every session of the tenant may send as well.
const DATA: &[&str] =
    &["select", "insert", "update", "delete", "merge", "values", "table", "with", "truncate"];

/// Objects that `CREATE`, `ALTER` and `DROP` may name.
const OBJECTS: &[&str] = &[
    "table",
    "index",
    "sequence",
    "view",
    "materialized view",
    "type",
    "domain",
    "function",
    "procedure",
    "routine",
    "aggregate",
    "trigger",
    "policy",
    "statistics",
];

/// Words that may stand between `CREATE` and the object, with their plain form.
const ADORNED: &[(&str, &str)] = &[
    ("unique index", "index"),
    ("recursive view", "view"),
    ("constraint trigger", "trigger"),
    ("or replace", ""),
];

/// Objects that are refused, with advice. The first match counts.
const REFUSED: &[(&str, &str)] = &[
    ("rule", "rules change what other statements do; write a view, or do it in the handler"),
    ("foreign", "tables of other servers are out of reach; a handler's effect is in this database"),
    ("server", "other servers are out of reach"),
    ("user mapping", "other servers are out of reach"),
    ("import", "tables of other servers are out of reach"),
    ("extension", "extensions belong to the database; ask whoever runs it"),
    ("publication", "replication belongs to the database; ask whoever runs it"),
    ("subscription", "replication belongs to the database; ask whoever runs it"),
    ("event trigger", "it would run for other tenants as well"),
    ("language", "languages belong to the database; ask whoever runs it to grant one"),
    ("trusted language", "languages belong to the database; ask whoever runs it to grant one"),
    ("role", "logins are made by the host"),
    ("user", "logins are made by the host"),
    ("group", "logins are made by the host"),
    ("database", "the database belongs to whoever runs it"),
    ("tablespace", "the database belongs to whoever runs it"),
    ("system", "the server belongs to whoever runs it"),
    ("schema", "the tenant has one schema, which is there; leave the schema out of names"),
    ("default privileges", "the handlers' login gets what it needs on every new table"),
    ("owned", "the tenant's objects belong to its own login; drop them by name"),
    ("temp", "a temporary table is gone when the migration ends"),
    ("temporary", "a temporary table is gone when the migration ends"),
    ("local", "a temporary table is gone when the migration ends"),
    ("global", "a temporary table is gone when the migration ends"),
    (
        "unlogged",
        "it is empty after a crash of the server, while the inbox says that its messages are \
            completed; make it logged",
    ),
    ("large object", "large objects belong to no schema; use `bytea`"),
];

/// First words that are refused, with advice.
const REFUSED_FIRST: &[(&str, &str)] = &[
    (
        "grant",
        "the handlers' login gets what it needs on every new table, and nobody else gets anything",
    ),
    ("revoke", "the handlers' login needs what it has, and nobody else has anything"),
    (
        "begin start commit end rollback abort savepoint release prepare",
        "every migration is one transaction; leave this out",
    ),
    ("set reset discard show", "settings would end with the migration; leave this out"),
    ("copy", "the host has no file for it; use INSERT"),
    ("do", "write plain statements"),
    ("call", "write plain statements"),
    ("lock", "statements lock what they change"),
    ("listen unlisten notify", "notifications reach other tenants"),
    ("vacuum cluster reindex checkpoint load", "upkeep of the database belongs to whoever runs it"),
    ("security", "labels belong to whoever runs the database"),
    ("import", "tables of other servers are out of reach"),
    ("reassign", "the tenant's objects belong to its own login"),
    ("declare fetch move close execute deallocate", "write plain statements"),
    ("explain", "it changes nothing; leave it out"),
];

/// Returns the problem of a statement that is refused, with its line.
pub(super) fn problem(statement: &Statement) -> Option<Problem> {
    let words: Vec<&str> = statement
        .tokens
        .iter()
        .skip_while(|token| **token == Lexeme::Symbol('('))
        .map_while(Lexeme::word)
        .collect();
    let refusal = match words.as_slice() {
        [first, ..] if DATA.contains(first) => None,
        ["comment", "on", ..]
        | ["analyze" | "analyse", ..]
        | ["refresh", "materialized", "view", ..] => None,
        ["drop", "rule", ..] => None,
        [verb @ ("create" | "alter" | "drop"), rest @ ..] => {
            object(verb, rest).or_else(|| detail(statement))
        }
        [first, ..] => Some(
            match REFUSED_FIRST
                .iter()
                .find(|(words, _)| words.split(' ').any(|word| word == *first))
            {
                Some((_, instead)) => (first.to_uppercase(), (*instead).to_owned()),
                None => (first.to_uppercase(), unknown()),
            },
        ),
        [] => Some((shown(statement), unknown())),
    };
    let (what, why) = refusal?;
    Some(Problem::new(
        "statement_refused",
        format!("line {}: `{what}` is not for a tenant's schema: {why}", statement.line),
    ))
}

/// Returns the refused words and the reason, where a verb's object is not permitted.
fn object(verb: &str, rest: &[&str]) -> Option<(String, String)> {
    let mut rest = rest.join(" ");
    for (words, plain) in ADORNED {
        if let Some(after) = after(&rest, words) {
            rest = format!("{plain} {after}").trim_start().to_owned();
        }
    }
    let refused =
        |what: &str, why: &str| Some((format!("{verb} {what}").to_uppercase(), why.to_owned()));
    if ["index concurrently", "index if exists concurrently"]
        .iter()
        .any(|words| after(&rest, words).is_some())
    {
        return refused(
            "index concurrently",
            "it cannot run in the migration's transaction; leave `CONCURRENTLY` out",
        );
    }
    if OBJECTS.iter().any(|object| after(&rest, object).is_some()) {
        return None;
    }
    match REFUSED.iter().find(|(words, _)| after(&rest, words).is_some()) {
        Some((words, why)) => refused(words, why),
        None => refused(rest.split(' ').next().unwrap_or_default(), &unknown()),
    }
}

/// Returns the text that follows these words, or nothing where the text does not begin with them.
fn after<'a>(text: &'a str, words: &str) -> Option<&'a str> {
    let rest = text.strip_prefix(words)?;
    (rest.is_empty() || rest.starts_with(' ')).then(|| rest.trim_start())
}

/// Parts of a statement that are refused at any position, with the reason.
const PARTS: &[(&[&str], &str)] = &[
    (
        &["security", "definer"],
        "the function would have its owner's rights, who may change the schema; leave it out",
    ),
    (&["owner", "to"], "the tenant's objects belong to its own login"),
    (&["set", "schema"], "the tenant has one schema"),
    (
        &["set", "unlogged"],
        "the table is empty after a crash of the server, while the inbox says that its messages \
            are completed",
    ),
];

fn detail(statement: &Statement) -> Option<(String, String)> {
    let holds = |part: &[&str]| {
        statement
            .tokens
            .windows(part.len())
            .any(|tokens| tokens.iter().map(Lexeme::word).eq(part.iter().map(|w| Some(*w))))
    };
    let (part, why) = PARTS.iter().find(|(part, _)| holds(part))?;
    Some((part.join(" ").to_uppercase(), (*why).to_owned()))
}

fn unknown() -> String {
    "it takes CREATE, ALTER and DROP of tables, indexes, sequences, views, types, domains, \
        functions, procedures, aggregates, triggers, \
     policies and statistics, COMMENT ON, ANALYZE, REFRESH MATERIALIZED VIEW, and statements of \
     data"
        .to_owned()
}

fn shown(statement: &Statement) -> String {
    statement.text.chars().take(20).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use crate::database::statements::{check_schema, read};

    #[test]
    fn what_a_schema_is_made_of_is_taken() {
        for sql in [
            "CREATE TABLE t (id int PRIMARY KEY, note text DEFAULT 'grant; begin')",
            "create table if not exists t (id int)",
            "CREATE TABLE p PARTITION OF t FOR VALUES IN (1)",
            "CREATE UNIQUE INDEX ON t (id)",
            "CREATE INDEX i ON t (id) WHERE id > 0",
            "CREATE OR REPLACE VIEW v AS SELECT 1",
            "CREATE RECURSIVE VIEW v (n) AS SELECT 1",
            "CREATE MATERIALIZED VIEW m AS SELECT 1",
            "REFRESH MATERIALIZED VIEW m",
            "CREATE SEQUENCE s",
            "CREATE TYPE mood AS ENUM ('set schema', 'owner to')",
            "CREATE DOMAIN d AS int CHECK (VALUE > 0)",
            "CREATE FUNCTION f() RETURNS int LANGUAGE sql AS $$ SELECT 1; COMMIT $$",
            "CREATE OR REPLACE PROCEDURE p() LANGUAGE sql BEGIN ATOMIC SELECT 1; END",
            "CREATE TRIGGER g BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f()",
            "CREATE CONSTRAINT TRIGGER g AFTER INSERT ON t DEFERRABLE FOR EACH ROW EXECUTE \
                FUNCTION f()",
            "CREATE POLICY p ON t USING (true)",
            "CREATE STATISTICS s ON a, b FROM t",
            "ALTER TABLE t ADD COLUMN a int, ALTER COLUMN b SET DEFAULT 1, ENABLE ROW LEVEL \
                SECURITY",
            "ALTER TABLE t RENAME TO owner",
            "DROP TABLE IF EXISTS t CASCADE",
            "DROP RULE r ON t",
            "COMMENT ON TABLE t IS 'x'",
            "INSERT INTO t SELECT generate_series(1, 3)",
            "WITH x AS (SELECT 1) UPDATE t SET id = 2",
            "MERGE INTO t USING u ON true WHEN MATCHED THEN DO NOTHING",
            "(SELECT 1) UNION VALUES (2)",
            "TRUNCATE t; ANALYZE; TABLE t",
            "",
        ] {
            let problems = check_schema(sql);
            assert!(problems.is_empty(), "`{sql}`: {problems:?}");
        }
    }

    #[test]
    fn everything_else_is_refused_by_name_with_what_to_do() {
        for (sql, said) in [
            (
                "CREATE RULE r AS ON INSERT TO t DO ALSO NOTIFY x",
                "`CREATE RULE` is not for a tenant's schema: rules change",
            ),
            (
                "CREATE OR REPLACE RULE r AS ON INSERT TO t DO ALSO (SELECT 1; SELECT 2)",
                "`CREATE RULE`",
            ),
            ("CREATE FOREIGN TABLE f (a int) SERVER s", "`CREATE FOREIGN`"),
            ("CREATE SERVER s FOREIGN DATA WRAPPER w", "`CREATE SERVER`"),
            ("CREATE USER MAPPING FOR u SERVER s", "`CREATE USER MAPPING`"),
            ("CREATE EXTENSION dblink", "`CREATE EXTENSION`"),
            ("CREATE PUBLICATION p", "`CREATE PUBLICATION`"),
            ("DROP SUBSCRIPTION s", "`DROP SUBSCRIPTION`"),
            (
                "CREATE EVENT TRIGGER e ON ddl_command_end EXECUTE FUNCTION f()",
                "`CREATE EVENT TRIGGER`",
            ),
            ("CREATE TRUSTED LANGUAGE plperl", "`CREATE TRUSTED LANGUAGE`"),
            ("ALTER ROLE current_user PASSWORD 'x'", "`ALTER ROLE`"),
            ("ALTER USER u SET role = 'x'", "`ALTER USER`"),
            ("CREATE DATABASE d", "`CREATE DATABASE`"),
            ("ALTER SYSTEM SET fsync = off", "`ALTER SYSTEM`"),
            ("CREATE SCHEMA other", "`CREATE SCHEMA`"),
            ("DROP SCHEMA x CASCADE", "`DROP SCHEMA`"),
            (
                "ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO PUBLIC",
                "`ALTER DEFAULT PRIVILEGES`",
            ),
            ("DROP OWNED BY x", "`DROP OWNED`"),
            ("CREATE TEMP TABLE t (a int)", "`CREATE TEMP`"),
            ("CREATE LOCAL TEMPORARY TABLE t (a int)", "`CREATE LOCAL`"),
            ("CREATE UNLOGGED TABLE t (a int)", "after a crash of the server"),
            (
                "CREATE OPERATOR + (leftarg = int)",
                "`CREATE OPERATOR` is not for a tenant's schema: it takes CREATE",
            ),
            ("CREATE CAST (int AS text) WITHOUT FUNCTION", "`CREATE CAST`"),
            ("CREATE ACCESS METHOD m TYPE INDEX HANDLER h", "`CREATE ACCESS`"),
            ("CREATE UNIQUE INDEX CONCURRENTLY i ON t (a)", "leave `CONCURRENTLY` out"),
            ("DROP INDEX CONCURRENTLY i", "leave `CONCURRENTLY` out"),
            (
                "CREATE FUNCTION f() RETURNS int LANGUAGE sql SECURITY DEFINER AS 'SELECT 1'",
                "`SECURITY DEFINER`",
            ),
            (
                "CREATE FUNCTION f() RETURNS int AS 'SELECT 1' LANGUAGE sql EXTERNAL SECURITY /**/ \
                    DEFINER",
                "`SECURITY DEFINER`",
            ),
            ("ALTER FUNCTION f() SECURITY DEFINER", "`SECURITY DEFINER`"),
            ("ALTER TABLE t OWNER TO postgres", "`OWNER TO`"),
            ("ALTER VIEW v SET SCHEMA public", "`SET SCHEMA`"),
            ("ALTER TABLE t SET UNLOGGED", "`SET UNLOGGED`"),
            ("GRANT ALL ON t TO PUBLIC", "`GRANT`"),
            ("SET ROLE x", "`SET`"),
            ("RESET ROLE", "`RESET`"),
            ("BEGIN", "every migration is one transaction"),
            ("/* x */ CoMmIt", "`COMMIT`"),
            ("PREPARE TRANSACTION 'x'", "`PREPARE`"),
            ("COPY t FROM PROGRAM 'id'", "`COPY`"),
            ("DO $$ BEGIN COMMIT; END $$", "`DO`"),
            ("CALL p()", "`CALL`"),
            ("LOCK TABLE t", "`LOCK`"),
            ("NOTIFY x", "`NOTIFY`"),
            ("VACUUM t", "`VACUUM`"),
            ("SECURITY LABEL ON TABLE t IS 'x'", "`SECURITY`"),
            ("IMPORT FOREIGN SCHEMA s FROM SERVER x INTO y", "`IMPORT`"),
            ("REASSIGN OWNED BY a TO b", "`REASSIGN`"),
            ("\\i other.sql", "`\\i other.sql`"),
            ("\"select\" 1", "`\"select\" 1`"),
        ] {
            let problems = check_schema(sql);
            assert!(
                problems.len() == 1
                    && problems[0].text.starts_with("line 1: ")
                    && problems[0].text.contains(said),
                "`{sql}`: {problems:?}"
            );
        }
    }

    #[test]
    fn all_problems_of_a_text_are_named_with_their_lines() {
        let problems =
            check_schema("CREATE TABLE t (a int);\nGRANT ALL ON t TO x;\n\nSELECT 1; COMMIT;");
        let lines: Vec<_> = problems
            .iter()
            .map(|problem| problem.text.split(':').next().unwrap_or_default())
            .collect();
        assert_eq!(lines, ["line 2", "line 4"]);
    }

    // A shipped example is the text that a tenant would send.
    #[test]
    fn the_schemas_of_the_examples_are_taken() {
        let mut folders = vec![std::path::PathBuf::from(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../guest-examples"
        ))];
        let mut checked = 0;
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(&folder).expect("a folder").flatten() {
                let path = entry.path();
                if path.is_dir() && !path.ends_with("target") && !path.ends_with("node_modules") {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "sql") {
                    let statements = read(&std::fs::read_to_string(&path).expect("a text"));
                    assert!(
                        !statements
                            .unwrap_or_else(|problems| panic!("{}: {problems:?}", path.display()))
                            .is_empty()
                    );
                    checked += 1;
                }
            }
        }
        assert!(checked >= 5, "{checked} schemas were found");
    }
}
