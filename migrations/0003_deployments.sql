-- Versions that were checked, deployments with a beginning and an end, the hosts that run them, and who may
-- change them.

-- Components ---------------------------------------------------------------------------------

-- A component is checked and compiled once before a version of it can be deployed. What was stored before
-- this migration had been compiled by the command that deployed it.
ALTER TABLE oncebox.component
    ADD COLUMN state text NOT NULL DEFAULT 'ready'
        CONSTRAINT component_state_known CHECK (state IN ('queued', 'compiling', 'ready', 'failed')),
    ADD COLUMN state_at timestamptz NOT NULL DEFAULT now(),
    -- Why it cannot be deployed: [{"code": …, "text": …}].
    ADD COLUMN problems jsonb NOT NULL DEFAULT '[]',
    -- What it is: imports, languages, sizes.
    ADD COLUMN report jsonb,
    ADD COLUMN compile_ms bigint,
    -- Compilations that were begun; one that ended its process is not tried for ever.
    ADD COLUMN compile_starts int NOT NULL DEFAULT 0,
    -- The host that compiles it.
    ADD COLUMN host_id bigint,
    ADD CONSTRAINT component_failed_has_problem CHECK (state <> 'failed' OR jsonb_array_length(problems) > 0);
CREATE INDEX component_unfinished ON oncebox.component (state_at) WHERE state IN ('queued', 'compiling');

ALTER TABLE oncebox.version
    -- SHA-256 of what was uploaded, where that was a core module.
    ADD COLUMN source_digest bytea CONSTRAINT version_source_digest_length CHECK (octet_length(source_digest) = 32),
    ADD COLUMN created_by text NOT NULL DEFAULT 'unknown';

-- Deployments --------------------------------------------------------------------------------

-- A row is live until it ends, and is never brought back: going back is a new row. An event type, a range
-- of event versions and a role together are a slot, which holds one live row.
ALTER TABLE oncebox.deployment
    -- A semantic-version requirement such as `>=2, <4`; null takes every version, and none.
    ADD COLUMN event_versions text,
    ADD COLUMN role text NOT NULL DEFAULT 'stable'
        CONSTRAINT deployment_role_known CHECK (role IN ('stable', 'canary', 'shadow')),
    -- Of ordering keys for a canary, of messages for a shadow.
    ADD COLUMN percent double precision,
    -- Overrides of the consumer's caps.
    ADD COLUMN limits jsonb NOT NULL DEFAULT '{}',
    -- Name of the migration that the tenant's schema must hold.
    ADD COLUMN requires_migration text,
    ADD COLUMN retries text NOT NULL DEFAULT 'live'
        CONSTRAINT deployment_retries_known CHECK (retries IN ('live', 'pinned')),
    -- What ends a canary by itself.
    ADD COLUMN guard jsonb,
    -- The consumer's generation that it began with.
    ADD COLUMN generation bigint NOT NULL DEFAULT 0,
    ADD COLUMN created_by text NOT NULL DEFAULT 'unknown',
    ADD COLUMN ended_at timestamptz,
    ADD COLUMN ended_how text
        CONSTRAINT deployment_ended_how_known CHECK (ended_how IN ('superseded', 'rolled_back', 'promoted', 'ended')),
    ADD COLUMN ended_reason text,
    ADD CONSTRAINT deployment_percent_fits_role
        CHECK (CASE role WHEN 'stable' THEN percent IS NULL ELSE percent > 0 AND percent <= 100 END),
    ADD CONSTRAINT deployment_guard_is_of_canary CHECK ((role = 'canary') = (guard IS NOT NULL)),
    ADD CONSTRAINT deployment_end_has_how CHECK ((ended_at IS NULL) = (ended_how IS NULL));

UPDATE oncebox.deployment d SET ended_at = n.created_at, ended_how = 'superseded'
FROM (SELECT deployment_id, lead(created_at) OVER (PARTITION BY consumer_id, event_type ORDER BY deployment_id) AS created_at
      FROM oncebox.deployment) n
WHERE n.deployment_id = d.deployment_id AND n.created_at IS NOT NULL;
UPDATE oncebox.deployment d SET generation = c.generation FROM oncebox.consumer c WHERE c.consumer_id = d.consumer_id;

CREATE UNIQUE INDEX deployment_slot ON oncebox.deployment (consumer_id, event_type, coalesce(event_versions, ''), role)
    WHERE ended_at IS NULL;

-- What became of runs, while a canary is compared with the stable version of its slot.
CREATE TABLE oncebox.deployment_outcome (
    deployment_id         bigint NOT NULL REFERENCES oncebox.deployment,
    -- Start of the second in which the runs ended.
    at                    timestamptz NOT NULL,
    completed             bigint NOT NULL,
    failed                bigint NOT NULL,
    PRIMARY KEY (deployment_id, at)
);

-- Migrations of a tenant's own tables, by name.
CREATE TABLE oncebox.tenant_migration (
    tenant_id             int NOT NULL REFERENCES oncebox.tenant ON DELETE CASCADE,
    name                  text NOT NULL CONSTRAINT tenant_migration_name_shape CHECK (name ~ '^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$'),
    -- SHA-256 of its text.
    digest                bytea NOT NULL,
    applied_at            timestamptz NOT NULL DEFAULT now(),
    applied_by            text NOT NULL,
    PRIMARY KEY (tenant_id, name)
);

