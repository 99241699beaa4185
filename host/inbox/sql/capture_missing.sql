-- Returns the tables of a tenant without a capturing trigger that works. Partitions have their
-- parent's.
CREATE OR REPLACE FUNCTION oncebox.capture_missing(p_schema name) RETURNS SETOF name
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = p_schema AND c.relkind IN ('r', 'p') AND NOT c.relispartition
      AND NOT EXISTS (SELECT FROM pg_trigger g JOIN pg_proc p ON p.oid = g.tgfoid
        WHERE g.tgrelid = c.oid AND g.tgname = 'RI_oncebox_capture' AND g.tgenabled IN ('O', 'A')
          AND p.proname = 'capture_row' AND p.pronamespace = 'oncebox_host'::regnamespace)
    ORDER BY 1
$$;
