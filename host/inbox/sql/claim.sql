-- Claims messages of one Kafka partition, and returns one answer for each.
--
-- A message without a row gets one, in the status that the host names: `completed` (it runs in this
-- very transaction, and the guard row refuses a COMMIT that `complete` did not precede), `received`
-- (it runs later, under a lease) or `parked` (an operator decides). A message with a row is a
-- duplicate: the answer has the row's status and result, and whether both payloads are equal.
--
-- The session logs in as the tenant's role, which has no rights on the tables of this schema. The
-- function runs as their owner. SQLSTATEs that begin with OB are this schema's own.
--
-- Parameters of the call:
--
--   p_secret         secret of the tenant, known to hosts alone; `authorize` compares its hash
--   p_consumer       key of the consumer's row; the scope of ids, keys and locks
--   p_generation     generation of the deployments by which the host chose the handlers; refused
--                    (OB005) below the consumer's `generation_required`, so that a version that was
--                    rolled back completes no message
--   p_status         status of a new row: `completed`, `received` or `parked`
--   p_topic,         the Kafka partition of all records of the call
--   p_partition
--
-- Parameters of the messages: parallel arrays, one element for each message, in the order of the
-- partition. They are empty with `dedup = "off"`: the call then checks the caller and inserts the
-- guard row.
--
--   p_id             id under which the message is deduplicated; never null
--   p_offset         Kafka's offset of the record
--   p_timestamp_ms   time of the record, milliseconds since 1970 by the producer's or the broker's
--                    clock; 0: the record has none
--   p_key            key of the record; null: the record has none
--   p_ordering_key   key that the policy orders by, which is also the key of the message's
--                    aggregate; null: the message has none
--   p_source         CloudEvents `source`, or the topic
--   p_event_type     type of the event; empty: the record could not be decoded
--   p_event_version  version of the event's schema; null: the record names none
--   p_content_type   media type of the payload; null: the record names none
--   p_trace_parent   W3C trace context; null: the record has none
--   p_hash           HMAC-SHA-256 of the payload under the tenant's key; null: the record has no
--                    payload
--   p_version        version of the handler that is to run the message; null: none is
--   p_reason         why the row is `parked`, or why it is `received` instead of run; null: there
--                    is no reason to keep
--   p_headers,       encoded headers and payload that the row keeps; null: the policy keeps none,
--   p_payload        or the record has no payload
--   p_ordering       number that the message shares with the messages that it must run in order
--                    with (see Order); null: no order. Null instead of an array: no message of the
--                    call has an order
--   p_sequence       version that the message makes of its aggregate; null: it makes none, or
--                    `p_ordering` is null
--
--   p_parks_forgotten  whether unknown messages that may have run are parked (see Forgotten
--                    messages); of the call again
--   p_light          whether a message that runs in this very transaction gets a light row (see
--                    Light rows); of the call again
--   p_position       offset before which all records of the partition are settled, to be noted as
--                    its position in this database; null: it is not to be noted now
--
-- Columns of the answer:
--
--   ordinal          position of the message in the arrays, from 1
--   outcome          `new`: this call inserted the row. `waiting`: it did, but not as `completed`,
--                    but as `received` or `waiting`, since it is not the message's turn (see
--                    Order). `known`: the message is a duplicate; it has a row, or its id comes
--                    earlier in `p_id`. `forgotten`: it is unknown and may have run; its row is
--                    `parked`, or `skipped` where its aggregate is past it. `elsewhere`: another
--                    session inserted a row despite the locks; the host rolls back and claims again
--   known_status     status of the message's row
--   same_payload     whether the row's payload hash is that of this delivery; true for a light row,
--                    and for a message that was erased
--   known_result     result that the row of a duplicate keeps, as JSON; null: none
--   lost_record      true for a dead letter whose record the inbox no longer has and this delivery
--                    may bring back; see `restore_records`
--
-- Uniqueness. The inbox is partitioned by the time of the last change of `status` (`bucket`), so
-- that old rows are dropped with their partition. No unique index spans these time partitions. So
-- the function first takes an advisory lock for each message, in the order of the lock numbers, and
-- only then, in later statements, looks for the ids and inserts. Under READ COMMITTED those
-- statements' snapshots are younger than the locks, and a commit is visible before its locks are
-- released. So they see what every earlier holder of a lock committed, in any time partition.
--
-- Order. `p_ordering` is a 64-bit hash of the consumer and the key, or of the consumer and the
-- partition. An aggregate is the thing that a key names, such as one order or one account;
-- `p_sequence` counts the changes of it. A transaction that runs or settles a message of a key
-- holds the key's lock from before any SQL of the handler to its COMMIT, and reads the key's rows
-- in a later statement. So of two such transactions the second sees what the first left. A claim
-- only tries a key's lock: a wait would hold up all other keys for as long as a handler runs. Where
-- another transaction holds the lock, the message becomes `received`, and a retry worker runs it.
-- Where an earlier message of the key is open (it is still to run, or is a dead letter or parked),
-- the message becomes `waiting`. A parked message takes no lock: it runs nothing, and what it holds
-- back comes behind it in the partition, to the same worker.
--
-- Forgotten messages. The inbox removes what completed long ago, and `oncebox.forgotten` keeps how
-- far that went in each partition of a topic. Where the caller says `p_parks_forgotten`, an unknown
-- message at or below both marks becomes `parked` with the reason `horizon`: it may have run. The
-- marks are read in a later statement than the rows, and a host writes them before it removes rows.
-- So a claim that misses a removed row sees the mark.
--
-- Light rows. With `p_light` a row that is inserted as `completed` keeps of the record its position
-- and its timestamp alone, and what the sequence of its aggregate reads. `complete` writes the rest
-- where the message does not complete. Rows in any other status are full. The rest is in the arrays
-- all the same: PostgreSQL refuses here, before a handler runs, what no row can hold. `event_type`
-- is null in light rows and in no other. A light row has no hash, so any payload under its id
-- counts as that of the row.
--
-- Plans. Each statement reads one row by its key, or the head of an index. A time partition that
-- was made ahead has no statistics, and a plan for an empty table scans all of it once it has
-- filled. So the function plans each statement once per session (planning costs more than the
-- claim), scans no table, and looks for a message in a lateral subquery, which the planner cannot
-- reorder.
CREATE OR REPLACE FUNCTION oncebox_host.claim(
    p_secret bytea, p_consumer int, p_generation bigint, p_status text, p_reason text[],
    p_topic text, p_partition int, p_id text[], p_offset bigint[], p_timestamp_ms bigint[],
    p_key bytea[], p_ordering_key bytea[], p_source text[], p_event_type text[],
    p_event_version text[], p_content_type text[], p_trace_parent text[], p_hash bytea[],
    p_version int[], p_headers bytea[], p_payload bytea[], p_ordering bigint[], p_sequence bigint[],
    p_parks_forgotten boolean DEFAULT true, p_light boolean DEFAULT false,
    p_position bigint DEFAULT NULL)
