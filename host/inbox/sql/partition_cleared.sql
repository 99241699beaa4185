-- Clears a partition of suspicion: after the first progress, or a clean hand-over. Also notes the
-- partition's position; null: it is not to be noted now.
CREATE OR REPLACE FUNCTION oncebox_host.partition_cleared(
    p_secret bytea, p_consumer int, p_topic text, p_partition int,
    p_next_offset bigint DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM oncebox.authorize(p_secret, p_consumer);
    UPDATE oncebox.partition_position p SET next_offset = p_next_offset
    WHERE p.next_offset < p_next_offset
      AND p.consumer_id = p_consumer AND p.topic = p_topic AND p.partition = p_partition;
    DELETE FROM oncebox.probation p
    WHERE p.consumer_id = p_consumer AND p.topic = p_topic AND p.partition = p_partition;
END $$;
