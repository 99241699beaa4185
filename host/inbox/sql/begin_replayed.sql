-- Begins the run of a replayed message: takes the lock of its key and of its row, looks whether it
-- is as the replay found it, and inserts the guard row, before any SQL of the guest.
--
-- A replay waits for no lock, since live messages come first. The row of the message stays as it
-- is, whatever the run does: it is locked against an erasure and against a second replay.
--
-- Returns `ours` where the message is to run; `busy` where another session has its key or its row;
-- `changed` where it is not there any more, was erased or has no record; `lost` where the replay is
-- paused or over, or another host works on it. The caller gives the transaction up unless it is
-- `ours`.
--
-- Parameters:
--
--   p_generation     generation of the loaded deployments. A replay runs no older version than the
--                    newest: it is there to run what was deployed last
--   p_epoch          number of the lease of the replay
--   p_step           moves of the cursor that the host knows of
--   p_at             completion time of the message
CREATE OR REPLACE FUNCTION oncebox_host.begin_replayed(
    p_secret bytea, p_consumer int, p_generation bigint, p_replay bigint, p_epoch bigint,
    p_step bigint, p_id text, p_at timestamptz)
RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off
    SET enable_bitmapscan = off AS $$
DECLARE
    v record;
    v_generation bigint;
    v_hash bigint;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'claims need READ COMMITTED' USING ERRCODE = 'OB004';
    END IF;
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);
    SELECT c.generation INTO v_generation FROM oncebox.consumer c
        WHERE c.consumer_id = p_consumer;
    IF p_generation < v_generation THEN
        RAISE EXCEPTION 'stale deployments: generation % is loaded, a replay needs %',
            p_generation, v_generation USING ERRCODE = 'OB005';
    END IF;
    SELECT i.ordering_hash INTO v_hash FROM oncebox.inbox i
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = p_id
          AND i.status = 'completed' AND i.processed_at = p_at AND i.erased_at IS NULL
          AND i.headers IS NOT NULL;
    IF NOT FOUND THEN
        RETURN 'changed';
    END IF;
    IF v_hash IS NOT NULL
            AND NOT pg_try_advisory_xact_lock(-p_consumer, (v_hash >> 32)::int) THEN
        RETURN 'busy';
    END IF;
    PERFORM FROM oncebox.inbox i
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = p_id
          AND i.status = 'completed' AND i.processed_at = p_at AND i.erased_at IS NULL
          AND i.headers IS NOT NULL
        FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN 'busy';
    END IF;
    -- After the lock of the row: a host that had the message before has moved the cursor by then.
    PERFORM FROM oncebox.replay r
        WHERE r.replay_id = p_replay AND r.consumer_id = p_consumer AND r.state = 'running'
          AND r.epoch = p_epoch AND r.step = p_step;
    IF NOT FOUND THEN
        RETURN 'lost';
    END IF;
    INSERT INTO oncebox.guard VALUES (pg_current_xact_id()) ON CONFLICT DO NOTHING;
    RETURN 'ours';
END $$;
