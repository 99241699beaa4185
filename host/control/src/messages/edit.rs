//! Edits of dead letters: another payload, and a run with it.

use chrono::{DateTime, Utc};
use oncebox_model::{
    Reason,
    error::InboxError,
    hooks,
    policy::{Policy, ReferenceSource},
};
use serde_json::json;

use crate::{
    audit::Subject,
    handles::Messages,
    messages::{bulk::erased, list::InboxRow},
    tenants::moves::check_is_here,
};

/// The new payload of a message, with the reason for it.
#[derive(Debug, Clone)]
pub struct Edit {
    /// New payload.
    pub payload: Vec<u8>,
    /// Reason; stored with the message and in the audit log.
    pub reason: String,
    /// Time by which the message must have been a dead letter; none for the present time. A
    /// repeated request gives the time of the first one.
    pub as_of: Option<DateTime<Utc>>,
}

impl Messages<'_> {
    /// Replaces the payload of a dead letter and redrives it. The row keeps its id and its headers,
    /// and the payload before is kept. A repeated request is refused, since the message is then no
    /// dead letter. A payload that was copied from a masked one is refused.
    pub async fn edit_message(
        &self,
        tenant: &str,
        name: &str,
        message_id: &str,
        edit: &Edit,
    ) -> Result<(), InboxError> {
        const EDIT: &str = "SELECT oncebox.edit($1, $2, $3, $4, coalesce($5, now()), $6, $7)";
        let consumer = self.0.consumers().get(tenant, name).await?;
        if consumer.state.is_deleting() {
            return Err(InboxError::conflict(format!(
                "consumer `{tenant}/{name}` is being deleted"
            )));
        }
        let policy = consumer.policy()?;
        if policy.mask().is_left_in(&edit.payload) {
            return Err(InboxError::Invalid(format!(
                "the new payload has `***` where the policy of `{tenant}/{name}` masks it \
                    (`masking.fields`); write what is to stand there"
            )));
        }
        self.check_carried(tenant, name, message_id, &policy).await?;
        let database = self.0.tenant_databases().get(&self.0.tenants().get(tenant).await?)?;
        let subject = Subject::of(tenant, name);
        let details =
            json!({ "message_id": message_id, "reason": edit.reason, "bytes": edit.payload.len() });
        // The audit log is in the host's database. Where the message is in another database, the
        // attempt is logged before the change.
        if database.is_dedicated {
            let mut tx = self.0.pool.begin().await?;
            self.0.audit().record(&mut tx, "inbox.edit", subject, details.clone()).await?;
            tx.commit().await?;
        }
        let mut tx = database.pool.begin().await?;
        hooks::point("inbox:action:before");
        check_is_here(&mut tx, consumer.consumer_id).await?;
        let query = sqlx::query_scalar(EDIT)
            .bind(consumer.consumer_id)
            .bind(policy.retention.class())
            .bind(message_id)
            .bind(&edit.payload)
            .bind(edit.as_of)
            .bind(&self.0.actor)
            .bind(&edit.reason);
        if !query.fetch_one(&mut *tx).await? {
            tx.rollback().await?;
            return Err(self.edit_refused(tenant, name, message_id).await);
        }
        if !database.is_dedicated {
            self.0
                .audit()
                .record(&mut tx, "inbox.edit", Subject::of(tenant, name), details)
                .await?;
        }
        tx.commit().await?;
        hooks::point("inbox:action:after");
        Ok(())
    }

    /// Refuses to edit a message whose header refers to another payload: no handler would get the
    /// new one.
    async fn check_carried(
        &self,
        tenant: &str,
        consumer: &str,
        message_id: &str,
        policy: &Policy,
    ) -> Result<(), InboxError> {
        let Some(ReferenceSource::Header(header)) = policy.reference.as_ref().map(|of| &of.source)
        else {
            return Ok(());
        };
        let detail = self.inbox_show(tenant, consumer, message_id).await?;
        let has = |(name, _): &(String, Vec<u8>)| name.eq_ignore_ascii_case(header);
        if !detail.headers.iter().any(has) {
            return Ok(());
        }
        Err(InboxError::conflict(format!(
            "message `{message_id}` of `{tenant}/{consumer}` refers to its payload by the header \
                `{header}`, and no handler would get another one; put the new payload where the \
                reference leads, then redrive the message"
        )))
    }

    /// Returns an error with the reason for which a message was not edited.
    async fn edit_refused(&self, tenant: &str, consumer: &str, message_id: &str) -> InboxError {
        let detail = match self.inbox_show(tenant, consumer, message_id).await {
            Ok(detail) => detail,
            Err(error) => return error,
        };
        let InboxRow { status, reason, erased_at, .. } = &detail.row;
        if let Some(erased_at) = erased_at {
            return erased(tenant, consumer, message_id, *erased_at);
        }
        let reason = reason.as_deref().and_then(Reason::of);
        let why = match reason {
            _ if !status.is_dead() => format!(
                "is {status}; only dead letters and parked messages can be given another payload"
            ),
            Some(reason) if reason.is_without_identity() => {
                "was never understood, and has no identity to run under".to_owned()
            }
            _ if !detail.is_kept => "has no record that could be run".to_owned(),
            Some(Reason::Collision) => "is a second payload under the id of a message that is in \
                order, and has no place in it"
                .to_owned(),
            _ => "became a dead letter again just now, or somebody is working on it; look again"
                .to_owned(),
        };
        InboxError::conflict(format!("message `{message_id}` of `{tenant}/{consumer}` {why}"))
    }
}
