-- Delivers an outgoing message into the inbox of another consumer of its tenant, or of the same
-- one, and marks it as `completed`, in one transaction. So it is delivered exactly once. Delivers
-- the answer of an endpoint in the same way: the inbox gets the answer, and the outgoing message
-- that it answers is marked.
--
--   p_consumer, p_message,   key of the outgoing message's row
--   p_ordinal, p_bucket
--   p_epoch                  number of the lease; see `mark_outgoing`
--   p_target                 key of the consumer that gets the message
--   p_id … p_sequence        columns of the inbox row, as for `claim`
--   p_answer_status          of an answer: its status; null: the message itself is delivered. The
--                            destination has it by then, whatever happened to the lease, so that
--                            an answer is also delivered for a row whose lease ran out and that
--                            nobody has leased since
--   p_reason, p_error        of an answer that refuses the message: reason and text of the row
--
-- Outcomes: `new`: the inbox has a new row. `known`: it had one under this id, so that the message
-- was delivered before. `lost`: the lease is another relay's; nothing is changed. `no_consumer`:
-- the database shows no such consumer of the tenant; nothing is changed.
--
-- The steps are those of `claim` for the status `received`: the lock of the id, then the look in
-- all time partitions, then the insert, each in a statement of its own; and of a key the lock, then
-- the look. `claim` itself belongs to sessions that log in as the tenant, and those have no right
-- on outgoing messages.
--
-- The row of the consumer is locked against a change of its state, so that a message comes before a
-- deletion of its consumer, which removes it, or finds the deletion.
CREATE OR REPLACE FUNCTION oncebox.deliver_outgoing(
    p_consumer int, p_message text, p_ordinal int, p_bucket timestamptz, p_epoch bigint,
    p_target int, p_id text, p_topic text, p_partition int, p_offset bigint, p_timestamp_ms bigint,
    p_key bytea, p_ordering_key bytea, p_source text, p_event_type text, p_event_version text,
    p_content_type text, p_trace_parent text, p_hash bytea, p_headers bytea, p_payload bytea,
    p_ordering bigint, p_sequence bigint, p_answer_status int DEFAULT NULL,
    p_reason text DEFAULT NULL, p_error text DEFAULT NULL)
RETURNS TABLE (outcome text, delay_s double precision)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off AS $$
DECLARE
    v record;
    v_status text := 'received';
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'deliveries need READ COMMITTED' USING ERRCODE = 'OB004';
    END IF;
    SELECT c.retention_class AS class,
            date_bin(r.bucket, now(), '2000-01-03 00:00:00+00') AS bucket INTO v
    FROM oncebox.consumer c
    JOIN oncebox.retention_class r USING (retention_class)
    WHERE c.consumer_id = p_target AND c.state <> 'deleting' AND c.tenant_id = (
        SELECT e.tenant_id FROM oncebox.consumer e WHERE e.consumer_id = p_consumer)
    FOR SHARE OF c;
    IF NOT FOUND THEN
        RETURN QUERY SELECT 'no_consumer', NULL::double precision;
        RETURN;
    END IF;

    -- Only the holder of the lease delivers. The row stays locked to the COMMIT.
    UPDATE oncebox.outgoing o SET status = 'completed', reason = p_reason, last_error = p_error,
        next_attempt_at = NULL, locked_until = NULL, locked_by = NULL, settled_at = now(),
        answer_status = p_answer_status
    WHERE o.consumer_id = p_consumer AND o.message_id = p_message AND o.ordinal = p_ordinal
      AND o.bucket = p_bucket AND o.epoch = p_epoch
      AND (o.status = 'in_progress' OR p_answer_status IS NOT NULL
        AND o.status IN ('received', 'failed_retryable'))
    RETURNING greatest(0, extract(epoch FROM now() - o.due_at)) INTO delay_s;
    IF NOT FOUND THEN
        RETURN QUERY SELECT 'lost', NULL::double precision;
        RETURN;
    END IF;

    PERFORM pg_advisory_xact_lock(p_target,
        (hashtextextended(p_id, p_target::bigint) >> 32)::int);
    PERFORM FROM oncebox.inbox i
    WHERE i.consumer_id = p_target AND i.message_id = p_id AND i.retention_class = v.class LIMIT 1;
    IF FOUND THEN
        RETURN QUERY SELECT 'known', delay_s;
        RETURN;
    END IF;

    -- Where another transaction holds the lock of the key, the message is `received`: the holder
    -- may have looked already for the message to run next.
    IF p_ordering IS NOT NULL
            AND pg_try_advisory_xact_lock(-p_target, (p_ordering >> 32)::int) THEN
        PERFORM FROM oncebox.inbox i
        WHERE i.consumer_id = p_target AND i.retention_class = v.class
          AND i.ordering_hash = p_ordering
          AND i.ordering_position <= coalesce(p_sequence, i.ordering_position)
          AND i.status NOT IN ('completed', 'skipped', 'discarded') LIMIT 1;
        IF FOUND THEN
            v_status := 'waiting';
        END IF;
    END IF;

    INSERT INTO oncebox.inbox (consumer_id, message_id, retention_class, bucket, topic, partition,
        "offset", record_timestamp_ms, key, ordering_key, source, event_type, event_version,
        content_type, trace_parent, status, attempts, next_attempt_at, payload, headers,
        payload_hash, ordering_hash, ordering_position, sequence_version)
    VALUES (p_target, p_id, v.class, v.bucket, p_topic, p_partition, p_offset, p_timestamp_ms,
        p_key, p_ordering_key, p_source, p_event_type, p_event_version, p_content_type,
        p_trace_parent, v_status, 0, CASE v_status WHEN 'received' THEN now() END, p_payload,
        p_headers, p_hash, p_ordering,
        CASE WHEN p_ordering IS NOT NULL
            THEN coalesce(p_sequence, nextval('oncebox.ordering_place')) END,
        CASE WHEN p_ordering IS NOT NULL THEN p_sequence END)
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'another session inserted the message despite its lock'
            USING ERRCODE = '40001';
    END IF;
    RETURN QUERY SELECT 'new', delay_s;
END $$;
