-- Takes a partition at an offset, for a process. Returns whether an earlier process did so at the
-- same offset and neither made progress nor gave it up, so that the messages there are suspect.
CREATE OR REPLACE FUNCTION oncebox_host.take_partition(
    p_secret bytea, p_consumer int, p_topic text, p_partition int, p_next_offset bigint)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_starts int;
BEGIN
    PERFORM oncebox.authorize(p_secret, p_consumer);
    INSERT INTO oncebox.probation AS p VALUES (p_consumer, p_topic, p_partition, p_next_offset, 1)
    ON CONFLICT (consumer_id, topic, partition) DO UPDATE
        SET starts = CASE WHEN p.next_offset = excluded.next_offset THEN p.starts + 1 ELSE 1 END,
            next_offset = excluded.next_offset
    RETURNING p.starts INTO v_starts;
    RETURN v_starts > 1;
END $$;
