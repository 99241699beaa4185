-- Locks that cannot meet. An advisory lock of two numbers says in the first one whose it is:
--
-- * the consumer's number: a message, by the upper half of its id's hash;
-- * the same below zero: what messages are in order with, by the upper half of `ordering_hash`;
-- * zero: the host's own, by a number of the closed list in host/inbox/src/locks.rs.
--
-- The numbers that ids and keys hash to can be chosen by whoever makes these, so they name a lock of their own consumer
-- and no other. Ids and keys of one consumer that share a lock wait for each other and are nothing else to each other:
-- rows are found by the whole id, and a key by the whole `ordering_hash`.
--
-- A host that claims under other locks would not see these. So this waits until the claims that are open have ended, and
-- those that older hosts try from here on are refused, also those that wait for this: what they insert with is gone.

ALTER TABLE oncebox.consumer ADD CONSTRAINT consumer_id_positive CHECK (consumer_id > 0);
ALTER TABLE oncebox.inbox ADD CONSTRAINT inbox_consumer_positive CHECK (consumer_id > 0) NOT VALID;
ALTER SEQUENCE oncebox.ordering_position RENAME TO ordering_place;

ALTER TABLE oncebox.inbox_history
    DROP CONSTRAINT inbox_history_event_known,
    ADD CONSTRAINT inbox_history_event_known
        CHECK (event IN ('failed', 'crashed', 'redriven', 'discarded', 'retried', 'revised', 'restored')) NOT VALID;

-- Whether a row is a dead letter, or parked, that could run again if its record had been kept. Called by functions that
-- have set the search path, as is the next one.
CREATE FUNCTION oncebox.has_lost_record(p_status text, p_reason text, p_headers bytea) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT p_status IN ('failed_terminal', 'parked') AND p_headers IS NULL AND p_reason !~ '^(undecodable|unclaimable)'
$$;

-- Whether a redelivery brought back the record of a message.
CREATE FUNCTION oncebox.was_restored(p_row oncebox.inbox) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM oncebox.inbox_history h WHERE h.consumer_id = p_row.consumer_id AND h.message_id = p_row.message_id
        AND h.event = 'restored')
$$;

-- Take messages; see the first migration for what it promises. `p_ordering` has for each message the hash of what it is
-- in order with, and `p_sequence` the version that it makes. What cannot be run now becomes `waiting`, or, where its key
-- is being worked on, `received`. `lost_record` says of a known message that its record is wanted; see `restore_records`.
CREATE FUNCTION oncebox_host.claim_messages(
    p_secret bytea, p_consumer int, p_generation bigint, p_status text, p_reason text[],
    p_topic text, p_partition int, p_id text[], p_offset bigint[], p_timestamp_ms bigint[], p_key bytea[],
    p_ordering_key bytea[], p_source text[], p_event_type text[], p_event_version text[], p_content_type text[],
    p_trace_parent text[], p_hash bytea[], p_version int[], p_headers bytea[], p_payload bytea[], p_ordering bigint[],
    p_sequence bigint[])
