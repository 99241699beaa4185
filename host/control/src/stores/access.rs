//! A tenant's access to a store: its bucket, its prefix, and its access key.

use chrono::{DateTime, Utc};
use oncebox_archive::{ArchiveError, ObjectOptions, ObjectReader};
use oncebox_model::error::InboxError;
use serde::{Deserialize, Serialize};
use serde_json::json;
use sqlx::PgConnection;

use super::place::is_plain;
use crate::{
    audit::Subject,
    handles::TenantStores,
    tenants::{Tenant, keys::MasterKey},
};

/// Purpose under which `oncebox.tenant_store.access_key` is sealed, for the login and the store.
const ACCESS_KEY: &str = "access key";
/// Longest id of an access key, and longest key, bytes.
const KEY_BYTES_MAX: usize = 4_096;
/// Longest prefix, bytes.
const PREFIX_BYTES_MAX: usize = 512;

/// A tenant's access to a store, without its key.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct TenantStore {
    /// Name of the store.
    pub store: String,
    /// Bucket in which references may be.
    pub bucket: String,
    /// Prefix below which they may be; empty for the whole bucket.
    pub prefix: String,
    /// Time of the last change.
    pub set_at: DateTime<Utc>,
    /// Author of the last change.
    pub set_by: String,
}

/// A tenant's access to a store, with its key.
#[derive(Clone, PartialEq, Eq)]
pub struct NewTenantStore {
    /// Name of the store, among those that the settings name.
    pub store: String,
    /// Bucket in which references may be.
    pub bucket: String,
    /// Prefix below which they may be, without `/` at its ends; empty for the whole bucket.
    pub prefix: String,
    /// Id of the access key.
    pub access_key_id: String,
    /// The access key itself.
    pub secret_access_key: String,
}

/// The access key is a secret.
impl std::fmt::Debug for NewTenantStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NewTenantStore")
            .field("store", &self.store)
            .field("bucket", &self.bucket)
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}

/// An access key, as it is sealed.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct AccessKey {
    pub(super) id: String,
    pub(super) secret: String,
}

/// A row as a fetch reads it.
#[derive(Clone, PartialEq, Eq, sqlx::FromRow)]
pub(crate) struct StoreRow {
    pub(crate) bucket: String,
    pub(crate) prefix: String,
    pub(crate) access_key: Vec<u8>,
}

