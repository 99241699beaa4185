-- Tables, constraints, indexes, views, seeds and grants. The functions are files of their own, in
-- host/inbox/sql: `oncebox migrate` applies them after the numbered migrations.
--
-- Run as the role that owns the schemas `oncebox` (tables, reachable by the host alone) and
-- `oncebox_host` (functions, the only way a tenant's session reaches the inbox).

-- The installation ----------------------------------------------------------------------------

-- Names the installation that a database belongs to. Empty until the installation has a tenant with
-- a database of its own.
CREATE TABLE oncebox.installation (
    only_one              boolean PRIMARY KEY DEFAULT true
                          CONSTRAINT installation_only_one CHECK (only_one),
    installation_id       uuid NOT NULL,
    -- Whether this database holds tenants of another database's installation, and nothing else.
    is_dedicated          boolean NOT NULL
);

-- Records the functions that `oncebox migrate` applied: the text of each, and the schema number of
-- the program that applied it. A program with a lower number changes nothing, so that an older host
-- that starts later never puts an older text back.
CREATE TABLE oncebox.function (
    -- Schema and name.
    name                  text PRIMARY KEY,
    -- SHA-256 of the file.
    hash                  bytea NOT NULL,
    -- SHA-256 of the function in PostgreSQL after it was applied, which reveals changes by hand.
    definition_hash       bytea NOT NULL,
    -- Schema number of the program that applied it.
    schema_number         int NOT NULL,
    -- Time of the last application.
    applied_at            timestamptz NOT NULL DEFAULT now()
);

-- Tenants --------------------------------------------------------------------------------------

CREATE TABLE oncebox.tenant (
    tenant_id             int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name                  text NOT NULL CONSTRAINT tenant_name_unique UNIQUE
                          CONSTRAINT tenant_name_shape CHECK (name ~ '^[a-z][a-z0-9-]{0,62}$'),
    -- Opaque, because every role can read the catalogs.
    schema_name           text NOT NULL UNIQUE,
    login                 text NOT NULL UNIQUE,
    owner_login           text NOT NULL UNIQUE,
    -- SHA-256 of the secret that the host binds to every call of an `oncebox_host` function.
    secret_hash           bytea NOT NULL,
    created_at            timestamptz NOT NULL DEFAULT now(),
    state                 text NOT NULL DEFAULT 'active'
        CONSTRAINT tenant_state_known CHECK (state IN ('active', 'suspended', 'deleting')),
    -- Limits that hosts apply to the tenant, as `TenantLimits` reads them.
    limits                jsonb NOT NULL DEFAULT '{}',
    -- Plus one at each change that running hosts must learn: of state, limits or credentials.
    revision              bigint NOT NULL DEFAULT 0,
    -- Passwords and secret, sealed under the master key. Null: derived from that key.
    credentials           bytea,
    -- Hash of the secret before the last rotation, and the time until which sessions may use it.
    secret_hash_before    bytea,
    secret_before_until   timestamptz,
    -- URL of the database with its inbox and its tables, sealed under the master key. Null: this
    -- database. A database of its own holds a replica of this row and of its consumers, which the
    -- host functions there read; this database stays the source.
    database_url          bytea,
    -- Host, port and name of `database_url`, for readers.
    database              text,
    CONSTRAINT tenant_secret_before_has_end
        CHECK ((secret_hash_before IS NULL) = (secret_before_until IS NULL)),
    CONSTRAINT tenant_database_is_shown CHECK (database_url IS NULL OR database IS NOT NULL)
);

-- Migrations of a tenant's own tables, by name.
CREATE TABLE oncebox.tenant_migration (
    tenant_id             int NOT NULL REFERENCES oncebox.tenant ON DELETE CASCADE,
    name                  text NOT NULL CONSTRAINT tenant_migration_name_shape
                          CHECK (name ~ '^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$'),
    -- SHA-256 of its text.
    digest                bytea NOT NULL,
    applied_at            timestamptz NOT NULL DEFAULT now(),
    applied_by            text NOT NULL,
    PRIMARY KEY (tenant_id, name)
);

-- The stores that a tenant has access to, from which hosts fetch the payloads that its messages
-- refer to. The settings of hosts say where a store is. Rows are in the host's database alone.
CREATE TABLE oncebox.tenant_store (
    tenant_id             int NOT NULL REFERENCES oncebox.tenant ON DELETE CASCADE,
    store                 text NOT NULL CONSTRAINT tenant_store_shape
                          CHECK (store ~ '^[a-z][a-z0-9-]{0,62}$'),
    bucket                text NOT NULL,
    -- References may not leave it. Empty: the whole bucket.
    prefix                text NOT NULL,
    -- Id and secret of the tenant's access key, sealed under the master key.
    access_key            bytea NOT NULL,
    set_at                timestamptz NOT NULL DEFAULT now(),
    set_by                text NOT NULL,
    PRIMARY KEY (tenant_id, store)
);

-- Endpoints: places outside to which the tenant's handlers send, by their names
-- (`http:<endpoint>`). The settings of hosts and the tenant's limits say which hosts are allowed,
-- and are compared again before each request. Rows are in the host's database alone.
CREATE TABLE oncebox.endpoint (
    tenant_id             int NOT NULL REFERENCES oncebox.tenant ON DELETE CASCADE,
    name                  text NOT NULL CONSTRAINT endpoint_name_shape
                          CHECK (name ~ '^[a-z][a-z0-9-]{0,62}$'),
    -- 1 at first, plus one at each change.
    revision              bigint NOT NULL DEFAULT 1,
    -- Scheme, host and port of the URL, for readers.
    origin                text NOT NULL,
    method                text NOT NULL CONSTRAINT endpoint_method_known
                          CHECK (method IN ('POST', 'PUT', 'PATCH', 'DELETE')),
    -- Names of the headers that each request has, for readers.
    header_names          text[] NOT NULL,
    -- Number of signing secrets, for readers: 0 for requests without a signature, 2 during a
    -- rotation.
    signing_secrets       int NOT NULL CONSTRAINT endpoint_signing_secrets_few
                          CHECK (signing_secrets BETWEEN 0 AND 2),
    -- URL, headers and signing secrets, sealed under the master key.
    request               bytea NOT NULL,
    -- Longest time for DNS, connection and TLS, and for all of a request.
    connect_timeout_ms    int NOT NULL,
    timeout_ms            int NOT NULL,
    -- Requests a second of one host. Null: no bound.
    requests_per_second   int CONSTRAINT endpoint_rate_positive CHECK (requests_per_second > 0),
    -- Requests of one host at a time.
    requests_max          int NOT NULL CONSTRAINT endpoint_requests_positive
                          CHECK (requests_max > 0),
    -- Failures in a row after which a host's circuit breaker opens, and its first pause.
    failures_max          int NOT NULL CONSTRAINT endpoint_failures_positive
                          CHECK (failures_max > 0),
    pause_ms              int NOT NULL CONSTRAINT endpoint_pause_positive CHECK (pause_ms > 0),
    -- What becomes of answers.
    answer                text NOT NULL CONSTRAINT endpoint_answer_known
                          CHECK (answer IN ('none', 'stored', 'delivered')),
    -- Consumer that gets them, and the type of their events. Null: the consumer that emitted, and
    -- the type of the outgoing message with `.answered` behind it.
    answer_to             text,
    answer_event_type     text,
    -- Whether the receiver recognises a repeated request by its key; else who accepts that it may
    -- act twice, and why.
    receiver_deduplicates boolean NOT NULL,
    duplicates_accepted_by text,
    duplicates_because    text,
    set_at                timestamptz NOT NULL DEFAULT now(),
    set_by                text NOT NULL,
    PRIMARY KEY (tenant_id, name),
    CONSTRAINT endpoint_timeouts_whole CHECK (connect_timeout_ms BETWEEN 1 AND timeout_ms),
    CONSTRAINT endpoint_answers_delivered
        CHECK (answer = 'delivered' OR coalesce(answer_to, answer_event_type) IS NULL),
    CONSTRAINT endpoint_duplicates_decided
        CHECK (receiver_deduplicates = (duplicates_accepted_by IS NULL)
            AND (duplicates_accepted_by IS NULL) = (duplicates_because IS NULL))
);

-- Tokens: the callers of the API, and their rights.
CREATE TABLE oncebox.token (
    token_id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name                  text NOT NULL
        CONSTRAINT token_name_shape CHECK (name ~ '^[A-Za-z0-9][A-Za-z0-9._@-]{0,62}$'),
    -- SHA-256 of the token, which is random and shown once.
    hash                  bytea NOT NULL CONSTRAINT token_hash_unique UNIQUE
                          CONSTRAINT token_hash_length CHECK (octet_length(hash) = 32),
    role                  text NOT NULL CONSTRAINT token_role_known
                          CHECK (role IN ('viewer', 'operator', 'deployer', 'admin')),
    -- Tenant that the token reaches. Null: all tenants.
    tenant_id             int REFERENCES oncebox.tenant ON DELETE CASCADE,
    created_at            timestamptz NOT NULL DEFAULT now(),
    created_by            text NOT NULL,
    expires_at            timestamptz,
    revoked_at            timestamptz
);

-- Sessions of the console: browsers that presented a token. A session has the rights of its token,
-- and ends with it.
CREATE TABLE oncebox.console_session (
    -- SHA-256 of the secret in the browser's cookie, which is random.
    hash                  bytea PRIMARY KEY
                          CONSTRAINT console_session_hash_length CHECK (octet_length(hash) = 32),
    token_id              bigint NOT NULL REFERENCES oncebox.token ON DELETE CASCADE,
    created_at            timestamptz NOT NULL DEFAULT now(),
    expires_at            timestamptz NOT NULL
);
CREATE INDEX console_session_of_token ON oncebox.console_session (token_id, created_at);

-- The audit log: each change and its actor. Append-only.
CREATE TABLE oncebox.audit (
    audit_id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at                    timestamptz NOT NULL DEFAULT now(),
    actor                 text NOT NULL,
    action                text NOT NULL,
    subject               text NOT NULL,
    details               jsonb NOT NULL DEFAULT '{}',
    -- Name of the changed tenant. Null: the change was of no single tenant.
    tenant                text
);
CREATE INDEX audit_of_tenant ON oncebox.audit (tenant, audit_id DESC);

-- A trigger and its function are one rule of their table, so that both stand here.
CREATE FUNCTION oncebox.audit_is_append_only() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'the audit log is append-only';
END $$;
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON oncebox.audit
    FOR EACH STATEMENT EXECUTE FUNCTION oncebox.audit_is_append_only();

-- Consumers ------------------------------------------------------------------------------------

-- A class has its own partitions. A bucket is about a third of the retention, so that a claim
-- probes four or five indexes whatever the retention. No retention: for ever.
CREATE TABLE oncebox.retention_class (
    retention_class       smallint PRIMARY KEY,
    name                  text NOT NULL UNIQUE,
    bucket                interval NOT NULL,
    retention             interval
);
INSERT INTO oncebox.retention_class VALUES
    (1, '7d', '56 hours', '7 days'), (2, '30d', '10 days', '30 days'),
    (3, '1y', '122 days', '366 days'), (4, 'permanent', '366 days', NULL);

CREATE TABLE oncebox.consumer (
    -- Names the advisory locks of its messages, and below zero of its keys; zero is the host's. An
    -- advisory lock of two numbers says in the first one whose it is:
    --
    -- * the consumer's number: a message, by the upper half of its id's hash;
    -- * the same below zero: what messages are in order with, by the upper half of `ordering_hash`;
    -- * zero: the host's own, by a number of the closed list in host/control/src/database/locks.rs.
    --
    -- A sender can choose the numbers that its ids and keys hash to, so they name a lock of their
    -- own consumer and no other. Ids and keys of one consumer that share a lock wait for each other
    -- and are nothing else to each other: rows are found by the whole id, and a key by the whole
    -- `ordering_hash`.
    consumer_id           int GENERATED ALWAYS AS IDENTITY PRIMARY KEY
                          CONSTRAINT consumer_id_positive CHECK (consumer_id > 0),
    tenant_id             int NOT NULL REFERENCES oncebox.tenant,
    name                  text NOT NULL
        CONSTRAINT consumer_name_shape CHECK (name ~ '^[a-z][a-z0-9-]{0,62}$'),
    policy                jsonb NOT NULL,
    retention_class       smallint NOT NULL REFERENCES oncebox.retention_class,
    -- Plus one at each change of the consumer's deployments.
    generation            bigint NOT NULL DEFAULT 0,
    -- Lowest generation that a host must have loaded to claim; raised where an older one must not
    -- run any more.
    generation_required   bigint NOT NULL DEFAULT 0,
    created_at            timestamptz NOT NULL DEFAULT now(),
    state                 text NOT NULL DEFAULT 'running' CONSTRAINT consumer_state_known
                          CHECK (state IN ('running', 'paused', 'draining', 'deleting')),
    -- Plus one at each change of policy or state. A host that runs an older one restarts the
    -- consumer.
    revision              bigint NOT NULL DEFAULT 0,
    -- Offsets to which hosts are to set the consumer's group. Null again once they are set.
    seek                  jsonb,
    -- The `revision` of the last change of the policy. Pausing, resuming and suspending leave it as
    -- it is.
    policy_revision       bigint NOT NULL DEFAULT 0,
    CONSTRAINT consumer_name_unique UNIQUE (tenant_id, name)
);

-- Deliveries that were refused, since their message was done already. Hosts count them in memory
-- and add every two seconds what they refused, so that a duplicate costs no write of its own. What
-- a host that dies had not added yet is lost: the count is a lower bound.
CREATE TABLE oncebox.duplicates_refused (
    consumer_id           int PRIMARY KEY REFERENCES oncebox.consumer ON DELETE CASCADE,
    refused               bigint NOT NULL
        CONSTRAINT duplicates_refused_counts_up CHECK (refused >= 0),
    -- Time of the first count. A consumer without a row has refused no delivery.
    since                 timestamptz NOT NULL,
    -- Time at which a host last added to `refused`.
    last_at               timestamptz
);

-- Versions and deployments -----------------------------------------------------------------------

-- A component is checked and compiled once before a version of it can be deployed.
CREATE TABLE oncebox.component (
    digest                bytea PRIMARY KEY
        CONSTRAINT component_digest_length CHECK (octet_length(digest) = 32),
    bytes                 bytea NOT NULL,
    created_at            timestamptz NOT NULL DEFAULT now(),
    state                 text NOT NULL DEFAULT 'ready' CONSTRAINT component_state_known
                          CHECK (state IN ('queued', 'compiling', 'ready', 'failed')),
    state_at              timestamptz NOT NULL DEFAULT now(),
    -- Reasons against a deployment, set with `failed`: [{"code": …, "text": …}].
    problems              jsonb NOT NULL DEFAULT '[]',
    -- Imports, languages and sizes, set when it is checked.
    report                jsonb,
    compile_ms            bigint,
    -- Compilations so far: plus one at each start. A bound on it ends the attempts of a component
    -- that kills its compiler.
    compile_starts        int NOT NULL DEFAULT 0,
    -- Host that compiles the component. Null: none does.
    host_id               bigint,
    -- The session that the compiling host keeps open for it. When its process ends, the session
    -- ends, and the component is free for the next host at once. Null: the host's silence of 30
    -- seconds says the same.
    session_pid           int,
    -- A process id is given again; together with this it is not.
    session_began_at      timestamptz,
    CONSTRAINT component_failed_has_problem
        CHECK (state <> 'failed' OR jsonb_array_length(problems) > 0)
);
ALTER TABLE oncebox.component ALTER COLUMN bytes SET STORAGE EXTERNAL;
CREATE INDEX component_unfinished ON oncebox.component (state_at)
    WHERE state IN ('queued', 'compiling');

CREATE TABLE oncebox.handler (
    handler_id            int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id             int NOT NULL REFERENCES oncebox.tenant,
    name                  text NOT NULL
        CONSTRAINT handler_name_shape CHECK (name ~ '^[a-z][a-z0-9-]{0,62}$'),
    CONSTRAINT handler_name_unique UNIQUE (tenant_id, name)
);

CREATE TABLE oncebox.version (
    version_id            int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    handler_id            int NOT NULL REFERENCES oncebox.handler,
    digest                bytea NOT NULL REFERENCES oncebox.component,
    created_at            timestamptz NOT NULL DEFAULT now(),
    -- SHA-256 of the upload, where that was a core module.
    source_digest         bytea
        CONSTRAINT version_source_digest_length CHECK (octet_length(source_digest) = 32),
    created_by            text NOT NULL DEFAULT 'unknown',
    CONSTRAINT version_digest_unique UNIQUE (handler_id, digest)
);

-- Outcomes of `oncebox verify` for a version, as somebody stored them. The newest one counts; of
-- each version the newest twenty are kept.
CREATE TABLE oncebox.verification (
    verification_id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    version_id            int NOT NULL REFERENCES oncebox.version ON DELETE CASCADE,
    -- Time at which it was stored.
    at                    timestamptz NOT NULL DEFAULT now(),
    actor                 text NOT NULL,
    -- Whether every window left each effect exactly once.
    is_passed             boolean NOT NULL,
    -- Messages of the file, windows, windows that failed, and workers that were killed.
    messages              int NOT NULL,
    windows               int NOT NULL,
    windows_failed        int NOT NULL,
    killed                int NOT NULL,
    warnings              int NOT NULL,
    -- Seed of orders and repetitions.
    seed                  bigint NOT NULL,
    -- Release of the program that verified.
    program_version       text NOT NULL,
    -- Without a killed worker nothing is shown.
    CONSTRAINT verification_counts CHECK (messages > 0 AND windows > 0 AND killed > 0
        AND warnings >= 0 AND windows_failed BETWEEN 0 AND windows),
    CONSTRAINT verification_passed_is_whole CHECK (NOT is_passed OR windows_failed = 0)
);
CREATE INDEX verification_newest ON oncebox.verification (version_id, verification_id DESC);

-- A row is live until it ends, and is never brought back: going back is a new row. An event type, a
-- range of event versions and a role together are a slot, which holds one live row.
CREATE TABLE oncebox.deployment (
    deployment_id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    consumer_id           int NOT NULL REFERENCES oncebox.consumer,
    -- Event type that it takes; `*` takes all that no other deployment of the consumer takes.
    event_type            text NOT NULL,
    version_id            int NOT NULL REFERENCES oncebox.version,
    settings              jsonb NOT NULL DEFAULT '{}',
    created_at            timestamptz NOT NULL DEFAULT now(),
    -- Requirement on the event's version, such as `>=2, <4`. Null: every version, or none.
    event_versions        text,
    role                  text NOT NULL DEFAULT 'stable'
        CONSTRAINT deployment_role_known CHECK (role IN ('stable', 'canary', 'shadow')),
    -- Percentage of ordering keys for a canary, of messages for a shadow. Changes when a canary
    -- grows.
    percent               double precision,
    -- Overrides of the consumer's caps.
    limits                jsonb NOT NULL DEFAULT '{}',
    -- Rights that the operator gave it beyond its tenant's tables: `emit`, to send messages.
    grants                text[] NOT NULL DEFAULT '{}' CONSTRAINT deployment_grants_known
                          CHECK (grants <@ ARRAY['emit']),
    -- Name of the migration that the tenant's schema must hold.
    requires_migration    text,
    retries               text NOT NULL DEFAULT 'live'
        CONSTRAINT deployment_retries_known CHECK (retries IN ('live', 'pinned')),
    -- Conditions under which a host ends a canary.
    guard                 jsonb,
    -- Generation of the consumer at its start.
    generation            bigint NOT NULL DEFAULT 0,
    created_by            text NOT NULL DEFAULT 'unknown',
    ended_at              timestamptz,
    ended_how             text CONSTRAINT deployment_ended_how_known
        CHECK (ended_how IN ('superseded', 'rolled_back', 'promoted', 'ended')),
    ended_reason          text,
    -- Redrives belong to the transaction that withdraws a version. Where the messages are in
    -- another database, that transaction leaves this mark; a host that finds it redrives there and
    -- takes it away.
    redrive_pending       boolean NOT NULL DEFAULT false,
    -- Messages that a host made due again when it took the mark away.
    redriven              bigint,
    CONSTRAINT deployment_percent_fits_role CHECK (CASE role WHEN 'stable' THEN percent IS NULL
        ELSE percent > 0 AND percent <= 100 END),
    CONSTRAINT deployment_guard_is_of_canary CHECK ((role = 'canary') = (guard IS NOT NULL)),
    CONSTRAINT deployment_end_has_how CHECK ((ended_at IS NULL) = (ended_how IS NULL))
);
CREATE INDEX deployment_live ON oncebox.deployment (consumer_id, event_type, deployment_id DESC);
CREATE UNIQUE INDEX deployment_slot
    ON oncebox.deployment (consumer_id, event_type, coalesce(event_versions, ''), role)
    WHERE ended_at IS NULL;
CREATE INDEX deployment_redrive ON oncebox.deployment (consumer_id) WHERE redrive_pending;

-- Results of runs, while a canary is compared with the stable version of its slot.
CREATE TABLE oncebox.deployment_outcome (
    deployment_id         bigint NOT NULL REFERENCES oncebox.deployment,
    -- Start of the second in which the runs ended.
    at                    timestamptz NOT NULL,
    completed             bigint NOT NULL,
    failed                bigint NOT NULL,
    PRIMARY KEY (deployment_id, at)
);

-- Sums of one shadow. Every message that was sampled is in one of `same`, `differ`, `failed` and
-- `skipped`.
CREATE TABLE oncebox.shadow_total (
    deployment_id         bigint PRIMARY KEY REFERENCES oncebox.deployment ON DELETE CASCADE,
    messages              bigint NOT NULL DEFAULT 0,
    same                  bigint NOT NULL DEFAULT 0,
    differ                bigint NOT NULL DEFAULT 0,
    -- Messages on which the candidate failed and the live version did not.
    failed                bigint NOT NULL DEFAULT 0,
    -- Messages that were not compared, by reason.
    skipped               jsonb NOT NULL DEFAULT '{}',
    -- Sums over the compared messages, `same` and `differ`: microseconds and statements.
    live_us               bigint NOT NULL DEFAULT 0,
    candidate_us          bigint NOT NULL DEFAULT 0,
    live_statements       bigint NOT NULL DEFAULT 0,
    candidate_statements  bigint NOT NULL DEFAULT 0,
    first_at              timestamptz NOT NULL DEFAULT now(),
    last_at               timestamptz NOT NULL DEFAULT now()
);

-- Messages with equal differences, counted without a bound.
CREATE TABLE oncebox.shadow_sum (
    deployment_id         bigint NOT NULL REFERENCES oncebox.deployment ON DELETE CASCADE,
    -- Empty where the outcome differs.
    "table"               text NOT NULL,
    change                text NOT NULL,
    -- Empty where a whole row differs; `result`, `outgoing`, `failure` where the outcome does.
    "column"              text NOT NULL,
    messages              bigint NOT NULL,
    PRIMARY KEY (deployment_id, "table", change, "column")
);

-- The newest differences, with values as PostgreSQL writes them, cut.
CREATE TABLE oncebox.shadow_difference (
    difference_id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    deployment_id         bigint NOT NULL REFERENCES oncebox.deployment ON DELETE CASCADE,
    at                    timestamptz NOT NULL DEFAULT now(),
    message_id            text NOT NULL,
    "table"               text NOT NULL,
    change                text NOT NULL,
    "column"              text NOT NULL,
    row_key               text,
    before                text,
    live                  text,
    candidate             text
);
CREATE INDEX shadow_difference_newest
    ON oncebox.shadow_difference (deployment_id, difference_id DESC);

-- The inbox --------------------------------------------------------------------------------------

-- A row per message. A claim inserts it, and keeps the values of the record; a lease, a completion
-- and an operator's action change the rest.
--
-- The row of a completed message is light where its consumer's policy says `inbox = "light"`. It
-- keeps of the record its position and its timestamp alone: key, type, event version, source, media
-- type, trace context, payload hash, payload and headers are null. So is the ordering key, except
-- where the message has a `sequence_version`.
CREATE TABLE oncebox.inbox (
    consumer_id           int NOT NULL,
    -- Id under which the message is deduplicated: of the record, or made of its position for a
    -- record without one. Never changes.
    message_id            text NOT NULL,
    -- Retention class of the consumer at the claim.
    retention_class       smallint NOT NULL,
    -- Start of the bucket of the last change of `status`; decides how long the row is kept.
    bucket                timestamptz NOT NULL,
    -- Position of the record of the first delivery.
    topic                 text NOT NULL,
    partition             int NOT NULL,
    "offset"              bigint NOT NULL,
    -- Timestamp of the record, by the producer's or the broker's clock, milliseconds.
    record_timestamp_ms   bigint NOT NULL,
    -- Key of the record. Null: the record has none.
    key                   bytea,
    -- Key of the order, as the policy finds it. Null: the message has none.
    ordering_key          bytea,
    -- CloudEvents `source`, or the topic.
    source                text,
    -- Type of the event, which selects the handler; empty where the record was never decoded. Null:
    -- the row is light.
    event_type            text,
    -- Version of the event's schema. Null: the record names none.
    event_version         text,
    -- Media type of the payload. Null: the record names none.
    content_type          text,
    -- W3C trace context. Null: the record has none.
    trace_parent          text,
    -- Status; `MessageStatus` in host/model/src/status.rs says what moves a message to each.
    status                text NOT NULL,
    -- Reason of the status: one of `Reason` in host/model/src/status.rs, and details after a colon.
    -- Set with each status that has one, and null after a completion or a redrive.
    reason                text,
    -- Attempts so far: 1 on a claim that runs the message, else 0, plus one at each lease. Minus
    -- one where a lease is given back, 0 again at a redrive.
    attempts              int NOT NULL DEFAULT 0,
    -- Attempts that ended without an answer, since the process or its connection died: plus one
    -- where another worker takes over an expired lease. Minus one where the database was away
    -- instead, 0 again at a redrive.
    crashes               int NOT NULL DEFAULT 0,
    -- Text of the last failure, for readers. Set with each failure, null after a completion.
    last_error            text,
    -- Time of the next run: set by a failed run, a redrive, a retry, and the release of a key. Null
    -- from the lease on.
    next_attempt_at       timestamptz,
    -- End of the lease, and the host that has it. Set by each lease, null from its end on.
    locked_until          timestamptz,
    locked_by             text,
    -- Leases so far: 0 on insert, plus one at each lease, and where an expired one parks the
    -- message. A worker whose epoch is lower has lost the message.
    epoch                 bigint NOT NULL DEFAULT 0,
    -- Version of the handler that ran the message last, or is about to. Null: none did.
    version_id            int,
    -- Result of the handler, set by the completion.
    result                jsonb,
    -- Payload and encoded headers. A completion and a failure drop them where the policy keeps
    -- none. A redelivery of a dead letter restores them, and an edit replaces the payload.
    payload               bytea,
    headers               bytea,
    -- HMAC-SHA-256 of the payload of the first delivery, under a key of the tenant, which no
    -- rotation changes. A redelivery is compared with it, so that an erasure alone changes it. Null:
    -- the record has no payload, or the row is light or erased.
    payload_hash          bytea,
    -- Time of the erasure of all that the row held of the payload. The row then stays as it is, and
    -- any delivery of its id is a duplicate. Null: not erased.
    erased_at             timestamptz,
    -- Begin of the transaction that inserted the row.
    received_at           timestamptz NOT NULL DEFAULT now(),
    -- Time of the last change to a status in which nothing is due: `completed`, `failed_terminal`,
    -- `parked`, `skipped` or `discarded`. Null in all other statuses.
    processed_at          timestamptz,
    -- Hash of the key, or partition, that orders the message; its upper half is the advisory lock.
    -- Never changes. Null: no order.
    ordering_hash         bigint,
    -- Position within that order: the version of the aggregate where the message has one, else a
    -- number that the claim gives in the order of the partition. Never changes.
    ordering_position     bigint,
    -- Version that the message gives its aggregate, which is its key, where the consumer guards the
    -- sequence. Never changes. A message at or below its aggregate's version is skipped. A message
    -- above a gap waits with the reason `gap`.
    sequence_version      bigint,
    -- End of the wait for missing versions. Set with the reason `gap`, null after the wait.
    waits_until           timestamptz,
    -- Whether the message may run over its gap: false on insert, true once an operator redrives it
    -- or the policy lets it proceed.
    over_gap              boolean NOT NULL DEFAULT false,
    -- The `processed_at` of the failure that was last copied to the consumer's topic of dead
    -- letters, set after each copy. A message that fails again has another `processed_at`, and is
    -- copied again.
    copied_at             timestamptz,
    -- Holds within one bucket alone: uniqueness across buckets comes from the lock of a claim.
    CONSTRAINT inbox_key PRIMARY KEY (consumer_id, message_id, retention_class, bucket),
    CONSTRAINT inbox_consumer_positive CHECK (consumer_id > 0),
    CONSTRAINT inbox_message_id_length CHECK (octet_length(message_id) BETWEEN 1 AND 600),
    CONSTRAINT inbox_status_known CHECK (status IN ('received', 'in_progress', 'completed',
        'failed_retryable', 'failed_terminal', 'parked', 'waiting', 'skipped', 'discarded')),
    CONSTRAINT inbox_settled_has_time CHECK ((processed_at IS NOT NULL)
        = (status IN ('completed', 'failed_terminal', 'parked', 'skipped', 'discarded'))),
    CONSTRAINT inbox_lease_has_end CHECK ((status = 'in_progress') = (locked_until IS NOT NULL)),
    CONSTRAINT inbox_due_has_time
        CHECK ((status IN ('received', 'failed_retryable')) = (next_attempt_at IS NOT NULL)),
    CONSTRAINT inbox_failure_has_reason CHECK (
        status NOT IN ('failed_retryable', 'failed_terminal', 'parked') OR reason IS NOT NULL),
    CONSTRAINT inbox_ordering_whole CHECK ((ordering_hash IS NULL) = (ordering_position IS NULL)),
    CONSTRAINT inbox_erased_is_empty CHECK (erased_at IS NULL
        OR (payload IS NULL AND headers IS NULL AND payload_hash IS NULL AND result IS NULL
            AND last_error IS NULL AND status IN ('completed', 'skipped', 'discarded')))
) PARTITION BY LIST (retention_class);

CREATE TABLE oncebox.inbox_7d        PARTITION OF oncebox.inbox
    FOR VALUES IN (1) PARTITION BY RANGE (bucket);
CREATE TABLE oncebox.inbox_30d       PARTITION OF oncebox.inbox
    FOR VALUES IN (2) PARTITION BY RANGE (bucket);
CREATE TABLE oncebox.inbox_1y        PARTITION OF oncebox.inbox
    FOR VALUES IN (3) PARTITION BY RANGE (bucket);
CREATE TABLE oncebox.inbox_permanent PARTITION OF oncebox.inbox
    FOR VALUES IN (4) PARTITION BY RANGE (bucket);

-- What is not completed: for operators, and for the workers that look for what is due.
CREATE INDEX inbox_open ON oncebox.inbox (consumer_id, status, received_at)
    WHERE status <> 'completed';
CREATE INDEX inbox_due ON oncebox.inbox (consumer_id, next_attempt_at, "offset")
    WHERE status IN ('received', 'failed_retryable');
CREATE INDEX inbox_leased ON oncebox.inbox (consumer_id, locked_until, "offset")
    WHERE status = 'in_progress';
CREATE INDEX inbox_processed ON oncebox.inbox USING brin (processed_at)
    WHERE status = 'completed';
CREATE INDEX inbox_ordering ON oncebox.inbox (consumer_id, ordering_hash, ordering_position)
    WHERE ordering_hash IS NOT NULL AND status NOT IN ('completed', 'skipped', 'discarded');
-- The versions that aggregates pass over without having run them.
CREATE INDEX inbox_passed_over ON oncebox.inbox (consumer_id, ordering_hash, ordering_position)
    WHERE sequence_version IS NOT NULL AND status IN ('skipped', 'discarded');
CREATE INDEX inbox_uncopied ON oncebox.inbox (consumer_id, processed_at, "offset")
    WHERE status IN ('failed_terminal', 'parked') AND copied_at IS DISTINCT FROM processed_at;
-- A list of a consumer's messages begins with the newest and ends with its page. Without an index
-- in that order every page of it sorts the consumer's whole part of the inbox. A message costs one
-- more entry, at the right edge of its consumer's part, and no update of a row that stays in its
-- bucket changes it, since nothing changes when a message was received.
--
-- It is on an expression, so that only a list can use it, which says the same: on the bare column,
-- a claim whose plan is made while a partition is new and empty may take it for as good as the key,
-- and read a consumer's whole part for every message once that has filled.
CREATE INDEX inbox_newest ON oncebox.inbox ((consumer_id::bigint), received_at);

-- The messages that completed in another transaction than that of their claim, in the order in
-- which they did. With `inbox_newest`, where the others stand in that order, it gives replays their
-- pages. A message that completes at once has no entry. It is on an expression for the same reason.
CREATE INDEX inbox_completed_late ON oncebox.inbox ((consumer_id::bigint), processed_at)
    WHERE status = 'completed' AND processed_at <> received_at;

-- Gives messages without a version their place in the order of their key.
CREATE SEQUENCE oncebox.ordering_place AS bigint;

-- Names instead of numbers, for operators and tools.
CREATE VIEW oncebox.inbox_message AS
    SELECT t.name AS tenant_name, c.name AS consumer_name, i.*
    FROM oncebox.inbox i
    JOIN oncebox.consumer c USING (consumer_id)
    JOIN oncebox.tenant t USING (tenant_id);
CREATE VIEW oncebox.processed_message AS
    SELECT tenant_name, consumer_name, message_id, processed_at, result
    FROM oncebox.inbox_message WHERE status = 'completed';
CREATE VIEW oncebox.dead_letter AS
    SELECT * FROM oncebox.inbox_message WHERE status IN ('failed_terminal', 'parked');

-- A row per open transaction that holds a claim; always empty from outside. Its dead rows would be
-- read by a plan that was made while it was empty, so its check scans no whole table.
CREATE TABLE oncebox.guard (xid xid8 PRIMARY KEY)
    WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000);

