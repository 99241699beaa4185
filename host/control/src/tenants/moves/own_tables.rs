//! The tenant's own tables: their schema by `pg_dump`, their rows by COPY. All statements run in a
//! session of their owner: constraints, generated columns and bounds of partitions may call what the
//! tenant has written, with the rights of the session.

use std::{os::unix::process::ExitStatusExt, process::Stdio};

use oncebox_model::error::InboxError;
use sqlx::{
    AssertSqlSafe, ConnectOptions, Connection, Executor, PgConnection, postgres::PgConnectOptions,
};
use tokio::process::Command;

use super::{carry::Mover, rows::CopyProgress};
use crate::{
    database::{postgres_programs, tenant_database::open::LONGEST_ANSWER},
    tenants::{Tenant, lock_grants, roles::role_statements},
};

/// Statements that make what is in a schema, apart from its rows.
struct SchemaDump {
    /// What stands before the rows: tables, types, functions.
    before_rows: String,
    /// What stands after them: indexes, constraints, triggers, policies.
    after_rows: String,
}

/// Settings of both sessions, so that the text of a value means the same value.
const TEXT_SETTINGS: &str = "SET datestyle = 'ISO, YMD'; SET intervalstyle = 'postgres'; \
    SET timezone = 'UTC'; SET extra_float_digits = 3; SET row_security = off";

/// Settings in place of those that `pg_dump` begins with: a server may not know them all, and the
/// owner of the tables may not set them all.
const DUMP_SETTINGS: &str = "SET search_path = ''; SET check_function_bodies = false; \
    SET client_min_messages = warning; SET xmloption = content; SET row_security = off;\n";

/// Makes the tenant's roles and its empty schema in the other database, and its tables in a
/// transaction that is rolled back: what cannot be made there is found while the tenant runs.
pub(super) async fn try_schema(mover: &Mover<'_>) -> Result<(), InboxError> {
    refuse_too_many(mover).await?;
    let dump = SchemaDump::of(mover).await?;
    mover.note_made().await?;
    make_roles(mover).await?;
    let mut owner = owner_there(mover).await?;
    let mut tx = owner.begin().await?;
    run(&mut tx, &dump.before_rows).await?;
    run(&mut tx, &dump.after_rows).await?;
    tx.rollback().await?;
    Ok(owner.close().await?)
}

/// Copies the tenant's tables, in one transaction. Two hosts that do so at a time make the same
/// tables, so that one of them fails.
pub(super) async fn copy(
    mover: &Mover<'_>,
    progress: &mut CopyProgress<'_>,
) -> Result<(), InboxError> {
    let dump = SchemaDump::of(mover).await?;
    let mut from = mover.from.connect_for_long().await?;
    let mut owner = owner_there(mover).await?;
    set_text(&mut from).await?;
    set_text(&mut owner).await?;
    let mut tx = owner.begin().await?;
    run(&mut tx, &dump.before_rows).await?;
    copy_rows(&mover.tenant, &mut from, &mut tx, progress).await?;
    set_sequences(&mover.tenant, &mut from, &mut tx).await?;
    let views = filled_views(&mover.tenant, &mut from).await?;
    from.close().await;
    run(&mut tx, &dump.after_rows).await?;
    for view in views {
        let fill = format!("REFRESH MATERIALIZED VIEW {view}");
        tx.execute(sqlx::raw_sql(AssertSqlSafe(fill))).await?;
    }
    progress.note().await?;
    tx.commit().await?;
    Ok(owner.close().await?)
}

/// Opens a session of the login that owns the tables in the other database.
async fn owner_there(mover: &Mover<'_>) -> Result<PgConnection, InboxError> {
    let tenant = &mover.tenant;
    let credentials = mover.control.key.credentials(tenant)?;
    let options = mover.to.options.clone().answer_timeout(LONGEST_ANSWER);
    let options = options.username(&tenant.owner_login).password(&credentials.owner_password);
    // One that stands still loses its locks.
    let options =
        options.options([("idle_in_transaction_session_timeout", "5min"), ("lock_timeout", "30s")]);
    Ok(PgConnection::connect_with(&options).await?)
}

