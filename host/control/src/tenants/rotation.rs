//! Rotation of secrets: a tenant's credentials while its messages run, and the master key that
//! seals all credentials.

use oncebox_model::error::InboxError;
use serde_json::json;
use sqlx::{Executor, PgConnection};

use crate::{
    audit::Subject,
    handles::Tenants,
    tenants::{
        Tenant,
        credentials::{CREDENTIALS, Credentials},
        keys::{MasterKey, secret_hash},
        scram,
    },
};

/// Purpose under which `oncebox.tenant.database_url` is sealed, for the tenant's login.
const DATABASE_URL: &str = "database url";

/// The result of a change of the master key.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct KeyRotation {
    /// Name of the key under which everything is sealed afterwards.
    pub key: String,
    /// Tenants with a value that was sealed under another key, or not at all.
    pub sealed: usize,
    /// Tenants whose values were all sealed under this key already.
    pub unchanged: usize,
}

impl Tenants<'_> {
    /// Gives a tenant new passwords and a new secret, in one transaction. Open sessions go on: the
    /// earlier secret counts for ten more minutes, and PostgreSQL asks for a password only at the
    /// start of a connection. Returns the tenant.
    ///
    /// # Errors
    /// `NotFound` where there is no such tenant. `NotPropagated` where the tenant's own database does
    /// not know of the change yet.
    pub async fn rotate_credentials(&self, name: &str) -> Result<Tenant, InboxError> {
        let mut tx = self.0.pool.begin().await?;
        let tenant = self.lock(&mut tx, name).await?;
        let credentials = self.0.tenant_databases().credentials(&tenant)?.rotated();
        // This transaction cannot change roles of another database.
        if tenant.database_url.is_none() {
            set_passwords(&mut tx, &tenant, &credentials).await?;
        }
        set_secret(&mut tx, &tenant, &credentials).await?;
        const KEEP: &str = "UPDATE oncebox.tenant SET credentials = $2, revision = revision + 1 \
            WHERE tenant_id = $1 RETURNING *";
        let sealed = credentials.sealed(&self.0.key, &tenant.login);
        let tenant: Tenant =
            sqlx::query_as(KEEP).bind(tenant.tenant_id).bind(sealed).fetch_one(&mut *tx).await?;
        self.0
            .audit()
            .record(
                &mut tx,
                "tenant.rotate_credentials",
                Subject::tenant(name),
                json!({ "revision": tenant.revision }),
            )
            .await?;
        tx.commit().await?;
        self.announce(&tenant).await;
        let replicated = self.0.tenant_databases().replicate(&tenant).await;
        replicated.map_err(|source| InboxError::NotPropagated {
            text: format!(
                "the credentials of `{name}` are new, but its own database does not know them yet: \
                    sessions that are open go on, new ones \
                 wait; hosts tell it as soon as it answers"
            ),
            source: Box::new(source),
        })?;
        Ok(tenant)
    }

    /// Seals everything under another master key, in one transaction. A value that is sealed under
    /// that key already stays as it is. A second run therefore finishes what hosts with the old key
    /// have sealed in between. Nothing changes when a value opens with neither key.
    /// Returns the numbers of values.
    ///
    /// # Errors
    /// `Sealed` where a value opens with neither key.
    pub async fn rotate_master_key(&self, new: &MasterKey) -> Result<KeyRotation, InboxError> {
        let keys = new.clone().with_previous(&self.0.key);
        let mut tx = self.0.pool.begin().await?;
        let tenants: Vec<Tenant> =
            sqlx::query_as("SELECT * FROM oncebox.tenant ORDER BY tenant_id FOR NO KEY UPDATE")
                .fetch_all(&mut *tx)
                .await?;
        let mut rotation = KeyRotation { key: new.name(), sealed: 0, unchanged: 0 };
        for tenant in &tenants {
            if tenant.state.is_deleting() && tenant.credentials.is_none() {
                // The tenant was created before credentials were sealed, and its secret is already
                // cleared.
                rotation.unchanged += 1;
                continue;
            }
            let credentials = sealed_anew(&keys, new, tenant)?;
            let database_url = tenant
                .database_url
                .as_deref()
                .map(|url| anew(&keys, new, DATABASE_URL, &tenant.login, url))
                .transpose()?;
            let stores = self.0.tenant_stores();
            let is_new_for_stores = stores.seal_anew(&mut tx, &keys, new, tenant).await?;
            reseal_move(&mut tx, &keys, new, tenant).await?;
            let endpoints = self.0.endpoints();
            let is_new_for_endpoints = endpoints.seal_anew(&mut tx, &keys, new, tenant).await?;
            let ingress = self.0.ingress();
            let is_new_for_ingress = ingress.seal_anew(&mut tx, &keys, new, tenant).await?;
            if Some(&credentials) == tenant.credentials.as_ref()
                && database_url == tenant.database_url
                && !is_new_for_stores
                && !is_new_for_endpoints
                && !is_new_for_ingress
            {
                rotation.unchanged += 1;
                continue;
            }
            const KEEP: &str = "UPDATE oncebox.tenant SET credentials = $2, database_url = $3 \
                WHERE tenant_id = $1";
            sqlx::query(KEEP)
                .bind(tenant.tenant_id)
                .bind(credentials)
                .bind(database_url)
                .execute(&mut *tx)
                .await?;
            rotation.sealed += 1;
        }
        if rotation.sealed > 0 {
            let details =
                json!({ "from": self.0.key.name(), "to": new.name(), "tenants": rotation.sealed });
            self.0
                .audit()
                .record(&mut tx, "keys.rotate", Subject::platform("master key"), details)
                .await?;
        }
        tx.commit().await?;
        Ok(rotation)
    }
}

