-- Takes messages. A new one becomes a row: `completed` (it is about to be run in this very
-- transaction, which the guard keeps from being committed before `complete`), `received` (stored to
-- be run under a lease) or `parked`. A known one is answered with what became of it.
--
-- Uniqueness across partitions: first a lock per message, sorted, then, in a second statement, the
-- look and the insert. Under READ COMMITTED that statement's snapshot is younger than the locks,
-- and a commit is visible before its locks go, so it sees whatever earlier holders committed, in
-- any bucket.
--
-- `p_ordering` has for each message the hash of what it is in order with, and `p_sequence` the
-- version that it makes. A message that cannot run now becomes `waiting`, or, where its key is
-- being worked on, `received`. Whoever runs or settles a message of a key holds the key's lock,
-- from before any SQL of the guest to its commit, and looks at the key's rows in a later statement.
-- So of two that meet, the second sees what the first left. A live batch does not wait for a key,
-- since that would hold up other keys for as long as a handler takes: what it finds taken it leaves
-- to the workers of the inbox, as due.
--
-- `lost_record` says of a known message that its record is wanted; see `restore_records`.
--
-- What the host asks of the inbox is one row by its key, or the head of an index, and is planned so
-- whatever the statistics say. A partition that was made ahead has none, and a plan made for an
-- empty table reads all of it for every claim once it has filled, until it is analyzed. So the host
-- functions make plans once per session and not for each call, which cost more than the claim
-- itself; they look for a message by its whole key, in a subquery of its own that the planner
-- cannot turn around; and they scan no whole table.
CREATE OR REPLACE FUNCTION oncebox_host.claim(
    p_secret bytea, p_consumer int, p_generation bigint, p_status text, p_reason text[],
    p_topic text, p_partition int, p_id text[], p_offset bigint[], p_timestamp_ms bigint[],
    p_key bytea[], p_ordering_key bytea[], p_source text[], p_event_type text[],
    p_event_version text[], p_content_type text[], p_trace_parent text[], p_hash bytea[],
    p_version int[], p_headers bytea[], p_payload bytea[], p_ordering bigint[], p_sequence bigint[])
