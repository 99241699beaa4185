-- Does an operator's action on messages, each once. Messages in another state, and messages that a
-- worker holds, stay as they are.
--
-- * `redrive` makes dead letters due again, with the runs of a new message. It takes only messages
--   that were dead letters by `p_as_of`, so that a message that fails again in between does not run
--   again and again. A message whose record was not kept cannot run. A message that was never
--   decoded has no identity to run under, and a collision has no position in an order. A message
--   that was parked for a gap runs over the gap.
-- * `discard` excludes messages from any run. Messages that wait behind them in their key are due.
-- * `retry` makes messages that wait for their next attempt due now, once. It leaves out messages
--   that failed again since `p_as_of`.
--
-- Returns the number of messages that changed.
CREATE OR REPLACE FUNCTION oncebox.act_on_messages(
    p_consumer int, p_class smallint, p_action text, p_id text[], p_as_of timestamptz, p_actor text,
    p_reason text)
RETURNS int
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off AS $$
DECLARE
    v_id text;
    v_hash bigint;
    v_attempt int;
    v_version int;
    v_done int := 0;
BEGIN
    FOREACH v_id IN ARRAY p_id LOOP
        SELECT i.ordering_hash INTO v_hash FROM oncebox.inbox i
            WHERE i.consumer_id = p_consumer AND i.retention_class = p_class
              AND i.message_id = v_id;
        -- A message of a key is settled under the key's lock, which is taken before the row's. The
        -- lock's holder runs a message of the key.
        CONTINUE WHEN p_action = 'discard' AND v_hash IS NOT NULL
            AND NOT pg_try_advisory_xact_lock(-p_consumer, (v_hash >> 32)::int);
        SELECT i.attempts, i.version_id INTO v_attempt, v_version FROM oncebox.inbox i
            WHERE i.consumer_id = p_consumer AND i.retention_class = p_class
              AND i.message_id = v_id AND CASE p_action
                WHEN 'redrive' THEN
                    i.status IN ('failed_terminal', 'parked') AND i.processed_at <= p_as_of
                    AND i.headers IS NOT NULL AND i.reason !~ '^(undecodable|unclaimable)'
                    AND NOT oncebox.is_unordered(i)
                WHEN 'discard' THEN i.status IN
                    ('received', 'failed_retryable', 'failed_terminal', 'parked', 'waiting')
                WHEN 'retry' THEN i.status = 'failed_retryable' AND i.next_attempt_at > now()
                    AND NOT oncebox.changed_since(i, p_as_of) END
            FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        UPDATE oncebox.inbox i SET bucket = oncebox.bucket_at(p_class, now()),
            status = CASE p_action WHEN 'redrive' THEN 'received' WHEN 'discard' THEN 'discarded'
                ELSE i.status END,
            reason = CASE WHEN p_action <> 'redrive' THEN i.reason END,
            over_gap = i.over_gap OR p_action = 'redrive' AND i.reason IS NOT DISTINCT FROM 'gap',
            attempts = CASE p_action WHEN 'redrive' THEN 0 ELSE i.attempts END,
            crashes = CASE p_action WHEN 'redrive' THEN 0 ELSE i.crashes END,
            next_attempt_at = CASE WHEN p_action <> 'discard' THEN now() END,
            processed_at = CASE WHEN p_action = 'discard' THEN now() END,
            -- A record that a redelivery restored is kept for a run only.
            headers = CASE
                WHEN NOT (p_action = 'discard' AND oncebox.was_restored(i)) THEN i.headers END,
            payload = CASE
                WHEN NOT (p_action = 'discard' AND oncebox.was_restored(i)) THEN i.payload END
        WHERE i.consumer_id = p_consumer AND i.retention_class = p_class AND i.message_id = v_id;
        INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, attempt, version_id,
            reason, actor)
        VALUES (p_consumer, v_id,
            CASE p_action WHEN 'redrive' THEN 'redriven' WHEN 'discard' THEN 'discarded'
                ELSE 'retried' END,
            v_attempt, v_version, p_reason, p_actor);
        IF p_action = 'discard' AND v_hash IS NOT NULL THEN
            PERFORM oncebox.release_key(p_consumer, p_class, v_hash);
        END IF;
        v_done := v_done + 1;
    END LOOP;
    RETURN v_done;
END $$;
