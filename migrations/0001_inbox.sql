-- Run as the role that owns the schemas `oncebox` (tables, reachable by the host alone) and
-- `oncebox_host` (functions, the only way a tenant's session reaches the inbox).

-- Tenants, consumers, handlers ------------------------------------------------------------

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
    created_at            timestamptz NOT NULL DEFAULT now()
);

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
    consumer_id           int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id             int NOT NULL REFERENCES oncebox.tenant,
    name                  text NOT NULL CONSTRAINT consumer_name_shape CHECK (name ~ '^[a-z][a-z0-9-]{0,62}$'),
    policy                jsonb NOT NULL,
    retention_class       smallint NOT NULL REFERENCES oncebox.retention_class,
    -- Grows with every change of the consumer's deployments.
    generation            bigint NOT NULL DEFAULT 0,
    -- Claims of hosts that loaded an older generation are refused.
    generation_required   bigint NOT NULL DEFAULT 0,
    created_at            timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT consumer_name_unique UNIQUE (tenant_id, name)
);

CREATE TABLE oncebox.component (
    digest                bytea PRIMARY KEY CONSTRAINT component_digest_length CHECK (octet_length(digest) = 32),
    bytes                 bytea NOT NULL,
    created_at            timestamptz NOT NULL DEFAULT now()
);
ALTER TABLE oncebox.component ALTER COLUMN bytes SET STORAGE EXTERNAL;

CREATE TABLE oncebox.handler (
    handler_id            int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id             int NOT NULL REFERENCES oncebox.tenant,
    name                  text NOT NULL CONSTRAINT handler_name_shape CHECK (name ~ '^[a-z][a-z0-9-]{0,62}$'),
    CONSTRAINT handler_name_unique UNIQUE (tenant_id, name)
);

CREATE TABLE oncebox.version (
    version_id            int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    handler_id            int NOT NULL REFERENCES oncebox.handler,
    digest                bytea NOT NULL REFERENCES oncebox.component,
    created_at            timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT version_digest_unique UNIQUE (handler_id, digest)
);

