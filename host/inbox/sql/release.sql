-- Gives a lease back unused: the attempt did not happen.
CREATE OR REPLACE FUNCTION oncebox_host.release(
    p_secret bytea, p_consumer int, p_id text, p_epoch bigint, p_delay_ms bigint)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off AS $$
DECLARE
    v record;
BEGIN
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);
    UPDATE oncebox.inbox i SET bucket = v.bucket,
        status = CASE WHEN i.reason IS NULL THEN 'received' ELSE 'failed_retryable' END,
        attempts = i.attempts - 1,
        next_attempt_at = now() + p_delay_ms * interval '1 millisecond',
        locked_until = NULL, locked_by = NULL
    WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = p_id
      AND i.status = 'in_progress' AND i.epoch = p_epoch;
    RETURN FOUND;
END $$;
