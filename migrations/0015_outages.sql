-- Runs that ended without an answer: by the message, which is counted and parks it in the end, or by an outage of the
-- database, which is nobody's fault.
--
-- Two know of an outage. The host, whose connections broke together, or which could not say in time how a run had ended: it
-- says so when the database answers again, and what was counted meanwhile, since the lease had run out, is taken back. And
-- the database, which was away when a lease ran out, also where the host went with it. A message that makes the outage itself is under
-- way in each of them, and is parked when those are more than chance explains.

ALTER TABLE oncebox.inbox_history
    DROP CONSTRAINT inbox_history_event_known,
    ADD CONSTRAINT inbox_history_event_known
        CHECK (event IN ('failed', 'crashed', 'interrupted', 'redriven', 'discarded', 'retried', 'revised', 'restored')) NOT VALID;

-- How many outages a message was under way in, since it was received or last redriven.
CREATE FUNCTION oncebox.interruptions_of(p_consumer int, p_id text) RETURNS int
LANGUAGE sql STABLE AS $$
    SELECT count(*)::int FROM oncebox.inbox_history h
    WHERE h.consumer_id = p_consumer AND h.message_id = p_id AND h.event = 'interrupted' AND h.history_id > coalesce((
        SELECT max(r.history_id) FROM oncebox.inbox_history r
        WHERE r.consumer_id = p_consumer AND r.message_id = p_id AND r.event = 'redriven'), 0)
$$;

-- Lease what is due: the attempt is counted and committed before it runs. A row whose lease ran out had a worker that
-- died; the third time it is parked. Where the server was started after the lease had run out, that says nothing of the
-- message, and is counted apart.
-- `ended` says which: `parked`, a row that is not leased and will not be; `crashed` or `interrupted`, one that was taken
-- over; null, one that was due. A row whose worker still holds its transaction is locked, and skipped.
CREATE FUNCTION oncebox_host.lease_told(p_secret bytea, p_consumer int, p_owner text, p_limit int, p_lease_ms bigint, p_crashes_max int,
    p_interruptions_max int)
