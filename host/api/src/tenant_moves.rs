//! Moves of tenants to another database.

use axum::Json;
use oncebox_control::TenantMove;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    auth::Caller,
    error::ApiError,
    extract::{self, Path},
};

/// The request to move a tenant.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewTenantMove {
    /// Name of the other database in `[[databases]]` of the hosts' configuration.
    pub to: String,
}

/// The move of a tenant to another database.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = TenantMove)]
pub struct TenantMoveBody {
    /// The tenant.
    pub tenant: String,
    /// Database in which it is now: a name in `[[databases]]`, or host, port and name; null for the
    /// host's.
    pub database: Option<String>,
    /// Whether nothing is left to do. The other members say nothing then.
    pub is_done: bool,
    /// `preparing`: the tenant runs, and the move is tried as far as that stops nothing.
    /// `stopping`: its consumers stop. `copying`: its rows are copied. `moved`: it runs in the other
    /// database, and what is left in the first is removed. `cancelled`: it runs where it was, and
    /// what is left in the other one is removed. Null where it is done.
    pub step: Option<String>,
    /// The database that it leaves; null for the host's.
    pub from: Option<String>,
    /// The other database; null where it is done.
    pub to: Option<String>,
    /// Bytes that the copy has read so far.
    pub copied_bytes: u64,
    /// Host that works on it, or worked on it last.
    pub host: Option<String>,
    /// Why the last try ended. Hosts try again.
    pub error: Option<String>,
    /// Time of its begin; null where it is done.
    pub began_at: Option<chrono::DateTime<chrono::Utc>>,
}

impl TenantMoveBody {
    fn of(tenant: &str, database: Option<String>, known: Option<TenantMove>) -> Self {
        let tenant = tenant.to_owned();
        let Some(known) = known else {
            return Self {
                tenant,
                database,
                is_done: true,
                step: None,
                from: None,
                to: None,
                copied_bytes: 0,
                host: None,
                error: None,
                began_at: None,
            };
        };
        Self {
            tenant,
            database,
            is_done: false,
            step: Some(known.step.as_str().to_owned()),
            from: known.from_database,
            to: Some(known.to_database),
            copied_bytes: known.copied_bytes.max(0) as u64,
            host: known.host,
            error: known.error,
            began_at: Some(known.began_at),
        }
    }
}

/// Show the move of a tenant to another database
#[utoipa::path(get, path = "/v1/tenants/{tenant}/move", tag = "tenants", params(("tenant" = String, Path)),
    responses((status = 200, body = TenantMoveBody)), extensions(("x-role" = json!("platform"))))]
pub(crate) async fn show(
    caller: Caller,
    Path(tenant): Path<String>,
) -> Result<Json<TenantMoveBody>, ApiError> {
    let tenants = caller.control.tenants();
    // First the move: one that ends in between is over, and the tenant is where it says.
    let known = tenants.move_of(&tenant).await?;
    let database = tenants.get(&tenant).await?.database;
    Ok(Json(TenantMoveBody::of(&tenant, database, known)))
}

/// Move a tenant to another database of the hosts' configuration
///
/// Hosts carry it out. They try first whether it can be done, while the tenant runs. Then they stop
/// its consumers, copy its tables and its inbox, and start the consumers where the copy is; its
/// messages wait in Kafka meanwhile. Repeating the request changes nothing.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/move", tag = "tenants", params(("tenant" = String, Path)),
    request_body = NewTenantMove, responses((status = 200, body = TenantMoveBody)), extensions(("x-role" = json!("platform"))))]
pub(crate) async fn begin(
    caller: Caller,
    Path(tenant): Path<String>,
    extract::Json(NewTenantMove { to }): extract::Json<NewTenantMove>,
) -> Result<Json<TenantMoveBody>, ApiError> {
    let known = caller.control.tenants().begin_move(&tenant, &to).await?;
    let database = caller.control.tenants().get(&tenant).await?.database;
    Ok(Json(TenantMoveBody::of(&tenant, database, known)))
}

/// Cancel the move of a tenant: it stays where it is
///
/// What was copied is removed. Where the tenant is in the other database already, or the move was
/// cancelled before, what is left in a database is not removed any more.
#[utoipa::path(delete, path = "/v1/tenants/{tenant}/move", tag = "tenants", params(("tenant" = String, Path)),
    responses((status = 200, body = TenantMoveBody)), extensions(("x-role" = json!("platform"))))]
pub(crate) async fn cancel(
    caller: Caller,
    Path(tenant): Path<String>,
) -> Result<Json<TenantMoveBody>, ApiError> {
    let known = caller.control.tenants().cancel_move(&tenant).await?;
    let database = caller.control.tenants().get(&tenant).await?.database;
    Ok(Json(TenantMoveBody::of(&tenant, database, known)))
}
