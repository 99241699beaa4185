-- Locks: oncebox.installation, an instant

-- Its name in `[[databases]]` of the hosts' configurations, where it has one. Null: the host's own
-- database, or one that tenants named. A host that finds another name here than its configuration
-- has uses neither of the two databases for the other.
ALTER TABLE oncebox.installation ADD COLUMN database_name text;