/// Refuses a tenant whose tables and indexes would take most of the locks that the other server has
/// room for, from the transactions of others.
async fn refuse_too_many(mover: &Mover<'_>) -> Result<(), InboxError> {
    const OBJECTS: &str = "SELECT count(*) FROM pg_class WHERE relnamespace = to_regnamespace($1)";
    const ROOM: &str = "SELECT current_setting('max_locks_per_transaction')::bigint * \
        current_setting('max_connections')::bigint / 4";
    let objects: i64 = sqlx::query_scalar(OBJECTS)
        .bind(&mover.tenant.schema_name)
        .fetch_one(&mover.from.pool)
        .await?;
    let room: i64 = sqlx::query_scalar(ROOM).fetch_one(&mover.to.pool).await?;
    if objects <= room {
        return Ok(());
    }
    Err(InboxError::conflict(format!(
        "tenant `{}` has {objects} tables, indexes and others, and `{}` has locks for {room} in one \
            transaction; raise `max_locks_per_transaction` there",
        mover.tenant.name, mover.row.to_database
    )))
}

/// Makes the tenant's roles in the other database where they are missing, with the rights that they
/// need, and its schema. Others wait for the lock of this transaction.
pub(super) async fn make_roles(mover: &Mover<'_>) -> Result<(), InboxError> {
    let Tenant { schema_name, login, owner_login, .. } = &mover.tenant;
    let mut from = mover.from.connect().await?;
    let languages = languages_of(&mut from, owner_login).await?;
    from.close().await;
    let mut connection = mover.to.connect().await?;
    let mut tx = connection.begin().await?;
    mover.guard.hold(&mut tx).await?;
    lock_grants(&mut tx).await?;
    let database: String =
        sqlx::query_scalar("SELECT quote_ident(current_database())").fetch_one(&mut *tx).await?;
    // The present ones, which nobody changes meanwhile: both databases may be on one server.
    let mut own = mover.control.pool.begin().await?;
    let tenant = mover.control.tenants().lock_row(&mut own, &mover.tenant.name).await?;
    let credentials = mover.control.key.credentials(&tenant)?;
    let mut statements = role_statements(&database, schema_name, login, owner_login, &credentials);
    let granted = languages_of(&mut tx, owner_login).await?;
    let missing = languages.into_iter().filter(|language| !granted.contains(language));
    statements.extend(
        missing.map(|language| format!("GRANT USAGE ON LANGUAGE {language} TO {owner_login}")),
    );
    for statement in statements {
        tx.execute(sqlx::raw_sql(AssertSqlSafe(statement))).await?;
    }
    tx.commit().await?;
    own.rollback().await?; // it was begun for its lock
    connection.close().await;
    let databases = mover.control.tenant_databases();
    databases.restrict_logs(&mover.to.pool, login, owner_login).await;
    Ok(())
}

/// Lists the languages that an operator granted to a login.
pub(super) async fn languages_of(
    connection: &mut PgConnection,
    login: &str,
) -> Result<Vec<String>, InboxError> {
    const LANGUAGES: &str = "SELECT quote_ident(l.lanname) FROM pg_language l, \
        aclexplode(l.lanacl) a WHERE a.grantee = (SELECT oid FROM pg_roles WHERE rolname = $1) AND \
        a.privilege_type = 'USAGE' \
        ORDER BY 1";
    Ok(sqlx::query_scalar(LANGUAGES).bind(login).fetch_all(connection).await?)
}

impl SchemaDump {
    /// Reads the tenant's schema in the database that it leaves.
    async fn of(mover: &Mover<'_>) -> Result<Self, InboxError> {
        let (options, schema) = (&mover.from.options, &mover.tenant.schema_name);
        refuse_line_breaks(mover, schema).await?;
        Ok(Self {
            before_rows: pg_dump(options, schema, "pre-data").await?,
            after_rows: pg_dump(options, schema, "post-data").await?,
        })
    }
}

