-- Ends leases of outgoing messages that have run out, at most `p_most`, and returns how many. Their
-- relay died, lost its database, or stood still. Its attempt counts: the message may have reached
-- its destination, unless that is an inbox, where it would be marked as well.
--
-- The epoch stays. A relay that still lives and hears of the delivery can say so until another
-- relay leases the message (see `mark_outgoing`).
CREATE OR REPLACE FUNCTION oncebox.reclaim_outgoing(p_most int)
RETURNS int
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off
    SET enable_seqscan = off SET enable_sort = off AS $$
DECLARE
    s record;
    v_ended int := 0;
BEGIN
    FOR s IN SELECT o.consumer_id, o.message_id, o.ordinal, o.bucket FROM oncebox.outgoing o
            WHERE o.status = 'in_progress' AND o.locked_until < now()
            ORDER BY o.locked_until LIMIT p_most FOR UPDATE SKIP LOCKED LOOP
        UPDATE oncebox.outgoing o SET status = 'failed_retryable', reason = 'lease_expired',
            last_error = 'the relay `' || coalesce(o.locked_by, '') || '` did not report in time;'
                || ' the message may have arrived',
            may_have_arrived = o.may_have_arrived OR o.destination NOT LIKE 'inbox:%',
            next_attempt_at = now(), locked_until = NULL, locked_by = NULL
        WHERE o.consumer_id = s.consumer_id AND o.message_id = s.message_id
          AND o.ordinal = s.ordinal AND o.bucket = s.bucket;
        v_ended := v_ended + 1;
    END LOOP;
    RETURN v_ended;
END $$;
