-- Makes due the messages that wait for nothing: what stood before them was deleted by hand, or is
-- of a lost transaction of a restored database, or their gap has lasted too long, or was closed by
-- one that did not run. Releases at most so many keys, each of which is looked at again under its
-- lock; keys that are taken are being worked on. Returns how many messages are due now.
CREATE OR REPLACE FUNCTION oncebox.release_unblocked(p_consumer int, p_class smallint, p_keys int)
RETURNS int
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off AS $$
DECLARE
    v_hash bigint;
    v_released int := 0;
BEGIN
    FOR v_hash IN
        -- From key to key along the index, however many messages each has.
        WITH RECURSIVE keys AS (
            (SELECT i.ordering_hash AS hash FROM oncebox.inbox i
                WHERE i.consumer_id = p_consumer AND i.retention_class = p_class
                  AND i.ordering_hash IS NOT NULL
                  AND i.status NOT IN ('completed', 'skipped', 'discarded')
                ORDER BY i.ordering_hash LIMIT 1)
            UNION ALL
            SELECT (SELECT i.ordering_hash FROM oncebox.inbox i
                WHERE i.consumer_id = p_consumer AND i.retention_class = p_class
                  AND i.ordering_hash > k.hash
                  AND i.status NOT IN ('completed', 'skipped', 'discarded')
                ORDER BY i.ordering_hash LIMIT 1)
            FROM keys k WHERE k.hash IS NOT NULL
        )
        SELECT k.hash FROM keys k CROSS JOIN LATERAL (
            SELECT i.status, i.reason FROM oncebox.inbox i
            WHERE i.consumer_id = p_consumer AND i.retention_class = p_class
              AND i.ordering_hash = k.hash
              AND i.status NOT IN ('completed', 'skipped', 'discarded')
            ORDER BY i.ordering_position LIMIT 1) head
        WHERE (head.status = 'waiting' OR head.status = 'parked' AND head.reason = 'gap')
          AND EXISTS (SELECT FROM oncebox.next_of_key(p_consumer, p_class, k.hash)) LIMIT p_keys
    LOOP
        IF pg_try_advisory_xact_lock(-p_consumer, (v_hash >> 32)::int)
                AND oncebox.release_key(p_consumer, p_class, v_hash) THEN
            v_released := v_released + 1;
        END IF;
    END LOOP;
    RETURN v_released;
END $$;