/// Refuses names with control characters. Releases of `pg_dump` before August 2025 write names into
/// comments as they are, so that a line after a line break would be a statement of the host.
async fn refuse_line_breaks(mover: &Mover<'_>, schema: &str) -> Result<(), InboxError> {
    const NAMED: &str = "WITH relation AS (SELECT oid FROM pg_class WHERE relnamespace = \
                to_regnamespace($1)), \
            name(name) AS (SELECT relname FROM pg_class WHERE oid IN (TABLE relation) \
            UNION ALL SELECT attname FROM pg_attribute WHERE attrelid IN (TABLE relation) \
            UNION ALL SELECT tgname FROM pg_trigger WHERE tgrelid IN (TABLE relation) \
            UNION ALL SELECT rulename FROM pg_rewrite WHERE ev_class IN (TABLE relation) \
            UNION ALL SELECT polname FROM pg_policy WHERE polrelid IN (TABLE relation) \
            UNION ALL SELECT conname FROM pg_constraint WHERE connamespace = to_regnamespace($1) \
            UNION ALL SELECT typname FROM pg_type WHERE typnamespace = to_regnamespace($1) \
            UNION ALL SELECT stxname FROM pg_statistic_ext WHERE stxnamespace = to_regnamespace($1) \
            UNION ALL SELECT collname FROM pg_collation WHERE collnamespace = to_regnamespace($1) \
            UNION ALL SELECT oprname FROM pg_operator WHERE oprnamespace = to_regnamespace($1) \
            UNION ALL SELECT unnest(proargnames || proname::text) FROM pg_proc WHERE pronamespace = \
                to_regnamespace($1)) \
        SELECT name::text FROM name WHERE name::text ~ '[[:cntrl:]]' LIMIT 1";
    let mut connection = mover.from.pool.acquire().await?;
    let name: Option<String> =
        sqlx::query_scalar(NAMED).bind(schema).fetch_optional(&mut *connection).await?;
    let Some(name) = name else { return Ok(()) };
    Err(InboxError::conflict(format!(
        "tenant `{}` has something named {name:?}, with a line break or another control character; \
            a migration has to give it another name",
        mover.tenant.name
    )))
}

/// Runs statements of `pg_dump`.
async fn run(connection: &mut PgConnection, statements: &str) -> Result<(), InboxError> {
    connection.execute(sqlx::raw_sql(AssertSqlSafe(statements.to_owned()))).await?;
    Ok(())
}

/// Returns a section of the statements that make a schema.
async fn pg_dump(
    options: &PgConnectOptions,
    schema: &str,
    section: &str,
) -> Result<String, InboxError> {
    let program = postgres_programs::find("pg_dump").ok_or_else(|| {
        InboxError::conflict(
            "no `pg_dump` on this host, which reads the tenant's tables; install PostgreSQL's \
                client package (`postgresql-client` on Debian and Ubuntu, `postgresql` on Fedora), \
                of the server's version or a newer one",
        )
    })?;
    let mut command = Command::new(&program);
    command
        .args(["--schema-only", "--no-publications", "--no-subscriptions", "--no-tablespaces"])
        // The default privileges of the schema give the login what it has. Beside those of the
        // schema there are rights of what is outside, which are not the tenant's.
        .arg("--no-privileges")
        .arg("--lock-wait-timeout=20s")
        .args([format!("--schema={schema}"), format!("--section={section}")])
        .env_clear()
        .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
        .envs(libpq_environment(options))
        .stdin(Stdio::null())
        .kill_on_drop(true);
    let failed =
        |what: String| InboxError::conflict(format!("`{}` failed: {what}", program.display()));
    let output = command.output().await.map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let signal = output.status.signal().map(|signal| format!("signal {signal}"));
        return Err(failed(signal.unwrap_or_else(|| said.trim().replace('\n', "; "))));
    }
    let dump = String::from_utf8(output.stdout)
        .map_err(|_| failed("its output is not UTF-8".to_owned()))?;
    prepared(&dump, schema).ok_or_else(|| failed("its output is not what is expected".to_owned()))
}

