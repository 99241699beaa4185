-- What became of a message run by run, and what people do with messages that do not go on by themselves.

-- Failures, and what was done by hand. A message that completes at once has no row here.
CREATE TABLE oncebox.inbox_history (
    consumer_id           int NOT NULL,
    message_id            text NOT NULL,
    history_id            bigint GENERATED ALWAYS AS IDENTITY,
    at                    timestamptz NOT NULL DEFAULT now(),
    event                 text NOT NULL
        CONSTRAINT inbox_history_event_known CHECK (event IN ('failed', 'crashed', 'redriven', 'discarded', 'retried')),
    -- Which run it was, since the message was first received or last redriven.
    attempt               int,
    version_id            int,
    -- Of a run, as in the inbox; of a person, in their words.
    reason                text,
    error                 text,
    -- Who, where it was a person.
    actor                 text,
    PRIMARY KEY (consumer_id, message_id, history_id)
);

-- Whether a message has no place in an order that its consumer keeps: a second payload under the id of one that has.
CREATE FUNCTION oncebox.is_unordered(p_row oncebox.inbox) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT p_row.reason = 'collision' AND p_row.ordering_hash IS NULL AND EXISTS (
        SELECT FROM oncebox.inbox o WHERE o.consumer_id = p_row.consumer_id AND o.retention_class = p_row.retention_class
            AND o.message_id = regexp_replace(p_row.message_id, '#[^#]*$', '') AND o.ordering_hash IS NOT NULL)
$$;

-- Whether a run of a message failed, or a person did something with it, after a time.
CREATE FUNCTION oncebox.changed_since(p_row oncebox.inbox, p_time timestamptz) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM oncebox.inbox_history h WHERE h.consumer_id = p_row.consumer_id AND h.message_id = p_row.message_id
        AND h.at > p_time)
$$;

-- Do with messages what a person says, each once: those that are in a state for it and that nobody is working on.
--
-- * `redrive`: dead letters are due again, with a budget of runs as if they were new. Only those that were dead letters
--   by `p_as_of`, so that what fails again meanwhile is not run again and again. One whose record was not kept cannot
--   be run; one that was never decoded has no identity to run under, and a collision no place in an order. One that
--   was parked for a gap runs over it.
-- * `discard`: what is not to run any more. What waits behind it in its key is due.
-- * `retry`: what waits for its next attempt is due now, once: not what failed again since `p_as_of`.
--
-- The answer is how many messages that were.
CREATE FUNCTION oncebox.remedy(p_consumer int, p_class smallint, p_verb text, p_id text[], p_as_of timestamptz, p_actor text, p_reason text)
RETURNS int
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
DECLARE
    v_id text;
    v_hash bigint;
    v_attempt int;
    v_version int;
    v_done int := 0;
