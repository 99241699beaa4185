-- Returns whether a row is a dead letter, or parked, that could run again if its record had been
-- kept. Called by functions that have set the search path.
CREATE OR REPLACE FUNCTION oncebox.has_lost_record(p_status text, p_reason text, p_headers bytea)
RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT p_status IN ('failed_terminal', 'parked') AND p_headers IS NULL
        AND p_reason !~ '^(undecodable|unclaimable)'
$$;
