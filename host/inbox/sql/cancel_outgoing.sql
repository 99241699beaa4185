-- Cancels the outgoing messages of a consumer that have a token and that no relay has sent, in the
-- transaction of the handler that asks for it. Returns true if there was any.
--
-- A relay leases in a transaction of its own, which commits before it sends. So a message whose row
-- another session has locked is about to be sent, or is being cancelled already: it is passed over.
-- So is a message that waits for another attempt and may have arrived by an earlier one. A message
-- is therefore cancelled or sent, and never both.
--
-- What earlier messages of this very transaction emitted with a token has rows by now (see
-- `write_outgoing`). What the run itself emitted has none yet, and the host withdraws it by itself.
CREATE OR REPLACE FUNCTION oncebox_host.cancel_outgoing(
    p_secret bytea, p_consumer int, p_token text)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off AS $$
DECLARE
    v record;
    r record;
    v_is_cancelled boolean := false;
BEGIN
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);
    FOR r IN SELECT o.message_id, o.ordinal, o.bucket FROM oncebox.outgoing o
            WHERE o.consumer_id = p_consumer AND o.cancel_token = p_token
              AND o.status IN ('received', 'failed_retryable') AND NOT o.may_have_arrived
            FOR UPDATE SKIP LOCKED LOOP
        UPDATE oncebox.outgoing o
        SET status = 'cancelled', reason = NULL, next_attempt_at = NULL, settled_at = now()
        WHERE o.consumer_id = p_consumer AND o.message_id = r.message_id
          AND o.ordinal = r.ordinal AND o.bucket = r.bucket;
        v_is_cancelled := true;
    END LOOP;
    RETURN v_is_cancelled;
END $$;
