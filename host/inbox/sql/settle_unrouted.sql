-- Gives messages that this transaction parked for want of a handler the status that the consumer's
-- policy says instead.
CREATE OR REPLACE FUNCTION oncebox_host.settle_unrouted(
    p_secret bytea, p_consumer int, p_id text[], p_status text)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off AS $$
DECLARE
    v record;
BEGIN
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);
    IF p_status NOT IN ('skipped', 'failed_terminal') THEN
        RAISE EXCEPTION 'a message without a handler cannot become `%`', p_status
            USING ERRCODE = '22023';
    END IF;
    UPDATE oncebox.inbox i SET status = p_status,
        payload = CASE WHEN p_status <> 'skipped' THEN i.payload END,
        headers = CASE WHEN p_status <> 'skipped' THEN i.headers END
    WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = ANY (p_id)
      AND i.status = 'parked' AND i.reason = 'no_route' AND i.xmin = pg_current_xact_id()::xid;
END $$;
