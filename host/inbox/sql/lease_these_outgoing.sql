-- Leases the first of these outgoing messages that are still due, at most `p_most`, and returns their
-- rows; not those that another session has locked, or has changed. It locks no row that it does not
-- lease, since a `cancel` passes over rows that are locked. Called by `lease_outgoing`.
--
-- Parallel arrays, one element for each message: the key of its row.
CREATE OR REPLACE FUNCTION oncebox.lease_these_outgoing(
    p_consumer int[], p_message text[], p_ordinal int[], p_bucket timestamptz[], p_most int,
    p_lease_ms bigint, p_owner text)
RETURNS SETOF oncebox.outgoing
LANGUAGE plpgsql AS $$
DECLARE
    -- A variable, so that no index of due messages serves: all of those would be read by a plan
    -- that was made while there were none.
    c_due CONSTANT text[] := ARRAY['received', 'failed_retryable'];
BEGIN
    RETURN QUERY WITH locked AS MATERIALIZED (
        SELECT o.consumer_id, o.message_id, o.ordinal, o.bucket
        FROM unnest(p_consumer, p_message, p_ordinal, p_bucket) AS s(consumer, message, ordinal,
            bucket)
        JOIN oncebox.outgoing o ON o.consumer_id = s.consumer AND o.message_id = s.message
            AND o.ordinal = s.ordinal AND o.bucket = s.bucket
        WHERE o.status = ANY (c_due) AND o.next_attempt_at <= now()
        LIMIT p_most FOR UPDATE OF o SKIP LOCKED)
    UPDATE oncebox.outgoing o SET status = 'in_progress', epoch = o.epoch + 1,
        attempts = o.attempts + 1, next_attempt_at = NULL, locked_by = p_owner,
        locked_until = now() + p_lease_ms * interval '1 millisecond'
    FROM locked l
    WHERE o.consumer_id = l.consumer_id AND o.message_id = l.message_id AND o.ordinal = l.ordinal
      AND o.bucket = l.bucket
    RETURNING o.*;
END $$;
