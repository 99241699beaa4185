//! Consumers that share a handler and topics. The scope of deduplication is the consumer: a message
//! is claimed once for each. Two consumers that hand a message to one handler therefore have its
//! effect twice.

use oncebox_model::error::InboxError;
use sqlx::FromRow;

use crate::{
    deployments::{Deployment, Slot},
    handles::Deployments,
};

#[derive(FromRow)]
struct Other {
    consumer: String,
    topics: Vec<String>,
    #[sqlx(flatten)]
    slot: Slot,
}

impl Deployments<'_> {
    /// Returns warnings about other consumers of the tenant that hand messages to the deployment's
    /// handler. Shared tables are safe as long as each message comes to them through one consumer.
    /// S1-053.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn overlap_warnings(
        &self,
        consumer_id: i32,
        deployment: &Deployment,
    ) -> Result<Vec<String>, InboxError> {
        const OTHERS: &str = "SELECT c.name AS consumer, d.event_type, d.event_versions, \
                ARRAY(SELECT t.topic FROM jsonb_array_elements_text(c.policy->'topics') AS \
                t(topic) \
                      WHERE t.topic IN (SELECT jsonb_array_elements_text(own.policy->'topics'))) \
                      AS topics \
            FROM oncebox.consumer own JOIN oncebox.consumer c ON c.tenant_id = own.tenant_id AND \
            c.consumer_id <> own.consumer_id \
            JOIN oncebox.deployment d ON d.consumer_id = c.consumer_id AND d.ended_at IS NULL AND \
            d.role <> 'shadow' \
            JOIN oncebox.version v USING (version_id) JOIN oncebox.handler h USING (handler_id) \
            WHERE own.consumer_id = $1 AND h.name = $2 ORDER BY c.name, d.event_type";
        let others: Vec<Other> = sqlx::query_as(OTHERS)
            .bind(consumer_id)
            .bind(&deployment.handler)
            .fetch_all(&self.0.pool)
            .await?;
        let shares = |other: &&Other| {
            !other.topics.is_empty() && overlap(&other.slot.event_type, &deployment.slot.event_type)
        };
        let warning = |other: &Other| {
            format!(
                "consumer `{}` hands messages of topic `{}` to handler `{}` as well, for {}: each \
                    has its effect once for each consumer; \
                 let one consumer do it where the effect is meant to happen once",
                other.consumer,
                other.topics.join("`, `"),
                deployment.handler,
                other.slot
            )
        };
        Ok(others.iter().filter(shares).map(warning).collect())
    }
}

/// Returns whether two event types, or patterns of them, have a type in common.
fn overlap(one: &str, other: &str) -> bool {
    match (one.strip_suffix('*'), other.strip_suffix('*')) {
        (None, None) => one == other,
        (Some(prefix), None) => other.starts_with(prefix),
        (None, Some(prefix)) => one.starts_with(prefix),
        (Some(one), Some(other)) => one.starts_with(other) || other.starts_with(one),
    }
}

#[cfg(test)]
mod tests {
    use super::overlap;

    #[test]
    fn event_types_overlap_where_one_message_fits_both() {
        for (one, other, expected) in [
            ("a", "a", true),
            ("a", "b", false),
            ("*", "b", true),
            ("orders.*", "orders.placed", true),
            ("orders.placed", "orders.*", true),
            ("orders.*", "orders.eu.*", true),
            ("orders.*", "payments.*", false),
        ] {
            assert_eq!(overlap(one, other), expected, "{one} {other}");
        }
    }
}
