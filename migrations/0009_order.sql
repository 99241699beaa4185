-- Messages of one key, or of one partition, that run in their order. A message waits, as a row, while an earlier
-- one of its key is neither completed nor skipped nor discarded; other keys go on.
--
-- Whoever runs or settles a message of a key holds the key's lock, from before any SQL of the guest to its
-- commit, and looks at the key's rows in a later statement. So of two that meet, the second sees what the first
-- left: nobody waits for a message that is done, and nobody passes one that failed. A live batch does not wait
-- for a key, since that would hold up other keys for as long as a handler takes: what it finds taken it leaves to
-- the workers of the inbox, as due.
--
-- Where messages say which version of their aggregate, their key, they make, that is their place. One whose version
-- is not above that of the aggregate is skipped; one that leaves a gap waits for it to close, with the reason `gap`.

ALTER TABLE oncebox.inbox
    -- What the message is to be in order with, as the number of its lock. Null: with nothing.
    ADD COLUMN ordering_hash bigint,
    -- Its place among those: its version where it has one, else given in the order in which messages are claimed,
    -- which is that of a partition.
    ADD COLUMN ordering_position bigint,
    -- The version of its aggregate that it makes, where the consumer guards the sequence.
    ADD COLUMN sequence_version bigint,
    -- Until when it waits for a gap to close.
    ADD COLUMN waits_until timestamptz,
    -- Whether it was let to run over its gap, by a person or by the policy.
    ADD COLUMN over_gap boolean NOT NULL DEFAULT false,
    ADD CONSTRAINT inbox_ordering_whole CHECK ((ordering_hash IS NULL) = (ordering_position IS NULL));
CREATE SEQUENCE oncebox.ordering_position AS bigint;
CREATE INDEX inbox_ordering ON oncebox.inbox (consumer_id, ordering_hash, ordering_position)
    WHERE ordering_hash IS NOT NULL AND status NOT IN ('completed', 'skipped', 'discarded');

-- What versions go on over without having run.
CREATE INDEX inbox_passed_over ON oncebox.inbox (consumer_id, ordering_hash, ordering_position)
    WHERE sequence_version IS NOT NULL AND status IN ('skipped', 'discarded');

-- The versions that aggregates are at; moved in the transaction of the message that completes.
CREATE TABLE oncebox.sequence_position (
    consumer_id           int NOT NULL,
    -- SHA-256 of the ordering key.
    key_hash              bytea NOT NULL CHECK (length(key_hash) = 32),
    version               bigint NOT NULL,
    moved_at              timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer_id, key_hash)
);

CREATE OR REPLACE VIEW oncebox.inbox_message AS
    SELECT t.name AS tenant_name, c.name AS consumer_name, i.*
    FROM oncebox.inbox i JOIN oncebox.consumer c USING (consumer_id) JOIN oncebox.tenant t USING (tenant_id);
CREATE OR REPLACE VIEW oncebox.dead_letter AS
    SELECT * FROM oncebox.inbox_message WHERE status IN ('failed_terminal', 'parked');

-- Whether an earlier message of the key is open; of those in one place, one is before the other by its id. Called, as
-- the next one is, by functions that have set the search path and how to plan.
CREATE FUNCTION oncebox.is_behind(p_consumer int, p_class smallint, p_hash bigint, p_position bigint, p_id text) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN EXISTS (SELECT FROM oncebox.inbox i WHERE i.consumer_id = p_consumer AND i.retention_class = p_class
        AND i.ordering_hash = p_hash AND i.ordering_position <= p_position AND i.status NOT IN ('completed', 'skipped', 'discarded')
        AND (i.ordering_position < p_position OR i.message_id COLLATE "C" < p_id));
END $$;

