-- Locks: oncebox.consumer, an instant

-- The secrets by which a consumer knows the senders of messages over HTTP. Rows are in the host's
-- database alone.
CREATE TABLE oncebox.ingress_secret (
    consumer_id           int PRIMARY KEY REFERENCES oncebox.consumer ON DELETE CASCADE,
    -- 1 at first, plus one at each change.
    revision              bigint NOT NULL DEFAULT 1,
    -- Number of secrets, for readers: 2 during a rotation.
    secrets               int NOT NULL CONSTRAINT ingress_secret_few CHECK (secrets BETWEEN 1 AND 2),
    -- The secrets, the present one first, sealed under the master key.
    sealed                bytea NOT NULL,
    set_at                timestamptz NOT NULL DEFAULT now(),
    set_by                text NOT NULL
);