BEGIN
    FOREACH v_id IN ARRAY p_id LOOP
        SELECT i.ordering_hash INTO v_hash FROM oncebox.inbox i
            WHERE i.consumer_id = p_consumer AND i.retention_class = p_class AND i.message_id = v_id;
        -- To settle a message of a key takes the key's lock, before that of the row. Whoever has it is at work.
        CONTINUE WHEN p_verb = 'discard' AND v_hash IS NOT NULL AND NOT pg_try_advisory_xact_lock(v_hash);
        SELECT i.attempts, i.version_id INTO v_attempt, v_version FROM oncebox.inbox i
            WHERE i.consumer_id = p_consumer AND i.retention_class = p_class AND i.message_id = v_id AND CASE p_verb
                WHEN 'redrive' THEN i.status IN ('failed_terminal', 'parked') AND i.processed_at <= p_as_of
                    AND i.headers IS NOT NULL AND i.reason !~ '^(undecodable|unclaimable)' AND NOT oncebox.is_unordered(i)
                WHEN 'discard' THEN i.status IN ('received', 'failed_retryable', 'failed_terminal', 'parked', 'waiting')
                WHEN 'retry' THEN i.status = 'failed_retryable' AND i.next_attempt_at > now() AND NOT oncebox.changed_since(i, p_as_of) END
            FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        UPDATE oncebox.inbox i SET bucket = oncebox.bucket_at(p_class, now()),
            status = CASE p_verb WHEN 'redrive' THEN 'received' WHEN 'discard' THEN 'discarded' ELSE i.status END,
            reason = CASE WHEN p_verb <> 'redrive' THEN i.reason END,
            over_gap = i.over_gap OR p_verb = 'redrive' AND i.reason IS NOT DISTINCT FROM 'gap',
            attempts = CASE p_verb WHEN 'redrive' THEN 0 ELSE i.attempts END,
            crashes = CASE p_verb WHEN 'redrive' THEN 0 ELSE i.crashes END,
            next_attempt_at = CASE WHEN p_verb <> 'discard' THEN now() END,
            processed_at = CASE WHEN p_verb = 'discard' THEN now() END
        WHERE i.consumer_id = p_consumer AND i.retention_class = p_class AND i.message_id = v_id;
        INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, attempt, version_id, reason, actor)
        VALUES (p_consumer, v_id, CASE p_verb WHEN 'redrive' THEN 'redriven' WHEN 'discard' THEN 'discarded' ELSE 'retried' END,
                v_attempt, v_version, p_reason, p_actor);
        IF p_verb = 'discard' AND v_hash IS NOT NULL THEN
            PERFORM oncebox.release_key(p_consumer, p_class, v_hash);
        END IF;
        v_done := v_done + 1;
    END LOOP;
    RETURN v_done;
END $$;

-- The end of a transaction that claimed or resumed. Each failure is kept.
CREATE OR REPLACE FUNCTION oncebox_host.complete(
    p_secret bytea, p_consumer int, p_withdrawn text[], p_id text[], p_epoch bigint[], p_status text[], p_reason text[],
    p_error text[], p_result text[], p_delay_ms bigint[], p_version int[], p_keep boolean[], p_headers bytea[], p_payload bytea[])
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
DECLARE
    v record;
    v_id text;
    v_ordering bigint;
    v_attempt int;
    v_version int;
    s record;
BEGIN
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);
    DELETE FROM oncebox.guard g WHERE g.xid = pg_current_xact_id();
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no claim in this transaction' USING ERRCODE = 'OB002';
    END IF;
    FOREACH v_id IN ARRAY p_withdrawn LOOP
        DELETE FROM oncebox.inbox i
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = v_id
          AND i.epoch = 0 AND i.xmin = pg_current_xact_id()::xid;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'a withdrawn claim is not of this transaction' USING ERRCODE = 'OB003';
        END IF;
    END LOOP;
    FOR s IN SELECT * FROM unnest(p_id, p_epoch, p_status, p_reason, p_error, p_result, p_delay_ms, p_version, p_keep, p_headers, p_payload)
            AS s(id, epoch, status, reason, error, result, delay_ms, version, keep, headers, payload) LOOP
        UPDATE oncebox.inbox i SET
            bucket = v.bucket, status = s.status, reason = s.reason, last_error = s.error, result = s.result::jsonb,
            -- Its claim, or its lease, may have counted what then did not run.
            attempts = CASE WHEN s.status NOT IN ('received', 'waiting', 'skipped') AND s.reason IS DISTINCT FROM 'gap' THEN i.attempts
                WHEN s.epoch > 0 THEN i.attempts - 1 ELSE 0 END,
            next_attempt_at = CASE s.status WHEN 'failed_retryable' THEN now() + s.delay_ms * interval '1 millisecond' WHEN 'received' THEN now() END,
            waits_until = CASE WHEN s.status = 'waiting' THEN now() + s.delay_ms * interval '1 millisecond' END,
            processed_at = CASE WHEN s.status NOT IN ('failed_retryable', 'received', 'waiting') THEN now() END,
            locked_until = NULL, locked_by = NULL, version_id = coalesce(s.version, i.version_id),
            over_gap = i.over_gap OR coalesce(i.reason = 'gap_overdue' AND s.reason <> 'gap', false),
            headers = CASE WHEN s.keep THEN coalesce(s.headers, i.headers) END,
            payload = CASE WHEN s.keep THEN coalesce(s.payload, i.payload) END
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = s.id AND i.epoch = s.epoch
          AND CASE WHEN s.epoch = 0 THEN i.xmin = pg_current_xact_id()::xid ELSE i.status = 'in_progress' END
        RETURNING i.ordering_hash, i.attempts, i.version_id INTO v_ordering, v_attempt, v_version;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'a completed claim is not of this transaction' USING ERRCODE = 'OB003';
        END IF;
        IF s.status IN ('failed_retryable', 'failed_terminal', 'parked') THEN
            INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, attempt, version_id, reason, error)
            VALUES (p_consumer, s.id, 'failed', v_attempt, v_version, s.reason, s.error);
        END IF;
        IF v_ordering IS NOT NULL AND s.epoch > 0 AND s.status IN ('completed', 'skipped') THEN
            PERFORM oncebox.release_key(p_consumer, v.class, v_ordering);
        END IF;
    END LOOP;
