-- Returns the start of the bucket of a retention class in which a time is.
CREATE OR REPLACE FUNCTION oncebox.bucket_at(p_class smallint, p_at timestamptz) RETURNS timestamptz
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT date_bin(r.bucket, p_at, '2000-01-03 00:00:00+00')
    FROM oncebox.retention_class r WHERE r.retention_class = p_class
$$;
