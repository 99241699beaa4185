-- Stores a message that did not come by Kafka in the inbox of a consumer, where it waits for a
-- retry worker.
--
--   p_tenant            key of its tenant, which must have its inbox in this database, and has it
--                       until the transaction ends; null: the caller has seen to that
--   p_target            key of the consumer
--   p_id … p_sequence   columns of the inbox row, as for `claim`
--
-- Columns of the answer:
--
--   outcome        `new`: the inbox has a new row. `known`: it had one under this id.
--                  `no_consumer`: the database shows no such consumer, or one that is being
--                  deleted; nothing is changed. `not_here`: the tenant's inbox is in another
--                  database, or on its way there; nothing is changed
--   row_status     status of the row: of the new one, or of the known message; else null
--   same_payload   whether that row's payload hash is that of this message; true for a light row,
--                  and for a message that was erased; else null
--
-- The steps are those of `claim` for the status `received`: the lock of the id, then the look in
-- all time partitions, then the insert, each in a statement of its own; and of a key the lock, then
-- the look. `claim` itself belongs to sessions that log in as the tenant; this runs under the
-- host's login.
--
-- The row of the consumer is locked against a change of its state, so that a message comes before a
-- deletion of its consumer, which removes it, or finds the deletion.
CREATE OR REPLACE FUNCTION oncebox.receive(
    p_tenant int, p_target int, p_id text, p_topic text, p_partition int, p_offset bigint,
    p_timestamp_ms bigint, p_key bytea, p_ordering_key bytea, p_source text, p_event_type text,
    p_event_version text, p_content_type text, p_trace_parent text, p_hash bytea, p_headers bytea,
    p_payload bytea, p_ordering bigint, p_sequence bigint)
RETURNS TABLE (outcome text, row_status text, same_payload boolean)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off AS $$
DECLARE
    v record;
    v_status text := 'received';
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'deliveries need READ COMMITTED' USING ERRCODE = 'OB004';
    END IF;
    IF p_tenant IS NOT NULL AND NOT oncebox.is_here(p_tenant) THEN
        RETURN QUERY SELECT 'not_here', NULL::text, NULL::boolean;
        RETURN;
    END IF;
    SELECT c.retention_class AS class,
            date_bin(r.bucket, now(), '2000-01-03 00:00:00+00') AS bucket INTO v
    FROM oncebox.consumer c
    JOIN oncebox.retention_class r USING (retention_class)
    WHERE c.consumer_id = p_target AND c.state <> 'deleting'
      AND c.tenant_id = coalesce(p_tenant, c.tenant_id)
    FOR SHARE OF c;
    IF NOT FOUND THEN
        RETURN QUERY SELECT 'no_consumer', NULL::text, NULL::boolean;
        RETURN;
    END IF;

    PERFORM pg_advisory_xact_lock(p_target,
        (hashtextextended(p_id, p_target::bigint) >> 32)::int);
    RETURN QUERY SELECT 'known', i.status, i.event_type IS NULL OR i.erased_at IS NOT NULL
            OR i.payload_hash IS NOT DISTINCT FROM p_hash
    FROM oncebox.inbox i
    WHERE i.consumer_id = p_target AND i.message_id = p_id AND i.retention_class = v.class LIMIT 1;
    IF FOUND THEN
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
    RETURN QUERY SELECT 'new', v_status, NULL::boolean;
END $$;
