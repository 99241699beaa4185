//! Who asks.

use axum::Json;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{auth::Caller, tokens::Role};

/// Whose token this is.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Whoami {
    /// The name that the audit log keeps.
    pub name: String,
    /// What they may do.
    pub role: Role,
    /// The only tenant that they reach.
    pub tenant: Option<String>,
    /// The token; null where none was asked for.
    pub token_id: Option<i64>,
}

/// Who asks
///
/// Any token may, also one of a tenant.
#[utoipa::path(get, path = "/v1/whoami", tag = "tokens", responses((status = 200, body = Whoami)), extensions(("x-role" = json!("any"))))]
pub(crate) async fn show(caller: Caller) -> Json<Whoami> {
    let principal = caller.principal;
    Json(Whoami {
        name: principal.name().to_owned(),
        role: principal.role(),
        tenant: principal.tenant().map(str::to_owned),
        token_id: principal.token_id(),
    })
}