/// Returns the statements of `pg_dump` for a session of the owner: without the settings that they
/// begin with, the lines for `psql` around them, the schema itself, which is there, and the host's
/// triggers, which the host makes.
fn prepared(dump: &str, schema: &str) -> Option<String> {
    const LAST_SETTING: &str = "SET row_security = off;\n";
    let token = dump.lines().find_map(|line| line.strip_prefix("\\restrict "));
    let end = token.map(|token| format!("\\unrestrict {token}"));
    let (_, statements) = dump.split_once(LAST_SETTING)?;
    let mut of_schema =
        vec![format!("CREATE SCHEMA {schema};"), format!("ALTER SCHEMA {schema} OWNER TO ")];
    let mut kept = String::from(DUMP_SETTINGS);
    for line in statements.lines() {
        // The first lines of this kind; in the text of a function they stay.
        if let Some(at) = of_schema.iter().position(|start| line.starts_with(start.as_str())) {
            of_schema.remove(at);
            continue;
        }
        let is_of_host = line.starts_with("CREATE TRIGGER \"RI_oncebox_capture\" ")
            && line.ends_with(" EXECUTE FUNCTION oncebox_host.capture_row();");
        if is_of_host || Some(line) == end.as_deref() {
            continue;
        }
        kept.push_str(line);
        kept.push('\n');
    }
    Some(kept)
}

/// Returns the variables by which PostgreSQL's programs reach a database. No argument holds a
/// password, which every process could read.
fn libpq_environment(options: &PgConnectOptions) -> Vec<(&'static str, String)> {
    let url = options.to_url_lossy();
    let host = options
        .get_socket()
        .map_or_else(|| options.get_host().to_owned(), |socket| socket.display().to_string());
    let decoded =
        |text: &str| percent_encoding::percent_decode_str(text).decode_utf8_lossy().into_owned();
    let mut variables = vec![
        ("PGHOST", host.trim_matches(['[', ']']).to_owned()),
        ("PGPORT", options.get_port().to_string()),
        ("PGUSER", options.get_username().to_owned()),
        ("PGDATABASE", options.get_database().unwrap_or_default().to_owned()),
        ("PGPASSWORD", url.password().map(decoded).unwrap_or_default()),
        ("PGAPPNAME", "oncebox host".to_owned()),
        ("PGCONNECT_TIMEOUT", "10".to_owned()),
        ("PGCLIENTENCODING", "UTF8".to_owned()),
    ];
    for (name, value) in url.query_pairs() {
        let variable = match &*name {
            "sslmode" => "PGSSLMODE",
            "sslrootcert" => "PGSSLROOTCERT",
            "sslcert" => "PGSSLCERT",
            "sslkey" => "PGSSLKEY",
            _ => continue,
        };
        // The driver says so before the path of a file.
        let path = value.strip_prefix("file: ").unwrap_or(&value).to_owned();
        variables.push((variable, path));
    }
    variables
}

/// Copies the rows of the tenant's tables.
async fn copy_rows(
    tenant: &Tenant,
    from: &mut PgConnection,
    owner: &mut PgConnection,
    progress: &mut CopyProgress<'_>,
) -> Result<(), InboxError> {
    // Partitions are tables of their own. Generated columns are made anew.
    const TABLES: &str = "SELECT c.oid::regclass::text, string_agg(quote_ident(a.attname), ', ' \
            ORDER BY a.attnum) \
        FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT \
            a.attisdropped AND a.attgenerated = '' \
        WHERE c.relnamespace = to_regnamespace($1) AND c.relkind = 'r' GROUP BY c.oid ORDER BY 1";
    let tables: Vec<(String, String)> =
        sqlx::query_as(TABLES).bind(&tenant.schema_name).fetch_all(&mut *from).await?;
    for (table, columns) in tables {
        let rows = format!("SELECT {columns} FROM ONLY {table}");
        progress.copy(from, &rows, owner, &format!("{table} ({columns})")).await?;
        owner.execute(sqlx::raw_sql(AssertSqlSafe(format!("ANALYZE {table}")))).await?;
    }
    Ok(())
}

