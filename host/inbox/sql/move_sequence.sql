-- Moves aggregates to the versions of messages of this transaction that completed, and makes due
-- what waited for that. Returns whether something did. Called with the locks of their keys.
CREATE OR REPLACE FUNCTION oncebox_host.move_sequence(
    p_secret bytea, p_consumer int, p_id text[])
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off AS $$
DECLARE
    v record;
BEGIN
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);
    INSERT INTO oncebox.sequence_position AS s (consumer_id, key_hash, version)
        SELECT p_consumer, sha256(i.ordering_key), max(i.sequence_version)
        FROM unnest(p_id) AS u(id) JOIN oncebox.inbox i
            ON i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = u.id
        WHERE i.sequence_version IS NOT NULL GROUP BY 2
    ON CONFLICT (consumer_id, key_hash) DO UPDATE
        SET version = greatest(s.version, excluded.version), moved_at = now();
    RETURN (SELECT coalesce(
            bool_or(oncebox.release_key(p_consumer, v.class, k.ordering_hash)), false) FROM (
        SELECT DISTINCT i.ordering_hash FROM unnest(p_id) AS u(id) JOIN oncebox.inbox i
            ON i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = u.id
        WHERE i.sequence_version IS NOT NULL) k);
END $$;