-- The version that an aggregate is at: that of its last message that completed, and on over those that were skipped
-- or discarded. Null: none yet.
CREATE FUNCTION oncebox.version_of(p_consumer int, p_class smallint, p_hash bigint, p_key bytea) RETURNS bigint
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_version bigint;
BEGIN
    SELECT s.version INTO v_version FROM oncebox.sequence_position s WHERE s.consumer_id = p_consumer AND s.key_hash = sha256(p_key);
    RETURN coalesce((
        SELECT max(t.place) FROM (
            SELECT i.ordering_position AS place, dense_rank() OVER (ORDER BY i.ordering_position) AS nth FROM oncebox.inbox i
            WHERE i.consumer_id = p_consumer AND i.retention_class = p_class AND i.ordering_hash = p_hash
              AND i.ordering_position > v_version AND i.sequence_version IS NOT NULL AND i.status IN ('skipped', 'discarded')) t
        WHERE t.place - t.nth = v_version), v_version);
END $$;

-- The first open message of a key, where it waits and no longer has to; and whether that is so because its gap
-- lasted too long. One that was parked for a gap goes on too once that closed.
CREATE FUNCTION oncebox.next_of_key(p_consumer int, p_class smallint, p_hash bigint) RETURNS TABLE (id text, is_overdue boolean)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    h record;
BEGIN
    SELECT i.message_id, i.status, i.reason, i.waits_until, i.sequence_version, i.ordering_key INTO h FROM oncebox.inbox i
        WHERE i.consumer_id = p_consumer AND i.retention_class = p_class AND i.ordering_hash = p_hash
          AND i.status NOT IN ('completed', 'skipped', 'discarded')
        ORDER BY i.ordering_position, i.message_id COLLATE "C" LIMIT 1;
    IF h.status = 'waiting' AND h.reason IS DISTINCT FROM 'gap' THEN
        RETURN QUERY SELECT h.message_id, false;
    ELSIF h.status IN ('waiting', 'parked') AND h.reason = 'gap' THEN
        IF oncebox.version_of(p_consumer, p_class, p_hash, h.ordering_key) >= h.sequence_version - 1 THEN
            RETURN QUERY SELECT h.message_id, false;
        ELSIF h.status = 'waiting' AND h.waits_until <= now() THEN
            RETURN QUERY SELECT h.message_id, true;
        END IF;
    END IF;
END $$;

