-- Returns what was captured since capturing began, and ends it. `is_complete`: every table of the
-- tenant carries the trigger. A trigger comes and goes under a lock that excludes writers, so what
-- is there now was there for every row that this transaction wrote. Times bound what a clock of
-- this transaction can have said, in microseconds since the epoch. While a tenant's credentials are
-- rotated, the secret before counts too, as it does for claims.
CREATE OR REPLACE FUNCTION oncebox_host.captured(
    p_secret bytea, OUT captured text, OUT is_complete boolean, OUT began_us bigint,
    OUT ended_us bigint, OUT zone_s int)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_schema name;
BEGIN
    SELECT t.schema_name INTO v_schema FROM oncebox.tenant t
    WHERE t.login = session_user
      AND (t.secret_hash = sha256(p_secret)
        OR (t.secret_hash_before = sha256(p_secret) AND t.secret_before_until > now()));
    IF NOT FOUND THEN
        RAISE EXCEPTION 'denied' USING ERRCODE = '42501';
    END IF;
    captured := coalesce(current_setting('oncebox.captured', true), '');
    -- Only a rollback of all that there was switches it off.
    IF coalesce(current_setting('oncebox.capture', true), '') = '' AND captured NOT LIKE '!%' THEN
        captured := '!not_captured';
    END IF;
    is_complete := NOT EXISTS (SELECT FROM oncebox.capture_missing(v_schema));
    began_us := extract(epoch FROM now()) * 1000000;
    ended_us := extract(epoch FROM clock_timestamp()) * 1000000;
    zone_s := extract(timezone FROM now());
    PERFORM set_config('oncebox.captured', '', true), set_config('oncebox.capture', '', true);
END $$;
