-- Returns whether an outgoing message of the same lane has to go first: an open one, or a parked
-- one of a consumer in `p_stopping`, with an earlier due time or, of equal times, an earlier place.
--
-- A lane is a tenant, a destination and a key. `p_lane` is a hash of the three, which finds the
-- rows; a key can be made for any hash, so that the three themselves are compared too. Called by
-- functions that have set the search path and how to plan.
CREATE OR REPLACE FUNCTION oncebox.has_earlier_outgoing(
    p_tenant int, p_stopping int[], p_destination text, p_lane bigint, p_key bytea,
    p_due_at timestamptz, p_position bigint)
RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN EXISTS (SELECT FROM oncebox.outgoing e
        WHERE e.lane = p_lane AND e.due_at <= p_due_at
          AND e.status IN ('received', 'in_progress', 'failed_retryable', 'parked')
          AND (e.due_at < p_due_at OR e.position < p_position)
          AND (e.status <> 'parked' OR e.consumer_id = ANY (p_stopping))
          AND e.destination = p_destination AND e.key = p_key
          AND EXISTS (SELECT FROM oncebox.consumer c
              WHERE c.consumer_id = e.consumer_id AND c.tenant_id = p_tenant));
END $$;