RETURNS TABLE (ordinal bigint, outcome text, known_status text, same_payload boolean,
    known_result text, lost_record boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off AS $$
DECLARE
    -- Retention class of the consumer, bucket of new rows, lowest generation that may claim.
    v record;
    -- Locks that were taken, and rows that were inserted.
    v_locks bigint;
    v_claimed bigint;
    -- Position of the first occurrence of each id; null instead of an array where no id comes
    -- twice.
    v_first bigint[];
    -- The row that each id has; null elements where it has none.
    v_status text[];
    v_hash bytea[];
    v_result text[];
    v_lost boolean[];
    -- Elements of `p_ordering` whose locks other transactions hold.
    v_taken bigint[];
    -- Positions of messages with an open row before them in their order.
    v_blocked bigint[];
    -- Status that each new row gets; null for `p_status`.
    v_becomes text[];
    -- The marks of the partition: what was forgotten of it.
    v_offset bigint;
    v_timestamp_ms bigint;
    -- Positions of unknown messages that may have run.
    v_forgotten bigint[];
    -- Whether the policy keeps the payloads of parked messages.
    v_keeps boolean := true;
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

    -- The number of a message's lock is the upper half of a hash of its id. The locks are taken in
    -- the order of these numbers, not of the ids: two ids may share a lock, and locks taken in two
    -- orders deadlock.
    PERFORM pg_advisory_xact_lock(p_consumer, l.key)
        FROM (SELECT DISTINCT (hashtextextended(u.id, p_consumer::bigint) >> 32)::int AS key
            FROM unnest(p_id) AS u(id) ORDER BY 1) AS l;
    GET DIAGNOSTICS v_locks = ROW_COUNT;

    -- The locks of keys come after those of messages. A claim waits for none of them, so they need
    -- no order.
    IF p_ordering IS NOT NULL AND p_status <> 'parked' THEN
        SELECT array_agg(t.ordering) INTO v_taken FROM (
            SELECT d.ordering,
                pg_try_advisory_xact_lock(-p_consumer, (d.ordering >> 32)::int) AS is_ours
            FROM (SELECT DISTINCT u.ordering FROM unnest(p_ordering) AS u(ordering)
                WHERE u.ordering IS NOT NULL) d) t
        WHERE NOT t.is_ours;
    END IF;

    -- An id may come twice in one call; its first occurrence is claimed. Two ids may share a lock,
    -- so fewer locks than ids need not mean that: each of those ids is then its own first.
    IF v_locks < cardinality(p_id) THEN
        SELECT array_agg(w.first ORDER BY w.ordinal) INTO v_first FROM (
            SELECT u.ordinal,
                first_value(u.ordinal)
                    OVER (PARTITION BY u.id COLLATE "C" ORDER BY u.ordinal) AS first
            FROM unnest(p_id) WITH ORDINALITY AS u(id, ordinal)) w;
    END IF;

    -- The rows of the ids: a later statement, whose snapshot is younger than the locks.
    -- An erased message has no hash any more, so that any payload counts as its own.
    SELECT array_agg(k.status ORDER BY u.ordinal), array_agg(k.hash ORDER BY u.ordinal),
            array_agg(k.result::text ORDER BY u.ordinal), array_agg(k.is_lost ORDER BY u.ordinal)
        INTO v_status, v_hash, v_result, v_lost
    FROM unnest(p_id, p_hash) WITH ORDINALITY AS u(id, hash, ordinal)
    LEFT JOIN LATERAL (
        SELECT i.status, i.result,
            CASE WHEN i.event_type IS NULL OR i.erased_at IS NOT NULL
                THEN u.hash ELSE i.payload_hash END AS hash,
            oncebox.has_lost_record(i.status, i.reason, i.headers) AS is_lost
        FROM oncebox.inbox i
        WHERE i.consumer_id = p_consumer AND i.message_id = u.id AND i.retention_class = v.class
        LIMIT 1
    ) k ON true;

    -- Messages behind an open row of their key, and the status that each message gets. Of new
    -- messages that are stored together, the first of each key is due and the others wait. Of those
    -- that run, the host itself makes the others wait where the first one fails.
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

    -- A parked message holds back the later versions of its aggregate. One whose aggregate is past
    -- its version is skipped instead.
    IF p_status = 'parked' THEN
        SELECT array_agg(CASE WHEN u.ordering IS NOT NULL AND EXISTS (
                SELECT FROM oncebox.sequence_position s
                WHERE s.consumer_id = p_consumer AND s.key_hash = sha256(u.key)
                  AND s.version >= u.sequence) THEN 'skipped' END ORDER BY u.ordinal)
            INTO v_becomes
        FROM unnest(p_ordering, p_ordering_key, p_sequence) WITH ORDINALITY
            AS u(ordering, key, sequence, ordinal);
    END IF;

    -- Unknown messages that may have run. One whose aggregate is past its version did. What is
    -- parked under an id of its own, since the record has none that can be used, never ran.
    IF p_parks_forgotten AND array_position(v_status, NULL) IS NOT NULL THEN
        SELECT f."offset", f.record_timestamp_ms INTO v_offset, v_timestamp_ms
        FROM oncebox.forgotten f
        WHERE f.consumer_id = p_consumer AND f.topic = p_topic AND f.partition = p_partition;
    END IF;
    -- Most calls stop here: all of their records are above the mark, or there is none.
    IF v_offset >= ANY (p_offset) THEN
        SELECT array_agg(u.ordinal) INTO v_forgotten
        FROM unnest(p_offset, p_timestamp_ms, v_status, p_reason) WITH ORDINALITY
            AS u("offset", timestamp_ms, known, reason, ordinal)
        WHERE u.known IS NULL AND u."offset" <= v_offset AND u.timestamp_ms <= v_timestamp_ms
          AND coalesce(u.reason, '') !~ '^(undecodable|unclaimable|collision)';
    END IF;
    IF v_forgotten IS NOT NULL THEN
        SELECT c.policy->>'payload' IS DISTINCT FROM 'none' INTO v_keeps
            FROM oncebox.consumer c WHERE c.consumer_id = p_consumer;
        SELECT array_agg(CASE WHEN NOT u.ordinal = ANY (v_forgotten) THEN u.becomes
                WHEN u.sequence IS NOT NULL AND EXISTS (
                    SELECT FROM oncebox.sequence_position s
                    WHERE s.consumer_id = p_consumer AND s.key_hash = sha256(u.key)
                      AND s.version >= u.sequence) THEN 'skipped'
                ELSE 'parked' END ORDER BY u.ordinal)
            INTO v_becomes
        FROM unnest(p_id, v_becomes, p_ordering_key, p_sequence) WITH ORDINALITY
            AS u(id, becomes, key, sequence, ordinal);
    END IF;

    -- A `completed` row counts its first attempt, and a `received` one is due at once. A message
    -- without a version gets its position in the order of its key from a counter. A conflict means
    -- that another session inserted the row despite the lock; the counts below then differ.
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
        p_topic, p_partition, o."offset", o.timestamp_ms,
        CASE WHEN NOT f.is_light THEN o.key END,
        CASE WHEN NOT f.is_light OR o.sequence IS NOT NULL THEN o.ordering_key END,
        CASE WHEN NOT f.is_light THEN o.source END,
        CASE WHEN NOT f.is_light THEN o.event_type END,
        CASE WHEN NOT f.is_light THEN o.event_version END,
        CASE WHEN NOT f.is_light THEN o.content_type END,
        CASE WHEN NOT f.is_light THEN o.trace_parent END,
        coalesce(o.becomes, p_status),
        CASE WHEN o.becomes = 'skipped' THEN 'old_version'
            WHEN o.ordinal = ANY (v_forgotten) THEN 'horizon' ELSE o.reason END,
        (coalesce(o.becomes, p_status) = 'completed')::int,
        CASE coalesce(o.becomes, p_status) WHEN 'received' THEN now() END,
        -- A version would say that it failed the message, and its withdrawal would run it.
        CASE WHEN o.ordinal = ANY (v_forgotten) THEN NULL ELSE o.version END,
        CASE WHEN v_keeps OR NOT o.ordinal = ANY (v_forgotten) THEN o.payload END,
        CASE WHEN v_keeps OR NOT o.ordinal = ANY (v_forgotten) THEN o.headers END,
        CASE WHEN NOT f.is_light THEN o.hash END,
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
    CROSS JOIN LATERAL (
        SELECT p_light AND coalesce(o.becomes, p_status) = 'completed' AS is_light) AS f
    WHERE o.known IS NULL AND coalesce(o.first, o.ordinal) = o.ordinal
    ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS v_claimed = ROW_COUNT;

    -- Only the opening of a partition sets its position back: a host that lost it may be late.
    IF p_position IS NOT NULL THEN
        UPDATE oncebox.partition_position p SET next_offset = p_position
        WHERE p.consumer_id = p_consumer AND p.topic = p_topic AND p.partition = p_partition
          AND p.next_offset < p_position;
    END IF;

    -- One answer for each id.
    RETURN QUERY
    SELECT o.ordinal,
        CASE WHEN o.known IS NOT NULL OR o.first <> o.ordinal THEN 'known'
             WHEN v_claimed < count(*) FILTER (
                WHERE o.known IS NULL AND coalesce(o.first, o.ordinal) = o.ordinal) OVER ()
                THEN 'elsewhere'
             WHEN o.ordinal = ANY (v_forgotten) THEN 'forgotten'
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
