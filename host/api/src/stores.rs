//! The stores that a tenant has access to, from which hosts fetch the payloads that its messages
//! refer to.

use axum::Json;
use chrono::{DateTime, Utc};
use oncebox_control::{NewTenantStore, TenantStore};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    auth::Caller,
    error::ApiError,
    extract::{self, Path},
};

/// A tenant's access to a store. The access key is never shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = TenantStore)]
pub struct StoreBody {
    /// Name of the store, as the settings of hosts and policies name it.
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

/// Access to a store, for a tenant.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewTenantStore)]
pub struct NewStore {
    /// Bucket in which references may be.
    pub bucket: String,
    /// Prefix below which they may be, without `/` at its ends; empty for the whole bucket.
    #[serde(default)]
    pub prefix: String,
    /// Id of the access key, which needs the right to read objects there. It is kept sealed, and
    /// never shown.
    #[schema(write_only)]
    pub access_key_id: String,
    /// The access key itself. It is kept sealed, and never shown.
    #[schema(write_only)]
    pub secret_access_key: String,
}

/// Leaves out the access key.
impl std::fmt::Debug for NewStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NewStore")
            .field("bucket", &self.bucket)
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}

impl From<TenantStore> for StoreBody {
    fn from(store: TenantStore) -> Self {
        let TenantStore { store, bucket, prefix, set_at, set_by } = store;
        Self { store, bucket, prefix, set_at, set_by }
    }
}

/// List the stores that the tenant has access to
#[utoipa::path(get, path = "/v1/tenants/{tenant}/stores", tag = "tenants", params(("tenant" = String, Path)),
    responses((status = 200, body = Vec<StoreBody>)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn list(
    caller: Caller,
    Path(tenant): Path<String>,
) -> Result<Json<Vec<StoreBody>>, ApiError> {
    let stores = caller.control.tenant_stores().list(&tenant).await?;
    Ok(Json(stores.into_iter().map(Into::into).collect()))
}

/// Give the tenant access to a store, or replace its access
///
/// The settings of hosts say which stores there are. Fetches that begin some seconds later use the
/// new access.
#[utoipa::path(put, path = "/v1/tenants/{tenant}/stores/{store}", tag = "tenants",
    params(("tenant" = String, Path), ("store" = String, Path)), request_body = NewStore,
    responses((status = 200, body = StoreBody)), extensions(("x-role" = json!("admin"))))]
pub(crate) async fn set(
    caller: Caller,
    Path((tenant, store)): Path<(String, String)>,
    extract::Json(new): extract::Json<NewStore>,
) -> Result<Json<StoreBody>, ApiError> {
    let NewStore { bucket, prefix, access_key_id, secret_access_key } = new;
    let new = NewTenantStore { store, bucket, prefix, access_key_id, secret_access_key };
    Ok(Json(caller.control.tenant_stores().set(&tenant, &new).await?.into()))
}

/// Take the tenant's access to a store away, with its key
///
/// Messages that refer to objects there are parked from then on.
#[utoipa::path(delete, path = "/v1/tenants/{tenant}/stores/{store}", tag = "tenants",
    params(("tenant" = String, Path), ("store" = String, Path)),
    responses((status = 200, body = StoreBody)), extensions(("x-role" = json!("admin"))))]
pub(crate) async fn delete(
    caller: Caller,
    Path((tenant, store)): Path<(String, String)>,
) -> Result<Json<StoreBody>, ApiError> {
    Ok(Json(caller.control.tenant_stores().delete(&tenant, &store).await?.into()))
}
