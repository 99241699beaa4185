-- Returns whether a run of a message failed, or an operator did something with it, after a time.
CREATE OR REPLACE FUNCTION oncebox.changed_since(p_row oncebox.inbox, p_time timestamptz)
RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM oncebox.inbox_history h
        WHERE h.consumer_id = p_row.consumer_id AND h.message_id = p_row.message_id
          AND h.at > p_time)
$$;
