-- Erases what messages hold of their payloads: payload, headers and their hash, the result and the
-- texts of failures, in the inbox, its history, its edits and its replays, and what their handlers
-- sent (see `erase_outgoing`). The row keeps its id, so that another delivery is a duplicate, and
-- its keys and its position, so that the order stays whole. A message that is not settled is
-- discarded first, since it cannot run without its payload.
--
-- A message that a worker holds, or whose key a worker holds, stays as it is. So does one with an
-- outgoing message that a relay sends now, and one that is erased already.
--
-- Columns of the answer, a row for each of these ids whose message is not erased before the call:
--
--   id               id of the message
--   status           status before the erasure; null: the message stays as it is
--   edits            payloads in its edits that were erased
--   errors           texts of failures in its history that were erased
--   partitions       tables that hold the versions of the rows before the erasure
CREATE OR REPLACE FUNCTION oncebox.erase(
    p_consumer int, p_class smallint, p_id text[], p_actor text, p_reason text)
RETURNS TABLE (id text, status text, edits bigint, errors bigint, partitions text[])
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off AS $$
DECLARE
    v_id text;
    v_status text;
    v_before text;
    v_after text;
    v_outgoing record;
BEGIN
    FOREACH v_id IN ARRAY p_id LOOP
        id := v_id;
        status := NULL;
        edits := 0;
        errors := 0;
        partitions := '{}';
        SELECT i.status, i.tableoid::regclass::text INTO v_status, v_before FROM oncebox.inbox i
            WHERE i.consumer_id = p_consumer AND i.retention_class = p_class
              AND i.message_id = v_id AND i.erased_at IS NULL
            FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            IF EXISTS (SELECT FROM oncebox.inbox i
                WHERE i.consumer_id = p_consumer AND i.retention_class = p_class
                  AND i.message_id = v_id AND i.erased_at IS NULL)
            THEN
                RETURN NEXT;
            END IF;
            CONTINUE;
        END IF;
        SELECT * INTO v_outgoing FROM oncebox.erase_outgoing(p_consumer, v_id);
        IF v_outgoing.is_held THEN
            RETURN NEXT;
            CONTINUE;
        END IF;
        partitions := coalesce(v_outgoing.partitions, '{}');
        IF v_status NOT IN ('completed', 'skipped', 'discarded') THEN
            -- Refuses a message that is leased, and one whose key a worker holds.
            IF oncebox.act_on_messages(
                p_consumer, p_class, 'discard', ARRAY[v_id], now(), p_actor, p_reason) = 0
            THEN
                RETURN NEXT;
                CONTINUE;
            END IF;
        END IF;
        -- A discard has moved the row, with its payload, to the present partition.
        SELECT i.tableoid::regclass::text INTO v_after FROM oncebox.inbox i
            WHERE i.consumer_id = p_consumer AND i.retention_class = p_class
              AND i.message_id = v_id;
        UPDATE oncebox.inbox i SET payload = NULL, headers = NULL, payload_hash = NULL,
            result = NULL, last_error = NULL, erased_at = now()
        WHERE i.consumer_id = p_consumer AND i.retention_class = p_class
          AND i.message_id = v_id;
        -- Its time partition was detached between two of these statements.
        IF NOT FOUND THEN
            RETURN NEXT;
            CONTINUE;
        END IF;
        UPDATE oncebox.inbox_edit e SET payload = NULL
        WHERE e.consumer_id = p_consumer AND e.message_id = v_id AND e.payload IS NOT NULL;
        GET DIAGNOSTICS edits = ROW_COUNT;
        UPDATE oncebox.inbox_history h SET error = NULL
        WHERE h.consumer_id = p_consumer AND h.message_id = v_id AND h.error IS NOT NULL;
        GET DIAGNOSTICS errors = ROW_COUNT;
        UPDATE oncebox.replay_failure f SET error = NULL
        FROM oncebox.replay r
        WHERE r.replay_id = f.replay_id AND r.consumer_id = p_consumer
          AND f.message_id = v_id AND f.error IS NOT NULL;
        INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, reason, actor)
            VALUES (p_consumer, v_id, 'erased', p_reason, p_actor);
        status := v_status;
        partitions := partitions || array_remove(ARRAY[v_before, v_after], NULL);
        RETURN NEXT;
    END LOOP;
END $$;
