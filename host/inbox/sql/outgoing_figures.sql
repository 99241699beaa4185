-- Returns how many outgoing messages of each consumer are open, and how many seconds the oldest of
-- them is past its due time; for consumers with any that is not completed.
--
-- It counts at most `p_counted_max` in each status, the earliest emits first. Where there are more,
-- those may all be due in a year. So it also looks where relays look: at the head of each
-- destination, and at most at so many destinations of a consumer. A message that no relay has
-- leased yet is due at its next attempt, so that none behind the head is older than the head. One
-- that was leased before waits for a later attempt: more than `p_counted_max` of those in one
-- status can hide the oldest among themselves, and then the age is that of another one of them.
CREATE OR REPLACE FUNCTION oncebox.outgoing_figures(p_counted_max bigint)
RETURNS TABLE (tenant text, consumer text, messages bigint, oldest_s double precision)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off
    SET enable_seqscan = off SET enable_sort = off AS $$
DECLARE
    v_consumer int := 0;
    v_destination text;
    v_looked bigint;
    v_due_at timestamptz;
    v_oldest timestamptz;
BEGIN
    LOOP
        SELECT o.consumer_id INTO v_consumer FROM oncebox.outgoing o
        WHERE o.status <> 'completed' AND o.consumer_id > v_consumer
        ORDER BY o.consumer_id LIMIT 1;
        EXIT WHEN NOT FOUND;

        v_destination := '';
        v_looked := 0;
        v_oldest := NULL;
        WHILE v_looked < p_counted_max LOOP
            SELECT o.destination, o.due_at INTO v_destination, v_due_at FROM oncebox.outgoing o
            WHERE o.consumer_id = v_consumer AND o.destination > v_destination
              AND o.status IN ('received', 'failed_retryable')
            ORDER BY o.destination, o.next_attempt_at LIMIT 1;
            EXIT WHEN NOT FOUND;
            v_looked := v_looked + 1;
            v_oldest := least(v_oldest, v_due_at);
        END LOOP;

        RETURN QUERY
        SELECT t.name, c.name, k.messages,
            greatest(0, extract(epoch FROM now() - least(k.due_at, v_oldest)))::double precision
        FROM oncebox.consumer c JOIN oncebox.tenant t USING (tenant_id) CROSS JOIN (
            SELECT coalesce(sum(p.messages), 0)::bigint AS messages, min(p.due_at) AS due_at
            FROM unnest(ARRAY['received', 'in_progress', 'failed_retryable']) AS u(status)
            CROSS JOIN LATERAL (
                SELECT count(*) AS messages, min(e.due_at) AS due_at FROM (
                    SELECT o.due_at FROM oncebox.outgoing o
                    WHERE o.consumer_id = v_consumer AND o.status = u.status
                      AND o.status <> 'completed'
                    ORDER BY o.position LIMIT p_counted_max) e) p) k
        WHERE c.consumer_id = v_consumer;
    END LOOP;
END $$;