-- A trigger and its function are one rule of their table, so that both stand here.
CREATE FUNCTION oncebox.guard_check() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET enable_seqscan = off AS $$
BEGIN
    IF EXISTS (SELECT FROM oncebox.guard g WHERE g.xid = NEW.xid) THEN
        RAISE EXCEPTION 'commit guard: the transaction was not completed by the host'
            USING ERRCODE = 'OB001';
    END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER guard AFTER INSERT ON oncebox.guard
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION oncebox.guard_check();

-- A partition that a process holds. A start that finds the row of an unfinished one at the same
-- offset tells that the process died there.
CREATE TABLE oncebox.probation (
    consumer_id           int NOT NULL,
    topic                 text NOT NULL,
    partition             int NOT NULL,
    next_offset           bigint NOT NULL,
    starts                int NOT NULL,
    PRIMARY KEY (consumer_id, topic, partition)
);

-- Offsets before which all records of a partition were settled, noted every few seconds and when a
-- partition is opened or given up. A host that finds another server, or one that has started again,
-- compares them with the offsets that it has acked.
CREATE TABLE oncebox.partition_position (
    consumer_id           int NOT NULL,
    topic                 text NOT NULL,
    partition             int NOT NULL,
    -- Kafka's id of the topic. Null: the brokers have none.
    topic_id              text,
    next_offset           bigint NOT NULL,
    -- Number of the last opening of the partition, by chance. A database that lacks it has lost
    -- the opening.
    opening               bigint NOT NULL,
    PRIMARY KEY (consumer_id, topic, partition)
);

