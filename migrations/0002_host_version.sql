-- Locks: oncebox.host, an instant

-- The release that a host runs: while hosts are replaced one by one, two releases are at work.
-- Null: of a release that did not say so.
ALTER TABLE oncebox.host ADD COLUMN version text;
