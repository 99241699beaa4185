//! The caller of a request.

use axum::Json;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{auth::Caller, tokens::Role};

/// The principal of a token.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Whoami {
    /// Name that the audit log keeps.
    pub name: String,
    /// Role.
    pub role: Role,
    /// The only tenant that the principal reaches; null where it reaches all.
    pub tenant: Option<String>,
    /// Id of the token; null where the host requires none.
    pub token_id: Option<i64>,
}

/// Show the principal of the token
///
/// Any token may ask, also one of a tenant.
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
