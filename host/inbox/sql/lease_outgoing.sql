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
    SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_sort = off AS $$
DECLARE
    c_window CONSTANT int := 1000;
    c_lanes CONSTANT int := 200;
    s record;
    l oncebox.outgoing%ROWTYPE;
    v_bytes bigint := 0;
    v_seen int := 0;
    v_left int := p_most;
    v_lane bigint;
    v_looked int := 0;
    v_has_wrapped boolean := false;
BEGIN
    FOR s IN
        SELECT w.* FROM unnest(p_consumers) AS c(id) CROSS JOIN LATERAL (
            SELECT o.consumer_id, o.message_id, o.ordinal, o.bucket, o.lane, o.key, o.due_at,
                o.position, o.next_attempt_at
            FROM oncebox.outgoing o
            WHERE o.consumer_id = c.id AND o.destination = p_destination
              AND o.status IN ('received', 'failed_retryable') AND o.next_attempt_at <= now()
            ORDER BY o.next_attempt_at, o.position LIMIT c_window) w
        ORDER BY w.next_attempt_at, w.position LIMIT c_window
    LOOP
        EXIT WHEN v_left <= 0 OR v_bytes >= p_bytes_max;
        v_seen := v_seen + 1;
        CONTINUE WHEN p_lanes AND s.lane IS NOT NULL AND oncebox.has_earlier_outgoing(p_tenant,
            p_stopping, p_destination, s.lane, s.key, s.due_at, s.position);
        FOR l IN SELECT * FROM oncebox.lease_one_outgoing(s.consumer_id, s.message_id,
                s.ordinal, s.bucket, p_lease_ms, p_owner) LOOP
            v_left := v_left - 1;
            v_bytes := v_bytes + octet_length(l.headers) + coalesce(octet_length(l.payload), 0);
            RETURN NEXT l;
        END LOOP;
    END LOOP;
    IF v_seen < c_window OR NOT p_lanes THEN
        RETURN;
    END IF;

    FOR s IN
        SELECT w.* FROM unnest(p_consumers) AS c(id) CROSS JOIN LATERAL (
            SELECT o.consumer_id, o.message_id, o.ordinal, o.bucket, o.position, o.next_attempt_at
            FROM oncebox.outgoing o
            WHERE o.consumer_id = c.id AND o.destination = p_destination AND o.lane IS NULL
              AND o.status IN ('received', 'failed_retryable') AND o.next_attempt_at <= now()
            ORDER BY o.next_attempt_at, o.position LIMIT v_left) w
        ORDER BY w.next_attempt_at, w.position LIMIT (v_left + 1) / 2
    LOOP
        EXIT WHEN v_bytes >= p_bytes_max;
        FOR l IN SELECT * FROM oncebox.lease_one_outgoing(s.consumer_id, s.message_id,
                s.ordinal, s.bucket, p_lease_ms, p_owner) LOOP
            v_left := v_left - 1;
            v_bytes := v_bytes + octet_length(l.headers) + coalesce(octet_length(l.payload), 0);
            RETURN NEXT l;
        END LOOP;
    END LOOP;

    v_lane := ('x' || substr(md5(random()::text), 1, 16))::bit(64)::bigint;
    WHILE v_left > 0 AND v_bytes < p_bytes_max AND v_looked < c_lanes LOOP
        v_looked := v_looked + 1;
        SELECT o.lane INTO s FROM oncebox.outgoing o
        WHERE o.destination = p_destination AND o.lane > v_lane
          AND o.status IN ('received', 'in_progress', 'failed_retryable', 'parked')
        ORDER BY o.lane LIMIT 1;
        IF NOT FOUND THEN
            EXIT WHEN v_has_wrapped;
            v_has_wrapped := true;
            v_lane := -9223372036854775808;
            CONTINUE;
        END IF;
        v_lane := s.lane;
        SELECT o.consumer_id, o.message_id, o.ordinal, o.bucket, o.status, o.next_attempt_at INTO s
        FROM oncebox.outgoing o
        WHERE o.lane = v_lane AND o.destination = p_destination
          AND o.status IN ('received', 'in_progress', 'failed_retryable', 'parked')
          AND (o.status <> 'parked' OR o.consumer_id = ANY (p_stopping))
          AND EXISTS (SELECT FROM oncebox.consumer c
              WHERE c.consumer_id = o.consumer_id AND c.tenant_id = p_tenant)
        ORDER BY o.due_at, o.position LIMIT 1;
        CONTINUE WHEN NOT FOUND OR s.status NOT IN ('received', 'failed_retryable')
            OR s.next_attempt_at > now() OR NOT s.consumer_id = ANY (p_consumers);
        FOR l IN SELECT * FROM oncebox.lease_one_outgoing(s.consumer_id, s.message_id,
                s.ordinal, s.bucket, p_lease_ms, p_owner) LOOP
            v_left := v_left - 1;
            v_bytes := v_bytes + octet_length(l.headers) + coalesce(octet_length(l.payload), 0);
            RETURN NEXT l;
        END LOOP;
    END LOOP;
END $$;
