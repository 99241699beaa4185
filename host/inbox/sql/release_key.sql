-- Makes the first open message of a key due, if it waits and no longer has to. Called with the
-- key's lock. Returns whether it was.
CREATE OR REPLACE FUNCTION oncebox.release_key(p_consumer int, p_class smallint, p_hash bigint)
RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    n record;
BEGIN
    SELECT * INTO n FROM oncebox.next_of_key(p_consumer, p_class, p_hash);
    UPDATE oncebox.inbox i SET
        status = CASE WHEN i.reason IS NULL OR i.reason = 'gap' THEN 'received'
            ELSE 'failed_retryable' END,
        reason = CASE WHEN n.is_overdue THEN 'gap_overdue' WHEN i.reason <> 'gap' THEN i.reason END,
        next_attempt_at = now(), waits_until = NULL, processed_at = NULL,
        bucket = oncebox.bucket_at(p_class, now())
    WHERE i.consumer_id = p_consumer AND i.retention_class = p_class AND i.message_id = n.id
      AND i.status IN ('waiting', 'parked');
    RETURN FOUND;
END $$;
