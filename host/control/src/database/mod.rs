//! Databases: the objects that the host makes in its own database and in those of tenants.

// Connections of the host's own login to a database.
pub(crate) mod reach;
// The programs of PostgreSQL on this machine.
pub mod postgres_programs;
// The host's own advisory locks, a closed list.
pub(crate) mod locks;
// The host's own schema.
pub mod schema;
// The rights of a login that is no superuser.
pub(crate) mod rights;
// Functions of the host's schemas, each in its own file.
pub(crate) mod functions;
// What an update would change, and which tables it would lock.
pub(crate) mod plan;
// The database that holds a tenant's inbox and its tables.
pub(crate) mod tenant_database;
// Migrations of a tenant's own tables.
pub(crate) mod migration;
// Limits of those migrations.
pub(crate) mod migration_bounds;
// Checks of the statements that such a migration holds.
pub(crate) mod statements;
