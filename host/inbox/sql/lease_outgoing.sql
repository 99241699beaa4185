-- Leases outgoing messages of one tenant and destination that are due and are the heads of their
-- lanes, and returns their rows. The caller commits before it sends.
--
--   p_tenant         key of the tenant
--   p_consumers      the tenant's consumers whose messages may be sent now
--   p_stopping       those of the tenant's consumers whose parked messages hold their lanes
--   p_destination    the destination
--   p_most           most messages to lease
--   p_bytes_max      bytes of payloads and headers after which no further message is leased
--   p_lease_ms       length of the lease, milliseconds
--   p_owner          name of the host in the rows
--   p_lanes          false: lanes are ignored. For the test suite alone
--
-- A tenant that is being moved to another database has nothing leased here.
--
-- Order. A message is leased only while no earlier one of its lane is open, so that one message of
-- a lane is under way at a time, over all hosts. A message that is a head stays one: what is
-- settled never opens again. What moves before it later is a redrive of a parked message, or an
-- emit whose transaction began earlier and committed later. The look comes before the lock, since a
-- `cancel` passes over rows that are locked, and would find a message locked that is not going to
-- be sent.
--
-- Cost. The first part reads the earliest 1,000 due messages. Where most of them wait for others of
-- few lanes, what may go behind them is not among those 1,000. The second part reads messages
-- without a key, which wait for none, and leaves room for others. The third part reads the heads of
-- 200 lanes, from a random one on. Lanes are hashes, so every lane has its turn.
CREATE OR REPLACE FUNCTION oncebox.lease_outgoing(
    p_tenant int, p_consumers int[], p_stopping int[], p_destination text, p_most int,
    p_bytes_max bigint, p_lease_ms bigint, p_owner text, p_lanes boolean DEFAULT true)
RETURNS SETOF oncebox.outgoing
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off
    SET enable_seqscan = off SET enable_sort = off
    SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    c_window CONSTANT int := 1000;
    c_lanes CONSTANT int := 200;
    -- Candidates beyond those that are wanted, in place of what other sessions have locked.
    c_spare CONSTANT int := 100;
    s record;
    v record;
    l oncebox.outgoing%ROWTYPE;
    v_left int := p_most;
    v_bytes bigint := 0;
    v_passed int := 0;
    v_leased int;
    v_first bigint;
    v_lane bigint;
    v_looked int := 0;
    v_has_wrapped boolean := false;