/// Sets the positions of the tenant's sequences.
async fn set_sequences(
    tenant: &Tenant,
    from: &mut PgConnection,
    owner: &mut PgConnection,
) -> Result<(), InboxError> {
    const SEQUENCES: &str = "SELECT c.oid::regclass::text FROM pg_class c WHERE c.relnamespace = \
        to_regnamespace($1) AND c.relkind = 'S' ORDER BY 1";
    let sequences: Vec<String> =
        sqlx::query_scalar(SEQUENCES).bind(&tenant.schema_name).fetch_all(&mut *from).await?;
    for sequence in sequences {
        let read = format!("SELECT last_value, is_called FROM {sequence}");
        let (value, is_called): (i64, bool) =
            sqlx::query_as(AssertSqlSafe(read)).fetch_one(&mut *from).await?;
        sqlx::query("SELECT setval($1::regclass, $2, $3)")
            .bind(&sequence)
            .bind(value)
            .bind(is_called)
            .execute(&mut *owner)
            .await?;
    }
    Ok(())
}

/// Lists the materialized views that are filled.
async fn filled_views(tenant: &Tenant, from: &mut PgConnection) -> Result<Vec<String>, InboxError> {
    const VIEWS: &str = "SELECT oid::regclass::text FROM pg_class WHERE relnamespace = \
        to_regnamespace($1) AND relkind = 'm' AND relispopulated ORDER BY oid";
    Ok(sqlx::query_scalar(VIEWS).bind(&tenant.schema_name).fetch_all(from).await?)
}

/// Sets how values are written as text and read again.
pub(super) async fn set_text(connection: &mut PgConnection) -> Result<(), InboxError> {
    connection.execute(sqlx::raw_sql(TEXT_SETTINGS)).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_owner_may_not_do_goes_and_what_is_the_tenants_stays() {
        let trigger = "CREATE TRIGGER \"RI_oncebox_capture\" AFTER INSERT ON t_1.a FOR EACH ROW \
            EXECUTE FUNCTION oncebox_host.capture_row();\n";
        let body = "CREATE FUNCTION t_1.f() AS $$\n\\unrestrict other\nCREATE SCHEMA t_1;\n$$;\n";
        let dump = format!(
            "--\n\\restrict abc\nSET transaction_timeout = 0;\nSET row_security = off;\n\
             CREATE SCHEMA t_1;\nALTER SCHEMA t_1 OWNER TO oncebox_1_owner;\n{body}{trigger}\
             \\unrestrict abc\n"
        );
        assert_eq!(prepared(&dump, "t_1"), Some(format!("{DUMP_SETTINGS}{body}")));
        assert_eq!(prepared("SELECT 1;\n", "t_1"), None, "no dump");
    }

    #[test]
    fn programs_get_what_the_url_says() {
        let options: PgConnectOptions =
            "postgres://a%40b:p%2F%20w@[::1]:5444/db?sslmode=verify-full&sslrootcert=/ca.pem"
                .parse()
                .expect("a URL");
        let variables = libpq_environment(&options);
        for (name, value) in [
            ("PGHOST", "::1"),
            ("PGPORT", "5444"),
            ("PGUSER", "a@b"),
            ("PGDATABASE", "db"),
            ("PGPASSWORD", "p/ w"),
            ("PGSSLMODE", "verify-full"),
            ("PGSSLROOTCERT", "/ca.pem"),
        ] {
            assert!(variables.contains(&(name, value.to_owned())), "{name}: {variables:?}");
        }
    }
}