END $$;

-- Lease what is due. A run that ended with its process is kept too.
CREATE OR REPLACE FUNCTION oncebox_host.lease(p_secret bytea, p_consumer int, p_owner text, p_limit int, p_lease_ms bigint, p_crashes_max int)
RETURNS TABLE (id text, topic text, partition int, "offset" bigint, timestamp_ms bigint, key bytea, ordering_key bytea, source text,
    event_type text, event_version text, content_type text, trace_parent text, headers bytea, payload bytea,
    payload_hash bytea, attempts int, epoch bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_sort = off AS $$
DECLARE
    v record;
    v_ids text[];
    v_id text;
BEGIN
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);

    FOR v_id IN SELECT d.message_id FROM oncebox.inbox d
        WHERE d.consumer_id = p_consumer AND d.retention_class = v.class AND d.status = 'in_progress'
          AND d.locked_until < now() AND d.crashes + 1 >= p_crashes_max
        ORDER BY d.locked_until, d."offset" LIMIT p_limit FOR UPDATE SKIP LOCKED LOOP
        UPDATE oncebox.inbox i SET bucket = v.bucket, status = 'parked', reason = 'crashed', processed_at = now(),
            crashes = i.crashes + 1, epoch = i.epoch + 1, locked_until = NULL, locked_by = NULL,
            last_error = format('the process or its connection died while the message ran, %s times', i.crashes + 1)
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = v_id AND i.status = 'in_progress';
        INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, attempt, version_id, reason)
            SELECT p_consumer, v_id, 'crashed', i.attempts, i.version_id, i.reason FROM oncebox.inbox i
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
        INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, attempt, version_id)
            SELECT p_consumer, v_id, 'crashed', i.attempts, i.version_id FROM oncebox.inbox i
            WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = v_id AND i.status = 'in_progress' LIMIT 1;
        RETURN QUERY
        UPDATE oncebox.inbox i SET bucket = v.bucket, status = 'in_progress', attempts = i.attempts + 1,
            crashes = i.crashes + (i.status = 'in_progress')::int, epoch = i.epoch + 1, next_attempt_at = NULL,
            locked_until = now() + p_lease_ms * interval '1 millisecond', locked_by = p_owner
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = v_id
        RETURNING i.message_id, i.topic, i.partition, i."offset", i.record_timestamp_ms, i.key, i.ordering_key, i.source,
            i.event_type, i.event_version, i.content_type, i.trace_parent, i.headers, i.payload, i.payload_hash, i.attempts, i.epoch;
    END LOOP;
END $$;