RETURNS TABLE (ordinal bigint, outcome text, known_status text, same_payload boolean,
    known_result text, lost_record boolean)
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
        RAISE EXCEPTION 'stale deployments: generation % is loaded, % is required', p_generation,
            v.generation_required USING ERRCODE = 'OB005';
    END IF;
    IF p_status = 'completed' THEN
        INSERT INTO oncebox.guard VALUES (pg_current_xact_id()) ON CONFLICT DO NOTHING;
    END IF;

    -- In the order of the locks and not of the ids, since ids may share locks.
    PERFORM pg_advisory_xact_lock(p_consumer, l.key)
        FROM (SELECT DISTINCT (hashtextextended(u.id, p_consumer::bigint) >> 32)::int AS key
            FROM unnest(p_id) AS u(id) ORDER BY 1) AS l;
    GET DIAGNOSTICS v_locks = ROW_COUNT;

    -- Keys, after the messages. A claim waits for none of them, so their order does not matter.
    IF p_ordering IS NOT NULL AND p_status <> 'parked' THEN
        SELECT array_agg(t.ordering) INTO v_taken FROM (
            SELECT d.ordering,
                pg_try_advisory_xact_lock(-p_consumer, (d.ordering >> 32)::int) AS is_ours
            FROM (SELECT DISTINCT u.ordering FROM unnest(p_ordering) AS u(ordering)
                WHERE u.ordering IS NOT NULL) d) t
        WHERE NOT t.is_ours;
    END IF;

    -- Of an id that stands twice in the offer, the first is claimed. Fewer locks than ids may also
    -- be ids that share one: each of those is the first of its own.
    IF v_locks < cardinality(p_id) THEN
        SELECT array_agg(w.first ORDER BY w.ordinal) INTO v_first FROM (
            SELECT u.ordinal,
                first_value(u.ordinal)
                    OVER (PARTITION BY u.id COLLATE "C" ORDER BY u.ordinal) AS first
            FROM unnest(p_id) WITH ORDINALITY AS u(id, ordinal)) w;
    END IF;

    -- A statement of its own, whose snapshot is younger than the locks.
    SELECT array_agg(k.status ORDER BY u.ordinal), array_agg(k.payload_hash ORDER BY u.ordinal),
            array_agg(k.result::text ORDER BY u.ordinal), array_agg(k.is_lost ORDER BY u.ordinal)
        INTO v_status, v_hash, v_result, v_lost
    FROM unnest(p_id) WITH ORDINALITY AS u(id, ordinal)
    LEFT JOIN LATERAL (
        SELECT i.status, i.payload_hash, i.result,
            oncebox.has_lost_record(i.status, i.reason, i.headers) AS is_lost
        FROM oncebox.inbox i
        WHERE i.consumer_id = p_consumer AND i.message_id = u.id AND i.retention_class = v.class
        LIMIT 1
    ) k ON true;

    IF p_ordering IS NOT NULL AND p_status <> 'parked' THEN
        SELECT array_agg(u.ordinal) INTO v_blocked
        FROM unnest(p_ordering, p_sequence) WITH ORDINALITY AS u(ordering, sequence, ordinal)
        WHERE u.ordering IS NOT NULL AND EXISTS (
            SELECT FROM oncebox.inbox i
            WHERE i.consumer_id = p_consumer AND i.retention_class = v.class
              AND i.ordering_hash = u.ordering
              AND i.ordering_position <= coalesce(u.sequence, i.ordering_position)
              AND i.status NOT IN ('completed', 'skipped', 'discarded'));
        SELECT array_agg(CASE
                WHEN u.ordering = ANY (v_taken) THEN 'received'
                WHEN u.ordinal = ANY (v_blocked) THEN 'waiting'
                WHEN p_status = 'received' AND u.ordering IS NOT NULL AND u.nth > 1 THEN 'waiting'
                ELSE p_status END ORDER BY u.ordinal)
            INTO v_becomes
        FROM (
            SELECT w.*, row_number() OVER (
                PARTITION BY w.ordering, w.known IS NULL ORDER BY w.sequence, w.ordinal) AS nth
            FROM unnest(p_ordering, v_status, p_sequence) WITH ORDINALITY
                AS w(ordering, known, sequence, ordinal)) u;
    END IF;

    -- A message that is kept without having run would hold its aggregate, also where that is past
    -- it.
    IF p_status = 'parked' THEN
        SELECT array_agg(CASE WHEN u.ordering IS NOT NULL AND EXISTS (
                SELECT FROM oncebox.sequence_position s
                WHERE s.consumer_id = p_consumer AND s.key_hash = sha256(u.key)
                  AND s.version >= u.sequence) THEN 'skipped' END ORDER BY u.ordinal)
            INTO v_becomes
        FROM unnest(p_ordering, p_ordering_key, p_sequence) WITH ORDINALITY
            AS u(ordering, key, sequence, ordinal);
    END IF;

    INSERT INTO oncebox.inbox AS i (consumer_id, message_id, retention_class, bucket,
        topic, partition, "offset", record_timestamp_ms, key, ordering_key,
        source, event_type, event_version, content_type, trace_parent,
        status,
        reason,
        attempts,
        next_attempt_at,
        version_id, payload, headers, payload_hash,
        processed_at,
        ordering_hash,
        ordering_position,
        sequence_version)
    SELECT p_consumer, o.id, v.class, v.bucket,
        p_topic, p_partition, o."offset", o.timestamp_ms, o.key, o.ordering_key,
        o.source, o.event_type, o.event_version, o.content_type, o.trace_parent,
        coalesce(o.becomes, p_status),
        CASE WHEN o.becomes = 'skipped' THEN 'old_version' ELSE o.reason END,
        (coalesce(o.becomes, p_status) = 'completed')::int,
        CASE coalesce(o.becomes, p_status) WHEN 'received' THEN now() END,
        o.version, o.payload, o.headers, o.hash,
        CASE WHEN coalesce(o.becomes, p_status) IN ('completed', 'parked', 'skipped')
            THEN now() END,
        o.ordering,
        CASE WHEN o.ordering IS NOT NULL
            THEN coalesce(o.sequence, nextval('oncebox.ordering_place')) END,
        o.sequence
    FROM unnest(p_id, p_offset, p_timestamp_ms, p_key, p_ordering_key, p_source, p_event_type,
            p_event_version, p_content_type, p_trace_parent, p_hash, p_version, p_headers,
            p_payload, p_reason, v_status, v_first, p_ordering, v_becomes, p_sequence)
            WITH ORDINALITY
        AS o(id, "offset", timestamp_ms, key, ordering_key, source, event_type,
            event_version, content_type, trace_parent, hash, version, headers, payload,
            reason, known, first, ordering, becomes, sequence, ordinal)
    WHERE o.known IS NULL AND coalesce(o.first, o.ordinal) = o.ordinal
    ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS v_claimed = ROW_COUNT;

    RETURN QUERY
    SELECT o.ordinal,
        CASE WHEN o.known IS NOT NULL OR o.first <> o.ordinal THEN 'known'
             WHEN v_claimed < count(*) FILTER (
                WHERE o.known IS NULL AND coalesce(o.first, o.ordinal) = o.ordinal) OVER ()
                THEN 'elsewhere'
             WHEN p_status = 'completed' AND o.becomes <> p_status THEN 'waiting'
             ELSE 'new' END,
        coalesce(o.known, v_becomes[coalesce(o.first, o.ordinal)], p_status),
        CASE WHEN o.known IS NOT NULL THEN o.known_hash WHEN o.first IS NULL THEN o.hash
            ELSE p_hash[o.first] END IS NOT DISTINCT FROM o.hash,
        o.result, coalesce(o.is_lost, false)
    FROM unnest(p_hash, v_status, v_hash, v_result, v_first, v_becomes, v_lost) WITH ORDINALITY
        AS o(hash, known, known_hash, result, first, becomes, is_lost, ordinal)
    WHERE o.ordinal <= cardinality(p_id);
END $$;
