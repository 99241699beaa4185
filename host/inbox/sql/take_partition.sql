-- Takes a partition at an offset, for a process. Where the caller doubts that this database has all
-- commits before the offset, and the position that it knows is an earlier one, returns that
-- position in `behind_at` and takes nothing. Else notes the offset as the position, with the number
-- that the caller gave this opening, and returns in `is_suspect` whether an earlier process took the
-- partition at the same offset and neither made progress nor gave it up, so that the messages there
-- are suspect.
CREATE OR REPLACE FUNCTION oncebox_host.take_partition(
    p_secret bytea, p_consumer int, p_topic text, p_topic_id text, p_partition int,
    p_next_offset bigint, p_opening bigint, p_is_doubted boolean)
RETURNS TABLE (is_suspect boolean, behind_at bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_position bigint;
    v_starts int;
BEGIN
    PERFORM oncebox.authorize(p_secret, p_consumer);
    IF p_is_doubted THEN
        SELECT p.next_offset INTO v_position FROM oncebox.partition_position p
        WHERE p.consumer_id = p_consumer AND p.topic = p_topic AND p.partition = p_partition
          AND coalesce(p.topic_id = p_topic_id, true);
        IF coalesce(v_position, 0) < p_next_offset THEN
            RETURN QUERY SELECT false, coalesce(v_position, 0);
            RETURN;
        END IF;
    END IF;
    INSERT INTO oncebox.partition_position AS p
        VALUES (p_consumer, p_topic, p_partition, p_topic_id, p_next_offset, p_opening)
    ON CONFLICT (consumer_id, topic, partition) DO UPDATE
        SET topic_id = excluded.topic_id, next_offset = excluded.next_offset,
            opening = excluded.opening;
    INSERT INTO oncebox.probation AS p VALUES (p_consumer, p_topic, p_partition, p_next_offset, 1)
    ON CONFLICT (consumer_id, topic, partition) DO UPDATE
        SET starts = CASE WHEN p.next_offset = excluded.next_offset THEN p.starts + 1 ELSE 1 END,
            next_offset = excluded.next_offset
    RETURNING p.starts INTO v_starts;
    RETURN QUERY SELECT v_starts > 1, NULL::bigint;
END $$;
