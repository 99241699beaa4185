-- Inserts the messages that handlers emitted in this transaction, to be sent when they are due.
-- Called by `complete`, and by `write_outgoing` for those that a later message of the transaction
-- may cancel. Both have set the search path and how to plan.
--
-- An emitted message has one row for each day on which its cause ran. A cause that runs again on
-- that day emits the same ids, and their rows stay as they are. That happens with `dedup = "off"`,
-- or where the inbox has forgotten the cause.
--
-- Parallel arrays, one element for each message, in the order of the emits:
--
--   p_cause           id of the message whose run emitted it
--   p_ordinal         number of the emit among those of its cause
--   p_id              id, derived from tenant, consumer, cause and ordinal
--   p_destination     place to which it goes, such as `kafka:orders`
--   p_key             key of its order; null: no order
--   p_event_type      type of the event
--   p_content_type    media type of the payload; null: none is named
--   p_headers         encoded headers that the handler gave it
--   p_payload         payload; null: none
--   p_token           name by which the consumer may cancel it; null: none
--   p_after_ms        milliseconds after the begin of this transaction at which it is due; null: at
--                     once, or at a time
--   p_at_ms           time at which it is due, milliseconds since 1970; a time in the past is now.
--                     Null: at once, or after a delay
--   p_trace_parent    W3C trace context of the cause; null: it has none
--   p_correlation_id  correlation id that the cause hands on
CREATE OR REPLACE FUNCTION oncebox.insert_outgoing(
    p_consumer int, p_cause text[], p_ordinal int[], p_id text[], p_destination text[],
    p_key bytea[], p_event_type text[], p_content_type text[], p_headers bytea[],
    p_payload bytea[], p_token text[], p_after_ms bigint[], p_at_ms bigint[],
    p_trace_parent text[], p_correlation_id text[])
RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    v_tenant int;
BEGIN
    SELECT c.tenant_id INTO v_tenant FROM oncebox.consumer c WHERE c.consumer_id = p_consumer;
    INSERT INTO oncebox.outgoing AS o (consumer_id, message_id, ordinal, bucket, id, destination,
        key, lane, event_type, content_type, trace_parent, correlation_id, headers, payload,
        cancel_token, status, due_at, next_attempt_at)
    SELECT p_consumer, u.cause, u.ordinal,
        date_bin('1 day', now(), '2000-01-03 00:00:00+00'), u.id, u.destination,
        u.key, oncebox.outgoing_lane(v_tenant, u.destination, u.key), u.event_type,
        u.content_type, u.trace_parent, u.correlation_id, u.headers, u.payload,
        u.token, 'received', d.due_at, d.due_at
    FROM unnest(p_cause, p_ordinal, p_id, p_destination, p_key, p_event_type, p_content_type,
            p_headers, p_payload, p_token, p_after_ms, p_at_ms, p_trace_parent,
            p_correlation_id) WITH ORDINALITY
        AS u(cause, ordinal, id, destination, key, event_type, content_type, headers, payload,
            token, after_ms, at_ms, trace_parent, correlation_id, nth)
    CROSS JOIN LATERAL (SELECT CASE
        WHEN u.after_ms IS NOT NULL THEN now() + u.after_ms * interval '1 millisecond'
        WHEN u.at_ms IS NOT NULL
            THEN greatest(now(), timestamptz 'epoch' + u.at_ms * interval '1 millisecond')
        ELSE now() END AS due_at) AS d
    -- Positions are given in this order, and decide between equal due times of a lane.
    ORDER BY u.nth
    ON CONFLICT (consumer_id, message_id, ordinal, bucket) DO NOTHING;
END $$;
