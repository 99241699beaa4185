-- Returns whether a message has no place in an order that its consumer keeps: a second payload
-- under the id of one that has.
CREATE OR REPLACE FUNCTION oncebox.is_unordered(p_row oncebox.inbox) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT p_row.reason = 'collision' AND p_row.ordering_hash IS NULL AND EXISTS (
        SELECT FROM oncebox.inbox o
        WHERE o.consumer_id = p_row.consumer_id AND o.retention_class = p_row.retention_class
          AND o.message_id = regexp_replace(p_row.message_id, '#[^#]*$', '')
          AND o.ordering_hash IS NOT NULL)
$$;
