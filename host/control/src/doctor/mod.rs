//! Checks on the live database of the scheme that keeps tenants apart: privileges, the commit
//! guard, missing and surplus objects. One looks at the size of inboxes. They change nothing.
//!
//! Most checks are a query that lists defects, each row with its severity and the statement that
//! repairs it. Some properties are tried: the logins log in, a wrong password is presented, and a
//! session of the tenant reports its settings.

mod access;
mod archive;
mod budgets;
mod databases;
mod endpoints;
mod functions;
mod ids;
mod logins;
mod memory;
mod objects;
mod of_tenant;
mod program;
mod roles;
mod server;
mod shipped;
mod storage;
mod stores;
mod topics;

use std::collections::BTreeMap;

use oncebox_model::error::{InboxError, plain};
use serde::Serialize;
use sqlx::{AssertSqlSafe, Executor, PgPool, postgres::PgConnectOptions};

use crate::{
    control::Control, database::schema::REVOKED_FUNCTIONS, handles::Doctor, tenants::Tenant,
};

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// A broken promise.
    Error,
    /// A promise that holds with one safeguard less than it should have.
    Warning,
    /// A property that cannot be determined from here.
    Unknown,
    /// A property that is as it should be.
    Ok,
}

impl Severity {
    /// Returns the name of the severity.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Unknown => "unknown",
            Self::Ok => "ok",
        }
    }
}

/// Result of a check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The database, as `host:port/name`.
    pub place: String,
    /// Name of the check.
    pub check: &'static str,
    /// Severity of the result.
    pub severity: Severity,
    /// Description of the result.
    pub found: String,
    /// Statements that repair it, for a superuser in that database, or for other owners where they
    /// are allowed to run them.
    pub sql: Option<String>,
    /// Advice where statements do not help, or no available login may run them.
    pub advice: Option<String>,
}

/// Settings of the calling host that the database must be able to bear.
#[derive(Debug, Clone, Copy)]
pub struct HostLimits {
    /// Maximum of connections of all tenants together, per host.
    pub connections_max: usize,
}

/// A check that is a query. Its rows are defects: severity, description, and statements.
struct Check {
    name: &'static str,
    /// Property that holds when there is no row.
    sound: &'static str,
    /// Further advice for a row.
    advice: Option<&'static str>,
    /// First version of PostgreSQL, as a number, that supports the query.
    since: i32,
    /// Query, appended to [`LOGINS`].
    query: &'static str,
}

impl Check {
    const fn new(name: &'static str, sound: &'static str, query: &'static str) -> Self {
        Self { name, sound, advice: None, since: 0, query }
    }

    const fn advice(self, advice: &'static str) -> Self {
        Self { advice: Some(advice), ..self }
    }

    const fn since(self, since: i32) -> Self {
        Self { since, ..self }
    }
}

/// Common tables of the queries: `tenant`, `login` (both of each tenant), `grantee` (those and
/// PUBLIC), `host`.
const LOGINS: &str = "WITH tenant AS MATERIALIZED (
        SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[]) AS t(name, login, \
    owner_login, schema_name)),
    login AS MATERIALIZED (
        SELECT r.*, t.name AS tenant, t.schema_name, t.owner_login, r.rolname = t.owner_login AS \
    is_owner
        FROM tenant t JOIN pg_roles r ON r.rolname IN (t.login, t.owner_login)),
    grantee AS MATERIALIZED (
        SELECT 0::oid AS oid, 'PUBLIC' AS name, NULL::text AS schema_name, false AS is_owner
        UNION ALL SELECT l.oid, quote_ident(l.rolname), l.schema_name, l.is_owner FROM login l),
    host AS MATERIALIZED (
        SELECT r.oid AS login, r.rolname AS login_name, r.rolsuper AS is_superuser, n.nspowner AS \
    owner, pg_get_userbyid(n.nspowner) AS owner_name
        FROM pg_roles r, pg_namespace n WHERE r.rolname = session_user AND n.nspname = 'oncebox')";

