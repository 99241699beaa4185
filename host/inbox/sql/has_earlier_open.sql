-- Returns whether an earlier message of the key is open; of those in one place, one is before the
-- other by its id. Called by functions that have set the search path and how to plan.
CREATE OR REPLACE FUNCTION oncebox.has_earlier_open(
    p_consumer int, p_class smallint, p_hash bigint, p_position bigint, p_id text)
RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN EXISTS (SELECT FROM oncebox.inbox i
        WHERE i.consumer_id = p_consumer AND i.retention_class = p_class
          AND i.ordering_hash = p_hash AND i.ordering_position <= p_position
          AND i.status NOT IN ('completed', 'skipped', 'discarded')
          AND (i.ordering_position < p_position OR i.message_id COLLATE "C" < p_id));
END $$;
