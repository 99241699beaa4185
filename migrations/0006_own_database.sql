-- A tenant's inbox and tables may be in a database of its own, its place. That holds a mirror of the tenant
-- and of its consumers, which the host functions there read; this database stays the truth.

-- Which installation a database belongs to. Empty until the installation has a tenant with a place.
CREATE TABLE oncebox.installation (
    only_one              boolean PRIMARY KEY DEFAULT true CONSTRAINT installation_only_one CHECK (only_one),
    installation_id       uuid NOT NULL,
    -- Whether it holds tenants of another database, and nothing else.
    is_place              boolean NOT NULL
);

ALTER TABLE oncebox.tenant
    -- What of `database_url` may be shown: host, port and name.
    ADD COLUMN database text,
    ADD CONSTRAINT tenant_database_is_shown CHECK (database_url IS NULL OR database IS NOT NULL);

-- Redrives belong to the transaction that withdraws a version. Where the messages are in another database,
-- that transaction leaves a mark, and whoever finds it redrives there and takes it away.
ALTER TABLE oncebox.deployment
    ADD COLUMN redrive_pending boolean NOT NULL DEFAULT false,
    -- Messages that were made due again, where the mark was taken away.
    ADD COLUMN redriven bigint;
CREATE INDEX deployment_redrive ON oncebox.deployment (consumer_id) WHERE redrive_pending;