BEGIN
    IF NOT oncebox.is_here(p_tenant) THEN
        RETURN;
    END IF;
    LOOP
        WITH due AS MATERIALIZED (
            SELECT w.* FROM unnest(p_consumers) AS c(id) CROSS JOIN LATERAL (
                SELECT o.consumer_id, o.message_id, o.ordinal, o.bucket, o.lane, o.key, o.due_at,
                    o.position, o.next_attempt_at,
                    octet_length(o.headers) + coalesce(octet_length(o.payload), 0) AS bytes
                FROM oncebox.outgoing o
                WHERE o.consumer_id = c.id AND o.destination = p_destination
                  AND o.status IN ('received', 'failed_retryable') AND o.next_attempt_at <= now()
                ORDER BY o.next_attempt_at, o.position LIMIT c_window) w
            ORDER BY w.next_attempt_at, w.position LIMIT c_window),
        head AS (
            SELECT d.* FROM due d LEFT JOIN LATERAL (
                -- An open message of its lane that has to go first, or a parked one that holds the
                -- lane. A lane is a hash of tenant, destination and key, which finds the rows; a
                -- key can be made for any hash, so that the three themselves are compared too.
                SELECT true AS is_there FROM oncebox.outgoing e
                WHERE e.lane = d.lane AND e.due_at <= d.due_at AND e.settled_at IS NULL
                  AND (e.due_at < d.due_at OR e.position < d.position)
                  AND (e.status <> 'parked' OR e.consumer_id = ANY (p_stopping))
                  AND e.destination = p_destination AND e.key = d.key
                  AND EXISTS (SELECT FROM oncebox.consumer c
                      WHERE c.consumer_id = e.consumer_id AND c.tenant_id = p_tenant)
                LIMIT 1) earlier ON p_lanes
            WHERE earlier.is_there IS NULL OFFSET v_passed LIMIT v_left + c_spare),
        taken AS (
            SELECT h.*, sum(h.bytes) OVER (ROWS UNBOUNDED PRECEDING) - h.bytes AS before
            FROM head h)
        SELECT (SELECT count(*) FROM due) AS seen, array_agg(t.consumer_id) AS consumer,
            array_agg(t.message_id) AS message, array_agg(t.ordinal) AS ordinal,
            array_agg(t.bucket) AS bucket
            INTO v FROM taken t WHERE v_bytes + t.before < p_bytes_max;
        v_leased := 0;
        FOR l IN SELECT * FROM oncebox.lease_these_outgoing(v.consumer, v.message, v.ordinal,
                v.bucket, v_left, p_lease_ms, p_owner) LOOP
            v_leased := v_leased + 1;
            v_bytes := v_bytes + octet_length(l.headers) + coalesce(octet_length(l.payload), 0);
            RETURN NEXT l;
        END LOOP;
        v_left := v_left - v_leased;
        IF v_left <= 0 OR v_bytes >= p_bytes_max THEN
            RETURN;
        END IF;
        -- The others of them are locked, or have changed: what stands behind them is next.
        EXIT WHEN v_leased >= coalesce(cardinality(v.message), 0);
        v_passed := v_passed + cardinality(v.message) - v_leased;
    END LOOP;
    IF v.seen < c_window OR NOT p_lanes THEN
        RETURN;
    END IF;

    SELECT coalesce(array_agg(f.consumer_id), '{}') AS consumer,
        coalesce(array_agg(f.message_id), '{}') AS message,
        coalesce(array_agg(f.ordinal), '{}') AS ordinal,
        coalesce(array_agg(f.bucket), '{}') AS bucket, coalesce(sum(f.bytes), 0) AS bytes INTO v
    FROM (SELECT w.*, sum(w.bytes) OVER (ROWS UNBOUNDED PRECEDING) - w.bytes AS before FROM (
        SELECT w.* FROM unnest(p_consumers) AS c(id) CROSS JOIN LATERAL (
            SELECT o.consumer_id, o.message_id, o.ordinal, o.bucket, o.position, o.next_attempt_at,
                octet_length(o.headers) + coalesce(octet_length(o.payload), 0) AS bytes
            FROM oncebox.outgoing o
            WHERE o.consumer_id = c.id AND o.destination = p_destination AND o.lane IS NULL
              AND o.status IN ('received', 'failed_retryable') AND o.next_attempt_at <= now()
            ORDER BY o.next_attempt_at, o.position LIMIT v_left) w
        ORDER BY w.next_attempt_at, w.position LIMIT (v_left + 1) / 2) w) f
    WHERE v_bytes + f.before < p_bytes_max;
    v_bytes := v_bytes + v.bytes;

    v_first := ('x' || substr(md5(random()::text), 1, 16))::bit(64)::bigint;
    v_lane := v_first;
    WHILE cardinality(v.message) < v_left + c_spare AND v_bytes < p_bytes_max
            AND v_looked < c_lanes LOOP
        v_looked := v_looked + 1;
        SELECT o.lane INTO s FROM oncebox.outgoing o
        WHERE o.destination = p_destination AND o.lane > v_lane AND o.settled_at IS NULL
        ORDER BY o.lane LIMIT 1;
        IF NOT FOUND THEN
            EXIT WHEN v_has_wrapped;
            v_has_wrapped := true;
            v_lane := -9223372036854775808;
            CONTINUE;
        END IF;
        EXIT WHEN v_has_wrapped AND s.lane > v_first;
        v_lane := s.lane;
        SELECT o.consumer_id, o.message_id, o.ordinal, o.bucket, o.status, o.next_attempt_at,
            octet_length(o.headers) + coalesce(octet_length(o.payload), 0) AS bytes INTO s
        FROM oncebox.outgoing o
        WHERE o.lane = v_lane AND o.destination = p_destination AND o.settled_at IS NULL
          AND (o.status <> 'parked' OR o.consumer_id = ANY (p_stopping))
          AND EXISTS (SELECT FROM oncebox.consumer c
              WHERE c.consumer_id = o.consumer_id AND c.tenant_id = p_tenant)
        ORDER BY o.due_at, o.position LIMIT 1;
        CONTINUE WHEN NOT FOUND OR s.status NOT IN ('received', 'failed_retryable')
            OR s.next_attempt_at > now() OR NOT s.consumer_id = ANY (p_consumers);
        v.consumer := v.consumer || s.consumer_id;
        v.message := v.message || s.message_id;
        v.ordinal := v.ordinal || s.ordinal;
        v.bucket := v.bucket || s.bucket;
        v_bytes := v_bytes + s.bytes;
    END LOOP;
    RETURN QUERY SELECT * FROM oncebox.lease_these_outgoing(v.consumer, v.message, v.ordinal,
        v.bucket, v_left, p_lease_ms, p_owner);
END $$;