-- The live deployment of an event type is the newest row; `*` takes what no other takes.
CREATE TABLE oncebox.deployment (
    deployment_id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    consumer_id           int NOT NULL REFERENCES oncebox.consumer,
    event_type            text NOT NULL,
    version_id            int NOT NULL REFERENCES oncebox.version,
    settings              jsonb NOT NULL DEFAULT '{}',
    created_at            timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX deployment_live ON oncebox.deployment (consumer_id, event_type, deployment_id DESC);

CREATE TABLE oncebox.audit (
    audit_id              bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at                    timestamptz NOT NULL DEFAULT now(),
    actor                 text NOT NULL,
    action                text NOT NULL,
    subject               text NOT NULL,
    details               jsonb NOT NULL DEFAULT '{}'
);

-- The inbox --------------------------------------------------------------------------------

CREATE TABLE oncebox.inbox (
    consumer_id           int NOT NULL,
    message_id            text NOT NULL,
    retention_class       smallint NOT NULL,
    -- Start of the bucket in which the row last changed its state.
    bucket                timestamptz NOT NULL,
    topic                 text NOT NULL,
    partition             int NOT NULL,
    "offset"              bigint NOT NULL,
    record_timestamp_ms   bigint NOT NULL,
    key                   bytea,
    ordering_key          bytea,
    source                text,
    event_type            text,
    event_version         text,
    content_type          text,
    trace_parent          text,
    status                text NOT NULL,
    reason                text,
    attempts              int NOT NULL DEFAULT 0,
    -- Attempts that ended without an answer: the process or its connection died.
    crashes               int NOT NULL DEFAULT 0,
    last_error            text,
    next_attempt_at       timestamptz,
    locked_until          timestamptz,
    locked_by             text,
    -- Grows with every lease; a worker whose epoch is old has lost the message.
    epoch                 bigint NOT NULL DEFAULT 0,
    version_id            int,
    result                jsonb,
    payload               bytea,
    headers               bytea,
    payload_hash          bytea,
    received_at           timestamptz NOT NULL DEFAULT now(),
    processed_at          timestamptz,
    CONSTRAINT inbox_key PRIMARY KEY (consumer_id, message_id, retention_class, bucket),
    CONSTRAINT inbox_message_id_length CHECK (octet_length(message_id) BETWEEN 1 AND 600),
    CONSTRAINT inbox_status_known CHECK (status IN ('received', 'in_progress', 'completed', 'failed_retryable',
        'failed_terminal', 'parked', 'waiting', 'skipped', 'discarded')),
    CONSTRAINT inbox_settled_has_time CHECK ((processed_at IS NOT NULL)
        = (status IN ('completed', 'failed_terminal', 'parked', 'skipped', 'discarded'))),
    CONSTRAINT inbox_lease_has_end CHECK ((status = 'in_progress') = (locked_until IS NOT NULL)),
    CONSTRAINT inbox_due_has_time CHECK ((status IN ('received', 'failed_retryable')) = (next_attempt_at IS NOT NULL)),
    CONSTRAINT inbox_failure_has_reason CHECK (status NOT IN ('failed_retryable', 'failed_terminal', 'parked') OR reason IS NOT NULL)
) PARTITION BY LIST (retention_class);

CREATE TABLE oncebox.inbox_7d        PARTITION OF oncebox.inbox FOR VALUES IN (1) PARTITION BY RANGE (bucket);
CREATE TABLE oncebox.inbox_30d       PARTITION OF oncebox.inbox FOR VALUES IN (2) PARTITION BY RANGE (bucket);
CREATE TABLE oncebox.inbox_1y        PARTITION OF oncebox.inbox FOR VALUES IN (3) PARTITION BY RANGE (bucket);
CREATE TABLE oncebox.inbox_permanent PARTITION OF oncebox.inbox FOR VALUES IN (4) PARTITION BY RANGE (bucket);

-- What is not completed: for people, and for the workers that look for what is due.
CREATE INDEX inbox_open      ON oncebox.inbox (consumer_id, status, received_at) WHERE status <> 'completed';
CREATE INDEX inbox_due       ON oncebox.inbox (consumer_id, next_attempt_at, "offset") WHERE status IN ('received', 'failed_retryable');
CREATE INDEX inbox_leased    ON oncebox.inbox (consumer_id, locked_until, "offset") WHERE status = 'in_progress';
CREATE INDEX inbox_processed ON oncebox.inbox USING brin (processed_at) WHERE status = 'completed';

-- Names instead of numbers, for people and tools.
CREATE VIEW oncebox.inbox_message AS
    SELECT t.name AS tenant_name, c.name AS consumer_name, i.*
    FROM oncebox.inbox i JOIN oncebox.consumer c USING (consumer_id) JOIN oncebox.tenant t USING (tenant_id);
CREATE VIEW oncebox.processed_message AS
    SELECT tenant_name, consumer_name, message_id, processed_at, result FROM oncebox.inbox_message WHERE status = 'completed';
CREATE VIEW oncebox.dead_letter AS
    SELECT * FROM oncebox.inbox_message WHERE status IN ('failed_terminal', 'parked');

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

-- A row per open transaction that holds a claim; always empty from outside.
CREATE TABLE oncebox.guard (xid xid8 PRIMARY KEY)
    WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000);

CREATE FUNCTION oncebox.guard_check() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM oncebox.guard g WHERE g.xid = NEW.xid) THEN
        RAISE EXCEPTION 'commit guard: the transaction was not completed by the host' USING ERRCODE = 'OB001';
    END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER guard AFTER INSERT ON oncebox.guard
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION oncebox.guard_check();

-- Helpers of the host functions -----------------------------------------------------------

CREATE FUNCTION oncebox.bucket_at(p_class smallint, p_at timestamptz) RETURNS timestamptz
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT date_bin(r.bucket, p_at, '2000-01-03 00:00:00+00') FROM oncebox.retention_class r WHERE r.retention_class = p_class
$$;

-- The caller's consumer, when its session and its secret belong to that consumer's tenant.
CREATE FUNCTION oncebox.authorize(p_secret bytea, p_consumer int, OUT class smallint, OUT bucket timestamptz,
    OUT generation_required bigint)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    SELECT c.retention_class, date_bin(r.bucket, now(), '2000-01-03 00:00:00+00'), c.generation_required
        INTO class, bucket, generation_required
    FROM oncebox.consumer c
    JOIN oncebox.tenant t USING (tenant_id)
    JOIN oncebox.retention_class r USING (retention_class)
    WHERE c.consumer_id = p_consumer AND t.login = session_user AND t.secret_hash = sha256(p_secret);
    IF NOT FOUND THEN
        RAISE EXCEPTION 'denied' USING ERRCODE = '42501';
    END IF;
END $$;

CREATE FUNCTION oncebox.message_lock(p_consumer int, p_id text) RETURNS bigint
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT hashtextextended(p_id, p_consumer::bigint)
$$;

