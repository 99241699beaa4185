-- Notes that a change could not be kept: a type of the tenant does not write its value as text, for
-- instance.
CREATE OR REPLACE FUNCTION oncebox_host.capture_failed() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF pg_trigger_depth() = 0 THEN
        RAISE EXCEPTION 'denied' USING ERRCODE = '42501';
    END IF;
    PERFORM set_config('oncebox.captured', '!not_captured', true),
        set_config('oncebox.capture', '', true);
END $$;
