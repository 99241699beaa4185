-- Returns the destinations of each consumer at which an outgoing message is due. It looks for what
-- is unsent, and never for what came after something: a message that was committed late is found
-- like any other.
--
-- It steps along the index of due messages from one destination of a consumer to the next, and
-- reads the head of each, however many messages wait behind it. It takes at most `p_steps` for a
-- consumer, and begins at consumers behind `p_first` for two seconds, so that none with very many
-- destinations keeps the others waiting. What a look leaves out comes in the next one, which has to
-- begin there:
--
-- Parameters:
--
--   p_first                 consumers with this key and lower ones are passed over
--   p_consumers, p_afters   destinations behind which it begins; other consumers: at the first
--
-- Columns of the answer:
--
--   target    destination; null: the time was over after this consumer
--   is_due    whether a message is due there
--   is_cut    whether the steps of this consumer ended there
CREATE OR REPLACE FUNCTION oncebox.outgoing_due(
    p_steps int, p_first int, p_consumers int[], p_afters text[])
RETURNS TABLE (consumer int, tenant int, target text, is_due boolean, is_cut boolean)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off
    SET enable_seqscan = off SET enable_sort = off AS $$
DECLARE
    v_consumer int := p_first;
    v_after text;
    v_destination text;
    v_at timestamptz;
    v_tenant int;
    v_left int;
    v_is_behind boolean;
BEGIN
    LOOP
        SELECT o.consumer_id INTO v_consumer FROM oncebox.outgoing o
        WHERE o.status IN ('received', 'failed_retryable') AND o.consumer_id > v_consumer
        ORDER BY o.consumer_id LIMIT 1;
        EXIT WHEN NOT FOUND;
        SELECT c.tenant_id INTO v_tenant FROM oncebox.consumer c
        JOIN oncebox.tenant t USING (tenant_id)
        WHERE c.consumer_id = v_consumer AND t.secret_hash <> '' AND t.database_url IS NULL;
        -- A consumer that is gone takes its messages along. One whose tenant moves has them sent
        -- from the other database.
        CONTINUE WHEN NOT FOUND;

        consumer := v_consumer;
        tenant := v_tenant;
        v_after := coalesce(p_afters[array_position(p_consumers, v_consumer)], '');
        v_destination := v_after;
        v_is_behind := true;
        v_left := p_steps;
        LOOP
            SELECT o.destination, o.next_attempt_at INTO target, v_at FROM oncebox.outgoing o
            WHERE o.status IN ('received', 'failed_retryable')
              AND o.consumer_id = v_consumer AND o.destination > v_destination
            ORDER BY o.destination, o.next_attempt_at LIMIT 1;
            IF NOT FOUND THEN
                EXIT WHEN NOT v_is_behind OR v_after = '';
                v_is_behind := false;
                v_destination := '';
                CONTINUE;
            END IF;
            EXIT WHEN NOT v_is_behind AND target > v_after;
            v_destination := target;
            v_left := v_left - 1;
            is_due := v_at <= now();
            is_cut := v_left = 0;
            IF is_due OR is_cut THEN
                RETURN NEXT;
            END IF;
            EXIT WHEN is_cut;
        END LOOP;

        IF clock_timestamp() > statement_timestamp() + interval '2 seconds' THEN
            target := NULL;
            is_due := false;
            is_cut := true;
            RETURN NEXT;
            RETURN;
        END IF;
    END LOOP;
END $$;