-- The present version of each aggregate, moved in the transaction of each completion.
CREATE TABLE oncebox.sequence_position (
    consumer_id           int NOT NULL,
    -- SHA-256 of the ordering key.
    key_hash              bytea NOT NULL CHECK (length(key_hash) = 32),
    version               bigint NOT NULL,
    moved_at              timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer_id, key_hash)
);

-- Failed runs and actions of operators, in order. A message that completes at once has no row here.
CREATE TABLE oncebox.inbox_history (
    consumer_id           int NOT NULL,
    message_id            text NOT NULL,
    history_id            bigint GENERATED ALWAYS AS IDENTITY,
    at                    timestamptz NOT NULL DEFAULT now(),
    event                 text NOT NULL CONSTRAINT inbox_history_event_known
        CHECK (event IN ('failed', 'crashed', 'interrupted', 'redriven', 'discarded', 'retried',
            'edited', 'restored', 'erased', 'replayed')),
    -- Number of the run, since the message was first received or last redriven.
    attempt               int,
    -- Version that ran the message. Null: it did not run.
    version_id            int,
    -- Reason of a failed run, as in the inbox, or the reason that an operator gave. Of a replayed
    -- message: `replay`, the number of the replay, a colon, and the operator's reason.
    reason                text,
    -- Text of the failure. Null: none, or the message was erased.
    error                 text,
    -- Name of the operator's token or user. Null: no operator acted.
    actor                 text,
    PRIMARY KEY (consumer_id, message_id, history_id)
);

