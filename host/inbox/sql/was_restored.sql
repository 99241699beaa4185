-- Returns whether a redelivery brought back the record of a message. Called by functions that have
-- set the search path.
CREATE OR REPLACE FUNCTION oncebox.was_restored(p_row oncebox.inbox) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT FROM oncebox.inbox_history h
        WHERE h.consumer_id = p_row.consumer_id AND h.message_id = p_row.message_id
          AND h.event = 'restored')
$$;
