//! Filters of outgoing messages, and the SQL that they become.

use oncebox_model::outgoing::OutgoingStatus;
use sqlx::{Postgres, QueryBuilder};

/// Conditions on the outgoing messages of one tenant.
#[derive(Debug, Clone, Default)]
pub struct OutgoingFilter {
    /// Name of the consumer whose handlers emitted them; none for all.
    pub consumer: Option<String>,
    /// Status.
    pub status: Option<OutgoingStatus>,
    /// Whole destination, such as `kafka:orders`.
    pub destination: Option<String>,
    /// Id of the message that caused them.
    pub cause: Option<String>,
    /// Ids, of which a message has one; empty for any.
    pub ids: Vec<String>,
}

impl OutgoingFilter {
    /// Adds the conditions on the rows of `oncebox.outgoing`, which the statement calls `o`. The
    /// consumer's name is no column of it.
    pub(super) fn push(&self, query: &mut QueryBuilder<Postgres>) {
        if let Some(status) = self.status {
            query.push(" AND o.status = ").push_bind(status.as_str());
            if status != OutgoingStatus::Completed {
                // The condition of the partial index on what is not completed.
                query.push(" AND o.status <> 'completed'");
            }
        }
        for (condition, text) in
            [(" AND o.destination = ", &self.destination), (" AND o.message_id = ", &self.cause)]
        {
            if let Some(text) = text {
                query.push(condition).push_bind(text.clone());
            }
        }
        if !self.ids.is_empty() {
            query.push(" AND o.id = ANY (").push_bind(self.ids.clone()).push(")");
        }
    }

    /// Adds the condition on the consumer, which the statement calls `c`.
    pub(super) fn push_consumer(&self, query: &mut QueryBuilder<Postgres>) {
        if let Some(consumer) = &self.consumer {
            query.push(" AND c.name = ").push_bind(consumer.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sql(filter: &OutgoingFilter) -> String {
        let mut query = QueryBuilder::<Postgres>::new("");
        filter.push(&mut query);
        filter.push_consumer(&mut query);
        query.into_string()
    }

    // What could go wrong: a condition is left out, so that an action takes more than was asked.
    #[test]
    fn every_condition_is_in_the_statement() {
        assert_eq!(sql(&OutgoingFilter::default()), "");
        let filter = OutgoingFilter {
            consumer: Some("orders".to_owned()),
            status: Some(OutgoingStatus::Parked),
            destination: Some("kafka:receipts".to_owned()),
            cause: Some("m-1".to_owned()),
            ids: vec!["a".to_owned()],
        };
        assert_eq!(
            sql(&filter),
            " AND o.status = $1 AND o.status <> 'completed' AND o.destination = $2 AND \
                o.message_id = $3 AND o.id = ANY ($4) AND c.name = $5"
        );
        let completed =
            OutgoingFilter { status: Some(OutgoingStatus::Completed), ..OutgoingFilter::default() };
        assert_eq!(sql(&completed), " AND o.status = $1", "the partial index does not have it");
    }
}
