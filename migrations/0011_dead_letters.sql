-- What is done with dead letters beside redriving and discarding them: they are copied to a topic, and mended.

-- The `processed_at` of the dead letter that was last copied to the topic of its consumer's policy. One that was
-- redriven and failed again has another, and is copied again.
ALTER TABLE oncebox.inbox ADD COLUMN copied_at timestamptz;
CREATE INDEX inbox_uncopied ON oncebox.inbox (consumer_id, processed_at, "offset")
    WHERE status IN ('failed_terminal', 'parked') AND copied_at IS DISTINCT FROM processed_at;

-- Which host copies the dead letters of a consumer, until when, so that two do not copy the same.
CREATE TABLE oncebox.copying (
    consumer_id           int PRIMARY KEY,
    owner                 text NOT NULL,
    until                 timestamptz NOT NULL
);

CREATE OR REPLACE VIEW oncebox.inbox_message AS
    SELECT t.name AS tenant_name, c.name AS consumer_name, i.*
    FROM oncebox.inbox i JOIN oncebox.consumer c USING (consumer_id) JOIN oncebox.tenant t USING (tenant_id);
CREATE OR REPLACE VIEW oncebox.dead_letter AS
    SELECT * FROM oncebox.inbox_message WHERE status IN ('failed_terminal', 'parked');

-- Payloads that were replaced: what a message had before, the first of which is what came.
CREATE TABLE oncebox.inbox_revision (
    consumer_id           int NOT NULL,
    message_id            text NOT NULL,
    revision              int NOT NULL CHECK (revision > 0),
    at                    timestamptz NOT NULL DEFAULT now(),
    payload               bytea,
    PRIMARY KEY (consumer_id, message_id, revision)
);

ALTER TABLE oncebox.inbox_history
    DROP CONSTRAINT inbox_history_event_known,
    ADD CONSTRAINT inbox_history_event_known CHECK (event IN ('failed', 'crashed', 'redriven', 'discarded', 'retried', 'revised')) NOT VALID;

-- Give a dead letter another payload and redrive it: the same row, under the same id and with the same headers. The hash
-- stays that of what came, so that a redelivery is the duplicate that it is. Only one that was a dead letter by `p_as_of`,
-- so that what is asked for twice is done once. False: it is none, or somebody is working on it.
CREATE FUNCTION oncebox.revise(p_consumer int, p_class smallint, p_id text, p_payload bytea, p_as_of timestamptz, p_actor text, p_reason text)
RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
DECLARE
    v_payload bytea;
BEGIN
    -- Locks the row, and looks whether it may be run again.
    IF oncebox.remedy(p_consumer, p_class, 'redrive', ARRAY[p_id], p_as_of, p_actor, p_reason) = 0 THEN
        RETURN false;
    END IF;
    SELECT i.payload INTO v_payload FROM oncebox.inbox i
        WHERE i.consumer_id = p_consumer AND i.retention_class = p_class AND i.message_id = p_id;
    INSERT INTO oncebox.inbox_revision (consumer_id, message_id, revision, payload)
        SELECT p_consumer, p_id, count(*) + 1, v_payload FROM oncebox.inbox_revision r
        WHERE r.consumer_id = p_consumer AND r.message_id = p_id;
    UPDATE oncebox.inbox i SET payload = p_payload
        WHERE i.consumer_id = p_consumer AND i.retention_class = p_class AND i.message_id = p_id;
    INSERT INTO oncebox.inbox_history (consumer_id, message_id, event, reason, actor)
        VALUES (p_consumer, p_id, 'revised', p_reason, p_actor);
    RETURN true;
END $$;

-- `lease_with_version`, how long ago the message was received or last redriven, and whether it was taken from a lease
-- that had run out.
CREATE FUNCTION oncebox_host.lease_with_age(p_secret bytea, p_consumer int, p_owner text, p_limit int, p_lease_ms bigint, p_crashes_max int)
RETURNS TABLE (id text, topic text, partition int, "offset" bigint, timestamp_ms bigint, key bytea, ordering_key bytea, source text,
    event_type text, event_version text, content_type text, trace_parent text, headers bytea, payload bytea,
    payload_hash bytea, attempts int, epoch bigint, version_id int, age_ms bigint, is_taken_over boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET enable_seqscan = off AS $$
DECLARE
    v record;
BEGIN
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);
    RETURN QUERY
    -- What is read beside the call is as it was before it: whether the message was under a lease, and nothing of one that
    -- was committed since then, which is new.
    SELECT l.*, coalesce((extract(epoch FROM now() - greatest(r.received_at, h.redriven_at)) * 1000)::bigint, 0),
        coalesce(r.status = 'in_progress', false)
    FROM oncebox_host.lease_with_version(p_secret, p_consumer, p_owner, p_limit, p_lease_ms, p_crashes_max) l
        LEFT JOIN LATERAL (SELECT i.received_at, i.status FROM oncebox.inbox i
            WHERE i.consumer_id = p_consumer AND i.message_id = l.id AND i.retention_class = v.class LIMIT 1) r ON true
        LEFT JOIN LATERAL (SELECT max(at) AS redriven_at FROM oncebox.inbox_history
            WHERE consumer_id = p_consumer AND message_id = l.id AND event = 'redriven') h ON true;
END $$;
