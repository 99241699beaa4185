//! A message with what its consumer's policy masks, for somebody who says why.

use oncebox_model::error::InboxError;
use serde_json::json;

use crate::{audit::Subject, handles::Messages, messages::list::InboxDetail};

impl Messages<'_> {
    /// Returns one row with its record, once the audit log says who looked at it and why. The
    /// record is masked nowhere in this crate; whoever shows it does that.
    ///
    /// # Errors
    /// `NotFound` where there is no such message. Where the entry cannot be written, the row is not
    /// returned.
    pub async fn unmask(
        &self,
        tenant: &str,
        consumer: &str,
        message_id: &str,
        reason: &str,
    ) -> Result<InboxDetail, InboxError> {
        let detail = self.inbox_show(tenant, consumer, message_id).await?;
        let details = json!({ "message_id": message_id, "reason": reason });
        let mut tx = self.0.pool.begin().await?;
        self.0
            .audit()
            .record(&mut tx, "inbox.unmask", Subject::of(tenant, consumer), details)
            .await?;
        tx.commit().await?;
        Ok(detail)
    }
}
