-- Keeps one change of a row, for a shadow. Only from within a trigger, so that no guest calls it by
-- itself.
--
-- While a tenant has a shadow, each of its tables carries a trigger (`capture_row`) that does
-- nothing unless the host has set `oncebox.capture` in the transaction. What it sees is kept in a
-- second setting of the session, `oncebox.captured`, and in no table: both are set for the
-- transaction only, so a rollback takes them back, also one to a savepoint, and nothing is written,
-- logged or left to be vacuumed. Only the host's functions can set them: guests send no SET, and
-- `set_config` is taken from PUBLIC.
--
-- `oncebox.capture` is the number of changes that may still come, `oncebox.captured` a JSON array
-- [table, before, after] a line, rows as PostgreSQL writes them; or `!` and why nothing is
-- compared.
CREATE OR REPLACE FUNCTION oncebox_host.capture(p_table oid, p_before text, p_after text)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_left int;
    v_captured text;
BEGIN
    IF pg_trigger_depth() = 0 THEN
        RAISE EXCEPTION 'denied' USING ERRCODE = '42501';
    END IF;
    -- Empty: more than can be kept came before, in the same statement.
    v_left := nullif(current_setting('oncebox.capture', true), '')::int;
    IF v_left IS NULL THEN
        RETURN;
    END IF;
    v_captured := coalesce(current_setting('oncebox.captured', true), '')
        || json_build_array(p_table::bigint, p_before, p_after)::text || chr(10);
    IF v_left < 1 OR octet_length(v_captured) > 262144 THEN
        PERFORM set_config('oncebox.captured', '!too_many_changes', true),
            set_config('oncebox.capture', '', true);
    ELSE
        PERFORM set_config('oncebox.captured', v_captured, true),
            set_config('oncebox.capture', (v_left - 1)::text, true);
    END IF;
END $$;
