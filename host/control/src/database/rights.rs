//! The rights of the host's login, for a server on which it is no superuser: what an administrator
//! of the server gives once, and nothing besides.

use oncebox_model::error::InboxError;

use super::schema::{REVOKE_FUNCTIONS, REVOKED_FUNCTIONS};

/// Longest name of a login or a database. The name of the role that owns the inbox is longer.
const NAME_MAX: usize = 56;

/// A statement for an administrator of a server.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct RightsStatement {
    /// What it is for.
    pub reason: &'static str,
    /// Whether it is run in the new database, and not in one that the server has already.
    pub is_in_database: bool,
    /// Whether a host works without it, with one defence fewer. A managed server may refuse it to
    /// its administrator.
    pub is_optional: bool,
    /// The statement.
    pub sql: String,
}

/// Returns the statements that give a login what a host needs for a new database, in their order.
/// The login has no password yet.
///
/// # Errors
/// `Invalid` for a name that would have to be quoted.
pub fn rights(login: &str, database: &str) -> Result<Vec<RightsStatement>, InboxError> {
    check("login", login)?;
    check("database", database)?;
    let mut all = needed(login, database);
    all.extend(optional(login));
    Ok(all)
}

/// Returns the statements without which no host works.
fn needed(login: &str, database: &str) -> Vec<RightsStatement> {
    let owner = owner_of(login);
    let statement = |is_in_database, reason, sql| RightsStatement {
        reason,
        is_in_database,
        is_optional: false,
        sql,
    };
    vec![
        statement(
            false,
            "The login of hosts. Each tenant has two roles, which it makes.",
            format!("CREATE ROLE {login} LOGIN CREATEROLE"),
        ),
        statement(
            false,
            "The role that owns the inbox. It cannot log in, and hosts act as it.",
            format!("CREATE ROLE {owner} NOLOGIN; GRANT {owner} TO {login}"),
        ),
        statement(
            false,
            "An administrator who is no superuser makes things for these roles as a member.",
            format!("GRANT {login}, {owner} TO CURRENT_USER"),
        ),
        statement(
            false,
            "The database, which hosts close to everybody else.",
            format!("CREATE DATABASE {database} OWNER {login}"),
        ),
        statement(
            true,
            "The schemas of the inbox.",
            format!(
                "CREATE SCHEMA oncebox AUTHORIZATION {owner}; \
                 CREATE SCHEMA oncebox_host AUTHORIZATION {owner}"
            ),
        ),
    ]
}

/// Returns the statements that give a host one defence more each, and take back what the
/// administrator had for the others.
fn optional(login: &str) -> Vec<RightsStatement> {
    let owner = owner_of(login);
    let functions = REVOKE_FUNCTIONS
        .replace("{functions}", REVOKED_FUNCTIONS)
        .replace("{owner}", &owner)
        .replace("{login}", &format!("'{login}'"));
    let statement =
        |reason, sql| RightsStatement { reason, is_in_database: true, is_optional: true, sql };
    vec![
        statement(
            "Settings of tenants' roles: no parameters in the server's log, a bound on temporary \
                files, deadlocks found soon.",
            format!(
                "GRANT SET ON PARAMETER log_parameter_max_length, temp_file_limit, \
                    deadlock_timeout TO {login}"
            ),
        ),
        statement(
            "What `oncebox doctor` reads of the server's settings.",
            format!("GRANT pg_read_all_settings TO {login}"),
        ),
        statement("Functions by which one tenant could block another, or learn of it.", functions),
        statement(
            "Languages in which a tenant could write functions.",
            format!(
                "GRANT USAGE ON LANGUAGE plpgsql, sql TO {owner}; \
                 REVOKE USAGE ON LANGUAGE plpgsql, sql FROM PUBLIC"
            ),
        ),
        statement(
            "The administrator is a member no more.",
            format!("REVOKE {login}, {owner} FROM CURRENT_USER"),
        ),
    ]
}

/// Returns the name of the role that owns the inbox of a login.
fn owner_of(login: &str) -> String {
    format!("{login}_owner")
}

/// Returns the statements as a script for `psql`. It stops at the first statement that fails, so
/// that it changes nothing of an installation that exists, and goes on after an optional one.
///
/// # Errors
/// As [`rights`].
pub fn rights_script(login: &str, database: &str) -> Result<String, InboxError> {
    let mut script = "\\set ON_ERROR_STOP on\n\n".to_owned();
    let (mut is_connected, mut is_stopping) = (false, true);
    for RightsStatement { reason, is_in_database, is_optional, sql } in rights(login, database)? {
        if is_in_database && !is_connected {
            script += &format!("\\connect {database}\n\n");
            is_connected = true;
        }
        if is_optional && is_stopping {
            script += "-- A managed server may refuse these; hosts work without them.\n\
                \\set ON_ERROR_STOP off\n\n";
            is_stopping = false;
        }
        script += &format!("-- {reason}\n{sql};\n\n");
    }
    script += &format!(
        "-- Asks for the password of hosts; the server keeps its verifier.\n\\password {login}\n"
    );
    Ok(script)
}

fn check(what: &str, name: &str) -> Result<(), InboxError> {
    let is_sound = name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.len() <= NAME_MAX
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    if is_sound {
        return Ok(());
    }
    Err(InboxError::Invalid(format!(
        "`{name}` cannot be the name of the {what}; use a lower-case letter, then up to {} of a-z, \
            0-9 and `_`",
        NAME_MAX - 1
    )))
}