-- The payloads that edits replaced. The first of a message is the payload that came.
CREATE TABLE oncebox.inbox_edit (
    consumer_id           int NOT NULL,
    message_id            text NOT NULL,
    -- Edits of the message so far, this one included.
    edit_number           int NOT NULL CHECK (edit_number > 0),
    -- Time of the edit.
    at                    timestamptz NOT NULL DEFAULT now(),
    -- Payload before the edit. Null: none, or the message was erased.
    payload               bytea,
    PRIMARY KEY (consumer_id, message_id, edit_number)
);

-- The host that copies the dead letters of a consumer, so that no two hosts copy one message.
CREATE TABLE oncebox.copying (
    consumer_id           int PRIMARY KEY,
    owner                 text NOT NULL,
    until                 timestamptz NOT NULL
);

-- Replays ----------------------------------------------------------------------------------------

-- The replays of completed messages, which operators plan and then start: a row per plan, in the
-- database with the inbox. A host works on a replay under a lease. It moves the cursor in the
-- transaction of each replayed message, so that a host that dies repeats nothing that committed.
CREATE TABLE oncebox.replay (
    replay_id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    consumer_id           int NOT NULL REFERENCES oncebox.consumer ON DELETE CASCADE,
    -- `planned`: counted, and not started. `running`: hosts work on it. `paused`: they do not,
    -- until an operator resumes it. `done`: it came to its end. `cancelled`: an operator ended it.
    state                 text NOT NULL DEFAULT 'planned' CONSTRAINT replay_state_known
        CHECK (state IN ('planned', 'running', 'paused', 'done', 'cancelled')),
    -- The policy's `replay.kind` and `replay.emit` at the plan. Never change.
    kind                  text NOT NULL,
    emit                  text NOT NULL,
    -- Messages that it selects: {"event_type": …, "from": …, "to": …, "ids": […]}, as far as they
    -- are given. Never changes.
    filter                jsonb NOT NULL,
    -- Time before which a message must have completed: the plan's, or an earlier one of the filter.
    until_at              timestamptz NOT NULL,
    -- The consumer's `policy_revision` and `generation` at the plan.
    policy_revision       bigint NOT NULL,
    generation            bigint NOT NULL,
    -- SHA-256 of the secret part of the token. Null: it was used, and starts nothing any more.
    token_hash            bytea,
    -- Time after which the token starts nothing.
    expires_at            timestamptz NOT NULL,
    planned_at            timestamptz NOT NULL DEFAULT now(),
    planned_by            text NOT NULL,
    -- Messages with a record that the plan found, and without one; whether it looked at all.
    found                 bigint NOT NULL,
    found_without_payload bigint NOT NULL,
    is_counted_whole      boolean NOT NULL,
    -- Operator who started it, with the reason, and the times of its begin and its end.
    actor                 text,
    reason                text,
    began_at              timestamptz,
    ended_at              timestamptz,
    -- Completion time and id of the message that it came to last.
    cursor_at             timestamptz NOT NULL,
    cursor_id             text COLLATE "C" NOT NULL DEFAULT '',
    -- Moves of the cursor so far. A host that knows an older number has lost its place.
    step                  bigint NOT NULL DEFAULT 0,
    -- Messages so far: those that ran, that failed and were rolled back, that have no stored
    -- record, and that are not as they were planned.
    replayed              bigint NOT NULL DEFAULT 0,
    failed                bigint NOT NULL DEFAULT 0,
    without_payload       bigint NOT NULL DEFAULT 0,
    changed               bigint NOT NULL DEFAULT 0,
    -- Outgoing messages that replayed runs emitted and that were dropped.
    suppressed            bigint NOT NULL DEFAULT 0,
    failures_in_a_row     int NOT NULL DEFAULT 0,
    -- Hosts that ended while they had it, since the cursor moved last.
    crashes               int NOT NULL DEFAULT 0,
    -- Generation of the deployments that ran the last message. Null: none ran.
    generation_last       bigint,
    -- Why hosts paused it, for readers. Null: they did not.
    note                  text,
    -- End of the lease, and the host that has it. Null: no host has it.
    locked_until          timestamptz,
    locked_by             text,
    -- Leases so far. A host whose epoch is lower has lost it.
    epoch                 bigint NOT NULL DEFAULT 0,
    CONSTRAINT replay_lease_has_end CHECK ((locked_until IS NULL) = (locked_by IS NULL)),
    CONSTRAINT replay_lease_is_running CHECK (locked_until IS NULL OR state = 'running'),
    CONSTRAINT replay_begun_has_actor CHECK (state = 'planned'
        OR (began_at IS NOT NULL AND actor IS NOT NULL AND reason IS NOT NULL)),
    CONSTRAINT replay_end_has_time
        CHECK ((ended_at IS NOT NULL) = (state IN ('done', 'cancelled')))
);
-- A consumer has one replay at a time.
CREATE UNIQUE INDEX replay_open ON oncebox.replay (consumer_id)
    WHERE state IN ('running', 'paused');