RETURNS TABLE (ordinal bigint, outcome text, known_status text, same_payload boolean, known_result text, lost_record boolean)
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
    v_lost boolean[];
    v_taken bigint[];
    v_blocked bigint[];
    v_becomes text[];
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

    -- In the order of the locks and not of the ids, since ids may share locks.
    PERFORM pg_advisory_xact_lock(p_consumer, l.key)
        FROM (SELECT DISTINCT (hashtextextended(u.id, p_consumer::bigint) >> 32)::int AS key FROM unnest(p_id) AS u(id) ORDER BY 1) AS l;
    GET DIAGNOSTICS v_locks = ROW_COUNT;

    -- Keys, after the messages. Nobody waits for one here, so their order does not matter.
    IF p_ordering IS NOT NULL AND p_status <> 'parked' THEN
        SELECT array_agg(t.ordering) INTO v_taken FROM (
            SELECT d.ordering, pg_try_advisory_xact_lock(-p_consumer, (d.ordering >> 32)::int) AS is_ours
            FROM (SELECT DISTINCT u.ordering FROM unnest(p_ordering) AS u(ordering) WHERE u.ordering IS NOT NULL) d) t
        WHERE NOT t.is_ours;
    END IF;

    -- Of an id that stands twice in the offer, the first is claimed. Fewer locks than ids may also be ids that share one:
    -- each of those is the first of its own.
    IF v_locks < cardinality(p_id) THEN
        SELECT array_agg(w.first ORDER BY w.ordinal) INTO v_first FROM (
            SELECT u.ordinal, first_value(u.ordinal) OVER (PARTITION BY u.id COLLATE "C" ORDER BY u.ordinal) AS first
            FROM unnest(p_id) WITH ORDINALITY AS u(id, ordinal)) w;
    END IF;

    -- A statement of its own, whose snapshot is younger than the locks.
    SELECT array_agg(k.status ORDER BY u.ordinal), array_agg(k.payload_hash ORDER BY u.ordinal), array_agg(k.result::text ORDER BY u.ordinal),
            array_agg(k.is_lost ORDER BY u.ordinal)
        INTO v_status, v_hash, v_result, v_lost
    FROM unnest(p_id) WITH ORDINALITY AS u(id, ordinal)
    LEFT JOIN LATERAL (
        SELECT i.status, i.payload_hash, i.result, oncebox.has_lost_record(i.status, i.reason, i.headers) AS is_lost FROM oncebox.inbox i
        WHERE i.consumer_id = p_consumer AND i.message_id = u.id AND i.retention_class = v.class LIMIT 1
    ) k ON true;

    IF p_ordering IS NOT NULL AND p_status <> 'parked' THEN
        SELECT array_agg(u.ordinal) INTO v_blocked FROM unnest(p_ordering, p_sequence) WITH ORDINALITY AS u(ordering, sequence, ordinal)
        WHERE u.ordering IS NOT NULL AND EXISTS (
            SELECT FROM oncebox.inbox i WHERE i.consumer_id = p_consumer AND i.retention_class = v.class
                AND i.ordering_hash = u.ordering AND i.ordering_position <= coalesce(u.sequence, i.ordering_position)
                AND i.status NOT IN ('completed', 'skipped', 'discarded'));
        SELECT array_agg(CASE
                WHEN u.ordering = ANY (v_taken) THEN 'received'
                WHEN u.ordinal = ANY (v_blocked) THEN 'waiting'
                WHEN p_status = 'received' AND u.ordering IS NOT NULL AND u.nth > 1 THEN 'waiting'
                ELSE p_status END ORDER BY u.ordinal)
            INTO v_becomes
        FROM (SELECT w.*, row_number() OVER (PARTITION BY w.ordering, w.known IS NULL ORDER BY w.sequence, w.ordinal) AS nth
              FROM unnest(p_ordering, v_status, p_sequence) WITH ORDINALITY AS w(ordering, known, sequence, ordinal)) u;
    END IF;

    -- What is kept without having run would hold its aggregate, also where that is past it.
    IF p_status = 'parked' THEN
        SELECT array_agg(CASE WHEN u.ordering IS NOT NULL AND EXISTS (
                SELECT FROM oncebox.sequence_position s
                WHERE s.consumer_id = p_consumer AND s.key_hash = sha256(u.key) AND s.version >= u.sequence) THEN 'skipped' END ORDER BY u.ordinal)
            INTO v_becomes
        FROM unnest(p_ordering, p_ordering_key, p_sequence) WITH ORDINALITY AS u(ordering, key, sequence, ordinal);
    END IF;

    INSERT INTO oncebox.inbox AS i (consumer_id, message_id, retention_class, bucket, topic, partition, "offset",
        record_timestamp_ms, key, ordering_key, source, event_type, event_version, content_type, trace_parent, status,
        reason, attempts, next_attempt_at, version_id, payload, headers, payload_hash, processed_at, ordering_hash, ordering_position,
        sequence_version)
    SELECT p_consumer, o.id, v.class, v.bucket, p_topic, p_partition, o."offset", o.timestamp_ms, o.key, o.ordering_key,
        o.source, o.event_type, o.event_version, o.content_type, o.trace_parent, coalesce(o.becomes, p_status),
        CASE WHEN o.becomes = 'skipped' THEN 'old_version' ELSE o.reason END, (coalesce(o.becomes, p_status) = 'completed')::int, CASE coalesce(o.becomes, p_status) WHEN 'received' THEN now() END,
        o.version, o.payload, o.headers, o.hash, CASE WHEN coalesce(o.becomes, p_status) IN ('completed', 'parked', 'skipped') THEN now() END,
        o.ordering, CASE WHEN o.ordering IS NOT NULL THEN coalesce(o.sequence, nextval('oncebox.ordering_place')) END, o.sequence
    FROM unnest(p_id, p_offset, p_timestamp_ms, p_key, p_ordering_key, p_source, p_event_type, p_event_version, p_content_type,
                p_trace_parent, p_hash, p_version, p_headers, p_payload, p_reason, v_status, v_first, p_ordering, v_becomes,
                p_sequence) WITH ORDINALITY
        AS o(id, "offset", timestamp_ms, key, ordering_key, source, event_type, event_version, content_type,
             trace_parent, hash, version, headers, payload, reason, known, first, ordering, becomes, sequence, ordinal)
    WHERE o.known IS NULL AND coalesce(o.first, o.ordinal) = o.ordinal
    ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS v_claimed = ROW_COUNT;

    RETURN QUERY
    SELECT o.ordinal,
        CASE WHEN o.known IS NOT NULL OR o.first <> o.ordinal THEN 'known'
             WHEN v_claimed < count(*) FILTER (WHERE o.known IS NULL AND coalesce(o.first, o.ordinal) = o.ordinal) OVER () THEN 'elsewhere'
             WHEN p_status = 'completed' AND o.becomes <> p_status THEN 'waiting'
             ELSE 'new' END,
        coalesce(o.known, v_becomes[coalesce(o.first, o.ordinal)], p_status),
        CASE WHEN o.known IS NOT NULL THEN o.known_hash WHEN o.first IS NULL THEN o.hash ELSE p_hash[o.first] END IS NOT DISTINCT FROM o.hash,
        o.result, coalesce(o.is_lost, false)
    FROM unnest(p_hash, v_status, v_hash, v_result, v_first, v_becomes, v_lost) WITH ORDINALITY
        AS o(hash, known, known_hash, result, first, becomes, is_lost, ordinal)
    WHERE o.ordinal <= cardinality(p_id);
