-- Ends a lease whose run broke its connection: the worker that leases the message next counts the
-- crash.
CREATE OR REPLACE FUNCTION oncebox_host.lease_ends(
    p_secret bytea, p_consumer int, p_id text, p_epoch bigint)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off AS $$
DECLARE
    v record;
BEGIN
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);
    UPDATE oncebox.inbox i SET locked_until = least(i.locked_until, now())
    WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = p_id
      AND i.status = 'in_progress' AND i.epoch = p_epoch;
    RETURN FOUND;
END $$;