CREATE INDEX replay_of_consumer ON oncebox.replay (consumer_id, replay_id DESC);

-- The first failures of each replay.
CREATE TABLE oncebox.replay_failure (
    replay_id             bigint NOT NULL REFERENCES oncebox.replay ON DELETE CASCADE,
    -- Number of the move of the cursor, in whose transaction it was written.
    step                  bigint NOT NULL,
    message_id            text NOT NULL,
    at                    timestamptz NOT NULL DEFAULT now(),
    -- Kind of the failure, as in the inbox, and its text. Null text: the message was erased.
    reason                text NOT NULL,
    error                 text,
    PRIMARY KEY (replay_id, step)
);
CREATE INDEX replay_failure_of_message ON oncebox.replay_failure (message_id);

-- Jobs -------------------------------------------------------------------------------------------

-- Actions of operators on all messages that a filter selects. Any host leases a job and works on it
-- page by page; each page, its counts and its place are one transaction.
CREATE TABLE oncebox.job (
    job_id                bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id             int NOT NULL REFERENCES oncebox.tenant ON DELETE CASCADE,
    -- Null: outgoing messages of every consumer of the tenant. Never changes.
    consumer_id           int REFERENCES oncebox.consumer ON DELETE CASCADE,
    -- What it does with its messages. Never changes.
    action                text NOT NULL CONSTRAINT job_action_known CHECK (action IN
        ('redrive', 'retry', 'discard', 'outgoing_redrive', 'outgoing_discard')),
    -- `running`: hosts work on it. `paused`: they do not, until an operator resumes it. `done`: it
    -- came to its end. `cancelled`: an operator ended it.
    state                 text NOT NULL DEFAULT 'running' CONSTRAINT job_state_known
        CHECK (state IN ('running', 'paused', 'done', 'cancelled')),
    -- Messages that it selects: {"reason": …, "event_type": …, "ids": […]}, as far as members are
    -- given. Never changes.
    filter                jsonb NOT NULL,
    -- Latest time by which a message was received, or became a dead letter. A message that fails
    -- again while the job runs is left alone. Never changes.
    as_of                 timestamptz NOT NULL DEFAULT now(),
    -- Most messages per second. Null: no limit. Never changes.
    rate                  int CONSTRAINT job_rate_positive CHECK (rate > 0),
    -- Operator who started it, with the reason. Never change.
    actor                 text NOT NULL,
    reason                text NOT NULL,
    -- Messages that were counted before the start, and whether those were all.
    estimate              bigint NOT NULL,
    is_counted_whole      boolean NOT NULL,
    began_at              timestamptz NOT NULL DEFAULT now(),
    ended_at              timestamptz,
    -- Pass over the messages, from 1, and the place in it behind the last page.
    pass                  int NOT NULL DEFAULT 1,
    cursor                jsonb NOT NULL DEFAULT '{}',
    -- Pages so far. A host that knows an older number has lost its place.
    step                  bigint NOT NULL DEFAULT 0,
    -- Messages that were changed so far, and in this pass.
    changed               bigint NOT NULL DEFAULT 0,
    changed_in_pass       bigint NOT NULL DEFAULT 0,
    -- Messages that this pass left out, by reason: {"no_record": 3}.
    left_out              jsonb NOT NULL DEFAULT '{}',
    -- Hosts that ended while they had it, and pages that failed, since the last page.
    crashes               int NOT NULL DEFAULT 0,
    -- Why hosts paused it, or the text of the last page that failed. Null: neither.
    note                  text,
    -- Time of the last lease: hosts work on tenants, and on the jobs of each, in turn. Null: none
    -- yet.
    leased_at             timestamptz,
    -- Time before which no host goes on: its rate, messages that others work on, or a failed page.
    due_at                timestamptz NOT NULL DEFAULT now(),
    -- End of the lease, and the host that has it. Null: no host has it.
    locked_until          timestamptz,
    locked_by             text,
    -- Leases so far. A host whose epoch is lower has lost it.
    epoch                 bigint NOT NULL DEFAULT 0,
    CONSTRAINT job_inbox_has_consumer
        CHECK (consumer_id IS NOT NULL OR starts_with(action, 'outgoing_')),
    CONSTRAINT job_lease_has_end CHECK ((locked_until IS NULL) = (locked_by IS NULL)),
    CONSTRAINT job_lease_is_running CHECK (locked_until IS NULL OR state = 'running'),
    CONSTRAINT job_end_has_time
        CHECK ((ended_at IS NOT NULL) = (state IN ('done', 'cancelled')))
);
CREATE INDEX job_open ON oncebox.job (tenant_id) WHERE state IN ('running', 'paused');
CREATE INDEX job_of_tenant ON oncebox.job (tenant_id, job_id DESC);

