-- A process that died before its first new message leaves its row, and whoever takes the partition next is
-- careful, at whatever offset: duplicates that were settled again move the offset and are no progress.
CREATE OR REPLACE FUNCTION oncebox_host.partition_taken(p_secret bytea, p_consumer int, p_topic text, p_partition int, p_next_offset bigint)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_starts int;
BEGIN
    PERFORM oncebox.authorize(p_secret, p_consumer);
    INSERT INTO oncebox.probation AS p VALUES (p_consumer, p_topic, p_partition, p_next_offset, 1)
    ON CONFLICT (consumer_id, topic, partition) DO UPDATE
        SET starts = p.starts + 1, next_offset = excluded.next_offset
    RETURNING p.starts INTO v_starts;
    RETURN v_starts > 1;
END $$;
