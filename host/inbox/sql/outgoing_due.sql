-- Returns the tenants and destinations with an outgoing message that is due, each once for every
-- consumer that has one, and at most `p_pairs` of them. It looks for what is unsent, and never for
-- what came after something: a message that was committed late is found like any other.
--
-- It steps along the index of due messages from one consumer and destination to the next, and reads
-- the head of each, however many messages wait behind it.
CREATE OR REPLACE FUNCTION oncebox.outgoing_due(p_pairs int)
RETURNS TABLE (tenant int, target text)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_sort = off AS $$
DECLARE
    v_consumer int := 0;
    v_destination text := '';
    v_at timestamptz;
    v_tenant int;
    v_found int := 0;
BEGIN
    WHILE v_found < p_pairs LOOP
        SELECT o.consumer_id, o.destination, o.next_attempt_at
            INTO v_consumer, v_destination, v_at
        FROM oncebox.outgoing o
        WHERE o.status IN ('received', 'failed_retryable')
          AND (o.consumer_id, o.destination) > (v_consumer, v_destination)
        ORDER BY o.consumer_id, o.destination, o.next_attempt_at LIMIT 1;
        EXIT WHEN NOT FOUND;
        CONTINUE WHEN v_at > now();
        SELECT c.tenant_id INTO v_tenant FROM oncebox.consumer c
        WHERE c.consumer_id = v_consumer;
        -- A consumer that is gone takes its messages along.
        CONTINUE WHEN NOT FOUND;
        v_found := v_found + 1;
        tenant := v_tenant;
        target := v_destination;
        RETURN NEXT;
    END LOOP;
END $$;