-- Outgoing messages ------------------------------------------------------------------------------

-- A row per message that a handler sent. The completion of its cause inserts it; a relay, a cancel
-- of the consumer and an operator's action change the rest. Time partitions are of a day each, are
-- named `outgoing_YYYYMMDD` by UTC, and are made ahead of time.
CREATE TABLE oncebox.outgoing (
    consumer_id           int NOT NULL,
    -- Id of the cause: the message whose run emitted it. Never changes.
    message_id            text NOT NULL,
    -- Number of the emit among those of its cause, from 0. Never changes.
    ordinal               int NOT NULL,
    -- Start of the day of the insert (UTC), or of a later day where retention kept the row; decides
    -- its time partition.
    bucket                timestamptz NOT NULL,
    -- Order of the inserts, which is no order of the commits. Never changes.
    position              bigint GENERATED ALWAYS AS IDENTITY,
    -- Id derived from tenant, consumer, cause and ordinal. Receivers recognise a repetition by it.
    id                    text NOT NULL,
    -- Place to which it goes, such as `kafka:orders`. Never changes.
    destination           text NOT NULL,
    -- Key of its order. Null: no order, or the message was erased.
    key                   bytea,
    -- Hash of tenant, destination and key: messages of one lane are sent in the order of their due
    -- times, then of their positions. Null: no key.
    lane                  bigint,
    event_type            text NOT NULL,
    -- Media type of the payload. Null: the handler named none.
    content_type          text,
    -- W3C trace context of the cause. Null: it has none.
    trace_parent          text,
    -- Correlation id that the cause handed on, or the cause's id.
    correlation_id        text NOT NULL,
    -- Encoded headers that the handler gave it, and the payload. Null payload: none. An erasure of
    -- the cause empties both.
    headers               bytea NOT NULL,
    payload               bytea,
    -- Name by which the consumer may cancel it. Null: it cannot be cancelled.
    cancel_token          text,
    -- Status; `OutgoingStatus` in host/model/src/outgoing/status.rs says what moves a message to
    -- each.
    status                text NOT NULL,
    -- Reason of the status. Set with each status that has one. Null after a confirmation, but for
    -- `refused` where an endpoint refused the message and that was delivered as its answer.
    reason                text,
    -- Text of the last failure, or of such a refusal, for readers. Null after a confirmation.
    last_error            text,
    -- Whether an attempt ended without an answer, so that the destination may have the message. A
    -- cancel passes over it then. True for good.
    may_have_arrived      boolean NOT NULL DEFAULT false,
    -- Attempts so far: plus one at each lease. Minus one where a lease is given back, 0 again at a
    -- redrive.
    attempts              int NOT NULL DEFAULT 0,
    -- Leases so far. A relay whose epoch is lower has lost the message.
    epoch                 bigint NOT NULL DEFAULT 0,
    -- Time at which the handler wants it sent, by the clock of this database. Never changes.
    due_at                timestamptz NOT NULL,
    -- Time of the next attempt: `due_at` at first. Null in all statuses in which nothing is due.
    next_attempt_at       timestamptz,
    -- End of the lease, and the host that has it. Set by each lease, null from its end on.
    locked_until          timestamptz,
    locked_by             text,
    -- Begin of the transaction that inserted the row.
    created_at            timestamptz NOT NULL DEFAULT now(),
    -- Time of the change to `completed`, `cancelled` or `discarded`. Null in all other statuses.
    settled_at            timestamptz,
    -- The endpoint's answer, where the endpoint keeps answers or delivers them: its status; and
    -- where it keeps them, media type and body up to 64 KiB, and whether that is all of it. Written
    -- once, with the change to `completed`; an erasure of the cause empties type and body.
    answer_status         int,
    answer_content_type   text,
    answer                bytea,
    answer_is_whole       boolean,
    -- A redelivery under `dedup = "off"` emits the same messages: those of one day are one row.
    CONSTRAINT outgoing_key PRIMARY KEY (consumer_id, message_id, ordinal, bucket),
    CONSTRAINT outgoing_consumer_positive CHECK (consumer_id > 0),
    CONSTRAINT outgoing_message_id_length CHECK (octet_length(message_id) BETWEEN 1 AND 600),
    CONSTRAINT outgoing_ordinal_positive CHECK (ordinal >= 0),
    CONSTRAINT outgoing_destination_length CHECK (octet_length(destination) BETWEEN 1 AND 300),
    CONSTRAINT outgoing_status_known CHECK (status IN ('received', 'in_progress', 'completed',
        'failed_retryable', 'parked', 'cancelled', 'discarded')),
    CONSTRAINT outgoing_settled_has_time CHECK (
        (settled_at IS NOT NULL) = (status IN ('completed', 'cancelled', 'discarded'))),
    CONSTRAINT outgoing_lease_has_end
        CHECK ((status = 'in_progress') = (locked_until IS NOT NULL)),
    CONSTRAINT outgoing_due_has_time
        CHECK ((status IN ('received', 'failed_retryable')) = (next_attempt_at IS NOT NULL)),
    CONSTRAINT outgoing_failure_has_reason
        CHECK (status NOT IN ('failed_retryable', 'parked') OR reason IS NOT NULL),
    CONSTRAINT outgoing_lane_has_key CHECK ((lane IS NULL) = (key IS NULL)),
    CONSTRAINT outgoing_answer_is_last CHECK (answer_status IS NULL OR status = 'completed'),
    CONSTRAINT outgoing_answer_has_status CHECK (answer_status IS NOT NULL
        OR (answer IS NULL AND answer_content_type IS NULL AND answer_is_whole IS NULL))
) PARTITION BY RANGE (bucket);

