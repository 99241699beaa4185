-- Ends the run of a replayed message, as the host's last statement before COMMIT: deletes the guard
-- row, moves the cursor of the replay past the message and counts it. A message that ran gets an
-- entry in its history, which names the replay. One that failed was rolled back before this, and
-- gets an entry among the failures of the replay, as long as those are few.
--
-- Raises where the transaction has no guard row, or where the replay is paused or over, or another
-- host works on it: then nothing of the run is committed.
--
-- Returns the state of the replay: it is `paused` by too many failures in a row.
--
-- Parameters:
--
--   p_epoch, p_step  as for `begin_replayed`
--   p_at             completion time of the message
--   p_version        version that ran it; null: none did
--   p_generation     generation of the loaded deployments
--   p_suppressed     outgoing messages that the run emitted and that are dropped
--   p_reason         kind of the failure; null: the message ran
--   p_error          text of the failure
--   p_in_a_row_max   failures in a row that pause the replay
--   p_kept_max       failures of a replay that are kept
CREATE OR REPLACE FUNCTION oncebox_host.complete_replayed(
    p_secret bytea, p_consumer int, p_replay bigint, p_epoch bigint, p_step bigint, p_id text,
    p_at timestamptz, p_version int, p_generation bigint, p_suppressed bigint, p_reason text,
    p_error text, p_in_a_row_max int, p_kept_max int)
RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off AS $$
DECLARE
    v record;
BEGIN
    -- Checks the caller, and the guard row.
    PERFORM oncebox_host.complete(p_secret, p_consumer, '{}', '{}', '{}', '{}', '{}', '{}', '{}',
        '{}', '{}', '{}', '{}', '{}');
    UPDATE oncebox.replay r SET step = r.step + 1, cursor_at = p_at, cursor_id = p_id,
        replayed = r.replayed + (p_reason IS NULL)::int,
        failed = r.failed + (p_reason IS NOT NULL)::int,
        suppressed = r.suppressed + p_suppressed,
        failures_in_a_row = CASE WHEN p_reason IS NULL THEN 0 ELSE r.failures_in_a_row + 1 END,
        crashes = 0, generation_last = p_generation
    WHERE r.replay_id = p_replay AND r.consumer_id = p_consumer AND r.state = 'running'
      AND r.epoch = p_epoch AND r.step = p_step
    RETURNING r.* INTO v;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the replay % is not of this host any more', p_replay
            USING ERRCODE = 'OB003';
    END IF;
    IF p_reason IS NULL THEN
        INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, version_id, reason,
            actor)
        VALUES (p_consumer, p_id, 'replayed', p_version,
            format('replay %s: %s', p_replay, v.reason), v.actor);
        RETURN v.state;
    END IF;
    IF v.failed <= p_kept_max THEN
        INSERT INTO oncebox.replay_failure (replay_id, step, message_id, reason, error)
        VALUES (p_replay, v.step, p_id, p_reason, p_error);
    END IF;
    IF v.failures_in_a_row < p_in_a_row_max THEN
        RETURN v.state;
    END IF;
    UPDATE oncebox.replay p SET state = 'paused', locked_until = NULL, locked_by = NULL,
        note = format('%s messages in a row failed, the last with `%s`', v.failures_in_a_row,
            p_reason)
    WHERE p.replay_id = p_replay;
    RETURN 'paused';
END $$;
