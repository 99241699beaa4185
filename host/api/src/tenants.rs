//! Tenants and the migrations of their tables.

use axum::{Json, http::StatusCode};
use chrono::{DateTime, Utc};
use oncebox_control::DatabaseUrl;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    auth::Caller,
    error::ApiError,
    extract::{self, Path},
    migrations::NewMigrationBody,
    tenant_changes::TenantLimitsBody,
};

/// A tenant.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(as = Tenant)]
pub struct TenantBody {
    /// Key.
    pub tenant_id: i32,
    /// Name.
    pub name: String,
    /// Schema of its tables.
    pub schema_name: String,
    /// Login that handlers run as.
    pub login: String,
    /// Login that owns the schema.
    pub owner_login: String,
    /// Name of the database with its inbox and tables in the configuration of hosts, or host, port
    /// and name of one that the tenant named. Absent where they are in the host's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub database: Option<String>,
    /// `active`, `suspended` or `deleting`.
    pub state: String,
    /// Resources that each host gives the tenant.
    pub limits: TenantLimitsBody,
    /// Revision; it grows with every change that hosts must apply.
    pub revision: i64,
    /// Time of creation.
    pub created_at: DateTime<Utc>,
}

impl From<oncebox_control::Tenant> for TenantBody {
    fn from(tenant: oncebox_control::Tenant) -> Self {
        let oncebox_control::Tenant {
            tenant_id,
            name,
            schema_name,
            login,
            owner_login,
            database,
            state,
            limits,
            revision,
            created_at,
            ..
        } = tenant;
        Self {
            tenant_id,
            name,
            schema_name,
            login,
            owner_login,
            database,
            state: state.to_string(),
            limits: limits.into(),
            revision,
            created_at,
        }
    }
}

/// A tenant to be created.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewTenant {
    /// A lower-case letter, then up to 62 of a-z, 0-9 and `-`.
    pub name: String,
    /// Migrations of its tables, in order. If one fails, the tenant is not created.
    #[serde(default)]
    pub migrations: Vec<NewMigrationBody>,
    /// URL of a PostgreSQL database that holds its inbox and tables instead of the host's, as
    /// `postgres://login:password@host:5432/name?sslmode=verify-full`. The database must be empty
    /// and for this tenant alone. The login may create roles and schemas there. The URL is kept
    /// sealed, and never shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(write_only)]
    pub database_url: Option<String>,
    /// Name of a database in the configuration of hosts that holds its inbox and tables. Without a
    /// name and a URL, the host chooses one by weight; where it has none, the host's database.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub database: Option<String>,
}

/// Leaves out the URL, which holds a password.
impl std::fmt::Debug for NewTenant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NewTenant")
            .field("name", &self.name)
            .field("migrations", &self.migrations)
            .finish_non_exhaustive()
    }
}

/// List tenants
#[utoipa::path(get, path = "/v1/tenants", tag = "tenants", responses((status = 200, body = Vec<TenantBody>)),
    extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn list(caller: Caller) -> Result<Json<Vec<TenantBody>>, ApiError> {
    Ok(Json(caller.control.tenants().list().await?.into_iter().map(Into::into).collect()))
}

/// Create a tenant: its schema and its logins
#[utoipa::path(post, path = "/v1/tenants", tag = "tenants", request_body = NewTenant, responses((status = 201, body = TenantBody)),
    extensions(("x-role" = json!("admin"))))]
pub(crate) async fn create(
    caller: Caller,
    extract::Json(new): extract::Json<NewTenant>,
) -> Result<(StatusCode, Json<TenantBody>), ApiError> {
    let url = new.database_url.as_deref().map(DatabaseUrl::parse).transpose()?;
    let tenants = caller.control.tenants();
    let tenant = match (&url, &new.database) {
        (Some(url), None) => tenants.create_dedicated(&new.name, url).await?,
        (None, Some(database)) => tenants.create_in(&new.name, database).await?,
        (None, None) => tenants.create(&new.name).await?,
        (Some(_), Some(_)) => {
            return Err(ApiError::invalid(
                "a tenant has one database: leave out `database` or `database_url`",
            ));
        }
    };
    for migration in &new.migrations {
        if let Err(error) = caller
            .control
            .tenant_databases()
            .apply_migration(&tenant, &migration.name, &migration.sql)
            .await
        {
            // One transaction cannot hold both: the tables are created over other connections than
            // the row.
            caller.control.tenants().take_back(&tenant).await?;
            return Err(
                ApiError::from(error).because_of(&format!("tenant `{}` was not created", new.name))
            );
        }
    }
    Ok((StatusCode::CREATED, Json(tenant.into())))
}

/// Show a tenant
#[utoipa::path(get, path = "/v1/tenants/{tenant}", tag = "tenants", params(("tenant" = String, Path)),
    responses((status = 200, body = TenantBody)), extensions(("x-role" = json!("viewer"))))]
pub(crate) async fn show(
    caller: Caller,
    Path(tenant): Path<String>,
) -> Result<Json<TenantBody>, ApiError> {
    Ok(Json(caller.control.tenants().get(&tenant).await?.into()))
}