-- What is to be sent, by consumer and destination: for relays.
CREATE INDEX outgoing_due
    ON oncebox.outgoing (consumer_id, destination, next_attempt_at, position)
    WHERE status IN ('received', 'failed_retryable');
-- The same of messages without a key, for those that stand behind many that wait for others.
CREATE INDEX outgoing_due_free
    ON oncebox.outgoing (consumer_id, destination, next_attempt_at, position)
    WHERE lane IS NULL AND status IN ('received', 'failed_retryable');
-- What has to be sent first in a lane. Its condition is on the time, for no other index has the same:
-- a plan that was made while nothing was open would read all of `outgoing_open` for each message.
CREATE INDEX outgoing_lane ON oncebox.outgoing (destination, lane, due_at, position)
    WHERE lane IS NOT NULL AND settled_at IS NULL;
CREATE INDEX outgoing_leased ON oncebox.outgoing (locked_until) WHERE status = 'in_progress';
-- What a consumer may cancel.
CREATE INDEX outgoing_token ON oncebox.outgoing (consumer_id, cancel_token)
    WHERE cancel_token IS NOT NULL AND status IN ('received', 'failed_retryable');
-- What is not confirmed: for operators.
CREATE INDEX outgoing_open ON oncebox.outgoing (consumer_id, status, position)
    WHERE status <> 'completed';

-- Retention --------------------------------------------------------------------------------------

-- What the inbox has forgotten of each partition of a topic: a row per partition of which completed
-- messages were removed. A host adds to it before it removes a time partition of the inbox. A claim
-- that does not know an id reads it: a record at or below both marks may have run.
CREATE TABLE oncebox.forgotten (
    consumer_id           int NOT NULL REFERENCES oncebox.consumer ON DELETE CASCADE,
    topic                 text NOT NULL,
    partition             int NOT NULL,
    -- Highest offset of a removed message. Only goes up.
    "offset"              bigint NOT NULL,
    -- Latest timestamp of the record of a removed message, milliseconds. Only goes up. A topic that
    -- is made again begins with low offsets and later timestamps.
    record_timestamp_ms   bigint NOT NULL,
    -- Removed messages so far, by status.
    completed             bigint NOT NULL DEFAULT 0,
    skipped               bigint NOT NULL DEFAULT 0,
    discarded             bigint NOT NULL DEFAULT 0,
    -- Time of the last addition.
    forgotten_at          timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer_id, topic, partition)
);

-- The removal of each time partition of the inbox: a row from its first step on, kept for ever. A
-- host that finds a row that is not `dropped` continues with the next step.
CREATE TABLE oncebox.removal (
    -- Name of the table of the partition; names never come twice.
    partition_name        text PRIMARY KEY,
    retention_class       smallint NOT NULL REFERENCES oncebox.retention_class,
    -- Bounds of the partition: its messages changed their status for the last time in between.
    from_at               timestamptz NOT NULL,
    to_at                 timestamptz NOT NULL,
    -- `moving`: messages that must stay go to the present partition. `counted`: the rest is in
    -- `forgotten`. `dropped`: the table is gone.
    state                 text NOT NULL DEFAULT 'moving'
                          CONSTRAINT removal_state_known
                          CHECK (state IN ('moving', 'counted', 'dropped')),
    -- Messages moved so far: open, failed, waiting or parked, or versions that aggregates have yet
    -- to pass over.
    moved                 bigint NOT NULL DEFAULT 0,
    -- Messages removed with the partition, set when it is counted.
    removed               bigint,
    -- Size of the table with its indexes, set when it is counted.
    bytes                 bigint,
    -- Whether its messages are in `forgotten` already. A partition that was attached again after
    -- that is not counted twice.
    was_counted           boolean NOT NULL DEFAULT false,
    -- Whether messages were erased in its table after the detach: then the drop deletes the entries
    -- of that in the history.
    has_erased            boolean NOT NULL DEFAULT false,
    began_at              timestamptz NOT NULL DEFAULT now(),
    dropped_at            timestamptz,
    -- Host that did the last step.
    host                  text NOT NULL,
    -- Text of the error that ended the last try. Null: it did not fail.
    error                 text,
    CONSTRAINT removal_counted_has_figures
        CHECK (state = 'moving' OR (removed IS NOT NULL AND bytes IS NOT NULL)),
    CONSTRAINT removal_dropped_has_time CHECK ((state = 'dropped') = (dropped_at IS NOT NULL))
);
CREATE INDEX removal_unfinished ON oncebox.removal (to_at) WHERE state <> 'dropped';

-- Whether messages are archived before retention removes them, and where: a row while they are. A
-- host that is set to archive inserts it, and only an operator deletes it. A process that finds it
-- and is set to archive nowhere, or elsewhere, removes nothing. The row of the host's database
-- counts for tenants' own databases.
CREATE TABLE oncebox.archive_setting (
    only_one              boolean PRIMARY KEY DEFAULT true
                          CONSTRAINT archive_setting_only_one CHECK (only_one),
    -- Location of the archive, as the hosts' setting names it.
    location              text NOT NULL,
    -- Time of the insertion, and the host or operator that made it.
    set_at                timestamptz NOT NULL DEFAULT now(),
    set_by                text NOT NULL,
    -- Time at which the mark of this installation was written to the location. Null: not yet. Later
    -- a location without the mark is another one, such as a folder that is not mounted.
    marked_at             timestamptz,
    -- Random text in the mark. Null: not marked yet.
    token                 text,
    CONSTRAINT archive_setting_is_marked CHECK ((marked_at IS NULL) = (token IS NULL))
);

-- The files of the archive: a row per file that was read back and found whole. The history and the
-- table of a partition go only when all its messages are in files with a row. Names stay after
-- their tenant or consumer is deleted.
CREATE TABLE oncebox.archive_file (
    -- Path below the location.
    path                  text PRIMARY KEY,
    partition_name        text NOT NULL,
    -- The `began_at` of the removal. A partition that is made again has another removal.
    removal_began_at      timestamptz NOT NULL,
    tenant_id             int NOT NULL,
    tenant                text NOT NULL,
    consumer_id           int NOT NULL,
    consumer              text NOT NULL,
    -- Number of the file among those of the partition and the consumer, from 1.
    file_number           int NOT NULL,
    -- Lowest and highest message id in the order of bytes.
    first_id              text COLLATE "C" NOT NULL,
    last_id               text COLLATE "C" NOT NULL,
    -- Id of the last message in the order of this database, in which files follow each other.
    ends_with             text NOT NULL,
    rows                  bigint NOT NULL CONSTRAINT archive_file_has_rows CHECK (rows > 0),
    bytes                 bigint NOT NULL,
    -- SHA-256 of the SHA-256 of each id, in the order of the ids' bytes.
    id_digest             bytea NOT NULL,
    -- Bytes of the file's footer, and their SHA-256, by which the file is known again.
    footer_bytes          bigint NOT NULL,
    footer_digest         bytea NOT NULL,
    written_at            timestamptz NOT NULL,
    verified_at           timestamptz NOT NULL DEFAULT now(),
    -- Time at which an operator took the file out of the list. Nothing looks into it any more. The
    -- row goes a day later. Null: it is in the list.
    forgotten_at          timestamptz,
    CONSTRAINT archive_file_number_unique UNIQUE (partition_name, consumer_id, file_number)
);
CREATE INDEX archive_file_of_tenant ON oncebox.archive_file (tenant_id, first_id);

-- The attempts to write a file of the archive: a row from before the first of its messages is read
-- until the file has its row. A row that stays is that of a process that died, or of a file that is
-- not what was written or was replaced: the next run deletes the file. A put that goes on may bring
-- the file back, so that the row stays until no put can be under way.
CREATE TABLE oncebox.archive_attempt (
    -- Path below the location. No other attempt has it.
    path                  text PRIMARY KEY,
    partition_name        text NOT NULL,
    tenant_id             int NOT NULL,
    consumer_id           int NOT NULL,
    began_at              timestamptz NOT NULL DEFAULT now(),
    -- Erasure that writes the file, or that has replaced it. Null: a removal writes it.
    erasure_id            bigint,
    -- Whether the file may be there, and nobody writes it: the storage did not delete it when that
    -- was tried last, or the partition was dropped without it.
    is_left               boolean NOT NULL DEFAULT false,
    -- Time at which its deletion was tried last. Null: never.
    tried_at              timestamptz,
    -- Time after which no put of the file can be under way: one hour after it was known that its
    -- process has ended. Null: its process may be at work.
    put_ends_at           timestamptz
);
CREATE INDEX archive_attempt_of_partition ON oncebox.archive_attempt (partition_name);
CREATE INDEX archive_attempt_of_tenant ON oncebox.archive_attempt (tenant_id);

