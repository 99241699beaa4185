//! Trials of the tenants' logins: they log in with the host's passwords and not with others, and
//! their sessions have the required settings.

use futures::{StreamExt, stream};
use oncebox_model::{error::plain, sqlstate};
use sqlx::{ConnectOptions, Connection, PgConnection, postgres::PgConnectOptions};

use super::{Finding, Look, Severity};
use crate::tenants::{Tenant, credentials::Credentials, keys::secret_hash, scram};

const CHECK: &str = "logins";

/// Number of tenants that are tried in parallel.
const TRIED_AT_ONCE: usize = 4;

/// Query for the settings of a session of a tenant's handlers, before a host sets any.
const SETTINGS: &str = "SELECT current_setting('session_replication_role'), \
    current_setting('is_superuser'), \
    current_setting('log_parameter_max_length'), \
    current_setting('log_parameter_max_length_on_error'), \
    current_setting('log_statement') = 'all' OR current_setting('log_min_duration_statement') <> \
    '-1' \
        OR current_setting('log_min_duration_sample') <> '-1' OR \
        current_setting('log_transaction_sample_rate') <> '0'";

#[derive(sqlx::FromRow)]
struct Session(String, String, String, String, bool);

impl Look<'_> {
    /// Checks that passwords and secret of every tenant are those that the host has, and that a
    /// guessed password fails.
    pub(super) async fn logins_work(&self) -> Vec<Finding> {
        let tries: Vec<_> = self.tenants.iter().map(|tenant| self.tries(tenant)).collect();
        let mut findings: Vec<_> =
            stream::iter(tries).buffer_unordered(TRIED_AT_ONCE).concat().await;
        findings.extend(self.guess().await);
        if findings.is_empty() {
            let count = self.tenants.len();
            findings.push(self.finding(
                CHECK,
                Severity::Ok,
                format!(
                    "the logins of {count} tenants open with what the host has, with nothing \
                    else, and to a session that is caged"
                ),
            ));
        }
        findings
    }

    async fn tries(&self, tenant: &Tenant) -> Vec<Finding> {
        let credentials = match self.control.tenant_databases().credentials(tenant) {
            Ok(credentials) => credentials,
            Err(error) => {
                let found =
                    format!("the credentials of tenant `{}` cannot be read: {error}", tenant.name);
                return vec![
                    self.finding(CHECK, Severity::Error, found)
                        .advise("give the host the master key that they were sealed with"),
                ];
            }
        };
        let mut findings = Vec::new();
        for (login, password) in [
            (&tenant.login, &credentials.guest_password),
            (&tenant.owner_login, &credentials.owner_password),
        ] {
            findings.extend(self.log_in(tenant, login, password).await);
        }
        findings.extend(self.secret(tenant, &credentials).await);
        findings
    }

    async fn log_in(&self, tenant: &Tenant, login: &str, password: &str) -> Vec<Finding> {
        let error = match PgConnection::connect_with(&self.as_login(login, password)).await {
            Ok(connection) => return self.begins(login, connection).await,
            Err(error) => error,
        };
        let found =
            format!("`{login}` of tenant `{}` cannot log in: {}", tenant.name, plain(&error));
        let finding = self.finding(CHECK, Severity::Error, found).advise(
            "a tenant that may write functions can change the password of its own login; a host \
                with another master key finds other passwords",
        );
        let is_password = error
            .as_database_error()
            .and_then(|e| e.code())
            .is_some_and(|code| code == sqlstate::INVALID_PASSWORD);
        vec![if is_password {
            finding.fix(format!("ALTER ROLE {login} PASSWORD '{}'", scram::verifier(password)))
        } else {
            finding
        }]
    }

    /// Checks the initial settings of a session: the guard's trigger fires, and bound parameters
    /// are not written to the log.
    async fn begins(&self, login: &str, mut connection: PgConnection) -> Vec<Finding> {
        let session = sqlx::query_as(SETTINGS).fetch_one(&mut connection).await;
        let _ = connection.close().await; // the answer has arrived
        match session {
            Ok(session) => self.session(login, &session),
            Err(error) => vec![self.unknown(CHECK, &error)],
        }
    }

    async fn secret(&self, tenant: &Tenant, credentials: &Credentials) -> Option<Finding> {
        const KNOWN: &str =
            "SELECT EXISTS (SELECT FROM oncebox.tenant WHERE login = $1 AND secret_hash = $2)";
        let hash = secret_hash(&credentials.secret);
        match sqlx::query_scalar(KNOWN).bind(&tenant.login).bind(&hash).fetch_one(&self.pool).await
        {
            Ok(true) => None,
            Ok(false) => {
                let found = format!(
                    "the secret of tenant `{}` is not the one that the host has: its sessions are \
                        denied",
                    tenant.name
                );
                let sql = format!(
                    "UPDATE oncebox.tenant SET secret_hash = '\\x{}' WHERE login = '{}'",
                    hex::encode(&hash),
                    tenant.login
                );
                Some(self.finding(CHECK, Severity::Error, found).fix(sql).advise(
                    "find out who changed it: it lets whoever knows its secret claim messages",
                ))
            }
            Err(error) => Some(self.unknown(CHECK, &error)),
        }
    }

    /// Tries a guessed password. A server that asks for no password accepts it.
    async fn guess(&self) -> Option<Finding> {
        let tenant = self.tenants.first()?;
        let guess = hex::encode(rand::random::<[u8; 16]>());
        let connection =
            PgConnection::connect_with(&self.as_login(&tenant.login, &guess)).await.ok()?;
        let _ = connection.close().await; // the answer has arrived
        let found = "the server lets tenants' logins in with any password: whoever reaches its \
            port is any tenant";
        Some(self.finding(CHECK, Severity::Error, found).advise(
            "write `scram-sha-256` instead of `trust` into pg_hba.conf, then `SELECT \
                    pg_reload_conf()`",
        ))
    }

    fn as_login(&self, login: &str, password: &str) -> PgConnectOptions {
        self.options.clone().username(login).password(password).disable_statement_logging()
    }

    fn session(
        &self,
        login: &str,
        Session(replication, superuser, logged, logged_on_error, writes): &Session,
    ) -> Vec<Finding> {
        let mut findings = Vec::new();
        let mut wrong = |severity, found: String, sql: String| {
            findings.push(self.finding(CHECK, severity, found).fix(sql))
        };
        if replication != "origin" {
            let found = format!(
                "sessions of `{login}` begin with `session_replication_role = {replication}`: the \
                    commit guard does not fire"
            );
            wrong(
                Severity::Error,
                found,
                format!("ALTER ROLE {login} SET session_replication_role = origin"),
            );
        }
        if superuser != "off" {
            wrong(
                Severity::Error,
                format!("sessions of `{login}` are a superuser's"),
                format!("ALTER ROLE {login} NOSUPERUSER"),
            );
        }
        if logged != "0" {
            let severity = if *writes { Severity::Error } else { Severity::Warning };
            let now = if *writes { "writes" } else { "would write, if it logged statements," };
            let found = format!(
                "the server {now} the parameters of `{login}` to its log, and with them the secret \
                    of its sessions and payloads"
            );
            wrong(severity, found, format!("ALTER ROLE {login} SET log_parameter_max_length = 0"));
        }
        if logged_on_error != "0" {
            let found = format!(
                "the server writes parameters of failed statements of `{login}` to its log"
            );
            wrong(
                Severity::Error,
                found,
                format!("ALTER ROLE {login} SET log_parameter_max_length_on_error = 0"),
            );
        }
        findings
    }
}