-- The record of a migration, written by the owner's session in the very transaction of its statements.
CREATE FUNCTION oncebox_host.migration_applied(p_secret bytea, p_name text, p_digest bytea, p_actor text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO oncebox.tenant_migration (tenant_id, name, digest, applied_by)
    SELECT t.tenant_id, p_name, p_digest, p_actor FROM oncebox.tenant t
    WHERE t.owner_login = session_user AND t.secret_hash = sha256(p_secret);
    IF NOT FOUND THEN
        RAISE EXCEPTION 'denied' USING ERRCODE = '42501';
    END IF;
    INSERT INTO oncebox.audit (actor, action, subject, tenant, details)
    SELECT p_actor, 'tenant.migrate', format('%s/%s', t.name, p_name), t.name, jsonb_build_object('digest', encode(p_digest, 'hex'))
    FROM oncebox.tenant t WHERE t.owner_login = session_user;
END $$;

-- Messages without a handler -----------------------------------------------------------------

-- What this transaction parked for want of a handler becomes what the consumer's policy says instead.
CREATE FUNCTION oncebox_host.settle_unrouted(p_secret bytea, p_consumer int, p_id text[], p_status text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
DECLARE
    v record;
BEGIN
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);
    IF p_status NOT IN ('skipped', 'failed_terminal') THEN
        RAISE EXCEPTION 'a message without a handler cannot become `%`', p_status USING ERRCODE = '22023';
    END IF;
    UPDATE oncebox.inbox i SET status = p_status,
        payload = CASE WHEN p_status <> 'skipped' THEN i.payload END,
        headers = CASE WHEN p_status <> 'skipped' THEN i.headers END
    WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = ANY (p_id)
      AND i.status = 'parked' AND i.reason = 'no_route' AND i.xmin = pg_current_xact_id()::xid;
END $$;

-- Hosts --------------------------------------------------------------------------------------

-- A row per running host, seen every few seconds, gone after a clean end.
CREATE TABLE oncebox.host (
    host_id               bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name                  text NOT NULL,
    started_at            timestamptz NOT NULL DEFAULT now(),
    seen_at               timestamptz NOT NULL DEFAULT now()
);

-- What a host runs of a consumer, and how far it is with the next.
CREATE TABLE oncebox.host_consumer (
    host_id               bigint NOT NULL REFERENCES oncebox.host ON DELETE CASCADE,
    consumer_id           int NOT NULL REFERENCES oncebox.consumer ON DELETE CASCADE,
    -- The generation that it runs; 0 before the first.
    generation            bigint NOT NULL DEFAULT 0,
    -- The generation that it loads or failed to load.
    next_generation       bigint NOT NULL,
    state                 text NOT NULL CONSTRAINT host_consumer_state_known CHECK (state IN ('compiling', 'switched', 'failed')),
    error                 text,
    at                    timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (host_id, consumer_id)
);

-- Leases with the version that ran last -----------------------------------------------------

-- `lease`, and the version that the message's last run was of.
CREATE FUNCTION oncebox_host.lease_with_version(p_secret bytea, p_consumer int, p_owner text, p_limit int, p_lease_ms bigint, p_crashes_max int)
RETURNS TABLE (id text, topic text, partition int, "offset" bigint, timestamp_ms bigint, key bytea, ordering_key bytea, source text,
    event_type text, event_version text, content_type text, trace_parent text, headers bytea, payload bytea,
    payload_hash bytea, attempts int, epoch bigint, version_id int)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
DECLARE
    v record;
BEGIN
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);
    RETURN QUERY
    SELECT l.*, (SELECT i.version_id FROM oncebox.inbox i
                 WHERE i.consumer_id = p_consumer AND i.message_id = l.id AND i.retention_class = v.class LIMIT 1)
    FROM oncebox_host.lease(p_secret, p_consumer, p_owner, p_limit, p_lease_ms, p_crashes_max) l;
END $$;

-- Who may change things ----------------------------------------------------------------------

CREATE TABLE oncebox.token (
    token_id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name                  text NOT NULL CONSTRAINT token_name_shape CHECK (name ~ '^[A-Za-z0-9][A-Za-z0-9._@-]{0,62}$'),
    -- SHA-256 of the token, which is random and shown once.
    hash                  bytea NOT NULL CONSTRAINT token_hash_unique UNIQUE CONSTRAINT token_hash_length CHECK (octet_length(hash) = 32),
    role                  text NOT NULL CONSTRAINT token_role_known CHECK (role IN ('viewer', 'operator', 'deployer', 'admin')),
    -- Null reaches every tenant.
    tenant_id             int REFERENCES oncebox.tenant ON DELETE CASCADE,
    created_at            timestamptz NOT NULL DEFAULT now(),
    created_by            text NOT NULL,
    expires_at            timestamptz,
    revoked_at            timestamptz
);

-- The tenant that a change was about, where it was about one.
ALTER TABLE oncebox.audit ADD COLUMN tenant text;
UPDATE oncebox.audit SET tenant = split_part(subject, '/', 1);
CREATE INDEX audit_of_tenant ON oncebox.audit (tenant, audit_id DESC);

CREATE FUNCTION oncebox.audit_is_append_only() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'the audit log is append-only';
END $$;
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON oncebox.audit
    FOR EACH STATEMENT EXECUTE FUNCTION oncebox.audit_is_append_only();