-- Host functions: SELECT * FROM oncebox_host.f($1, …) --------------------------------------

-- Take messages. A new one becomes a row: `completed` (it is about to be run in this very
-- transaction, which the guard keeps from being committed before `complete`), `received` (stored
-- to be run under a lease) or `parked`. A known one is answered with what became of it.
--
-- Uniqueness across partitions: first a lock per message, sorted, then, in a second statement, the
-- look and the insert. Under READ COMMITTED that statement's snapshot is younger than the locks,
-- and a commit is visible before its locks go, so it sees whatever earlier holders committed,
-- in any bucket.
CREATE FUNCTION oncebox_host.claim(
    p_secret bytea, p_consumer int, p_generation bigint, p_status text, p_reason text[],
    p_topic text, p_partition int, p_id text[], p_offset bigint[], p_timestamp_ms bigint[], p_key bytea[],
    p_ordering_key bytea[], p_source text[], p_event_type text[], p_event_version text[], p_content_type text[],
    p_trace_parent text[], p_hash bytea[], p_version int[], p_headers bytea[], p_payload bytea[])
RETURNS TABLE (ordinal bigint, outcome text, known_status text, same_payload boolean, known_result text)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v record;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'claims need READ COMMITTED' USING ERRCODE = 'OB004';
    END IF;
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);
    IF p_status NOT IN ('completed', 'received', 'parked') THEN
        RAISE EXCEPTION 'a claim cannot make a row `%`', p_status USING ERRCODE = '22023';
    END IF;
    IF p_generation < v.generation_required THEN
        RAISE EXCEPTION 'stale deployments: generation % is loaded, % is required', p_generation, v.generation_required
            USING ERRCODE = 'OB005';
    END IF;
    IF p_status = 'completed' THEN
        INSERT INTO oncebox.guard VALUES (pg_current_xact_id()) ON CONFLICT DO NOTHING;
    END IF;

    PERFORM pg_advisory_xact_lock(l.key)
        FROM (SELECT DISTINCT oncebox.message_lock(p_consumer, u.id) AS key FROM unnest(p_id) AS u(id) ORDER BY 1) AS l;

    RETURN QUERY
    WITH offered AS MATERIALIZED (
        SELECT * FROM unnest(p_id, p_offset, p_timestamp_ms, p_key, p_ordering_key, p_source, p_event_type, p_event_version,
                             p_content_type, p_trace_parent, p_hash, p_version, p_headers, p_payload, p_reason) WITH ORDINALITY
            AS o(id, "offset", timestamp_ms, key, ordering_key, source, event_type, event_version,
                 content_type, trace_parent, hash, version, headers, payload, reason, ordinal)
    ), known AS MATERIALIZED (
        SELECT i.message_id, i.status, i.payload_hash, i.result FROM oncebox.inbox i
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = ANY (p_id)
    ), fresh AS MATERIALIZED (
        SELECT DISTINCT ON (o.id) o.* FROM offered o
        WHERE NOT EXISTS (SELECT FROM known k WHERE k.message_id = o.id) ORDER BY o.id, o.ordinal
    ), claimed AS (
        INSERT INTO oncebox.inbox AS i (consumer_id, message_id, retention_class, bucket, topic, partition, "offset",
            record_timestamp_ms, key, ordering_key, source, event_type, event_version, content_type, trace_parent, status,
            reason, attempts, next_attempt_at, version_id, payload, headers, payload_hash, processed_at)
        SELECT p_consumer, f.id, v.class, v.bucket, p_topic, p_partition, f."offset", f.timestamp_ms, f.key, f.ordering_key,
            f.source, f.event_type, f.event_version, f.content_type, f.trace_parent, p_status,
            f.reason, (p_status = 'completed')::int, CASE WHEN p_status = 'received' THEN now() END,
            f.version, f.payload, f.headers, f.hash, CASE WHEN p_status <> 'received' THEN now() END
        FROM fresh f ORDER BY f.ordinal
        ON CONFLICT DO NOTHING
        RETURNING i.message_id
    )
    SELECT o.ordinal,
        CASE WHEN k.message_id IS NOT NULL THEN 'known'
             WHEN f.ordinal <> o.ordinal THEN 'known'
             WHEN c.message_id IS NULL THEN 'elsewhere'
             ELSE 'new' END,
        coalesce(k.status, p_status),
        CASE WHEN k.message_id IS NOT NULL THEN k.payload_hash ELSE f.hash END IS NOT DISTINCT FROM o.hash,
        k.result::text
    FROM offered o
    LEFT JOIN known k ON k.message_id = o.id
    LEFT JOIN fresh f ON f.id = o.id
    LEFT JOIN claimed c ON c.message_id = o.id
    ORDER BY o.ordinal;
