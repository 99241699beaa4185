-- Shadow deployments: what runs of the live version change, row by row, and what a candidate would have
-- changed instead.

-- Changes of rows ------------------------------------------------------------------------------
--
-- While a tenant has a shadow, each of its tables carries a trigger that does nothing unless the host has
-- set `oncebox.capture` in the transaction. What it sees is kept in a second setting of the session,
-- `oncebox.captured`, and in no table: both are set for the transaction only, so a rollback takes them
-- back, also one to a savepoint, and nothing is written, logged or left to be vacuumed. Nobody but the
-- functions here can set them: guests send no SET, and `set_config` is taken from PUBLIC.
--
-- `oncebox.capture` is the number of changes that may still come, `oncebox.captured` a JSON array
-- [table, before, after] a line, rows as PostgreSQL writes them; or `!` and why nothing is compared.

-- Keep one change. Only from within a trigger, so that no guest calls it by itself.
CREATE FUNCTION oncebox_host.capture(p_table oid, p_before text, p_after text) RETURNS void
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
        PERFORM set_config('oncebox.captured', '!too_many_changes', true), set_config('oncebox.capture', '', true);
    ELSE
        PERFORM set_config('oncebox.captured', v_captured, true), set_config('oncebox.capture', (v_left - 1)::text, true);
    END IF;
END $$;

-- A change could not be kept: a type of the tenant does not write its value as text, for instance.
CREATE FUNCTION oncebox_host.capture_failed() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF pg_trigger_depth() = 0 THEN
        RAISE EXCEPTION 'denied' USING ERRCODE = '42501';
    END IF;
    PERFORM set_config('oncebox.captured', '!not_captured', true), set_config('oncebox.capture', '', true);
END $$;

-- Runs as the tenant, whose types may have output functions of its own. Whatever goes wrong here is not
-- the message's: the block takes it back, and neither it nor what it calls writes a row, so it costs no
-- transaction id.
CREATE FUNCTION oncebox_host.capture_row() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    BEGIN
        PERFORM oncebox_host.capture(TG_RELID, OLD::text, NEW::text);
    EXCEPTION WHEN OTHERS THEN
        PERFORM oncebox_host.capture_failed();
    END;
    RETURN NULL;
END $$;

-- What was captured since capturing began, which ends with this. `is_complete`: every table of the tenant
-- carries the trigger. A trigger comes and goes under a lock that excludes writers, so what is there now was
-- there for every row that this transaction wrote. Times bound what a clock of this transaction can have
-- said, in microseconds since the epoch.
CREATE FUNCTION oncebox_host.captured(p_secret bytea, OUT captured text, OUT is_complete boolean,
    OUT began_us bigint, OUT ended_us bigint, OUT zone_s int)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_schema name;
BEGIN
    SELECT t.schema_name INTO v_schema FROM oncebox.tenant t
    WHERE t.login = session_user AND t.secret_hash = sha256(p_secret);
    IF NOT FOUND THEN
        RAISE EXCEPTION 'denied' USING ERRCODE = '42501';
    END IF;
    captured := coalesce(current_setting('oncebox.captured', true), '');
    -- Switched off by nobody but a rollback of all that there was.
    IF coalesce(current_setting('oncebox.capture', true), '') = '' AND captured NOT LIKE '!%' THEN
        captured := '!not_captured';
    END IF;
    is_complete := NOT EXISTS (SELECT FROM oncebox.capture_missing(v_schema));
    began_us := extract(epoch FROM now()) * 1000000;
    ended_us := extract(epoch FROM clock_timestamp()) * 1000000;
    zone_s := extract(timezone FROM now());
    PERFORM set_config('oncebox.captured', '', true), set_config('oncebox.capture', '', true);
END $$;

-- Tables of a tenant without a trigger that works. Partitions have their parent's.
CREATE FUNCTION oncebox.capture_missing(p_schema name) RETURNS SETOF name
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = p_schema AND c.relkind IN ('r', 'p') AND NOT c.relispartition
      AND NOT EXISTS (SELECT FROM pg_trigger g JOIN pg_proc p ON p.oid = g.tgfoid
                      WHERE g.tgrelid = c.oid AND g.tgname = 'RI_oncebox_capture' AND g.tgenabled IN ('O', 'A')
                        AND p.proname = 'capture_row' AND p.pronamespace = 'oncebox_host'::regnamespace)
    ORDER BY 1
$$;

-- What was found --------------------------------------------------------------------------------

-- Sums of one shadow. Every message that was sampled is in one of `same`, `differ`, `failed` and `skipped`.
CREATE TABLE oncebox.shadow_total (
    deployment_id         bigint PRIMARY KEY REFERENCES oncebox.deployment ON DELETE CASCADE,
    messages              bigint NOT NULL DEFAULT 0,
    same                  bigint NOT NULL DEFAULT 0,
    differ                bigint NOT NULL DEFAULT 0,
    -- The candidate failed where the live version did not.
    failed                bigint NOT NULL DEFAULT 0,
    -- Not compared, by reason.
    skipped               jsonb NOT NULL DEFAULT '{}',
    -- Of what was compared: same and differ.
    live_us               bigint NOT NULL DEFAULT 0,
    candidate_us          bigint NOT NULL DEFAULT 0,
    live_statements       bigint NOT NULL DEFAULT 0,
    candidate_statements  bigint NOT NULL DEFAULT 0,
    first_at              timestamptz NOT NULL DEFAULT now(),
    last_at               timestamptz NOT NULL DEFAULT now()
);

-- In how many messages something differs in the same way; complete, however many there are.
CREATE TABLE oncebox.shadow_sum (
    deployment_id         bigint NOT NULL REFERENCES oncebox.deployment ON DELETE CASCADE,
    -- Empty where the outcome differs.
    "table"               text NOT NULL,
    change                text NOT NULL,
    -- Empty where a whole row differs; `result`, `failure` where the outcome does.
    "column"              text NOT NULL,
    messages              bigint NOT NULL,
    PRIMARY KEY (deployment_id, "table", change, "column")
);

-- The newest differences, with values as PostgreSQL writes them, cut.
CREATE TABLE oncebox.shadow_difference (
    difference_id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    deployment_id         bigint NOT NULL REFERENCES oncebox.deployment ON DELETE CASCADE,
    at                    timestamptz NOT NULL DEFAULT now(),
    message_id            text NOT NULL,
    "table"               text NOT NULL,
    change                text NOT NULL,
    "column"              text NOT NULL,
    row_key               text,
    before                text,
    live                  text,
    candidate             text
);
CREATE INDEX shadow_difference_newest ON oncebox.shadow_difference (deployment_id, difference_id DESC);
