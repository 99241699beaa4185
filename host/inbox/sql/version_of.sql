-- Returns the version that an aggregate is at: that of its last message that completed, and on over
-- those that were skipped or discarded. Null: none yet. Called by functions that have set the
-- search path and how to plan.
CREATE OR REPLACE FUNCTION oncebox.version_of(
    p_consumer int, p_class smallint, p_hash bigint, p_key bytea)
RETURNS bigint
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_version bigint;
BEGIN
    SELECT s.version INTO v_version FROM oncebox.sequence_position s
        WHERE s.consumer_id = p_consumer AND s.key_hash = sha256(p_key);
    RETURN coalesce((
        SELECT max(t.place) FROM (
            SELECT i.ordering_position AS place,
                dense_rank() OVER (ORDER BY i.ordering_position) AS nth
            FROM oncebox.inbox i
            WHERE i.consumer_id = p_consumer AND i.retention_class = p_class
              AND i.ordering_hash = p_hash AND i.ordering_position > v_version
              AND i.sequence_version IS NOT NULL AND i.status IN ('skipped', 'discarded')) t
        WHERE t.place - t.nth = v_version), v_version);
END $$;
