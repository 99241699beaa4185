-- Prolongs a lease whose message waits for its payload. Its run has not begun.
CREATE OR REPLACE FUNCTION oncebox_host.renew_lease(
    p_secret bytea, p_consumer int, p_id text, p_epoch bigint, p_lease_ms bigint)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off AS $$
DECLARE
    v record;
BEGIN
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);
    UPDATE oncebox.inbox i SET locked_until = now() + p_lease_ms * interval '1 millisecond'
    WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = p_id
      AND i.status = 'in_progress' AND i.epoch = p_epoch;
    RETURN FOUND;
END $$;
