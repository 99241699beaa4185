-- What the host asks of the inbox is one row by its key, or the head of an index, and is planned so whatever
-- the statistics say. A partition that was made ahead has none, and a plan made for an empty table reads all
-- of it for every claim once it has filled, until someone analyzes it. So: plans are made once per session
-- and not for each call, which cost more than the claim itself; a message is looked for by its whole key, in
-- a subquery of its own that the planner cannot turn around; scans of whole tables are not to be had.

-- Called by the host's functions alone, which have set the search path.
CREATE OR REPLACE FUNCTION oncebox.authorize(p_secret bytea, p_consumer int, OUT class smallint, OUT bucket timestamptz,
    OUT generation_required bigint)
LANGUAGE plpgsql STABLE AS $$
BEGIN
    SELECT c.retention_class, date_bin(r.bucket, now(), '2000-01-03 00:00:00+00'), c.generation_required
        INTO class, bucket, generation_required
    FROM oncebox.consumer c
    JOIN oncebox.tenant t USING (tenant_id)
    JOIN oncebox.retention_class r USING (retention_class)
    WHERE c.consumer_id = p_consumer AND t.login = session_user AND t.secret_hash = sha256(p_secret);
    IF NOT FOUND THEN
        RAISE EXCEPTION 'denied' USING ERRCODE = '42501';
    END IF;
END $$;

-- Take messages; see the first migration for what it promises.
CREATE OR REPLACE FUNCTION oncebox_host.claim(
    p_secret bytea, p_consumer int, p_generation bigint, p_status text, p_reason text[],
    p_topic text, p_partition int, p_id text[], p_offset bigint[], p_timestamp_ms bigint[], p_key bytea[],
    p_ordering_key bytea[], p_source text[], p_event_type text[], p_event_version text[], p_content_type text[],
    p_trace_parent text[], p_hash bytea[], p_version int[], p_headers bytea[], p_payload bytea[])
RETURNS TABLE (ordinal bigint, outcome text, known_status text, same_payload boolean, known_result text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
DECLARE
    v record;
    v_locks bigint;
    v_claimed bigint;
    v_first bigint[];
    v_status text[];
    v_hash bytea[];
    v_result text[];
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'claims need READ COMMITTED' USING ERRCODE = 'OB004';
    END IF;
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);
    IF p_status NOT IN ('completed', 'received', 'parked') THEN
        RAISE EXCEPTION 'a claim cannot make a row `%`', p_status USING ERRCODE = '22023';
    END IF;
    IF p_generation < v.generation_required THEN
        RAISE EXCEPTION 'stale deployments: generation % is loaded, % is required', p_generation, v.generation_required
            USING ERRCODE = 'OB005';
    END IF;
    IF p_status = 'completed' THEN
        INSERT INTO oncebox.guard VALUES (pg_current_xact_id()) ON CONFLICT DO NOTHING;
    END IF;

    PERFORM pg_advisory_xact_lock(l.key)
        FROM (SELECT DISTINCT hashtextextended(u.id, p_consumer::bigint) AS key FROM unnest(p_id) AS u(id) ORDER BY 1) AS l;
    GET DIAGNOSTICS v_locks = ROW_COUNT;

    -- Of an id that stands twice in the offer, the first is claimed.
    IF v_locks < cardinality(p_id) THEN
        SELECT array_agg(w.first ORDER BY w.ordinal) INTO v_first FROM (
            SELECT u.ordinal, first_value(u.ordinal) OVER (PARTITION BY u.id COLLATE "C" ORDER BY u.ordinal) AS first
            FROM unnest(p_id) WITH ORDINALITY AS u(id, ordinal)) w;
    END IF;

    -- A statement of its own, whose snapshot is younger than the locks.
    SELECT array_agg(k.status ORDER BY u.ordinal), array_agg(k.payload_hash ORDER BY u.ordinal), array_agg(k.result::text ORDER BY u.ordinal)
        INTO v_status, v_hash, v_result
    FROM unnest(p_id) WITH ORDINALITY AS u(id, ordinal)
    LEFT JOIN LATERAL (
        SELECT i.status, i.payload_hash, i.result FROM oncebox.inbox i
        WHERE i.consumer_id = p_consumer AND i.message_id = u.id AND i.retention_class = v.class LIMIT 1
    ) k ON true;

    INSERT INTO oncebox.inbox AS i (consumer_id, message_id, retention_class, bucket, topic, partition, "offset",
        record_timestamp_ms, key, ordering_key, source, event_type, event_version, content_type, trace_parent, status,
        reason, attempts, next_attempt_at, version_id, payload, headers, payload_hash, processed_at)
    SELECT p_consumer, o.id, v.class, v.bucket, p_topic, p_partition, o."offset", o.timestamp_ms, o.key, o.ordering_key,
        o.source, o.event_type, o.event_version, o.content_type, o.trace_parent, p_status,
        o.reason, (p_status = 'completed')::int, CASE WHEN p_status = 'received' THEN now() END,
        o.version, o.payload, o.headers, o.hash, CASE WHEN p_status <> 'received' THEN now() END
    FROM unnest(p_id, p_offset, p_timestamp_ms, p_key, p_ordering_key, p_source, p_event_type, p_event_version, p_content_type,
                p_trace_parent, p_hash, p_version, p_headers, p_payload, p_reason, v_status, v_first) WITH ORDINALITY
        AS o(id, "offset", timestamp_ms, key, ordering_key, source, event_type, event_version, content_type,
             trace_parent, hash, version, headers, payload, reason, known, first, ordinal)
    WHERE o.known IS NULL AND coalesce(o.first, o.ordinal) = o.ordinal
    ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS v_claimed = ROW_COUNT;

    RETURN QUERY
    SELECT o.ordinal,
        CASE WHEN o.known IS NOT NULL OR o.first <> o.ordinal THEN 'known'
             WHEN v_claimed < count(*) FILTER (WHERE o.known IS NULL AND coalesce(o.first, o.ordinal) = o.ordinal) OVER () THEN 'elsewhere'
             ELSE 'new' END,
        coalesce(o.known, p_status),
        CASE WHEN o.known IS NOT NULL THEN o.known_hash WHEN o.first IS NULL THEN o.hash ELSE p_hash[o.first] END IS NOT DISTINCT FROM o.hash,
        o.result
    FROM unnest(p_hash, v_status, v_hash, v_result, v_first) WITH ORDINALITY AS o(hash, known, known_hash, result, first, ordinal)
    WHERE o.ordinal <= cardinality(p_id);
