-- Ends a transaction that claimed or resumed messages, as the host's last statement before COMMIT:
-- deletes the guard row, withdraws the claims that did not run, writes the rows that differ from a
-- plain completion, and inserts the messages that the runs emitted. Raises where the transaction
-- has no guard row, or where a row was neither inserted by it nor leased to it.
--
-- A message that was claimed as `completed`, ran and left no result needs nothing here: its row
-- says so already. A message that completes, or is skipped, under a lease makes the next message of
-- its key due. Each failure is kept in the history; a message that is parked for the horizon did
-- not run.
--
-- With `p_light` a row that becomes `completed` becomes light (see `claim`): of the record it keeps
-- its position and its timestamp alone, and what the sequence of its aggregate reads.
--
-- Parameters of the call:
--
--   p_secret         secret of the tenant, known to hosts alone
--   p_consumer       key of the consumer's row
--   p_withdrawn      ids of messages that this transaction claimed and did not run, since its time
--                    was over; their rows are deleted, and the host offers the messages again
--
-- Parameters of the rows that change: parallel arrays, one element for each row.
--
--   p_id             id of the message
--   p_epoch          0: this transaction inserted the row. Else the number of the lease under which
--                    the message ran
--   p_status         new status
--   p_reason         reason of the status, such as the kind of the failure; null: none
--   p_error          text of the failure, for readers; null: none
--   p_result         result of the handler, as JSON; null: none
--   p_delay_ms       `failed_retryable`: milliseconds until the next attempt. `waiting`: longest
--                    wait for missing versions; null: until an earlier message of its key ends.
--                    Without meaning for any other status
--   p_version        version of the handler that ran the message; null: the row keeps its own
--   p_keep           whether the row keeps headers and payload; false deletes both
--   p_headers,       encoded headers and payload to be written; null: those of the row stay
--   p_payload
--   p_record         columns that a light row lacks, for a row that this transaction inserted as
--                    light and whose message did not complete: an object with their values by name,
--                    bytes as hexadecimal digits; null: the row has them, or is to be light
--
-- Parameter of the call again:
--
--   p_light          whether rows that become `completed` become light
--
-- Parameters of the emitted messages that have no row yet: as for `insert_outgoing`. All are null
-- where there are none.
CREATE OR REPLACE FUNCTION oncebox_host.complete(
    p_secret bytea, p_consumer int, p_withdrawn text[], p_id text[], p_epoch bigint[],
    p_status text[], p_reason text[], p_error text[], p_result text[], p_delay_ms bigint[],
    p_version int[], p_keep boolean[], p_headers bytea[], p_payload bytea[],
    p_record jsonb[] DEFAULT NULL, p_light boolean DEFAULT false,
    p_outgoing_cause text[] DEFAULT NULL, p_outgoing_ordinal int[] DEFAULT NULL,
    p_outgoing_id text[] DEFAULT NULL, p_outgoing_destination text[] DEFAULT NULL,
    p_outgoing_key bytea[] DEFAULT NULL, p_outgoing_event_type text[] DEFAULT NULL,
    p_outgoing_content_type text[] DEFAULT NULL, p_outgoing_headers bytea[] DEFAULT NULL,
    p_outgoing_payload bytea[] DEFAULT NULL, p_outgoing_token text[] DEFAULT NULL,
    p_outgoing_after_ms bigint[] DEFAULT NULL, p_outgoing_at_ms bigint[] DEFAULT NULL,
    p_outgoing_trace_parent text[] DEFAULT NULL, p_outgoing_correlation_id text[] DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off AS $$
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
    -- `xmin` is the transaction that wrote the row as it is now.
    FOREACH v_id IN ARRAY p_withdrawn LOOP
        DELETE FROM oncebox.inbox i
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = v_id
          AND i.epoch = 0 AND i.xmin = pg_current_xact_id()::xid;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'a withdrawn claim is not of this transaction' USING ERRCODE = 'OB003';
        END IF;
    END LOOP;
    FOR s IN SELECT u.*, p_light AND u.status = 'completed' AS is_light
            FROM unnest(p_id, p_epoch, p_status, p_reason, p_error, p_result, p_delay_ms,
                p_version, p_keep, p_headers, p_payload, p_record)
            AS u(id, epoch, status, reason, error, result, delay_ms,
                version, keep, headers, payload, whole) LOOP
        UPDATE oncebox.inbox i SET
            bucket = v.bucket, status = s.status, reason = s.reason, last_error = s.error,
            result = s.result::jsonb,
            -- Its claim, or its lease, may have counted a run that then did not happen.
            attempts = CASE
                WHEN s.status NOT IN ('received', 'waiting', 'skipped')
                    AND s.reason IS DISTINCT FROM 'gap' THEN i.attempts
                WHEN s.epoch > 0 THEN i.attempts - 1 ELSE 0 END,
            next_attempt_at = CASE s.status
                WHEN 'failed_retryable' THEN now() + s.delay_ms * interval '1 millisecond'
                WHEN 'received' THEN now() END,
            waits_until = CASE WHEN s.status = 'waiting'
                THEN now() + s.delay_ms * interval '1 millisecond' END,
            processed_at = CASE WHEN s.status NOT IN ('failed_retryable', 'received', 'waiting')
                THEN now() END,
            locked_until = NULL, locked_by = NULL, version_id = coalesce(s.version, i.version_id),
            over_gap = i.over_gap
                OR coalesce(i.reason = 'gap_overdue' AND s.reason <> 'gap', false),
            headers = CASE WHEN s.keep THEN coalesce(s.headers, i.headers) END,
            payload = CASE WHEN s.keep THEN coalesce(s.payload, i.payload) END,
            key = CASE WHEN NOT s.is_light
                THEN coalesce(decode(s.whole->>'key', 'hex'), i.key) END,
            ordering_key = CASE WHEN NOT s.is_light OR i.sequence_version IS NOT NULL
                THEN coalesce(decode(s.whole->>'ordering_key', 'hex'), i.ordering_key) END,
            source = CASE WHEN NOT s.is_light THEN coalesce(s.whole->>'source', i.source) END,
            event_type = CASE WHEN NOT s.is_light
                THEN coalesce(s.whole->>'event_type', i.event_type) END,
            event_version = CASE WHEN NOT s.is_light
                THEN coalesce(s.whole->>'event_version', i.event_version) END,
            content_type = CASE WHEN NOT s.is_light
                THEN coalesce(s.whole->>'content_type', i.content_type) END,
            trace_parent = CASE WHEN NOT s.is_light
                THEN coalesce(s.whole->>'trace_parent', i.trace_parent) END,
            payload_hash = CASE WHEN NOT s.is_light
                THEN coalesce(decode(s.whole->>'payload_hash', 'hex'), i.payload_hash) END
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class
          AND i.message_id = s.id AND i.epoch = s.epoch
          AND CASE WHEN s.epoch = 0 THEN i.xmin = pg_current_xact_id()::xid ELSE
              i.status = 'in_progress' END
        RETURNING i.ordering_hash, i.attempts, i.version_id INTO v_ordering, v_attempt, v_version;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'a completed claim is not of this transaction' USING ERRCODE = 'OB003';
        END IF;
        IF s.status IN ('failed_retryable', 'failed_terminal', 'parked')
                AND s.reason IS DISTINCT FROM 'horizon' THEN
            INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, attempt, version_id,
                reason, error)
            VALUES (p_consumer, s.id, 'failed', v_attempt, v_version, s.reason, s.error);
        END IF;
        IF v_ordering IS NOT NULL AND s.epoch > 0 AND s.status IN ('completed', 'skipped') THEN
            PERFORM oncebox.release_key(p_consumer, v.class, v_ordering);
        END IF;
    END LOOP;
    IF p_outgoing_id IS NOT NULL THEN
        PERFORM oncebox.insert_outgoing(p_consumer, p_outgoing_cause, p_outgoing_ordinal,
            p_outgoing_id, p_outgoing_destination, p_outgoing_key, p_outgoing_event_type,
            p_outgoing_content_type, p_outgoing_headers, p_outgoing_payload, p_outgoing_token,
            p_outgoing_after_ms, p_outgoing_at_ms, p_outgoing_trace_parent,
            p_outgoing_correlation_id);
    END IF;
END $$;
