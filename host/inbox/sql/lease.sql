-- Leases what is due: counts the attempt, and the host commits that before the run. A row whose
-- lease ran out had a worker that died; the third time it is parked. Where the server was started
-- after the lease had run out, that says nothing of the message, and is counted apart: nothing
-- could have ended the lease. A message that makes the outage itself is under way in each of them,
-- and is parked when those are more than chance explains.
--
-- `ended` says which: `parked`, a row that is not leased and will not be; `crashed` or
-- `interrupted`, one that was taken over; null, one that was due. A row whose worker still holds
-- its transaction is locked, and skipped.
CREATE OR REPLACE FUNCTION oncebox_host.lease(
    p_secret bytea, p_consumer int, p_owner text, p_limit int, p_lease_ms bigint,
    p_crashes_max int, p_interruptions_max int)
RETURNS TABLE (id text, topic text, partition int, "offset" bigint, timestamp_ms bigint, key bytea,
    ordering_key bytea, source text, event_type text, event_version text, content_type text,
    trace_parent text, headers bytea, payload bytea, payload_hash bytea, attempts int, epoch bigint,
    version_id int, age_ms bigint, ended text, last_error text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off
    SET enable_seqscan = off SET enable_sort = off AS $$
DECLARE
    v record;
    -- A lease that ran out before this ran out while the server was away.
    v_restarted timestamptz := pg_postmaster_start_time();
    v_ids text[];
    v_id text;
    v_ended text;
    v_at timestamptz;
BEGIN
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);

    FOR v_id, v_ended IN SELECT d.message_id,
            CASE WHEN d.locked_until < v_restarted THEN 'interrupted' ELSE 'crashed' END
        FROM oncebox.inbox d
        WHERE d.consumer_id = p_consumer AND d.retention_class = v.class
          AND d.status = 'in_progress' AND d.locked_until < now()
          AND CASE WHEN d.locked_until < v_restarted
              THEN oncebox.interruptions_of(p_consumer, d.message_id) + 1 >= p_interruptions_max
              ELSE d.crashes + 1 >= p_crashes_max END
        ORDER BY d.locked_until, d."offset" LIMIT p_limit FOR UPDATE SKIP LOCKED LOOP
        RETURN QUERY
        UPDATE oncebox.inbox i SET bucket = v.bucket, status = 'parked', reason = 'crashed',
            processed_at = now(), crashes = i.crashes + (v_ended = 'crashed')::int,
            epoch = i.epoch + 1, locked_until = NULL, locked_by = NULL,
            last_error = CASE v_ended WHEN 'crashed' THEN
                format('the process or its connection died while the message ran, %s times',
                    i.crashes + 1)
                ELSE format('the database went away while the message ran, %s times',
                    p_interruptions_max) END
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = v_id
          AND i.status = 'in_progress'
        RETURNING i.message_id, i.topic, i.partition, i."offset", i.record_timestamp_ms, i.key,
            i.ordering_key, i.source, i.event_type, i.event_version, i.content_type,
            i.trace_parent, NULL::bytea, NULL::bytea, i.payload_hash, i.attempts, i.epoch,
            i.version_id, 0::bigint, 'parked', i.last_error;
        INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, attempt, version_id,
                reason)
            SELECT p_consumer, v_id, v_ended, i.attempts, i.version_id,
                CASE v_ended WHEN 'interrupted' THEN 'lease ' || (i.epoch - 1) ELSE i.reason END
            FROM oncebox.inbox i
            WHERE i.consumer_id = p_consumer AND i.retention_class = v.class
              AND i.message_id = v_id LIMIT 1;
    END LOOP;

    -- Each look is the head of an index, however much is due.
    SELECT array_agg(d.message_id) INTO v_ids FROM (
        SELECT x.message_id FROM oncebox.inbox x
        WHERE x.consumer_id = p_consumer AND x.retention_class = v.class
          AND x.status = 'in_progress' AND x.locked_until < now()
        ORDER BY x.locked_until, x."offset" LIMIT p_limit FOR UPDATE SKIP LOCKED) d;
    IF v_ids IS NULL THEN
        SELECT array_agg(d.message_id) INTO v_ids FROM (
            SELECT x.message_id FROM oncebox.inbox x
            WHERE x.consumer_id = p_consumer AND x.retention_class = v.class
              AND x.status IN ('received', 'failed_retryable') AND x.next_attempt_at <= now()
            ORDER BY x.next_attempt_at, x."offset" LIMIT p_limit FOR UPDATE SKIP LOCKED) d;
    END IF;

    FOREACH v_id IN ARRAY coalesce(v_ids, '{}') LOOP
        SELECT CASE WHEN i.status <> 'in_progress' THEN NULL
                WHEN i.locked_until < v_restarted THEN 'interrupted' ELSE 'crashed' END
            INTO v_ended FROM oncebox.inbox i
            WHERE i.consumer_id = p_consumer AND i.retention_class = v.class
              AND i.message_id = v_id LIMIT 1;
        IF v_ended IS NOT NULL THEN
            INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, attempt, version_id,
                    reason)
                SELECT p_consumer, v_id, v_ended, i.attempts, i.version_id,
                    CASE v_ended WHEN 'interrupted' THEN 'lease ' || i.epoch END
                FROM oncebox.inbox i
                WHERE i.consumer_id = p_consumer AND i.retention_class = v.class
                  AND i.message_id = v_id LIMIT 1;
        END IF;
        SELECT max(h.at) INTO v_at FROM oncebox.inbox_history h
            WHERE h.consumer_id = p_consumer AND h.message_id = v_id AND h.event = 'redriven';
        RETURN QUERY
        UPDATE oncebox.inbox i SET bucket = v.bucket, status = 'in_progress',
            attempts = i.attempts + 1 - (v_ended IS NOT DISTINCT FROM 'interrupted')::int,
            crashes = i.crashes + (v_ended IS NOT DISTINCT FROM 'crashed')::int,
            epoch = i.epoch + 1, next_attempt_at = NULL,
            locked_until = now() + p_lease_ms * interval '1 millisecond', locked_by = p_owner
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = v_id
        RETURNING i.message_id, i.topic, i.partition, i."offset", i.record_timestamp_ms, i.key,
            i.ordering_key, i.source, i.event_type, i.event_version, i.content_type,
            i.trace_parent, i.headers, i.payload, i.payload_hash, i.attempts, i.epoch,
            i.version_id,
            (extract(epoch FROM now() - greatest(i.received_at, v_at)) * 1000)::bigint, v_ended,
            NULL::text;
    END LOOP;
END $$;
