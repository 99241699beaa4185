-- Leases an outgoing message that is still due, and returns its row; no row where another session
-- has it locked, or has changed it. Called by `lease_outgoing`.
CREATE OR REPLACE FUNCTION oncebox.lease_one_outgoing(
    p_consumer int, p_message text, p_ordinal int, p_bucket timestamptz, p_lease_ms bigint,
    p_owner text)
RETURNS SETOF oncebox.outgoing
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM oncebox.outgoing o
    WHERE o.consumer_id = p_consumer AND o.message_id = p_message AND o.ordinal = p_ordinal
      AND o.bucket = p_bucket AND o.status IN ('received', 'failed_retryable')
      AND o.next_attempt_at <= now()
    FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    RETURN QUERY UPDATE oncebox.outgoing o SET status = 'in_progress', epoch = o.epoch + 1,
        attempts = o.attempts + 1, next_attempt_at = NULL, locked_by = p_owner,
        locked_until = now() + p_lease_ms * interval '1 millisecond'
    WHERE o.consumer_id = p_consumer AND o.message_id = p_message AND o.ordinal = p_ordinal
      AND o.bucket = p_bucket
    RETURNING o.*;
END $$;
