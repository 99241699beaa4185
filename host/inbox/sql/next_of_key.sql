-- Returns the first open message of a key, where it waits and no longer has to; and whether that is
-- so because its gap lasted too long. A message that was parked for a gap goes on too once that
-- closed. Called by functions that have set the search path and how to plan.
CREATE OR REPLACE FUNCTION oncebox.next_of_key(p_consumer int, p_class smallint, p_hash bigint)
RETURNS TABLE (id text, is_overdue boolean)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    h record;
BEGIN
    SELECT i.message_id, i.status, i.reason, i.waits_until, i.sequence_version, i.ordering_key
        INTO h FROM oncebox.inbox i
        WHERE i.consumer_id = p_consumer AND i.retention_class = p_class
          AND i.ordering_hash = p_hash AND i.status NOT IN ('completed', 'skipped', 'discarded')
        ORDER BY i.ordering_position, i.message_id COLLATE "C" LIMIT 1;
    IF h.status = 'waiting' AND h.reason IS DISTINCT FROM 'gap' THEN
        RETURN QUERY SELECT h.message_id, false;
    ELSIF h.status IN ('waiting', 'parked') AND h.reason = 'gap' THEN
        IF oncebox.version_of(p_consumer, p_class, p_hash, h.ordering_key)
                >= h.sequence_version - 1 THEN
            RETURN QUERY SELECT h.message_id, false;
        ELSIF h.status = 'waiting' AND h.waits_until <= now() THEN
            RETURN QUERY SELECT h.message_id, true;
        END IF;
    END IF;
END $$;