/// Seals the address of the database that a tenant leaves, or has left and where something of it is
/// still to be removed.
async fn reseal_move(
    connection: &mut PgConnection,
    keys: &MasterKey,
    new: &MasterKey,
    tenant: &Tenant,
) -> Result<(), InboxError> {
    const READ: &str = "SELECT from_database_url FROM oncebox.tenant_move WHERE tenant_id = $1 AND \
        from_database_url IS NOT NULL FOR UPDATE";
    const KEEP: &str = "UPDATE oncebox.tenant_move SET from_database_url = $2 WHERE tenant_id = $1";
    let sealed: Option<Vec<u8>> =
        sqlx::query_scalar(READ).bind(tenant.tenant_id).fetch_optional(&mut *connection).await?;
    let Some(sealed) = sealed else { return Ok(()) };
    let sealed = anew(keys, new, DATABASE_URL, &tenant.login, &sealed)?;
    sqlx::query(KEEP).bind(tenant.tenant_id).bind(sealed).execute(connection).await?;
    Ok(())
}

fn sealed_anew(keys: &MasterKey, new: &MasterKey, tenant: &Tenant) -> Result<Vec<u8>, InboxError> {
    match &tenant.credentials {
        Some(sealed) => anew(keys, new, CREDENTIALS, &tenant.login, sealed),
        None => Ok(keys.credentials(tenant)?.sealed(new, &tenant.login)),
    }
}

fn anew(
    keys: &MasterKey,
    new: &MasterKey,
    purpose: &str,
    subject: &str,
    sealed: &[u8],
) -> Result<Vec<u8>, InboxError> {
    // The text is also opened where it stays: a matching key name does not prove that the text is
    // whole.
    let text = keys.unseal(purpose, subject, sealed)?;
    Ok(if new.has_sealed(sealed) { sealed.to_vec() } else { new.seal(purpose, subject, &text) })
}

/// Sets the passwords of the tenant's roles. A statement contains the verifier, never the password.
async fn set_passwords(
    connection: &mut PgConnection,
    tenant: &Tenant,
    credentials: &Credentials,
) -> Result<(), InboxError> {
    for (login, password) in [
        (&tenant.login, &credentials.guest_password),
        (&tenant.owner_login, &credentials.owner_password),
    ] {
        let statement = format!("ALTER ROLE {login} PASSWORD '{}'", scram::verifier(password));
        connection.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(statement))).await?;
    }
    Ok(())
}

/// Sets the hash of a new secret, and keeps the earlier hash valid for ten minutes. A session that
/// is two secrets old is denied, as an error of the host: its message comes again.
async fn set_secret(
    connection: &mut PgConnection,
    tenant: &Tenant,
    credentials: &Credentials,
) -> Result<(), InboxError> {
    const SET: &str = "UPDATE oncebox.tenant SET secret_hash_before = secret_hash, \
        secret_before_until = now() + interval '10 minutes', \
        secret_hash = $2 WHERE tenant_id = $1";
    sqlx::query(SET)
        .bind(tenant.tenant_id)
        .bind(secret_hash(&credentials.secret))
        .execute(connection)
        .await?;
    Ok(())
}