END $$;

-- As hosts before this migration call it.
CREATE OR REPLACE FUNCTION oncebox_host.claim_with_order(
    p_secret bytea, p_consumer int, p_generation bigint, p_status text, p_reason text[],
    p_topic text, p_partition int, p_id text[], p_offset bigint[], p_timestamp_ms bigint[], p_key bytea[],
    p_ordering_key bytea[], p_source text[], p_event_type text[], p_event_version text[], p_content_type text[],
    p_trace_parent text[], p_hash bytea[], p_version int[], p_headers bytea[], p_payload bytea[], p_ordering bigint[],
    p_sequence bigint[])
RETURNS TABLE (ordinal bigint, outcome text, known_status text, same_payload boolean, known_result text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM oncebox.authorize(p_secret, p_consumer);
    RAISE EXCEPTION 'this host is older than its database and claims messages under locks that newer hosts do not see; stop it, and start the release that the other hosts run'
        USING ERRCODE = 'OB006';
END $$;

CREATE OR REPLACE FUNCTION oncebox_host.claim(
    p_secret bytea, p_consumer int, p_generation bigint, p_status text, p_reason text[],
    p_topic text, p_partition int, p_id text[], p_offset bigint[], p_timestamp_ms bigint[], p_key bytea[],
    p_ordering_key bytea[], p_source text[], p_event_type text[], p_event_version text[], p_content_type text[],
    p_trace_parent text[], p_hash bytea[], p_version int[], p_headers bytea[], p_payload bytea[])
RETURNS TABLE (ordinal bigint, outcome text, known_status text, same_payload boolean, known_result text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM oncebox.authorize(p_secret, p_consumer);
    RAISE EXCEPTION 'this host is older than its database and claims messages under locks that newer hosts do not see; stop it, and start the release that the other hosts run'
        USING ERRCODE = 'OB006';
END $$;

-- Give records back to dead letters that lost them, in the transaction whose claim said so, which holds the locks of
-- the messages. Their states stay: a person redrives them. Only what came with the same payload. The answer is how many.
CREATE FUNCTION oncebox_host.restore_records(p_secret bytea, p_consumer int, p_id text[], p_hash bytea[], p_headers bytea[], p_payload bytea[])
RETURNS int
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
DECLARE
    v record;
    r record;
    v_restored int := 0;
BEGIN
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);
    FOR r IN SELECT u.id, u.hash, u.headers, u.payload FROM unnest(p_id, p_hash, p_headers, p_payload) AS u(id, hash, headers, payload)
            ORDER BY u.id COLLATE "C" LOOP
        UPDATE oncebox.inbox i SET headers = r.headers, payload = r.payload
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = r.id
          AND oncebox.has_lost_record(i.status, i.reason, i.headers) AND i.payload_hash IS NOT DISTINCT FROM r.hash;
        CONTINUE WHEN NOT FOUND;
        INSERT INTO oncebox.inbox_history (consumer_id, message_id, event) VALUES (p_consumer, r.id, 'restored');
        v_restored := v_restored + 1;
    END LOOP;
    RETURN v_restored;
END $$;

-- Begin the work of a lease: lock its key and its row, and check the epoch, before any SQL of the guest. False:
-- someone else has it, or it is not its turn, and the lease is given back. The caller commits in either case.
CREATE OR REPLACE FUNCTION oncebox_host.resume(p_secret bytea, p_consumer int, p_generation bigint, p_id text, p_epoch bigint)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
DECLARE
    v record;
    v_hash bigint;
    v_position bigint;
    v_is_locked boolean := true;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'claims need READ COMMITTED' USING ERRCODE = 'OB004';
    END IF;
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);
    IF p_generation < v.generation_required THEN
        RAISE EXCEPTION 'stale deployments: generation % is loaded, % is required', p_generation, v.generation_required
            USING ERRCODE = 'OB005';
    END IF;
    SELECT i.ordering_hash, i.ordering_position INTO v_hash, v_position FROM oncebox.inbox i
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = p_id;
    IF v_hash IS NOT NULL THEN
        -- Behind an earlier message, its key may be taken for as long as a handler runs; else by a live batch.
        IF oncebox.is_behind(p_consumer, v.class, v_hash, v_position, p_id) THEN
            v_is_locked := pg_try_advisory_xact_lock(-p_consumer, (v_hash >> 32)::int);
        ELSE
            PERFORM pg_advisory_xact_lock(-p_consumer, (v_hash >> 32)::int);
        END IF;
    END IF;
    PERFORM FROM oncebox.inbox i
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = p_id
          AND i.status = 'in_progress' AND i.epoch = p_epoch
        FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF v_hash IS NOT NULL AND (NOT v_is_locked OR oncebox.is_behind(p_consumer, v.class, v_hash, v_position, p_id)) THEN
        -- Without the lock it must not wait: whoever has it may have looked already for whom to release.
        UPDATE oncebox.inbox i SET bucket = v.bucket, attempts = i.attempts - 1, locked_until = NULL, locked_by = NULL,
            status = CASE WHEN v_is_locked THEN 'waiting' WHEN i.reason IS NULL THEN 'received' ELSE 'failed_retryable' END,
            next_attempt_at = CASE WHEN NOT v_is_locked THEN now() + interval '200 milliseconds' END
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = p_id AND i.epoch = p_epoch;
        RETURN false;
    END IF;
    INSERT INTO oncebox.guard VALUES (pg_current_xact_id()) ON CONFLICT DO NOTHING;
    RETURN true;