/// SQL expression for statements that revoke the functions `f` from `g`, and leave them to the
/// host.
const CLOSE: &str = "format('GRANT EXECUTE ON FUNCTION %1$s TO %2$I, %3$I; REVOKE EXECUTE ON \
    FUNCTION %1$s FROM %4$s', \
    string_agg(f.what, ', ' ORDER BY f.what), h.owner_name, h.login_name, g.name)";

/// One database under check, and the tenants that live in it.
struct Look<'a> {
    control: &'a Control,
    pool: PgPool,
    options: PgConnectOptions,
    place: String,
    tenants: Vec<Tenant>,
    limits: HostLimits,
    version: i32,
}

impl<'a> Doctor<'a> {
    /// Checks every database that holds tenants, and the host's own. Returns the findings by
    /// severity, errors first.
    ///
    /// # Errors
    /// An error where the tenants cannot be listed.
    pub async fn run(&self, limits: HostLimits) -> Result<Vec<Finding>, InboxError> {
        let mut findings = Vec::new();
        for look in self.looks(limits, &mut findings).await? {
            findings.extend(look.all().await);
        }
        findings.extend(self.databases_are_themselves().await);
        findings.extend(self.moves_go_on().await);
        findings.extend(self.topics_are_apart().await);
        findings.extend(self.archive_is_there().await);
        findings.extend(self.stores_are_open().await);
        findings.extend(self.endpoints_are_allowed().await);
        findings.extend(self.budgets_are_kept().await);
        findings.sort_by(|a, b| (a.severity, &a.place).cmp(&(b.severity, &b.place)));
        Ok(findings)
    }

    /// Returns a finding of a check that looks at no single database: it stands at the host's.
    fn of_host_database(&self, check: &'static str, severity: Severity, found: String) -> Finding {
        let place = place_name(&self.0.options);
        Finding { place, check, severity, found, sql: None, advice: None }
    }

    /// Returns the host's own database and those of tenants, each with its tenants. A tenant
    /// without a known database becomes a finding.
    async fn looks(
        &self,
        limits: HostLimits,
        findings: &mut Vec<Finding>,
    ) -> Result<Vec<Look<'a>>, InboxError> {
        let look = |pool: PgPool, options: PgConnectOptions, limits: HostLimits| Look {
            control: self.0,
            place: place_name(&options),
            pool,
            options,
            tenants: Vec::new(),
            limits,
            version: 0,
        };
        let mut looks = BTreeMap::from([(
            place_name(&self.0.options),
            look(self.0.pool.clone(), self.0.options.clone(), limits),
        )]);
        // Skips tenants in deletion: their roles and schema go before their row does.
        for tenant in
            self.0.tenants().list().await?.into_iter().filter(|tenant| !tenant.state.is_deleting())
        {
            match self.0.tenant_databases().get(&tenant) {
                Ok(place) => {
                    let named = &self.0.named_databases;
                    let limits = tenant
                        .database_name()
                        .and_then(|name| named.connections_max(name))
                        .map_or(limits, |connections_max| HostLimits { connections_max });
                    let entry = looks
                        .entry(place_name(&place.options))
                        .or_insert_with(|| look(place.pool, place.options, limits));
                    entry.tenants.push(tenant);
                }
                Err(error) => findings.push(unplaced(&tenant, &error)),
            }
        }
        Ok(looks.into_values().collect())
    }
}

/// Returns all checks that are a query.
fn queries() -> impl Iterator<Item = &'static Check> {
    [
        roles::CHECKS,
        access::CHECKS,
        functions::CHECKS,
        program::CHECKS,
        objects::CHECKS,
        storage::CHECKS,
        server::CHECKS,
    ]
    .into_iter()
    .flatten()
}

fn unplaced(tenant: &Tenant, error: &InboxError) -> Finding {
    Finding {
        place: String::new(),
        check: "place",
        severity: Severity::Error,
        found: format!("the database of tenant `{}` is not known: {error}", tenant.name),
        sql: None,
        advice: Some(
            "check that the host has the master key that the tenant was created with".to_owned(),
        ),
    }
}

