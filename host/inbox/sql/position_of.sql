-- Returns the offset before which all records of a partition were settled, as this database knows
-- it, and the number of its last opening; null: it knows nothing of the partition, or of another
-- topic of that name. Also returns whether rows are there: the one that was inserted for the record
-- at `p_inserted_offset` (null: none was) under one of its ids, and one for each of the other ids.
CREATE OR REPLACE FUNCTION oncebox_host.position_of(
    p_secret bytea, p_consumer int, p_topic text, p_topic_id text, p_partition int,
    p_inserted_offset bigint, p_inserted_id text[], p_id text[])
RETURNS TABLE (next_offset bigint, opening bigint, has_rows boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off AS $$
BEGIN
    PERFORM oncebox.authorize(p_secret, p_consumer);
    RETURN QUERY SELECT p.next_offset, p.opening,
        (p_inserted_offset IS NULL OR EXISTS (
            SELECT FROM oncebox.inbox i
            WHERE i.consumer_id = p_consumer AND i.message_id = ANY (p_inserted_id)
              AND i.topic = p_topic AND i.partition = p_partition
              AND i."offset" = p_inserted_offset))
        AND NOT EXISTS (
            SELECT FROM unnest(p_id) AS u(id)
            WHERE NOT EXISTS (
                SELECT FROM oncebox.inbox i
                WHERE i.consumer_id = p_consumer AND i.message_id = u.id))
    FROM (VALUES (true)) AS one LEFT JOIN oncebox.partition_position p
        ON p.consumer_id = p_consumer AND p.topic = p_topic AND p.partition = p_partition
        AND coalesce(p.topic_id = p_topic_id, true);
END $$;
