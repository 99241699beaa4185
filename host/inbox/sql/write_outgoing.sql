-- Inserts messages that handlers emitted in this transaction before its completion, so that the
-- handler of a later message can cancel them. The savepoint of that message comes after it. Raises
-- where the transaction has no guard row, which `complete` deletes. Parameters: as for
-- `insert_outgoing`.
CREATE OR REPLACE FUNCTION oncebox_host.write_outgoing(
    p_secret bytea, p_consumer int,
    p_outgoing_cause text[], p_outgoing_ordinal int[], p_outgoing_id text[],
    p_outgoing_destination text[], p_outgoing_key bytea[], p_outgoing_event_type text[],
    p_outgoing_content_type text[], p_outgoing_headers bytea[], p_outgoing_payload bytea[],
    p_outgoing_token text[], p_outgoing_after_ms bigint[], p_outgoing_at_ms bigint[],
    p_outgoing_trace_parent text[], p_outgoing_correlation_id text[])
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off AS $$
DECLARE
    v record;
BEGIN
    SELECT * INTO v FROM oncebox.authorize(p_secret, p_consumer);
    PERFORM FROM oncebox.guard g WHERE g.xid = pg_current_xact_id();
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no claim in this transaction' USING ERRCODE = 'OB002';
    END IF;
    PERFORM oncebox.insert_outgoing(p_consumer, p_outgoing_cause, p_outgoing_ordinal,
        p_outgoing_id, p_outgoing_destination, p_outgoing_key, p_outgoing_event_type,
        p_outgoing_content_type, p_outgoing_headers, p_outgoing_payload, p_outgoing_token,
        p_outgoing_after_ms, p_outgoing_at_ms, p_outgoing_trace_parent,
        p_outgoing_correlation_id);
END $$;