impl TenantStores<'_> {
    /// Gives a tenant access to a store, or replaces its access. Fetches that begin some seconds
    /// later use it. Opens no connection to the store.
    ///
    /// # Errors
    /// `NotFound` where there is no such tenant. `Invalid` where the settings name no such store,
    /// or where bucket, prefix or key cannot be used. `Conflict` where the tenant is being deleted.
    pub async fn set(&self, tenant: &str, new: &NewTenantStore) -> Result<TenantStore, InboxError> {
        const SET: &str = "INSERT INTO oncebox.tenant_store (tenant_id, store, bucket, prefix, \
            access_key, set_by) VALUES ($1, $2, $3, $4, $5, $6) \
            ON CONFLICT (tenant_id, store) DO UPDATE SET bucket = excluded.bucket, \
            prefix = excluded.prefix, access_key = excluded.access_key, set_at = now(), \
            set_by = excluded.set_by \
            RETURNING store, bucket, prefix, set_at, set_by";
        self.check(new)?;
        let mut tx = self.0.pool.begin().await?;
        let row = self.0.tenants().lock(&mut tx, tenant).await?;
        let set: TenantStore = sqlx::query_as(SET)
            .bind(row.tenant_id)
            .bind(&new.store)
            .bind(&new.bucket)
            .bind(&new.prefix)
            .bind(seal(&self.0.key, &row, new))
            .bind(&self.0.actor)
            .fetch_one(&mut *tx)
            .await?;
        let details = json!({ "bucket": set.bucket, "prefix": set.prefix });
        let subject = Subject::of(tenant, &set.store);
        self.0.audit().record(&mut tx, "tenant.set_store", subject, details).await?;
        tx.commit().await?;
        Ok(set)
    }

    /// Returns the stores that a tenant has access to, by name.
    ///
    /// # Errors
    /// `NotFound` where there is no such tenant, or an error of the host's database.
    pub async fn list(&self, tenant: &str) -> Result<Vec<TenantStore>, InboxError> {
        const LIST: &str = "SELECT store, bucket, prefix, set_at, set_by \
            FROM oncebox.tenant_store WHERE tenant_id = $1 ORDER BY store";
        let tenant = self.0.tenants().get(tenant).await?;
        Ok(sqlx::query_as(LIST).bind(tenant.tenant_id).fetch_all(&self.0.pool).await?)
    }

    /// Takes a tenant's access to a store away, with its key. Returns what it was.
    ///
    /// # Errors
    /// `NotFound` where there is no such tenant, or it has no access to the store. `Conflict` where
    /// the tenant is being deleted.
    pub async fn delete(&self, tenant: &str, store: &str) -> Result<TenantStore, InboxError> {
        const DELETE: &str = "DELETE FROM oncebox.tenant_store WHERE tenant_id = $1 AND store = $2 \
            RETURNING store, bucket, prefix, set_at, set_by";
        let mut tx = self.0.pool.begin().await?;
        let row = self.0.tenants().lock(&mut tx, tenant).await?;
        let deleted: Option<TenantStore> =
            sqlx::query_as(DELETE).bind(row.tenant_id).bind(store).fetch_optional(&mut *tx).await?;
        let deleted = deleted.ok_or_else(|| {
            InboxError::NotFound(format!(
                "tenant `{tenant}` has no access to a store `{store}`; `oncebox tenant store list \
                    {tenant}` shows those that it has access to"
            ))
        })?;
        let details = json!({ "bucket": deleted.bucket, "prefix": deleted.prefix });
        let subject = Subject::of(tenant, store);
        self.0.audit().record(&mut tx, "tenant.delete_store", subject, details).await?;
        tx.commit().await?;
        Ok(deleted)
    }

    /// Seals a tenant's access keys under another master key. Returns whether one was sealed under
    /// another key before.
    pub(crate) async fn seal_anew(
        &self,
        connection: &mut PgConnection,
        keys: &MasterKey,
        new: &MasterKey,
        tenant: &Tenant,
    ) -> Result<bool, InboxError> {
        const ALL: &str = "SELECT store, access_key FROM oncebox.tenant_store \
            WHERE tenant_id = $1 ORDER BY store FOR UPDATE";
        const KEEP: &str = "UPDATE oncebox.tenant_store SET access_key = $3 \
            WHERE tenant_id = $1 AND store = $2";
        let all: Vec<(String, Vec<u8>)> =
            sqlx::query_as(ALL).bind(tenant.tenant_id).fetch_all(&mut *connection).await?;
        let mut is_changed = false;
        for (store, sealed) in all {
            let subject = subject(tenant, &store);
            let key = keys.unseal(ACCESS_KEY, &subject, &sealed)?;
            if new.has_sealed(&sealed) {
                continue;
            }
            is_changed = true;
            sqlx::query(KEEP)
                .bind(tenant.tenant_id)
                .bind(&store)
                .bind(new.seal(ACCESS_KEY, &subject, &key))
                .execute(&mut *connection)
                .await?;
        }
        Ok(is_changed)
    }

    /// Returns the row of a tenant's access to a store, if there is one.
    pub(crate) async fn row(
        &self,
        tenant_id: i32,
        store: &str,
    ) -> Result<Option<StoreRow>, InboxError> {
        const ROW: &str = "SELECT bucket, prefix, access_key FROM oncebox.tenant_store \
            WHERE tenant_id = $1 AND store = $2";
        let query = sqlx::query_as(ROW).bind(tenant_id).bind(store);
        Ok(query.fetch_optional(&self.0.pool).await?)
    }

    /// Returns the bucket of a row, with the tenant's key and the operator's settings.
    pub(crate) fn open(
        &self,
        tenant: &Tenant,
        store: &str,
        row: &StoreRow,
    ) -> Result<ObjectReader, InboxError> {
        let sealed = self.0.key.unseal(ACCESS_KEY, &subject(tenant, store), &row.access_key)?;
        let key = serde_json::from_slice(&sealed).map_err(|_| {
            InboxError::Sealed(format!(
                "the access key of tenant `{}` for the store `{store}` is of a form that this \
                    version does not know",
                tenant.name
            ))
        })?;
        let options = self.options(store, &row.bucket, key)?;
        ObjectReader::new(&options).map_err(unusable)
    }

    fn options(
        &self,
        store: &str,
        bucket: &str,
        key: AccessKey,
    ) -> Result<ObjectOptions, InboxError> {
        let settings = self.0.stores.get(store)?;
        Ok(ObjectOptions {
            bucket: bucket.to_owned(),
            endpoint: settings.endpoint.clone(),
            region: settings.region.clone(),
            access_key_id: key.id,
            secret_access_key: key.secret,
            ca_file: settings.ca_file.clone(),
            allow_http: settings.allow_http,
            allow_private: settings.allow_private,
            stall: self.0.stores.limits.stall,
        })
    }

    /// Refuses an access that cannot be used.
    fn check(&self, new: &NewTenantStore) -> Result<(), InboxError> {
        let NewTenantStore { store, bucket, prefix, access_key_id: id, secret_access_key } = new;
        if prefix.len() > PREFIX_BYTES_MAX || !prefix.is_empty() && !is_plain(prefix) {
            return Err(InboxError::Invalid(format!(
                "the prefix is to have at most {PREFIX_BYTES_MAX} bytes, no `/` at its ends, no \
                    empty part, no `.` or `..` as a part, and none of `%`, `\\`, `?` and `#`"
            )));
        }
        for (what, text) in [("id of the access key", id), ("access key", secret_access_key)] {
            let is_short = (1..=KEY_BYTES_MAX).contains(&text.len());
            if !is_short || text.chars().any(|c| c.is_control() || c.is_whitespace()) {
                return Err(InboxError::Invalid(format!(
                    "the {what} is to have 1 to {KEY_BYTES_MAX} bytes, without spaces"
                )));
            }
        }
        let key = AccessKey { id: id.clone(), secret: secret_access_key.clone() };
        let options = self.options(store, bucket, key)?;
        ObjectReader::new(&options).map(drop).map_err(unusable)
    }
}

fn unusable(error: ArchiveError) -> InboxError {
    InboxError::Invalid(error.to_string())
}

/// Returns the subject that a key is sealed for: it opens for no other tenant and no other store.
fn subject(tenant: &Tenant, store: &str) -> String {
    format!("{}/{store}", tenant.login)
}

fn seal(key: &MasterKey, tenant: &Tenant, new: &NewTenantStore) -> Vec<u8> {
    let access = AccessKey { id: new.access_key_id.clone(), secret: new.secret_access_key.clone() };
    let text = serde_json::to_vec(&access).expect("texts are JSON");
    key.seal(ACCESS_KEY, &subject(tenant, &new.store), &text)
}
