-- Records a migration of a tenant's own tables: the owner's session writes it in the very
-- transaction of its statements. While credentials are rotated, the secret before counts too.
CREATE OR REPLACE FUNCTION oncebox_host.migration_applied(
    p_secret bytea, p_name text, p_digest bytea, p_actor text)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO oncebox.tenant_migration (tenant_id, name, digest, applied_by)
    SELECT t.tenant_id, p_name, p_digest, p_actor FROM oncebox.tenant t
    WHERE t.owner_login = session_user AND t.database_url IS NULL
      AND (t.secret_hash = sha256(p_secret)
        OR (t.secret_hash_before = sha256(p_secret) AND t.secret_before_until > now()));
    IF NOT FOUND THEN
        RAISE EXCEPTION 'denied' USING ERRCODE = '42501';
    END IF;
    INSERT INTO oncebox.audit (actor, action, subject, tenant, details)
    SELECT p_actor, 'tenant.migrate', format('%s/%s', t.name, p_name), t.name,
        jsonb_build_object('digest', encode(p_digest, 'hex'))
    FROM oncebox.tenant t WHERE t.owner_login = session_user;
END $$;
