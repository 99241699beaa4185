-- Tenants and consumers that change while they run: states, limits, credentials that can be rotated, and a
-- database of a tenant's own.

ALTER TABLE oncebox.tenant
    ADD COLUMN state text NOT NULL DEFAULT 'active'
        CONSTRAINT tenant_state_known CHECK (state IN ('active', 'suspended', 'deleting')),
    -- What hosts give it, as `TenantLimits` reads it.
    ADD COLUMN limits jsonb NOT NULL DEFAULT '{}',
    -- Grows with every change that running hosts have to hear of: state, limits, credentials.
    ADD COLUMN revision bigint NOT NULL DEFAULT 0,
    -- Passwords and secret, sealed under the master key. Null: derived from that key, as before this migration.
    ADD COLUMN credentials bytea,
    -- While credentials are rotated, sessions with the old secret still count.
    ADD COLUMN secret_hash_before bytea,
    ADD COLUMN secret_before_until timestamptz,
    -- Where its inbox and its tables are, sealed under the master key. Null: in this database.
    ADD COLUMN database_url bytea,
    ADD CONSTRAINT tenant_secret_before_has_end CHECK ((secret_hash_before IS NULL) = (secret_before_until IS NULL));

ALTER TABLE oncebox.consumer
    ADD COLUMN state text NOT NULL DEFAULT 'running'
        CONSTRAINT consumer_state_known CHECK (state IN ('running', 'paused', 'draining', 'deleting')),
    -- Grows with every change of policy or state; a host that runs an older one starts the consumer anew.
    ADD COLUMN revision bigint NOT NULL DEFAULT 0,
    -- Offsets that its group is to be set to, until that is done.
    ADD COLUMN seek jsonb;

-- How a host is with a consumer, beside how far it is with its deployments.
ALTER TABLE oncebox.host_consumer
    ADD COLUMN run_state text NOT NULL DEFAULT 'starting'
        CONSTRAINT host_consumer_run_state_known CHECK (run_state IN ('starting', 'idle', 'running', 'stopped', 'failing')),
    -- The consumer's revision that `run_state` speaks of.
    ADD COLUMN run_revision bigint NOT NULL DEFAULT 0,
    ADD COLUMN run_error text,
    -- Circuit breakers that are not closed: [{"version_id": …, "state": …, …}].
    ADD COLUMN breakers jsonb NOT NULL DEFAULT '[]';

-- The caller's consumer, when its session and its secret belong to that consumer's tenant.
CREATE OR REPLACE FUNCTION oncebox.authorize(p_secret bytea, p_consumer int, OUT class smallint, OUT bucket timestamptz,
    OUT generation_required bigint)
LANGUAGE plpgsql STABLE AS $$
BEGIN
    SELECT c.retention_class, date_bin(r.bucket, now(), '2000-01-03 00:00:00+00'), c.generation_required
        INTO class, bucket, generation_required
    FROM oncebox.consumer c
    JOIN oncebox.tenant t USING (tenant_id)
    JOIN oncebox.retention_class r USING (retention_class)
    WHERE c.consumer_id = p_consumer AND t.login = session_user
      AND (t.secret_hash = sha256(p_secret) OR (t.secret_hash_before = sha256(p_secret) AND t.secret_before_until > now()));
    IF NOT FOUND THEN
        RAISE EXCEPTION 'denied' USING ERRCODE = '42501';
    END IF;
END $$;

CREATE OR REPLACE FUNCTION oncebox_host.migration_applied(p_secret bytea, p_name text, p_digest bytea, p_actor text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO oncebox.tenant_migration (tenant_id, name, digest, applied_by)
    SELECT t.tenant_id, p_name, p_digest, p_actor FROM oncebox.tenant t
    WHERE t.owner_login = session_user
      AND (t.secret_hash = sha256(p_secret) OR (t.secret_hash_before = sha256(p_secret) AND t.secret_before_until > now()));
    IF NOT FOUND THEN
        RAISE EXCEPTION 'denied' USING ERRCODE = '42501';
    END IF;
    INSERT INTO oncebox.audit (actor, action, subject, tenant, details)
    SELECT p_actor, 'tenant.migrate', format('%s/%s', t.name, p_name), t.name, jsonb_build_object('digest', encode(p_digest, 'hex'))
    FROM oncebox.tenant t WHERE t.owner_login = session_user;
END $$;
