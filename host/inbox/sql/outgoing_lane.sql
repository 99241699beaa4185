-- Returns the number of the lane of an outgoing message: what must keep its order, which is a
-- tenant's messages of one destination and key. Null without a key: no order.
--
-- It is of a SHA-256, so that no tenant finds a key whose lane is another tenant's. Called by
-- functions that have set the search path, so that PostgreSQL puts its expression in their queries.
CREATE OR REPLACE FUNCTION oncebox.outgoing_lane(p_tenant int, p_destination text, p_key bytea)
RETURNS bigint
LANGUAGE sql STABLE STRICT AS $$
    SELECT ('x' || encode(substring(sha256(int4send(p_tenant)
        || int4send(octet_length(p_destination)) || convert_to(p_destination, 'UTF8') || p_key)
        FROM 1 FOR 8), 'hex'))::bit(64)::bigint
$$;