-- The first open message of a key is due, if it waits and no longer has to. Called with the key's lock. The answer
-- is whether it was.
CREATE FUNCTION oncebox.release_key(p_consumer int, p_class smallint, p_hash bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    n record;
BEGIN
    SELECT * INTO n FROM oncebox.next_of_key(p_consumer, p_class, p_hash);
    UPDATE oncebox.inbox i SET status = CASE WHEN i.reason IS NULL OR i.reason = 'gap' THEN 'received' ELSE 'failed_retryable' END,
        reason = CASE WHEN n.is_overdue THEN 'gap_overdue' WHEN i.reason <> 'gap' THEN i.reason END,
        next_attempt_at = now(), waits_until = NULL, processed_at = NULL, bucket = oncebox.bucket_at(p_class, now())
    WHERE i.consumer_id = p_consumer AND i.retention_class = p_class AND i.message_id = n.id AND i.status IN ('waiting', 'parked');
    RETURN FOUND;
END $$;

-- Messages that wait for nothing: what stood before them was deleted by hand, or is of a lost transaction of a
-- restored database, or their gap has lasted too long, or was closed by one that did not run. At most so many keys, each of which is looked at again under its lock; those that are taken
-- are being worked on. The answer is how many messages are due now.
CREATE FUNCTION oncebox.release_forgotten(p_consumer int, p_class smallint, p_keys int) RETURNS int
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
        IF pg_try_advisory_xact_lock(v_hash) AND oncebox.release_key(p_consumer, p_class, v_hash) THEN
            v_released := v_released + 1;
        END IF;
    END LOOP;
    RETURN v_released;
END $$;

-- Take messages; see the first migration for what it promises. `p_ordering` has for each message the lock of what
-- it is in order with, and `p_sequence` the version that it makes. What cannot be run now becomes `waiting`, or, where its key is being worked on, `received`.
CREATE FUNCTION oncebox_host.claim_with_order(
    p_secret bytea, p_consumer int, p_generation bigint, p_status text, p_reason text[],
    p_topic text, p_partition int, p_id text[], p_offset bigint[], p_timestamp_ms bigint[], p_key bytea[],
    p_ordering_key bytea[], p_source text[], p_event_type text[], p_event_version text[], p_content_type text[],
    p_trace_parent text[], p_hash bytea[], p_version int[], p_headers bytea[], p_payload bytea[], p_ordering bigint[],
    p_sequence bigint[])
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

    PERFORM pg_advisory_xact_lock(l.key)
        FROM (SELECT DISTINCT hashtextextended(u.id, p_consumer::bigint) AS key FROM unnest(p_id) AS u(id) ORDER BY 1) AS l;
    GET DIAGNOSTICS v_locks = ROW_COUNT;

    -- Keys, after the messages. Nobody waits for one here, so their order does not matter.
    IF p_ordering IS NOT NULL AND p_status <> 'parked' THEN
        SELECT array_agg(t.ordering) INTO v_taken FROM (
            SELECT d.ordering, pg_try_advisory_xact_lock(d.ordering) AS is_ours
            FROM (SELECT DISTINCT u.ordering FROM unnest(p_ordering) AS u(ordering) WHERE u.ordering IS NOT NULL) d) t
        WHERE NOT t.is_ours;
    END IF;

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
        o.ordering, CASE WHEN o.ordering IS NOT NULL THEN coalesce(o.sequence, nextval('oncebox.ordering_position')) END, o.sequence
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
        o.result
    FROM unnest(p_hash, v_status, v_hash, v_result, v_first, v_becomes) WITH ORDINALITY
        AS o(hash, known, known_hash, result, first, becomes, ordinal)
    WHERE o.ordinal <= cardinality(p_id);
END $$;

-- As hosts of the release before call it.
CREATE OR REPLACE FUNCTION oncebox_host.claim(
    p_secret bytea, p_consumer int, p_generation bigint, p_status text, p_reason text[],
    p_topic text, p_partition int, p_id text[], p_offset bigint[], p_timestamp_ms bigint[], p_key bytea[],
    p_ordering_key bytea[], p_source text[], p_event_type text[], p_event_version text[], p_content_type text[],
    p_trace_parent text[], p_hash bytea[], p_version int[], p_headers bytea[], p_payload bytea[])
RETURNS TABLE (ordinal bigint, outcome text, known_status text, same_payload boolean, known_result text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY SELECT * FROM oncebox_host.claim_with_order(p_secret, p_consumer, p_generation, p_status, p_reason,
        p_topic, p_partition, p_id, p_offset, p_timestamp_ms, p_key, p_ordering_key, p_source, p_event_type, p_event_version,
        p_content_type, p_trace_parent, p_hash, p_version, p_headers, p_payload, NULL, NULL);
END $$;

-- The end of a transaction that claimed or resumed. Of what it claimed, messages that wait for their turn are given
-- what they will need; where a message of a key came to its end under a lease, the next one is due.
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
            attempts = CASE WHEN s.status IN ('received', 'waiting') THEN 0 ELSE i.attempts END,
            next_attempt_at = CASE s.status WHEN 'failed_retryable' THEN now() + s.delay_ms * interval '1 millisecond' WHEN 'received' THEN now() END,
            processed_at = CASE WHEN s.status NOT IN ('failed_retryable', 'received', 'waiting') THEN now() END,
            locked_until = NULL, locked_by = NULL, version_id = coalesce(s.version, i.version_id),
            headers = CASE WHEN s.keep THEN coalesce(s.headers, i.headers) END,
            payload = CASE WHEN s.keep THEN coalesce(s.payload, i.payload) END
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = s.id AND i.epoch = s.epoch
          AND CASE WHEN s.epoch = 0 THEN i.xmin = pg_current_xact_id()::xid ELSE i.status = 'in_progress' END
        RETURNING i.ordering_hash INTO v_ordering;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'a completed claim is not of this transaction' USING ERRCODE = 'OB003';
        END IF;
        IF v_ordering IS NOT NULL AND s.epoch > 0 AND s.status IN ('completed', 'skipped') THEN
            PERFORM oncebox.release_key(p_consumer, v.class, v_ordering);
        END IF;
    END LOOP;
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
            v_is_locked := pg_try_advisory_xact_lock(v_hash);
        ELSE
            PERFORM pg_advisory_xact_lock(v_hash);
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

-- Where messages of this transaction stand in the sequences of their aggregates: the version each makes, that which
-- its aggregate is at, the reason of its row, and whether it was let to run over its gap. `p_first` is the version that an aggregate begins with; null where
-- it begins with whatever comes first. Called with the locks of their keys, as is the next one.
CREATE FUNCTION oncebox_host.sequence_of(p_secret bytea, p_consumer int, p_first bigint, p_id text[])
RETURNS TABLE (id text, version bigint, "at" bigint, reason text, over_gap boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
DECLARE
    v record;
BEGIN
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);
    IF p_first IS NOT NULL THEN
        INSERT INTO oncebox.sequence_position (consumer_id, key_hash, version)
            SELECT DISTINCT p_consumer, sha256(i.ordering_key), p_first - 1 FROM unnest(p_id) AS u(id) JOIN oncebox.inbox i
                ON i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = u.id
            WHERE i.sequence_version IS NOT NULL
        ON CONFLICT DO NOTHING;
    END IF;
    -- What was passed over is forgotten with its rows.
    UPDATE oncebox.sequence_position s SET version = k.at, moved_at = now() FROM (
            SELECT sha256(i.ordering_key) AS key_hash, max(oncebox.version_of(p_consumer, v.class, i.ordering_hash, i.ordering_key)) AS at
            FROM unnest(p_id) AS u(id) JOIN oncebox.inbox i
                ON i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = u.id
            WHERE i.sequence_version IS NOT NULL GROUP BY 1) k
        WHERE s.consumer_id = p_consumer AND s.key_hash = k.key_hash AND s.version < k.at;
    RETURN QUERY SELECT i.message_id, i.sequence_version,
            oncebox.version_of(p_consumer, v.class, i.ordering_hash, i.ordering_key), i.reason, i.over_gap
        FROM unnest(p_id) AS u(id) JOIN oncebox.inbox i
            ON i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = u.id
        WHERE i.sequence_version IS NOT NULL;
END $$;

-- Messages of this transaction completed: their aggregates are at their versions, and what waited for that is due.
-- The answer is whether something did.
CREATE FUNCTION oncebox_host.move_sequence(p_secret bytea, p_consumer int, p_id text[])
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
DECLARE
    v record;
BEGIN
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);
    INSERT INTO oncebox.sequence_position AS s (consumer_id, key_hash, version)
        SELECT p_consumer, sha256(i.ordering_key), max(i.sequence_version) FROM unnest(p_id) AS u(id) JOIN oncebox.inbox i
            ON i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = u.id
        WHERE i.sequence_version IS NOT NULL GROUP BY 2
    ON CONFLICT (consumer_id, key_hash) DO UPDATE SET version = greatest(s.version, excluded.version), moved_at = now();
    RETURN (SELECT coalesce(bool_or(oncebox.release_key(p_consumer, v.class, k.ordering_hash)), false) FROM (
        SELECT DISTINCT i.ordering_hash FROM unnest(p_id) AS u(id) JOIN oncebox.inbox i
            ON i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = u.id
        WHERE i.sequence_version IS NOT NULL) k);
END $$;