END $$;

-- The end of a transaction that claimed or resumed.
CREATE OR REPLACE FUNCTION oncebox_host.complete(
    p_secret bytea, p_consumer int, p_withdrawn text[], p_id text[], p_epoch bigint[], p_status text[], p_reason text[],
    p_error text[], p_result text[], p_delay_ms bigint[], p_version int[], p_keep boolean[], p_headers bytea[], p_payload bytea[])
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
DECLARE
    v record;
    v_id text;
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
            next_attempt_at = CASE WHEN s.status = 'failed_retryable' THEN now() + s.delay_ms * interval '1 millisecond' END,
            processed_at = CASE WHEN s.status <> 'failed_retryable' THEN now() END,
            locked_until = NULL, locked_by = NULL, version_id = coalesce(s.version, i.version_id),
            headers = CASE WHEN s.keep THEN coalesce(s.headers, i.headers) END,
            payload = CASE WHEN s.keep THEN coalesce(s.payload, i.payload) END
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = s.id AND i.epoch = s.epoch
          AND CASE WHEN s.epoch = 0 THEN i.xmin = pg_current_xact_id()::xid ELSE i.status = 'in_progress' END;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'a completed claim is not of this transaction' USING ERRCODE = 'OB003';
        END IF;
    END LOOP;
END $$;

-- Lease what is due.
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
        RETURN QUERY
        UPDATE oncebox.inbox i SET bucket = v.bucket, status = 'in_progress', attempts = i.attempts + 1,
            crashes = i.crashes + (i.status = 'in_progress')::int, epoch = i.epoch + 1, next_attempt_at = NULL,
            locked_until = now() + p_lease_ms * interval '1 millisecond', locked_by = p_owner
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = v_id
        RETURNING i.message_id, i.topic, i.partition, i."offset", i.record_timestamp_ms, i.key, i.ordering_key, i.source,
            i.event_type, i.event_version, i.content_type, i.trace_parent, i.headers, i.payload, i.payload_hash, i.attempts, i.epoch;
    END LOOP;
END $$;

ALTER FUNCTION oncebox_host.resume(bytea, int, bigint, text, bigint) SET plan_cache_mode = force_generic_plan;
ALTER FUNCTION oncebox_host.resume(bytea, int, bigint, text, bigint) SET enable_seqscan = off;
ALTER FUNCTION oncebox_host.release(bytea, int, text, bigint, bigint) SET plan_cache_mode = force_generic_plan;
ALTER FUNCTION oncebox_host.release(bytea, int, text, bigint, bigint) SET enable_seqscan = off;

-- Dead rows of the guard would be read by a plan that was made while it was empty.
ALTER FUNCTION oncebox.guard_check() SET enable_seqscan = off;

DROP FUNCTION oncebox.message_lock(int, text);
