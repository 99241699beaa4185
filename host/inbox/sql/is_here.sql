-- Returns whether a tenant has its inbox in this database: its row is here, it is not shut out, as
-- during its move to another database and its deletion, and its database is no other one.
--
-- The caller's transaction changes rows of the tenant by the host's login, which needs no secret.
-- Until it ends, no move begins to copy (`HostLock::Copy` in host/control): a change that is made
-- here is copied, or is refused.
CREATE OR REPLACE FUNCTION oncebox.is_here(p_tenant int) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(0, p_tenant * 16 + 10);
    -- Its own snapshot, taken after the wait for the lock.
    RETURN EXISTS (SELECT FROM oncebox.tenant t WHERE t.tenant_id = p_tenant
        AND t.secret_hash <> '' AND t.database_url IS NULL);
END $$;