RETURNS TABLE (id text, topic text, partition int, "offset" bigint, timestamp_ms bigint, key bytea, ordering_key bytea, source text,
    event_type text, event_version text, content_type text, trace_parent text, headers bytea, payload bytea,
    payload_hash bytea, attempts int, epoch bigint, version_id int, age_ms bigint, ended text, last_error text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_sort = off AS $$
DECLARE
    v record;
    -- A lease that ran out before this ran out while the server was away: nobody could have ended it.
    v_restarted timestamptz := pg_postmaster_start_time();
    v_ids text[];
    v_id text;
    v_ended text;
    v_at timestamptz;
BEGIN
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);

    FOR v_id, v_ended IN SELECT d.message_id, CASE WHEN d.locked_until < v_restarted THEN 'interrupted' ELSE 'crashed' END FROM oncebox.inbox d
        WHERE d.consumer_id = p_consumer AND d.retention_class = v.class AND d.status = 'in_progress' AND d.locked_until < now()
          AND CASE WHEN d.locked_until < v_restarted THEN oncebox.interruptions_of(p_consumer, d.message_id) + 1 >= p_interruptions_max
              ELSE d.crashes + 1 >= p_crashes_max END
        ORDER BY d.locked_until, d."offset" LIMIT p_limit FOR UPDATE SKIP LOCKED LOOP
        RETURN QUERY
        UPDATE oncebox.inbox i SET bucket = v.bucket, status = 'parked', reason = 'crashed', processed_at = now(),
            crashes = i.crashes + (v_ended = 'crashed')::int, epoch = i.epoch + 1, locked_until = NULL, locked_by = NULL,
            last_error = CASE v_ended WHEN 'crashed' THEN
                format('the process or its connection died while the message ran, %s times', i.crashes + 1)
                ELSE format('the database went away while the message ran, %s times', p_interruptions_max) END
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = v_id AND i.status = 'in_progress'
        RETURNING i.message_id, i.topic, i.partition, i."offset", i.record_timestamp_ms, i.key, i.ordering_key, i.source,
            i.event_type, i.event_version, i.content_type, i.trace_parent, NULL::bytea, NULL::bytea, i.payload_hash, i.attempts,
            i.epoch, i.version_id, 0::bigint, 'parked', i.last_error;
        INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, attempt, version_id, reason)
            SELECT p_consumer, v_id, v_ended, i.attempts, i.version_id,
                CASE v_ended WHEN 'interrupted' THEN 'lease ' || (i.epoch - 1) ELSE i.reason END FROM oncebox.inbox i
            WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = v_id LIMIT 1;
    END LOOP;

    -- Each look is the head of an index, however much is due.
    SELECT array_agg(d.message_id) INTO v_ids FROM (
        SELECT x.message_id FROM oncebox.inbox x
        WHERE x.consumer_id = p_consumer AND x.retention_class = v.class AND x.status = 'in_progress' AND x.locked_until < now()
        ORDER BY x.locked_until, x."offset" LIMIT p_limit FOR UPDATE SKIP LOCKED) d;
    IF v_ids IS NULL THEN
        SELECT array_agg(d.message_id) INTO v_ids FROM (
            SELECT x.message_id FROM oncebox.inbox x
            WHERE x.consumer_id = p_consumer AND x.retention_class = v.class
              AND x.status IN ('received', 'failed_retryable') AND x.next_attempt_at <= now()
            ORDER BY x.next_attempt_at, x."offset" LIMIT p_limit FOR UPDATE SKIP LOCKED) d;
    END IF;

    FOREACH v_id IN ARRAY coalesce(v_ids, '{}') LOOP
        SELECT CASE WHEN i.status <> 'in_progress' THEN NULL WHEN i.locked_until < v_restarted THEN 'interrupted' ELSE 'crashed' END
            INTO v_ended FROM oncebox.inbox i
            WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = v_id LIMIT 1;
        IF v_ended IS NOT NULL THEN
            INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, attempt, version_id, reason)
                SELECT p_consumer, v_id, v_ended, i.attempts, i.version_id, CASE v_ended WHEN 'interrupted' THEN 'lease ' || i.epoch END
                FROM oncebox.inbox i
                WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = v_id LIMIT 1;
        END IF;
        SELECT max(h.at) INTO v_at FROM oncebox.inbox_history h
            WHERE h.consumer_id = p_consumer AND h.message_id = v_id AND h.event = 'redriven';
        RETURN QUERY
        UPDATE oncebox.inbox i SET bucket = v.bucket, status = 'in_progress',
            attempts = i.attempts + 1 - (v_ended IS NOT DISTINCT FROM 'interrupted')::int,
            crashes = i.crashes + (v_ended IS NOT DISTINCT FROM 'crashed')::int, epoch = i.epoch + 1, next_attempt_at = NULL,
            locked_until = now() + p_lease_ms * interval '1 millisecond', locked_by = p_owner
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = v_id
        RETURNING i.message_id, i.topic, i.partition, i."offset", i.record_timestamp_ms, i.key, i.ordering_key, i.source,
            i.event_type, i.event_version, i.content_type, i.trace_parent, i.headers, i.payload, i.payload_hash, i.attempts, i.epoch,
            i.version_id, (extract(epoch FROM now() - greatest(i.received_at, v_at)) * 1000)::bigint, v_ended, NULL::text;
    END LOOP;
END $$;

-- The run of a lease broke its connection: the lease ends, and whoever leases next counts the crash.
CREATE FUNCTION oncebox_host.lease_ends(p_secret bytea, p_consumer int, p_id text, p_epoch bigint)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
DECLARE
    v record;
BEGIN
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);
    UPDATE oncebox.inbox i SET locked_until = least(i.locked_until, now())
    WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = p_id
      AND i.status = 'in_progress' AND i.epoch = p_epoch;
    RETURN FOUND;
END $$;

