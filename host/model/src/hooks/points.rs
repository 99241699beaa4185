//! Every fail point by name.

/// Every fail point of a message, in the order in which a message passes them.
pub const POINTS: &[&str] = &[
    "inbox:begin:after",
    "inbox:claim:before",
    "inbox:claim:after",
    "inbox:handle:before",
    "runtime:sql:enqueued",
    "runtime:sql:after",
    "inbox:handle:after",
    "inbox:fail:after",
    "inbox:sequence:before",
    "inbox:sequence:after",
    "inbox:complete:before",
    "inbox:complete:after",
    "inbox:commit:before",
    "inbox:commit:sent",
    "inbox:commit:after",
    "inbox:park:before",
    "inbox:park:after",
    "retry:lease:before",
    "retry:lease:after",
    "retry:handle:after",
    "retry:commit:before",
    "retry:commit:after",
    "kafka:assign:after",
    "kafka:ack:before",
    "kafka:ack:after",
    "kafka:revoke:before",
    "kafka:commit:before",
    "kafka:commit:after",
];

/// Every fail point of a message that a handler sends, in order.
pub const OUTGOING_POINTS: &[&str] = &[
    "outgoing:cancel:after",
    "outgoing:insert:before",
    "outgoing:lease:after",
    "outgoing:send:before",
    "outgoing:send:after",
    "outgoing:mark:after",
];

/// Every fail point of a message over HTTP, before those of its run.
pub const INGRESS_POINTS: &[&str] = &["ingress:commit:before", "ingress:commit:after"];

/// Every fail point of a replay, in the order in which a job and its messages pass them.
pub const REPLAY_POINTS: &[&str] = &[
    "replay:lease:after",
    "replay:begin:after",
    "replay:handle:after",
    "replay:complete:after",
    "replay:commit:after",
    "replay:end:before",
    "replay:end:after",
];

/// Every fail point of a message whose payload the host fetches, before those of other messages.
pub const REFERENCE_POINTS: &[&str] = &["reference:fetch:after"];

/// Every fail point of a host's work on a changed consumer.
pub const CHANGE_POINTS: &[&str] = &[
    "consumer:drained:before",
    "consumer:seek:before",
    "consumer:seek:committed",
    "consumer:delete:batch",
    "consumer:delete:last",
];

/// Every fail point of an operator's action on messages.
pub const ACTION_POINTS: &[&str] = &["inbox:action:before", "inbox:action:after"];

/// Every fail point of a job beside its actions, in the order in which a job passes them.
pub const JOB_POINTS: &[&str] = &["job:lease:after", "job:end:before", "job:end:after"];

/// Every fail point of the copying of a dead letter.
pub const COPY_POINTS: &[&str] = &["inbox:copied:before"];

/// Every fail point of an update of the schema.
pub const SCHEMA_POINTS: &[&str] = &["schema:migrated:before_functions"];

/// Every fail point between the host's database and one that a tenant named.
pub const TENANT_DATABASE_POINTS: &[&str] = &[
    "tenant_database:create:after",
    "tenant_database:replicate:before",
    "tenant_database:replicate:after",
    "tenant_database:redrive:before",
    "tenant_database:redrive:after",
];

/// Every fail point of the deletion of a tenant, in order.
pub const REMOVAL_POINTS: &[&str] = &[
    "tenant:delete:stopped",
    "tenant:delete:shut_out",
    "tenant:delete:objects",
    "tenant:delete:schema",
    "tenant:delete:batch",
    "tenant:delete:messages",
    "tenant:delete:rows",
    "tenant:delete:roles",
];

/// Every fail point of the move of a tenant to another database, in order.
pub const MOVE_POINTS: &[&str] = &[
    "tenant:move:prepared",
    "tenant:move:stopped",
    "tenant:move:shut_out",
    "tenant:move:roles",
    "tenant:move:tables",
    "tenant:move:copy:before_commit",
    "tenant:move:copied",
    "tenant:move:switched",
    "tenant:move:objects",
    "tenant:move:schema",
    "tenant:move:batch",
    "tenant:move:rows",
    "tenant:move:roles_gone",
    "tenant:move:ended",
];

/// Every fail point of the removal of a time partition, in order.
pub const RETENTION_POINTS: &[&str] = &[
    "retention:begin:after",
    "retention:move:before",
    "retention:move:after",
    "retention:count:after",
    "retention:detach:after",
    "archive:write:after",
    "archive:verify:after",
    "archive:record:before",
    "archive:record:after",
    "retention:history:after",
    "retention:drop:before",
    "retention:drop:after",
];

/// Every fail point of an erasure, in order.
pub const ERASE_POINTS: &[&str] = &[
    "erase:begin:after",
    "erase:batch:before",
    "erase:batch:after",
    "erase:vacuum:after",
    "erase:end:before",
    "erase:end:after",
];

/// Every fail point of an erasure in a file of the archive, in order.
pub const ARCHIVE_ERASE_POINTS: &[&str] =
    &["erase:archive:begun", "erase:archive:before", "erase:archive:after"];

/// Returns whether there is a point of this name.
pub(super) fn is_known(name: &str) -> bool {
    [
        POINTS,
        OUTGOING_POINTS,
        INGRESS_POINTS,
        REPLAY_POINTS,
        REFERENCE_POINTS,
        CHANGE_POINTS,
        ACTION_POINTS,
        JOB_POINTS,
        COPY_POINTS,
        SCHEMA_POINTS,
        TENANT_DATABASE_POINTS,
        REMOVAL_POINTS,
        MOVE_POINTS,
        RETENTION_POINTS,
        ERASE_POINTS,
        ARCHIVE_ERASE_POINTS,
    ]
    .iter()
    .any(|points| points.contains(&name))
}
