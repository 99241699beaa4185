-- Begins the work of a lease: locks its key and its row, and checks the epoch, before any SQL of
-- the guest. Returns false where another worker has it, or where it is not its turn, and the lease
-- is given back. The caller commits in either case.
CREATE OR REPLACE FUNCTION oncebox_host.resume(
    p_secret bytea, p_consumer int, p_generation bigint, p_id text, p_epoch bigint)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off AS $$
DECLARE
    v record;
    v_hash bigint;
    v_position bigint;
    v_is_locked boolean := true;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'claims need READ COMMITTED' USING ERRCODE = 'OB004';
    END IF;
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);
    IF p_generation < v.generation_required THEN
        RAISE EXCEPTION 'stale deployments: generation % is loaded, % is required', p_generation,
            v.generation_required USING ERRCODE = 'OB005';
    END IF;
    SELECT i.ordering_hash, i.ordering_position INTO v_hash, v_position FROM oncebox.inbox i
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = p_id;
    IF v_hash IS NOT NULL THEN
        -- Behind an earlier message, its key may be taken for as long as a handler runs; else by a
        -- live batch.
        IF oncebox.has_earlier_open(p_consumer, v.class, v_hash, v_position, p_id) THEN
            v_is_locked := pg_try_advisory_xact_lock(-p_consumer, (v_hash >> 32)::int);
        ELSE
            PERFORM pg_advisory_xact_lock(-p_consumer, (v_hash >> 32)::int);
        END IF;
    END IF;
    PERFORM FROM oncebox.inbox i
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = p_id
          AND i.status = 'in_progress' AND i.epoch = p_epoch
        FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF v_hash IS NOT NULL AND (NOT v_is_locked
            OR oncebox.has_earlier_open(p_consumer, v.class, v_hash, v_position, p_id)) THEN
        -- Without the lock it must not wait: the holder may have looked already for what to
        -- release.
        UPDATE oncebox.inbox i SET bucket = v.bucket, attempts = i.attempts - 1,
            locked_until = NULL, locked_by = NULL,
            status = CASE WHEN v_is_locked THEN 'waiting' WHEN i.reason IS NULL THEN 'received'
                ELSE 'failed_retryable' END,
            next_attempt_at = CASE WHEN NOT v_is_locked
                THEN now() + interval '200 milliseconds' END
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = p_id
          AND i.epoch = p_epoch;
        RETURN false;
    END IF;
    INSERT INTO oncebox.guard VALUES (pg_current_xact_id()) ON CONFLICT DO NOTHING;
    RETURN true;
END $$;
