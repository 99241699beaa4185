-- Gives records back to dead letters that lost them, in the transaction whose claim said so, which
-- holds the locks of the messages. Their states stay: an operator redrives them. Restores only what
-- came with the same payload. Returns how many.
CREATE OR REPLACE FUNCTION oncebox_host.restore_records(
    p_secret bytea, p_consumer int, p_id text[], p_hash bytea[], p_headers bytea[],
    p_payload bytea[])
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off AS $$
DECLARE
    v record;
    r record;
    v_restored int := 0;
BEGIN
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);
    FOR r IN SELECT u.id, u.hash, u.headers, u.payload
            FROM unnest(p_id, p_hash, p_headers, p_payload) AS u(id, hash, headers, payload)
            ORDER BY u.id COLLATE "C" LOOP
        UPDATE oncebox.inbox i SET headers = r.headers, payload = r.payload
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = r.id
          AND oncebox.has_lost_record(i.status, i.reason, i.headers)
          AND i.payload_hash IS NOT DISTINCT FROM r.hash;
        CONTINUE WHEN NOT FOUND;
        INSERT INTO oncebox.inbox_history (consumer_id, message_id, event)
            VALUES (p_consumer, r.id, 'restored');
        v_restored := v_restored + 1;
    END LOOP;
    RETURN v_restored;
END $$;