END $$;

-- Messages that wait for nothing; see the ninth migration.
CREATE OR REPLACE FUNCTION oncebox.release_forgotten(p_consumer int, p_class smallint, p_keys int) RETURNS int
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
DECLARE
    v_hash bigint;
    v_released int := 0;
BEGIN
    FOR v_hash IN
        -- From key to key along the index, however many messages each has.
        WITH RECURSIVE keys AS (
            (SELECT i.ordering_hash AS hash FROM oncebox.inbox i
                WHERE i.consumer_id = p_consumer AND i.retention_class = p_class AND i.ordering_hash IS NOT NULL
                  AND i.status NOT IN ('completed', 'skipped', 'discarded')
                ORDER BY i.ordering_hash LIMIT 1)
            UNION ALL
            SELECT (SELECT i.ordering_hash FROM oncebox.inbox i
                WHERE i.consumer_id = p_consumer AND i.retention_class = p_class AND i.ordering_hash > k.hash
                  AND i.status NOT IN ('completed', 'skipped', 'discarded')
                ORDER BY i.ordering_hash LIMIT 1)
            FROM keys k WHERE k.hash IS NOT NULL
        )
        SELECT k.hash FROM keys k CROSS JOIN LATERAL (
            SELECT i.status, i.reason FROM oncebox.inbox i
            WHERE i.consumer_id = p_consumer AND i.retention_class = p_class AND i.ordering_hash = k.hash
              AND i.status NOT IN ('completed', 'skipped', 'discarded')
            ORDER BY i.ordering_position LIMIT 1) head
        WHERE (head.status = 'waiting' OR head.status = 'parked' AND head.reason = 'gap')
          AND EXISTS (SELECT FROM oncebox.next_of_key(p_consumer, p_class, k.hash)) LIMIT p_keys
    LOOP
        IF pg_try_advisory_xact_lock(-p_consumer, (v_hash >> 32)::int) AND oncebox.release_key(p_consumer, p_class, v_hash) THEN
            v_released := v_released + 1;
        END IF;
    END LOOP;
    RETURN v_released;
END $$;

-- Do with messages what a person says; see the tenth migration.
CREATE OR REPLACE FUNCTION oncebox.remedy(p_consumer int, p_class smallint, p_verb text, p_id text[], p_as_of timestamptz, p_actor text, p_reason text)
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
        CONTINUE WHEN p_verb = 'discard' AND v_hash IS NOT NULL AND NOT pg_try_advisory_xact_lock(-p_consumer, (v_hash >> 32)::int);
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
            processed_at = CASE WHEN p_verb = 'discard' THEN now() END,
            -- What a redelivery brought back was to be kept for a run only.
            headers = CASE WHEN NOT (p_verb = 'discard' AND oncebox.was_restored(i)) THEN i.headers END,
            payload = CASE WHEN NOT (p_verb = 'discard' AND oncebox.was_restored(i)) THEN i.payload END
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