fn place_name(options: &PgConnectOptions) -> String {
    let host = options
        .get_socket()
        .map_or_else(|| options.get_host().to_owned(), |socket| socket.display().to_string());
    format!(
        "{host}:{}/{}",
        options.get_port(),
        options.get_database().unwrap_or(options.get_username())
    )
}

impl Look<'_> {
    /// Runs every check of this database.
    async fn all(mut self) -> Vec<Finding> {
        match sqlx::query_scalar("SELECT current_setting('server_version_num')::int")
            .fetch_one(&self.pool)
            .await
        {
            Ok(version) => self.version = version,
            Err(error) => {
                let advice = "check that the server runs, and that its URL is right";
                return vec![
                    self.finding("reachable", Severity::Error, plain(&error)).advise(advice),
                ];
            }
        }
        let mut findings = Vec::new();
        for check in queries() {
            findings.extend(self.ask(check).await);
        }
        findings.extend(self.functions_are_as_shipped().await);
        findings.extend(self.partitions_are_made_ahead().await);
        findings.extend(self.ids_stand_once().await);
        findings.extend(self.logins_work().await);
        findings.extend(self.server_bears_the_hosts().await);
        findings.extend(self.memory_is_bounded().await);
        findings.extend(self.clocks_agree().await);
        findings
    }

    async fn ask(&self, check: &Check) -> Vec<Finding> {
        if self.version < check.since {
            return Vec::new();
        }
        match self.rows(check).await {
            Err(error) => vec![self.unknown(check.name, &error)],
            Ok(rows) if rows.is_empty() => {
                vec![self.finding(check.name, Severity::Ok, check.sound)]
            }
            Ok(rows) => rows.into_iter().map(|row| self.wrong(check, row)).collect(),
        }
    }

    async fn rows(
        &self,
        check: &Check,
    ) -> Result<Vec<(String, String, Option<String>)>, sqlx::Error> {
        let column =
            |of: fn(&Tenant) -> &String| self.tenants.iter().map(of).cloned().collect::<Vec<_>>();
        let query = check.query.replace("{revoked}", REVOKED_FUNCTIONS).replace("{close}", CLOSE);
        let query = format!("{LOGINS} {query}");
        let query = sqlx::query_as(AssertSqlSafe(query))
            .bind(column(|t| &t.name))
            .bind(column(|t| &t.login))
            .bind(column(|t| &t.owner_login))
            .bind(column(|t| &t.schema_name));
        let mut tx = self.pool.begin().await?;
        // Names of the host's objects come with their schema, also for a login whose own name is
        // that of the schema.
        tx.execute("SET LOCAL search_path = pg_catalog").await?;
        let rows = query.fetch_all(&mut *tx).await?;
        tx.commit().await?;
        Ok(rows)
    }

    fn wrong(
        &self,
        check: &Check,
        (severity, found, sql): (String, String, Option<String>),
    ) -> Finding {
        let severity = match severity.as_str() {
            "ok" => Severity::Ok,
            "warning" => Severity::Warning,
            "unknown" => Severity::Unknown,
            _ => Severity::Error,
        };
        Finding {
            sql,
            advice: check.advice.map(str::to_owned),
            ..self.finding(check.name, severity, found)
        }
    }

    fn unknown(&self, check: &'static str, error: &sqlx::Error) -> Finding {
        self.finding(
            check,
            Severity::Unknown,
            format!("the database does not tell: {}", plain(error)),
        )
        .advise(
            "run this once as a superuser, or as a member of `pg_read_all_settings` and \
                `pg_read_all_stats`",
        )
    }

    fn finding(
        &self,
        check: &'static str,
        severity: Severity,
        found: impl Into<String>,
    ) -> Finding {
        Finding {
            place: self.place.clone(),
            check,
            severity,
            found: found.into(),
            sql: None,
            advice: None,
        }
    }
}

impl Finding {
    fn fix(self, sql: impl Into<String>) -> Self {
        Self { sql: Some(sql.into()), ..self }
    }

    fn advise(self, advice: impl Into<String>) -> Self {
        Self { advice: Some(advice.into()), ..self }
    }
}
