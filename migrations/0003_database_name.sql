-- Locks: oncebox.installation, an instant
-- Locks: oncebox.tenant, an instant

-- The name of this database in `[[databases]]` of the hosts' configurations, and its own id. Null: the
-- host's own database, or one that tenants named. A host uses a database for the tenants that were
-- placed under a name where both are what its own database knows of that name.
ALTER TABLE oncebox.installation
    ADD COLUMN database_name text,
    ADD COLUMN database_id uuid;

-- The databases in which tenants are placed, by name, each with the id that it has noted.
CREATE TABLE oncebox.named_database (
    name                  text PRIMARY KEY,
    database_id           uuid NOT NULL
);

-- The tenants outside this database whose roles, schema and replica were made there. Where they are
-- missing later, the database was restored from a backup that is older than the tenant.
CREATE TABLE oncebox.placed_tenant (
    tenant_id             int PRIMARY KEY REFERENCES oncebox.tenant ON DELETE CASCADE
);