END $$;

-- The end of a transaction that claimed or resumed: what differs from a plain completion is
-- written, claims that were not run are withdrawn, and the guard goes. Raises unless the claim
-- belongs to this very transaction.
CREATE FUNCTION oncebox_host.complete(
    p_secret bytea, p_consumer int, p_withdrawn text[], p_id text[], p_epoch bigint[], p_status text[], p_reason text[],
    p_error text[], p_result text[], p_delay_ms bigint[], p_version int[], p_keep boolean[], p_headers bytea[], p_payload bytea[])
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v record;
    touched bigint;
BEGIN
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);
    DELETE FROM oncebox.guard g WHERE g.xid = pg_current_xact_id();
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no claim in this transaction' USING ERRCODE = 'OB002';
    END IF;
    IF cardinality(p_withdrawn) > 0 THEN
        DELETE FROM oncebox.inbox i
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = ANY (p_withdrawn)
          AND i.epoch = 0 AND i.xmin = pg_current_xact_id()::xid;
        GET DIAGNOSTICS touched = ROW_COUNT;
        IF touched <> cardinality(p_withdrawn) THEN
            RAISE EXCEPTION 'a withdrawn claim is not of this transaction' USING ERRCODE = 'OB003';
        END IF;
    END IF;
    IF cardinality(p_id) > 0 THEN
        UPDATE oncebox.inbox i SET
            bucket = v.bucket, status = s.status, reason = s.reason, last_error = s.error, result = s.result::jsonb,
            next_attempt_at = CASE WHEN s.status = 'failed_retryable' THEN now() + s.delay_ms * interval '1 millisecond' END,
            processed_at = CASE WHEN s.status <> 'failed_retryable' THEN now() END,
            locked_until = NULL, locked_by = NULL, version_id = coalesce(s.version, i.version_id),
            headers = CASE WHEN s.keep THEN coalesce(s.headers, i.headers) END,
            payload = CASE WHEN s.keep THEN coalesce(s.payload, i.payload) END
        FROM unnest(p_id, p_epoch, p_status, p_reason, p_error, p_result, p_delay_ms, p_version, p_keep, p_headers, p_payload)
            AS s(id, epoch, status, reason, error, result, delay_ms, version, keep, headers, payload)
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = s.id AND i.epoch = s.epoch
          AND CASE WHEN s.epoch = 0 THEN i.xmin = pg_current_xact_id()::xid ELSE i.status = 'in_progress' END;
        GET DIAGNOSTICS touched = ROW_COUNT;
        IF touched <> cardinality(p_id) THEN
            RAISE EXCEPTION 'a completed claim is not of this transaction' USING ERRCODE = 'OB003';
        END IF;
    END IF;
END $$;

-- Lease what is due: the attempt is counted and committed before it runs. A row whose lease ran out
-- had a worker that died; the third time it is parked. A row whose worker still holds its transaction
-- is locked, and skipped.
CREATE FUNCTION oncebox_host.lease(p_secret bytea, p_consumer int, p_owner text, p_limit int, p_lease_ms bigint, p_crashes_max int)
RETURNS TABLE (id text, topic text, partition int, "offset" bigint, timestamp_ms bigint, key bytea, ordering_key bytea, source text,
    event_type text, event_version text, content_type text, trace_parent text, headers bytea, payload bytea,
    payload_hash bytea, attempts int, epoch bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v record;
    v_ids text[];
BEGIN
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);

    UPDATE oncebox.inbox i SET bucket = v.bucket, status = 'parked', reason = 'crashed', processed_at = now(),
        crashes = i.crashes + 1, epoch = i.epoch + 1, locked_until = NULL, locked_by = NULL,
        last_error = format('the process or its connection died while the message ran, %s times', i.crashes + 1)
    WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.status = 'in_progress'
      AND i.message_id IN (SELECT d.message_id FROM oncebox.inbox d
        WHERE d.consumer_id = p_consumer AND d.retention_class = v.class AND d.status = 'in_progress'
          AND d.locked_until < now() AND d.crashes + 1 >= p_crashes_max
        LIMIT p_limit FOR UPDATE SKIP LOCKED);

    -- Each look is the head of an index, however much is due.
    SELECT array_agg(d.message_id) INTO v_ids FROM (
        SELECT x.message_id FROM oncebox.inbox x
        WHERE x.consumer_id = p_consumer AND x.retention_class = v.class AND x.status = 'in_progress' AND x.locked_until < now()
        ORDER BY x.locked_until, x."offset" LIMIT p_limit FOR UPDATE SKIP LOCKED) d;
    IF v_ids IS NULL THEN
        SELECT array_agg(d.message_id) INTO v_ids FROM (
            SELECT x.message_id FROM oncebox.inbox x
            WHERE x.consumer_id = p_consumer AND x.retention_class = v.class
              AND x.status IN ('received', 'failed_retryable') AND x.next_attempt_at <= now()
            ORDER BY x.next_attempt_at, x."offset" LIMIT p_limit FOR UPDATE SKIP LOCKED) d;
    END IF;

    RETURN QUERY
    WITH leased AS (
        UPDATE oncebox.inbox i SET bucket = v.bucket, status = 'in_progress', attempts = i.attempts + 1,
            crashes = i.crashes + (i.status = 'in_progress')::int, epoch = i.epoch + 1, next_attempt_at = NULL,
            locked_until = now() + p_lease_ms * interval '1 millisecond', locked_by = p_owner
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = ANY (v_ids)
        RETURNING i.*
    )
    SELECT l.message_id, l.topic, l.partition, l."offset", l.record_timestamp_ms, l.key, l.ordering_key, l.source,
        l.event_type, l.event_version, l.content_type, l.trace_parent, l.headers, l.payload, l.payload_hash, l.attempts, l.epoch
    FROM leased l ORDER BY l.received_at, l."offset";
