-- Captures the change of a row: the trigger of tenants' tables. Runs as the tenant, whose types may
-- have output functions of its own. Whatever goes wrong here is not the message's: the block takes
-- it back, and neither it nor what it calls writes a row, so it costs no transaction id.
CREATE OR REPLACE FUNCTION oncebox_host.capture_row() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    BEGIN
        PERFORM oncebox_host.capture(TG_RELID, OLD::text, NEW::text);
    EXCEPTION WHEN OTHERS THEN
        PERFORM oncebox_host.capture_failed();
    END;
    RETURN NULL;
END $$;
