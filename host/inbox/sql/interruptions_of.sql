-- Returns how many outages a message was under way in, since it was received or last redriven.
CREATE OR REPLACE FUNCTION oncebox.interruptions_of(p_consumer int, p_id text) RETURNS int
LANGUAGE sql STABLE AS $$
    SELECT count(*)::int FROM oncebox.inbox_history h
    WHERE h.consumer_id = p_consumer AND h.message_id = p_id AND h.event = 'interrupted'
      AND h.history_id > coalesce((
        SELECT max(r.history_id) FROM oncebox.inbox_history r
        WHERE r.consumer_id = p_consumer AND r.message_id = p_id AND r.event = 'redriven'), 0)
$$;