END $$;

-- Begin the work of a lease: lock its row and check the epoch before any SQL of the guest. False:
-- someone else has it.
CREATE FUNCTION oncebox_host.resume(p_secret bytea, p_consumer int, p_generation bigint, p_id text, p_epoch bigint)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v record;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'claims need READ COMMITTED' USING ERRCODE = 'OB004';
    END IF;
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);
    IF p_generation < v.generation_required THEN
        RAISE EXCEPTION 'stale deployments: generation % is loaded, % is required', p_generation, v.generation_required
            USING ERRCODE = 'OB005';
    END IF;
    PERFORM FROM oncebox.inbox i
        WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = p_id
          AND i.status = 'in_progress' AND i.epoch = p_epoch
        FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO oncebox.guard VALUES (pg_current_xact_id()) ON CONFLICT DO NOTHING;
    RETURN true;
END $$;

-- Give a lease back unused: the attempt did not happen.
CREATE FUNCTION oncebox_host.release(p_secret bytea, p_consumer int, p_id text, p_epoch bigint, p_delay_ms bigint)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v record;
BEGIN
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);
    UPDATE oncebox.inbox i SET bucket = v.bucket, status = CASE WHEN i.reason IS NULL THEN 'received' ELSE 'failed_retryable' END,
        attempts = i.attempts - 1, next_attempt_at = now() + p_delay_ms * interval '1 millisecond',
        locked_until = NULL, locked_by = NULL
    WHERE i.consumer_id = p_consumer AND i.retention_class = v.class AND i.message_id = p_id
      AND i.status = 'in_progress' AND i.epoch = p_epoch;
    RETURN FOUND;
END $$;

-- A process takes a partition at an offset. True: an earlier one did so at the same offset and neither
-- made progress nor gave it up, so the messages there are suspect.
CREATE FUNCTION oncebox_host.partition_taken(p_secret bytea, p_consumer int, p_topic text, p_partition int, p_next_offset bigint)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_starts int;
BEGIN
    PERFORM oncebox.authorize(p_secret, p_consumer);
    INSERT INTO oncebox.probation AS p VALUES (p_consumer, p_topic, p_partition, p_next_offset, 1)
    ON CONFLICT (consumer_id, topic, partition) DO UPDATE
        SET starts = CASE WHEN p.next_offset = excluded.next_offset THEN p.starts + 1 ELSE 1 END,
            next_offset = excluded.next_offset
    RETURNING p.starts INTO v_starts;
    RETURN v_starts > 1;
END $$;

-- The first progress, or a clean hand-over.
CREATE FUNCTION oncebox_host.partition_cleared(p_secret bytea, p_consumer int, p_topic text, p_partition int)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM oncebox.authorize(p_secret, p_consumer);
    DELETE FROM oncebox.probation p WHERE p.consumer_id = p_consumer AND p.topic = p_topic AND p.partition = p_partition;
END $$;

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA oncebox, oncebox_host FROM PUBLIC;
