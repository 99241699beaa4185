-- Returns how many outgoing messages of each consumer are open, and how many seconds the oldest of
-- them is past its due time; for consumers with any that is not completed. Counts at most
-- `p_counted_max` in each status, the earliest emits first.
CREATE OR REPLACE FUNCTION oncebox.outgoing_figures(p_counted_max bigint)
RETURNS TABLE (tenant text, consumer text, messages bigint, oldest_s double precision)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_sort = off AS $$
DECLARE
    v_consumer int := 0;
BEGIN
    LOOP
        SELECT o.consumer_id INTO v_consumer FROM oncebox.outgoing o
        WHERE o.status <> 'completed' AND o.consumer_id > v_consumer
        ORDER BY o.consumer_id LIMIT 1;
        EXIT WHEN NOT FOUND;
        RETURN QUERY
        SELECT t.name, c.name, k.messages, k.oldest_s
        FROM oncebox.consumer c JOIN oncebox.tenant t USING (tenant_id) CROSS JOIN (
            SELECT coalesce(sum(p.messages), 0)::bigint AS messages,
                greatest(0, extract(epoch FROM now() - min(p.due_at)))::double precision AS oldest_s
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
