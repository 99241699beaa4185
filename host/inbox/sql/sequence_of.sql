-- Returns where messages of this transaction stand in the sequences of their aggregates: the
-- version each makes, that which its aggregate is at, the reason of its row, and whether it may run
-- over its gap. `p_first` is the version that an aggregate begins with; null where it begins with
-- whatever comes first. Called with the locks of their keys.
CREATE OR REPLACE FUNCTION oncebox_host.sequence_of(
    p_secret bytea, p_consumer int, p_first bigint, p_id text[])
RETURNS TABLE (id text, version bigint, "at" bigint, reason text, over_gap boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off AS $$
DECLARE
    v record;
BEGIN
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);
    IF p_first IS NOT NULL THEN
        INSERT INTO oncebox.sequence_position (consumer_id, key_hash, version)
            SELECT DISTINCT p_consumer, sha256(i.ordering_key), p_first - 1
            FROM unnest(p_id) AS u(id) JOIN oncebox.inbox i
                ON i.consumer_id = p_consumer AND i.retention_class = v.class
                  AND i.message_id = u.id
            WHERE i.sequence_version IS NOT NULL
        ON CONFLICT DO NOTHING;
    END IF;
    -- What was passed over is forgotten with its rows.
    UPDATE oncebox.sequence_position s SET version = k.at, moved_at = now() FROM (
            SELECT sha256(i.ordering_key) AS key_hash,
                max(oncebox.version_of(p_consumer, v.class, i.ordering_hash, i.ordering_key)) AS at
            FROM unnest(p_id) AS u(id) JOIN oncebox.inbox i
                ON i.consumer_id = p_consumer AND i.retention_class = v.class
                  AND i.message_id = u.id
            WHERE i.sequence_version IS NOT NULL GROUP BY 1) k
        WHERE s.consumer_id = p_consumer AND s.key_hash = k.key_hash AND s.version < k.at;
    RETURN QUERY SELECT i.message_id, i.sequence_version,
            oncebox.version_of(p_consumer, v.class, i.ordering_hash, i.ordering_key), i.reason,
            i.over_gap
        FROM unnest(p_id) AS u(id) JOIN oncebox.inbox i
            ON i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = u.id
        WHERE i.sequence_version IS NOT NULL;
END $$;
