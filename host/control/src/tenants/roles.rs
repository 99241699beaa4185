//! The two roles of a tenant, and its schema.

use super::{credentials::Credentials, scram};

/// Returns the statements that create the roles and the schema of a tenant in a database, or the
/// missing ones of them. They also set the passwords.
pub(crate) fn role_statements(
    database: &str,
    schema: &str,
    login: &str,
    owner: &str,
    credentials: &Credentials,
) -> Vec<String> {
    let guest_verifier = scram::verifier(&credentials.guest_password);
    let owner_verifier = scram::verifier(&credentials.owner_password);
    let make = |role: &str| {
        format!(
            "DO $$ BEGIN IF to_regrole('{role}') IS NULL THEN CREATE ROLE {role}; END IF; END $$"
        )
    };
    vec![
        make(login),
        make(owner),
        format!("ALTER ROLE {login} LOGIN NOINHERIT PASSWORD '{guest_verifier}'"),
        format!(
            "ALTER ROLE {owner} LOGIN NOINHERIT CONNECTION LIMIT 4 PASSWORD '{owner_verifier}'"
        ),
        // A login that is no superuser may only grant what it could also have.
        format!(
            "DO $$ BEGIN IF NOT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) THEN \
                EXECUTE format('GRANT {owner}, {login} TO %I', current_user); END IF; END $$"
        ),
        format!("GRANT CONNECT ON DATABASE {database} TO {login}, {owner}"),
        format!("CREATE SCHEMA IF NOT EXISTS {schema} AUTHORIZATION {owner}"),
        format!("GRANT USAGE ON SCHEMA {schema}, oncebox_host TO {login}"),
        format!("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA oncebox_host TO {login}"),
        format!("GRANT USAGE ON SCHEMA oncebox_host TO {owner}"),
        format!("GRANT EXECUTE ON FUNCTION oncebox_host.migration_applied TO {owner}"),
        format!(
            "ALTER DEFAULT PRIVILEGES FOR ROLE {owner} IN SCHEMA {schema} GRANT SELECT, INSERT, \
                UPDATE, DELETE ON TABLES TO {login}"
        ),
        format!(
            "ALTER DEFAULT PRIVILEGES FOR ROLE {owner} IN SCHEMA {schema} GRANT USAGE ON SEQUENCES \
                TO {login}"
        ),
        format!("ALTER ROLE {login} SET default_transaction_read_only = on"),
        format!("ALTER ROLE {owner} SET search_path = {schema}"),
    ]
}
