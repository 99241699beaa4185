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
-- `receive` stores the message. The consumer is looked for before the outgoing message is marked,
-- and its row stays locked against a deletion from then on.
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
    v_received text;
BEGIN
    PERFORM FROM oncebox.consumer c
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

    SELECT r.outcome INTO v_received
    FROM oncebox.receive(NULL, p_target, p_id, p_topic, p_partition, p_offset, p_timestamp_ms,
        p_key, p_ordering_key, p_source, p_event_type, p_event_version, p_content_type,
        p_trace_parent, p_hash, p_headers, p_payload, p_ordering, p_sequence) r;
    IF v_received NOT IN ('new', 'known') THEN
        RAISE EXCEPTION 'the message was not received: %', v_received;
    END IF;
    RETURN QUERY SELECT v_received, delay_s;
END $$;