-- Erasures ---------------------------------------------------------------------------------------

-- The erasures that are under way: a row from the begin of each to its end. It says how far the
-- erasure is, so that a repeated command continues. An erasure looks at the messages of each of its
-- consumers in the order of their ids, again and again, until two passes in a row find nothing to
-- erase.
CREATE TABLE oncebox.erasure (
    erasure_id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id             int NOT NULL REFERENCES oncebox.tenant ON DELETE CASCADE,
    -- Consumer whose messages are erased. Null: all consumers of the tenant.
    consumer_id           int REFERENCES oncebox.consumer ON DELETE CASCADE,
    -- HMAC-SHA-256 of the id or the key that selects the messages, under a key of the tenant.
    subject               bytea NOT NULL CHECK (length(subject) = 32),
    -- Operator who began it, and the reason for it.
    actor                 text NOT NULL,
    reason                text NOT NULL,
    began_at              timestamptz NOT NULL DEFAULT now(),
    -- Number of the pass, from 1.
    pass                  int NOT NULL DEFAULT 1,
    -- Consumer and id of the message that this pass looked at last. The id is empty before the
    -- first message of the consumer.
    at_consumer           int NOT NULL DEFAULT 0,
    at_message            text NOT NULL DEFAULT '',
    -- The same among the tables of time partitions that are out of the inbox and not dropped yet,
    -- which a pass looks at in the end: the table, the consumer and the message.
    removed_table         text NOT NULL DEFAULT '',
    removed_consumer      int NOT NULL DEFAULT 0,
    removed_message       text NOT NULL DEFAULT '',
    -- Messages that this pass found and that were not erased.
    found                 bigint NOT NULL DEFAULT 0,
    -- Passes in a row, before this one, that found nothing. The erasure ends with the second.
    empty_passes          int NOT NULL DEFAULT 0,
    -- Time of the last request or vacuum. A request that comes a minute later begins a new pass.
    worked_at             timestamptz NOT NULL DEFAULT now(),
    -- Transactions with claims that were open when this pass began: it waits for their end, since
    -- their messages are not seen before.
    waits_for             text[] NOT NULL DEFAULT '{}',
    -- Messages that all passes looked at.
    looked_at             bigint NOT NULL DEFAULT 0,
    -- Messages that were erased before the first pass came to them.
    already_erased        bigint NOT NULL DEFAULT 0,
    -- Erased payloads of edits, texts of failures in the history, and differences of shadows.
    edits                 bigint NOT NULL DEFAULT 0,
    errors                bigint NOT NULL DEFAULT 0,
    differences           bigint NOT NULL DEFAULT 0,
    -- Time at which the passes over the inbox had ended. Null: not yet. Then the files of the archive
    -- are looked at, in the order of their paths: the last one, the files that were written again,
    -- and the messages that were erased in them.
    passed_at             timestamptz,
    at_file               text NOT NULL DEFAULT '',
    archive_files         bigint NOT NULL DEFAULT 0,
    archived              bigint NOT NULL DEFAULT 0,
    -- Tables with dead versions of erased rows: those that are still to be vacuumed, those that
    -- were, and the errors of those that could not be.
    to_vacuum             text[] NOT NULL DEFAULT '{}',
    vacuumed              text[] NOT NULL DEFAULT '{}',
    not_vacuumed          text[] NOT NULL DEFAULT '{}'
);
CREATE UNIQUE INDEX erasure_subject
    ON oncebox.erasure (tenant_id, coalesce(consumer_id, 0), subject);

-- The messages that an erasure under way has found. Deleted with its row.
CREATE TABLE oncebox.erased_message (
    erasure_id            bigint NOT NULL REFERENCES oncebox.erasure ON DELETE CASCADE,
    consumer_id           int NOT NULL,
    message_id            text NOT NULL,
    -- Status before the erasure. Null: not erased yet, since a worker held the message.
    status                text,
    PRIMARY KEY (erasure_id, consumer_id, message_id)
);
CREATE INDEX erased_message_held ON oncebox.erased_message (erasure_id) WHERE status IS NULL;

-- Hosts ------------------------------------------------------------------------------------------

-- A row per running host: inserted at its start, deleted at its clean end. `seen_at` is the time of
-- its last heartbeat.
CREATE TABLE oncebox.host (
    host_id               bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name                  text NOT NULL,
    started_at            timestamptz NOT NULL DEFAULT now(),
    seen_at               timestamptz NOT NULL DEFAULT now(),
    -- Time of the heartbeat after the last answer to `/metrics`. Null: nobody asked for it yet.
    scraped_at            timestamptz
);

-- The generation of a consumer that a host runs, and its progress with the next one.
CREATE TABLE oncebox.host_consumer (
    host_id               bigint NOT NULL REFERENCES oncebox.host ON DELETE CASCADE,
    consumer_id           int NOT NULL REFERENCES oncebox.consumer ON DELETE CASCADE,
    -- The generation that it runs; 0 before the first.
    generation            bigint NOT NULL DEFAULT 0,
    -- The generation that it loads or failed to load.
    next_generation       bigint NOT NULL,
    state                 text NOT NULL CONSTRAINT host_consumer_state_known
                          CHECK (state IN ('compiling', 'switched', 'failed')),
    error                 text,
    at                    timestamptz NOT NULL DEFAULT now(),
    -- State of the consumer on this host, apart from its deployments.
    status                text NOT NULL DEFAULT 'starting' CONSTRAINT host_consumer_status_known
        CHECK (status IN ('starting', 'idle', 'running', 'stopped', 'failing')),
    -- The consumer's `revision` that `status` belongs to.
    status_revision       bigint NOT NULL DEFAULT 0,
    status_error          text,
    -- Circuit breakers that are not closed: [{"version_id": …, "state": …, …}].
    breakers              jsonb NOT NULL DEFAULT '[]',
    PRIMARY KEY (host_id, consumer_id)
);

-- Circuit breakers of endpoints that are not closed on a host.
CREATE TABLE oncebox.host_endpoint (
    host_id               bigint NOT NULL REFERENCES oncebox.host ON DELETE CASCADE,
    tenant_id             int NOT NULL,
    endpoint              text NOT NULL,
    state                 text NOT NULL CONSTRAINT host_endpoint_state_known
                          CHECK (state IN ('open', 'half_open')),
    -- Failures in a row so far.
    failures              int NOT NULL,
    -- Time of the next probe. Null: a message probes.
    probes_at             timestamptz,
    at                    timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (host_id, tenant_id, endpoint),
    FOREIGN KEY (tenant_id, endpoint) REFERENCES oncebox.endpoint ON DELETE CASCADE
);

-- Starts of consumers that a host might not survive: the host writes a mark before each, and takes
-- it away when it survived the start. The mark of a host that is gone says what that host started
-- when it ended.

-- The record of a consumer's starts.
CREATE TABLE oncebox.consumer_start (
    consumer_id           int PRIMARY KEY REFERENCES oncebox.consumer ON DELETE CASCADE,
    -- Revision of the policy, and build of the host, of the last start that a host survived.
    proven_revision       bigint,
    proven_build          text,
    -- Hosts in a row that ended while they started the consumer, perhaps for another reason.
    suspicions            int NOT NULL DEFAULT 0,
    -- Hosts that ended for no other reason than the start.
    deaths                int NOT NULL DEFAULT 0,
    -- Revision of the policy that hosts do not start any more, the time of that decision, and the
    -- host that ended. Null: no quarantine.
    quarantined_revision  bigint,
    quarantined_at        timestamptz,
    quarantined_host_id   bigint,
    quarantined_host      text,
    CONSTRAINT consumer_start_quarantine_whole
        CHECK ((quarantined_revision IS NULL) = (quarantined_at IS NULL)
            AND (quarantined_revision IS NULL) = (quarantined_host IS NULL))
);

-- A host is starting a consumer. The mark outlives the host's row, which is what makes it one of a
-- host that is gone.
CREATE TABLE oncebox.start_mark (
    consumer_id           int NOT NULL REFERENCES oncebox.consumer ON DELETE CASCADE,
    host_id               bigint NOT NULL,
    host                  text NOT NULL,
    policy_revision       bigint NOT NULL,
    -- No host of this build survived this policy yet: one host tries it, and one such consumer at a
    -- time.
    is_unproven           boolean NOT NULL,
    -- Whether the part is over in which nothing else of this host is so marked.
    is_settling           boolean NOT NULL DEFAULT false,
    started_at            timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer_id, host_id)
);

-- Grants -----------------------------------------------------------------------------------------

-- PostgreSQL lets PUBLIC execute what is new; `oncebox migrate` gives tenants what they call.
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA oncebox, oncebox_host FROM PUBLIC;
