//! The messages that one transaction of an erasure looks at.

use oncebox_model::error::InboxError;
use sqlx::{AssertSqlSafe, PgConnection};

use super::{ErasureTarget, inbox::ErasedConsumer};

/// Messages that one transaction erases.
pub(super) const BATCH: usize = 200;
/// Messages that one transaction looks at.
const WINDOW: i64 = 5_000;

/// A message that a pass looks at: one that the target selects, or the last one of its window.
#[derive(sqlx::FromRow)]
pub(super) struct SeenMessage {
    /// Position in the window, from 1.
    ordinal: i64,
    message_id: String,
    is_match: bool,
    is_erased: bool,
}

/// The messages that one transaction looks at.
#[derive(Default)]
pub(super) struct ErasureWindow {
    /// Messages that are to be erased.
    pub(super) found: Vec<String>,
    /// Messages that the target selects, erased or not.
    pub(super) matching: Vec<String>,
    pub(super) already_erased: i64,
    pub(super) looked_at: i64,
    /// The last message; none where the consumer has no further one.
    pub(super) last: Option<String>,
}

impl ErasureWindow {
    /// Takes the messages seen, up to the one that would be too many for a transaction.
    pub(super) fn of(seen: Vec<SeenMessage>) -> Self {
        let is_last = seen.last().is_none_or(|last| last.ordinal < WINDOW);
        let mut window = Self::default();
        for SeenMessage { ordinal, message_id, is_match, is_erased } in seen {
            if is_match && !is_erased && window.found.len() == BATCH {
                return window;
            }
            window.looked_at = ordinal;
            if is_match {
                window.matching.push(message_id.clone());
                if is_erased {
                    window.already_erased += 1;
                } else {
                    window.found.push(message_id.clone());
                }
            }
            window.last = Some(message_id);
        }
        if is_last {
            window.last = None;
        }
        window
    }
}

/// Reads the messages of a consumer in a table after an id: those that the target selects, and the
/// last of the window.
pub(super) async fn look(
    connection: &mut PgConnection,
    table: &str,
    consumer: &ErasedConsumer,
    target: &ErasureTarget,
    after: &str,
) -> Result<Vec<SeenMessage>, InboxError> {
    const BY_ID: &str = "SELECT 1::bigint AS ordinal, i.message_id, true AS is_match, \
        i.erased_at IS NOT NULL AS is_erased FROM oncebox.{table} i \
        WHERE i.consumer_id = $1 AND i.retention_class = $2 AND i.message_id = $3";
    const BY_KEY: &str = "SELECT w.ordinal, w.message_id, w.is_match, w.is_erased FROM ( \
            SELECT r.*, row_number() OVER (ORDER BY r.message_id) AS ordinal, \
                count(*) OVER () AS looked_at FROM ( \
                SELECT i.message_id, i.erased_at IS NOT NULL AS is_erased, \
                    coalesce(i.key = $3, false) OR coalesce(i.ordering_key = $3, false) \
                        AS is_match \
                FROM oncebox.{table} i \
                WHERE i.consumer_id = $1 AND i.retention_class = $2 AND i.message_id > $4 \
                ORDER BY i.message_id LIMIT $5) r) w \
        WHERE w.is_match OR w.ordinal = w.looked_at ORDER BY w.ordinal";
    let ErasedConsumer { consumer_id, retention_class, .. } = consumer;
    let of = |sql: &str| AssertSqlSafe(sql.replace("{table}", table));
    let seen = match target {
        ErasureTarget::MessageId(id) => {
            let query = sqlx::query_as(of(BY_ID)).bind(consumer_id).bind(retention_class);
            query.bind(id).fetch_all(connection).await?
        }
        ErasureTarget::Key(key) => {
            let query = sqlx::query_as(of(BY_KEY)).bind(consumer_id).bind(retention_class);
            query.bind(key).bind(after).bind(WINDOW).fetch_all(connection).await?
        }
    };
    Ok(seen)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(ordinal: i64, is_match: bool, is_erased: bool) -> SeenMessage {
        SeenMessage { ordinal, message_id: format!("m{ordinal:05}"), is_match, is_erased }
    }

    // What could go wrong: a message between two windows is in none of them, or a pass never ends.
    #[test]
    fn windows_follow_each_other_without_a_gap() {
        let part = ErasureWindow::of(vec![seen(1, true, false), seen(3, false, false)]);
        assert_eq!((part.found.len(), part.looked_at, part.last), (1, 3, None));
        assert_eq!(ErasureWindow::of(Vec::new()).last, None);

        let whole = ErasureWindow::of(vec![seen(7, true, true), seen(WINDOW, false, false)]);
        assert_eq!((whole.found.len(), whole.already_erased, whole.looked_at), (0, 1, WINDOW));
        assert_eq!(whole.last.as_deref(), Some("m05000"));

        // One more than a transaction takes: it is the first of the next one.
        let most = BATCH as i64;
        let many = ErasureWindow::of((1..=most + 1).map(|n| seen(n, true, false)).collect());
        assert_eq!((many.found.len(), many.looked_at), (BATCH, most));
        assert_eq!(many.last.as_deref(), Some("m00200"));
    }
}
