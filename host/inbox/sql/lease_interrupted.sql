-- Takes back runs of leases that ended for no fault of their messages: each is due again, later the
-- more often that was so, and the attempt did not happen. Takes back a crash that was counted since
-- the lease had run out, and makes due again what that parked. Each lease is told once, however
-- often a host says it. Called by the host that had the lease, when the database answers again.
--
-- `outcome`: `due`; `parked`, since that was so too often; `taken_back`; `busy`, for a worker is at
-- the message, and the host says it again; `done`, where nothing is left to be done.
CREATE OR REPLACE FUNCTION oncebox_host.lease_interrupted(
    p_secret bytea, p_consumer int, p_id text[], p_epoch bigint[], p_crashes_max int,
    p_interruptions_max int)
RETURNS TABLE (id text, epoch bigint, outcome text, event_type text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off AS $$
DECLARE
    v record;
    r record;
    w record;
    v_lease text;
    v_times int;
    v_outcome text;
BEGIN
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);
    FOR w IN SELECT u.id, u.epoch FROM unnest(p_id, p_epoch) AS u(id, epoch) LOOP
        v_lease := 'lease ' || w.epoch;
        SELECT i.status, i.reason, i.epoch, i.crashes, i.attempts, i.version_id, i.event_type
            INTO r FROM oncebox.inbox i
            WHERE i.consumer_id = p_consumer AND i.retention_class = v.class
              AND i.message_id = w.id FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            v_outcome := CASE WHEN EXISTS (SELECT FROM oncebox.inbox i
                WHERE i.consumer_id = p_consumer AND i.retention_class = v.class
                  AND i.message_id = w.id) THEN 'busy' ELSE 'done' END;
        ELSIF EXISTS (SELECT FROM oncebox.inbox_history h
                WHERE h.consumer_id = p_consumer AND h.message_id = w.id
                  AND h.event = 'interrupted' AND h.reason = v_lease) THEN
            v_outcome := 'done';
        ELSIF r.epoch = w.epoch AND r.status = 'in_progress' THEN
            v_times := oncebox.interruptions_of(p_consumer, w.id) + 1;
            v_outcome := CASE WHEN v_times >= p_interruptions_max THEN 'parked' ELSE 'due' END;
            UPDATE oncebox.inbox i SET bucket = v.bucket, locked_until = NULL, locked_by = NULL,
                status = CASE WHEN v_outcome = 'parked' THEN 'parked'
                    WHEN i.reason IS NULL THEN 'received' ELSE 'failed_retryable' END,
                reason = CASE WHEN v_outcome = 'parked' THEN 'crashed' ELSE i.reason END,
                last_error = CASE WHEN v_outcome = 'parked'
                    THEN format('the database went away while the message ran, %s times', v_times)
                    ELSE i.last_error END,
                processed_at = CASE WHEN v_outcome = 'parked' THEN now() END,
                next_attempt_at = CASE WHEN v_outcome = 'due'
                    THEN now() + (power(2, v_times - 1) - 1) * interval '1 second' END,
                attempts = CASE WHEN v_outcome = 'parked' THEN i.attempts ELSE i.attempts - 1 END
            WHERE i.consumer_id = p_consumer AND i.retention_class = v.class
              AND i.message_id = w.id;
        ELSIF r.epoch > w.epoch AND r.crashes > 0
                AND (r.status IN ('in_progress', 'received', 'failed_retryable', 'waiting')
                    OR r.status = 'parked' AND r.reason = 'crashed') THEN
            v_outcome := 'taken_back';
            UPDATE oncebox.inbox i SET bucket = v.bucket, crashes = i.crashes - 1,
                attempts = greatest(i.attempts - 1, (i.status = 'in_progress')::int),
                status = CASE WHEN i.status = 'parked' THEN 'received' ELSE i.status END,
                reason = CASE WHEN i.status = 'parked' THEN NULL ELSE i.reason END,
                last_error = CASE WHEN i.status = 'parked' THEN NULL ELSE i.last_error END,
                processed_at = CASE WHEN i.status = 'parked' THEN NULL ELSE i.processed_at END,
                next_attempt_at = CASE WHEN i.status = 'parked' THEN now()
                    ELSE i.next_attempt_at END
            WHERE i.consumer_id = p_consumer AND i.retention_class = v.class
              AND i.message_id = w.id;
        ELSE
            v_outcome := 'done';
        END IF;
        IF v_outcome IN ('due', 'parked', 'taken_back') THEN
            INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, attempt, version_id,
                reason)
            VALUES (p_consumer, w.id, 'interrupted', r.attempts, r.version_id, v_lease);
        END IF;
        id := w.id;
        epoch := w.epoch;
        outcome := v_outcome;
        event_type := r.event_type;
        RETURN NEXT;
    END LOOP;
END $$;