-- Runs of leases ended for no fault of their messages: each is due again, later the more often that was so, and the attempt
-- did not happen. A crash that was counted since the lease had run out is taken back, and what that parked is due again. Each
-- lease is told once, however often it is said. Called by the host that had the lease, when the database answers again.
--
-- `outcome`: `due`; `parked`, since that was so too often; `taken_back`; `busy`, for somebody is working on it, to be said
-- again; `done`, where nothing is left to be done.
CREATE FUNCTION oncebox_host.lease_interrupted(p_secret bytea, p_consumer int, p_id text[], p_epoch bigint[], p_crashes_max int,
    p_interruptions_max int)
RETURNS TABLE (id text, epoch bigint, outcome text, event_type text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
DECLARE
    v record;
    r record;
    w record;
    v_lease text;
    v_times int;
    v_outcome text;
BEGIN
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);
    FOR w IN SELECT u.id, u.epoch FROM unnest(p_id, p_epoch) AS u(id, epoch) LOOP
        v_lease := 'lease ' || w.epoch;
        SELECT i.status, i.reason, i.epoch, i.crashes, i.attempts, i.version_id, i.event_type INTO r FROM oncebox.inbox i
            WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = w.id FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            v_outcome := CASE WHEN EXISTS (SELECT FROM oncebox.inbox i WHERE i.consumer_id = p_consumer
                AND i.retention_class = v.class AND i.message_id = w.id) THEN 'busy' ELSE 'done' END;
        ELSIF EXISTS (SELECT FROM oncebox.inbox_history h WHERE h.consumer_id = p_consumer AND h.message_id = w.id
                AND h.event = 'interrupted' AND h.reason = v_lease) THEN
            v_outcome := 'done';
        ELSIF r.epoch = w.epoch AND r.status = 'in_progress' THEN
            v_times := oncebox.interruptions_of(p_consumer, w.id) + 1;
            v_outcome := CASE WHEN v_times >= p_interruptions_max THEN 'parked' ELSE 'due' END;
            UPDATE oncebox.inbox i SET bucket = v.bucket, locked_until = NULL, locked_by = NULL,
                status = CASE WHEN v_outcome = 'parked' THEN 'parked' WHEN i.reason IS NULL THEN 'received' ELSE 'failed_retryable' END,
                reason = CASE WHEN v_outcome = 'parked' THEN 'crashed' ELSE i.reason END,
                last_error = CASE WHEN v_outcome = 'parked'
                    THEN format('the database went away while the message ran, %s times', v_times) ELSE i.last_error END,
                processed_at = CASE WHEN v_outcome = 'parked' THEN now() END,
                next_attempt_at = CASE WHEN v_outcome = 'due' THEN now() + (power(2, v_times - 1) - 1) * interval '1 second' END,
                attempts = CASE WHEN v_outcome = 'parked' THEN i.attempts ELSE i.attempts - 1 END
            WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = w.id;
        ELSIF r.epoch > w.epoch AND r.crashes > 0 AND (r.status IN ('in_progress', 'received', 'failed_retryable', 'waiting')
                OR r.status = 'parked' AND r.reason = 'crashed') THEN
            v_outcome := 'taken_back';
            UPDATE oncebox.inbox i SET bucket = v.bucket, crashes = i.crashes - 1,
                attempts = greatest(i.attempts - 1, (i.status = 'in_progress')::int),
                status = CASE WHEN i.status = 'parked' THEN 'received' ELSE i.status END,
                reason = CASE WHEN i.status = 'parked' THEN NULL ELSE i.reason END,
                last_error = CASE WHEN i.status = 'parked' THEN NULL ELSE i.last_error END,
                processed_at = CASE WHEN i.status = 'parked' THEN NULL ELSE i.processed_at END,
                next_attempt_at = CASE WHEN i.status = 'parked' THEN now() ELSE i.next_attempt_at END
            WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = w.id;
        ELSE
            v_outcome := 'done';
        END IF;
        IF v_outcome IN ('due', 'parked', 'taken_back') THEN
            INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, attempt, version_id, reason)
            VALUES (p_consumer, w.id, 'interrupted', r.attempts, r.version_id, v_lease);
        END IF;
        id := w.id;
        epoch := w.epoch;
        outcome := v_outcome;
        event_type := r.event_type;
        RETURN NEXT;
    END LOOP;
END $$;
