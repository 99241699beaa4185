-- Returns the next page of the completed messages of a consumer, by their completion times, then by
-- their ids: those behind (`p_after`, `p_after_id`) that completed before `p_until`.
--
-- A message that completed in the transaction of its claim was received at the time at which it
-- completed, so that the index of lists holds these in order. The others have an index of their
-- own. The page is what is behind neither end of `p_limit` rows of each. So a page reads at most
-- twice that many rows, of this consumer alone, whatever the filter leaves out. The whole index of
-- lists has rows in other states too; they are passed over.
--
-- Parameters:
--
--   p_event_type     only messages of this type; null: any
--   p_ids            only messages with these ids, all in one page; null: any
--
-- Columns of the answer: parallel arrays with an element for each message, and the end of the page,
-- from which the next one continues; null: this is the last page.
--
--   ids              ids of the messages; null: the page has none
--   processed        times of their completion
--   have_record      whether each has its record, so that it can run
CREATE OR REPLACE FUNCTION oncebox.page_of_replay(
    p_consumer int, p_class smallint, p_after timestamptz, p_after_id text, p_until timestamptz,
    p_event_type text, p_ids text[], p_limit int,
    OUT ids text[], OUT processed timestamptz[], OUT have_record boolean[],
    OUT end_at timestamptz, OUT end_id text)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off
    SET enable_bitmapscan = off SET enable_sort = off AS $$
DECLARE
    -- A completed row is in the bucket of its completion.
    v_bucket timestamptz := oncebox.bucket_at(p_class, p_after);
BEGIN
    IF p_ids IS NOT NULL THEN
        SELECT array_agg(i.message_id ORDER BY i.processed_at, i.message_id COLLATE "C"),
            array_agg(i.processed_at ORDER BY i.processed_at, i.message_id COLLATE "C"),
            array_agg(i.headers IS NOT NULL AND i.erased_at IS NULL
                ORDER BY i.processed_at, i.message_id COLLATE "C")
            INTO ids, processed, have_record
        FROM (SELECT DISTINCT unnest(p_ids) AS id) u CROSS JOIN LATERAL (
            -- The key's index alone serves this, also for a plan of an empty inbox.
            SELECT i.message_id, i.status, i.processed_at, i.headers, i.erased_at, i.event_type
            FROM oncebox.inbox i
            WHERE i.consumer_id = p_consumer AND i.retention_class = p_class
              AND i.message_id = u.id OFFSET 0) i
        WHERE i.status = 'completed' AND i.processed_at < p_until
          AND (i.processed_at > p_after
            OR (i.processed_at = p_after AND i.message_id COLLATE "C" > p_after_id))
          AND (p_event_type IS NULL OR i.event_type = p_event_type);
        RETURN;
    END IF;
    WITH at_once AS MATERIALIZED (
        SELECT i.received_at AS at, i.message_id COLLATE "C" AS id, i.event_type,
            i.headers IS NOT NULL AND i.erased_at IS NULL AS has_record,
            i.status = 'completed' AND i.processed_at = i.received_at AS is_one
        FROM oncebox.inbox i
        WHERE i.consumer_id::bigint = p_consumer::bigint AND i.retention_class = p_class
          AND i.bucket >= v_bucket AND i.received_at >= p_after AND i.received_at < p_until
          AND (i.received_at > p_after OR i.message_id COLLATE "C" > p_after_id)
        ORDER BY i.received_at, i.message_id COLLATE "C" LIMIT p_limit),
    late AS MATERIALIZED (
        SELECT i.processed_at AS at, i.message_id COLLATE "C" AS id, i.event_type,
            i.headers IS NOT NULL AND i.erased_at IS NULL AS has_record
        FROM oncebox.inbox i
        WHERE i.consumer_id::bigint = p_consumer::bigint AND i.retention_class = p_class
          AND i.bucket >= v_bucket AND i.status = 'completed' AND i.processed_at <> i.received_at
          AND i.processed_at >= p_after AND i.processed_at < p_until
          AND (i.processed_at > p_after OR i.message_id COLLATE "C" > p_after_id)
        ORDER BY i.processed_at, i.message_id COLLATE "C" LIMIT p_limit),
    -- Where each of the two was cut off; no row where neither was.
    ends AS MATERIALIZED (
        SELECT e.at, e.id FROM (
            (SELECT a.at, a.id FROM at_once a
                WHERE (SELECT count(*) FROM at_once) >= p_limit
                ORDER BY a.at DESC, a.id DESC LIMIT 1)
            UNION ALL
            (SELECT l.at, l.id FROM late l
                WHERE (SELECT count(*) FROM late) >= p_limit
                ORDER BY l.at DESC, l.id DESC LIMIT 1)) e
        ORDER BY e.at, e.id LIMIT 1)
    SELECT array_agg(m.id ORDER BY m.at, m.id), array_agg(m.at ORDER BY m.at, m.id),
        array_agg(m.has_record ORDER BY m.at, m.id),
        (SELECT e.at FROM ends e), (SELECT e.id FROM ends e)
        INTO ids, processed, have_record, end_at, end_id
    FROM (
        SELECT a.at, a.id, a.event_type, a.has_record FROM at_once a WHERE a.is_one
        UNION ALL
        SELECT l.at, l.id, l.event_type, l.has_record FROM late l) m
    WHERE (p_event_type IS NULL OR m.event_type = p_event_type)
      AND NOT EXISTS (SELECT FROM ends e
        WHERE m.at > e.at OR (m.at = e.at AND m.id > e.id));
END $$;
