-- Erases what the outgoing messages of a cause hold of its data: payload, headers, key, token, the
-- text of the last failure and the answer of an endpoint. Their rows stay, with their ids and
-- destinations. A message that is still to be sent, or that is parked, is discarded: it cannot be
-- sent without its payload.
--
-- Columns of the answer:
--
--   is_held          true: a relay sends one of them now, so that all stay as they are
--   partitions       tables that hold the versions of the rows before the erasure; null: nothing
--                    was left to erase
CREATE OR REPLACE FUNCTION oncebox.erase_outgoing(
    p_consumer int, p_cause text, OUT is_held boolean, OUT partitions text[])
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off AS $$
BEGIN
    -- No relay leases a row while it is locked; the statements below see what was leased before.
    PERFORM FROM oncebox.outgoing o
        WHERE o.consumer_id = p_consumer AND o.message_id = p_cause FOR UPDATE;
    SELECT coalesce(bool_or(o.status = 'in_progress'), false) INTO is_held FROM oncebox.outgoing o
        WHERE o.consumer_id = p_consumer AND o.message_id = p_cause;
    IF is_held THEN
        RETURN;
    END IF;
    WITH erased AS (
        UPDATE oncebox.outgoing o SET payload = NULL, headers = '', key = NULL, lane = NULL,
            cancel_token = NULL, last_error = NULL, next_attempt_at = NULL,
            answer = NULL, answer_content_type = NULL, answer_is_whole = NULL,
            reason = CASE WHEN o.settled_at IS NULL THEN 'erased' ELSE o.reason END,
            status = CASE WHEN o.settled_at IS NULL THEN 'discarded' ELSE o.status END,
            settled_at = coalesce(o.settled_at, now())
        WHERE o.consumer_id = p_consumer AND o.message_id = p_cause
          AND (o.settled_at IS NULL OR o.headers <> ''
            OR coalesce(o.payload, o.key) IS NOT NULL
            OR coalesce(o.cancel_token, o.last_error, o.answer_content_type) IS NOT NULL
            OR o.answer IS NOT NULL)
        RETURNING o.tableoid::regclass::text AS name)
    SELECT array_agg(DISTINCT e.name) INTO partitions FROM erased e;
END $$;
