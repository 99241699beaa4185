-- Returns the offset before which all records of a partition were settled, as this database knows
-- it; null: it knows nothing of the partition, or of another topic of that name. Also returns
-- whether all of the given messages have rows.
CREATE OR REPLACE FUNCTION oncebox_host.position_of(
    p_secret bytea, p_consumer int, p_topic text, p_topic_id text, p_partition int, p_id text[])
RETURNS TABLE (next_offset bigint, has_rows boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM oncebox.authorize(p_secret, p_consumer);
    RETURN QUERY SELECT (
            SELECT p.next_offset FROM oncebox.partition_position p
            WHERE p.consumer_id = p_consumer AND p.topic = p_topic AND p.partition = p_partition
              AND p.topic_id IS NOT DISTINCT FROM p_topic_id),
        NOT EXISTS (
            SELECT FROM unnest(p_id) AS u(id)
            WHERE NOT EXISTS (
                SELECT FROM oncebox.inbox i
                WHERE i.consumer_id = p_consumer AND i.message_id = u.id));
END $$;
