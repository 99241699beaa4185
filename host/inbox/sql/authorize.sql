-- Returns the caller's consumer, where its session and its secret belong to that consumer's tenant.
-- While a tenant's credentials are rotated, the secret before counts too. Nothing of a consumer
-- that is being deleted is claimed, leased or completed any more: the database denies it to a host
-- that cannot be reached when that host comes back. So it is with a tenant whose inbox is in another
-- database now.
--
-- Called by the host's functions alone, which have set the search path.
CREATE OR REPLACE FUNCTION oncebox.authorize(
    p_secret bytea, p_consumer int, OUT class smallint, OUT bucket timestamptz,
    OUT generation_required bigint)
LANGUAGE plpgsql STABLE AS $$
BEGIN
    SELECT c.retention_class, date_bin(r.bucket, now(), '2000-01-03 00:00:00+00'),
            c.generation_required
        INTO class, bucket, generation_required
    FROM oncebox.consumer c
    JOIN oncebox.tenant t USING (tenant_id)
    JOIN oncebox.retention_class r USING (retention_class)
    WHERE c.consumer_id = p_consumer AND c.state <> 'deleting' AND t.login = session_user
      AND t.database_url IS NULL
      AND (t.secret_hash = sha256(p_secret)
        OR (t.secret_hash_before = sha256(p_secret) AND t.secret_before_until > now()));
    IF NOT FOUND THEN
        RAISE EXCEPTION 'denied' USING ERRCODE = '42501';
    END IF;
END $$;
