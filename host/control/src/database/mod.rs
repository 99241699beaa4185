//! Databases: what the host makes in its own and in those of tenants.

// How the host's own login reaches a database.
pub(crate) mod reach;
// Locks of the host's own, a closed list.
pub(crate) mod locks;
// The host's own schema.
pub mod schema;
// Functions of the host's schemas, each with its file.
pub(crate) mod functions;
// The database that holds a tenant's inbox and its tables.
pub(crate) mod tenant_database;
// Migrations of a tenant's own tables.
pub(crate) mod migration;
// What statements such a migration may hold.
pub(crate) mod statements;
