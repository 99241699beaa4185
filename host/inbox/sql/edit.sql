-- Gives a dead letter another payload and redrives it. The row keeps its id and its headers. It
-- also keeps the hash of the payload that came, so that a redelivery is a duplicate. The message
-- must have been a dead letter by `p_as_of`, so that a repeated request edits it once.
-- Returns false where the message is no dead letter, or a worker holds it.
CREATE OR REPLACE FUNCTION oncebox.edit(
    p_consumer int, p_class smallint, p_id text, p_payload bytea, p_as_of timestamptz, p_actor text,
    p_reason text)
RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off AS $$
DECLARE
    v_payload bytea;
BEGIN
    -- Locks the row, and checks that it may be run again.
    IF oncebox.act_on_messages(
        p_consumer, p_class, 'redrive', ARRAY[p_id], p_as_of, p_actor, p_reason) = 0
    THEN
        RETURN false;
    END IF;
    SELECT i.payload INTO v_payload FROM oncebox.inbox i
        WHERE i.consumer_id = p_consumer AND i.retention_class = p_class AND i.message_id = p_id;
    INSERT INTO oncebox.inbox_edit (consumer_id, message_id, edit_number, payload)
        SELECT p_consumer, p_id, count(*) + 1, v_payload FROM oncebox.inbox_edit e
        WHERE e.consumer_id = p_consumer AND e.message_id = p_id;
    UPDATE oncebox.inbox i SET payload = p_payload
        WHERE i.consumer_id = p_consumer AND i.retention_class = p_class AND i.message_id = p_id;
    INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, reason, actor)
        VALUES (p_consumer, p_id, 'edited', p_reason, p_actor);
    RETURN true;
END $$;
