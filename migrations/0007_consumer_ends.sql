-- Nothing of a consumer that is being deleted is claimed, leased or completed any more: a host that nobody can
-- reach is denied by the database when it comes back.

CREATE OR REPLACE FUNCTION oncebox.authorize(p_secret bytea, p_consumer int, OUT class smallint, OUT bucket timestamptz,
    OUT generation_required bigint)
LANGUAGE plpgsql STABLE AS $$
BEGIN
    SELECT c.retention_class, date_bin(r.bucket, now(), '2000-01-03 00:00:00+00'), c.generation_required
        INTO class, bucket, generation_required
    FROM oncebox.consumer c
    JOIN oncebox.tenant t USING (tenant_id)
    JOIN oncebox.retention_class r USING (retention_class)
    WHERE c.consumer_id = p_consumer AND c.state <> 'deleting' AND t.login = session_user
      AND (t.secret_hash = sha256(p_secret) OR (t.secret_hash_before = sha256(p_secret) AND t.secret_before_until > now()));
    IF NOT FOUND THEN
        RAISE EXCEPTION 'denied' USING ERRCODE = '42501';
    END IF;
END $$;
