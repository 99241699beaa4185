//! A message with all its columns.

use chrono::{DateTime, Utc};

use crate::column::{Cell, CellValue, Column};

/// Declares the fields of a message: the struct, its columns, and the way to cells and back.
macro_rules! archived_message {
    ($($(#[$doc:meta])* $name:ident: $type:ty,)+) => {
        /// A message as a row of a file: the columns of `oncebox.inbox`, the names of tenant and
        /// consumer, and what stood beside the message in other tables. A new field is optional,
        /// since files that were written before lack its column.
        #[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
        pub struct ArchivedMessage {
            $($(#[$doc])* pub $name: $type,)+
        }

        impl ArchivedMessage {
            /// The columns, in the order of the cells.
            pub(crate) const COLUMNS: &'static [Column] =
                &[$(Column::of::<$type>(stringify!($name)),)+];
            /// Names of the columns.
            pub const NAMES: &'static [&'static str] = &[$(stringify!($name),)+];

            /// Returns the cells of the message.
            pub(crate) fn cells(&self) -> Vec<Option<Cell>> {
                vec![$(self.$name.cell(),)+]
            }

            /// Makes a message of cells; none where a cell does not fit.
            pub(crate) fn of_cells(mut next: impl FnMut() -> Option<Cell>) -> Option<Self> {
                Some(Self { $($name: CellValue::of(next())?,)+ })
            }
        }
    };
}

archived_message! {
    /// Name of the tenant.
    tenant: String,
    /// Name of the consumer.
    consumer: String,
    /// Number of the consumer.
    consumer_id: i32,
    /// The message id.
    message_id: String,
    /// Number of the retention class.
    retention_class: i16,
    /// Begin of the time partition that held the message.
    bucket: DateTime<Utc>,
    /// Topic of the record.
    topic: String,
    /// Partition of the record.
    partition: i32,
    /// Offset of the record.
    offset: i64,
    /// Timestamp of the record, milliseconds.
    record_timestamp_ms: i64,
    /// Key of the record.
    key: Option<Vec<u8>>,
    /// Key that orders the message.
    ordering_key: Option<Vec<u8>>,
    /// CloudEvents `source`, or the topic.
    source: Option<String>,
    /// Type of the event.
    event_type: Option<String>,
    /// Version of the event's schema.
    event_version: Option<String>,
    /// Media type of the payload.
    content_type: Option<String>,
    /// W3C trace context.
    trace_parent: Option<String>,
    /// Status.
    status: String,
    /// Reason of the status.
    reason: Option<String>,
    /// Runs so far.
    attempts: i32,
    /// Runs that ended without an answer.
    crashes: i32,
    /// Text of the last failure.
    last_error: Option<String>,
    /// Time of the next run.
    next_attempt_at: Option<DateTime<Utc>>,
    /// End of the lease.
    locked_until: Option<DateTime<Utc>>,
    /// Host with the lease.
    locked_by: Option<String>,
    /// Leases so far.
    epoch: i64,
    /// Number of the version that ran it last.
    version_id: Option<i32>,
    /// SHA-256 of the component of that version, in hexadecimal digits.
    version: Option<String>,
    /// Result of the handler, JSON.
    result: Option<String>,
    /// Payload.
    payload: Option<Vec<u8>>,
    /// Headers, encoded as in the inbox.
    headers: Option<Vec<u8>>,
    /// HMAC-SHA-256 of the payload of the first delivery, under a key of the tenant.
    payload_hash: Option<Vec<u8>>,
    /// Time of the first claim.
    received_at: DateTime<Utc>,
    /// Time at which it was settled.
    processed_at: Option<DateTime<Utc>>,
    /// Hash of the key or partition that orders it.
    ordering_hash: Option<i64>,
    /// Position within that order.
    ordering_position: Option<i64>,
    /// Version that it gives its aggregate.
    sequence_version: Option<i64>,
    /// End of its wait for missing versions.
    waits_until: Option<DateTime<Utc>>,
    /// Whether it may run over its gap.
    over_gap: bool,
    /// `processed_at` of the failure that was last copied to a topic.
    copied_at: Option<DateTime<Utc>>,
    /// Time of the erasure of its payload.
    erased_at: Option<DateTime<Utc>>,
    /// Failed runs and operators' actions: a JSON array, the oldest first.
    history: Option<String>,
    /// Payloads that edits replaced: a JSON array, the oldest first.
    edits: Option<String>,
}

#[cfg(test)]
impl ArchivedMessage {
    /// Returns a message of a test.
    pub(crate) fn sample(message_id: &str) -> Self {
        let at = DateTime::from_timestamp_micros(1_790_000_000_123_456).expect("a time");
        Self {
            tenant: "acme".to_owned(),
            consumer: "orders".to_owned(),
            consumer_id: 7,
            message_id: message_id.to_owned(),
            retention_class: 1,
            bucket: at,
            topic: "t".to_owned(),
            partition: 3,
            offset: -1,
            record_timestamp_ms: 1_790_000_000_123,
            key: Some(vec![0, 255]),
            ordering_key: None,
            source: Some("größer 😀".to_owned()),
            event_type: None,
            event_version: None,
            content_type: None,
            trace_parent: None,
            status: "a status".to_owned(),
            reason: None,
            attempts: 1,
            crashes: 0,
            last_error: None,
            next_attempt_at: None,
            locked_until: None,
            locked_by: None,
            epoch: i64::MAX,
            version_id: Some(i32::MIN),
            version: None,
            result: Some("{\"a\": [1, null]}".to_owned()),
            payload: Some(message_id.repeat(20).into_bytes()),
            headers: Some(Vec::new()),
            payload_hash: Some(vec![7; 32]),
            received_at: at,
            processed_at: Some(at),
            ordering_hash: None,
            ordering_position: None,
            sequence_version: None,
            waits_until: None,
            over_gap: true,
            copied_at: None,
            erased_at: None,
            history: None,
            edits: None,
        }
    }
}
