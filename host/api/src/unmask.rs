//! Messages unmasked, one at a time, for a caller who says why.

use axum::Json;
use oncebox_model::{masking::Mask, policy::UnmaskRole};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{
    auth::Caller,
    error::{ApiError, Code},
    extract::{Json as Body, Path},
    inbox::InboxDetailBody,
    jobs::check_reason,
    tokens::Role,
};

impl From<UnmaskRole> for Role {
    fn from(role: UnmaskRole) -> Self {
        match role {
            UnmaskRole::Operator => Self::Operator,
            UnmaskRole::Admin => Self::Admin,
        }
    }
}

/// A look at a message unmasked.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewUnmasking {
    /// Reason, 1 to 1,000 characters, kept in the audit log.
    pub reason: String,
}

/// Show a message unmasked
///
/// Key, headers and payload are shown as they are stored, after the audit log has the entry
/// `inbox.unmask` with the caller and the reason. It needs the role of `masking.role` in the policy
/// of the consumer, `admin` by default.
#[utoipa::path(post, path = "/v1/tenants/{tenant}/consumers/{consumer}/inbox/{message_id}/unmask", tag = "inbox",
    params(("tenant" = String, Path), ("consumer" = String, Path), ("message_id" = String, Path)), request_body = NewUnmasking,
    responses((status = 200, body = InboxDetailBody)), extensions(("x-role" = json!("operator"))))]
pub(crate) async fn unmask(
    caller: Caller,
    Path((tenant, consumer, message_id)): Path<(String, String, String)>,
    Body(NewUnmasking { reason }): Body<NewUnmasking>,
) -> Result<Json<InboxDetailBody>, ApiError> {
    check_reason(&reason)?;
    let policy = caller.control.consumers().get(&tenant, &consumer).await?.policy()?;
    let (needed, role) = (Role::from(policy.masking.role), caller.principal.role());
    if role < needed {
        let detail = format!(
            "messages of `{tenant}/{consumer}` are shown unmasked to the role `{needed}`, as \
                `masking.role` in its policy says; the token has `{role}`"
        );
        return Err(ApiError::new(Code::Forbidden, detail));
    }
    let messages = caller.control.messages();
    let detail = messages.unmask(&tenant, &consumer, &message_id, &reason).await?;
    Ok(Json(InboxDetailBody::new(detail, Some(&Mask::nothing()))))
}
