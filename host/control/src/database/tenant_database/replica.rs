//! The replica of a tenant and its consumers in the database that the tenant named.
//!
//! Every writer first takes one lock there, and after it reads the source in the host's database.
//! So of two writers the later one has read the newer source. The replica's requirements never go
//! back to the state that an earlier reader saw.

use std::time::Duration;

use chrono::{DateTime, Utc};
use oncebox_model::{error::InboxError, hooks, status::ConsumerState};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};

use super::{TenantDatabase, answered_within, open::WorkTurn, prepare};
use crate::{
    database::{
        locks::{self, HostLock},
        schema,
    },
    handles::TenantDatabases,
    tenants::{Tenant, lock_grants, roles::role_statements},
};

/// Longest time for the replica, and for the copy of migration records, before each is given up.
const LOOK_MAX: Duration = Duration::from_secs(15);

/// A tenant with a database of its own, and its replicated state as one text. While the text is
/// equal, nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct SourceVersion {
    /// Name of the tenant.
    pub tenant: String,
    /// Name of its database.
    pub database: String,
    /// Text of all values that the replica follows.
    pub state: String,
}

/// Required contents of the replica, read from the host's database.
struct ReplicaSource {
    row: SourceTenant,
    consumers: Vec<SourceConsumer>,
}

#[derive(sqlx::FromRow)]
struct SourceTenant {
    #[sqlx(flatten)]
    tenant: Tenant,
    secret_hash: Vec<u8>,
    secret_hash_before: Option<Vec<u8>>,
    secret_before_until: Option<DateTime<Utc>>,
    /// Whether its roles, schema and replica were made before.
    was_made: bool,
}

#[derive(sqlx::FromRow)]
struct SourceConsumer {
    consumer_id: i32,
    name: String,
    retention_class: i16,
    generation: i64,
    generation_required: i64,
    state: ConsumerState,
    revision: i64,
}

/// State of a tenant in its own database.
#[derive(sqlx::FromRow)]
struct Replica {
    secret_hash: Option<Vec<u8>>,
    schema_name: Option<String>,
    has_roles: bool,
    has_schema: bool,
}

impl TenantDatabases<'_> {
    /// Makes the replica of a tenant and its consumers equal to the host's database. Finishes the
    /// work of a process that died between the two databases. Does nothing for tenants in the
    /// host's database. Safe to repeat, and to run from several hosts at once.
    ///
    /// # Errors
    /// `Unreachable` where the database does not answer in time. `Invalid` where it is not this
    /// installation's.
    pub async fn replicate(&self, tenant: &Tenant) -> Result<(), InboxError> {
        let database = self.get(tenant)?;
        if !database.is_dedicated {
            return Ok(());
        }
        // A wait for other work there says nothing about the database.
        let turn = database.turn().await;
        answered_within(LOOK_MAX, self.replicate_in(&database, tenant, turn)).await??;
        answered_within(LOOK_MAX, self.copy_migrations(tenant)).await??;
        answered_within(prepare::PREPARE_MAX, self.redrive_pending(&database, tenant)).await?
    }

    /// Makes the replica of a tenant, given by name, equal to the host's database.
    pub(crate) async fn replicate_named(&self, tenant: &str) -> Result<(), InboxError> {
        self.replicate(&self.0.tenants().get(tenant).await?).await
    }

    /// Returns the tenants with databases of their own, with their replicated state.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn dedicated_tenants(&self) -> Result<Vec<SourceVersion>, InboxError> {
        const DEDICATED: &str = "SELECT t.name AS tenant, t.database, concat_ws(' ', \
            t.tenant_id, t.revision, t.state, md5(t.secret_hash), md5(t.database_url), \
                (SELECT string_agg(concat_ws(':', c.consumer_id, c.revision, c.state, \
                c.retention_class, c.generation, c.generation_required, \
                        (SELECT max(d.deployment_id) FROM oncebox.deployment d WHERE d.consumer_id \
                        = c.consumer_id AND d.redrive_pending)), \
                    ',' ORDER BY c.consumer_id) FROM oncebox.consumer c WHERE c.tenant_id = \
                    t.tenant_id)) AS state \
            FROM oncebox.tenant t WHERE t.database_url IS NOT NULL ORDER BY t.name";
        Ok(sqlx::query_as(DEDICATED).fetch_all(&self.0.pool).await?)
    }

    /// Writes roles, schema and replica of a tenant, without migration records and redrives.
    pub(super) async fn replicate_in(
        &self,
        database: &TenantDatabase,
        tenant: &Tenant,
        turn: WorkTurn,
    ) -> Result<(), InboxError> {
        const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE";
        hooks::point("tenant_database:replicate:before");
        let mut connection = database.connect_in(turn).await?;
        self.check_is_ours(&mut connection, &tenant.label()).await?;
        let mut tx = connection.begin_with(BEGIN).await?;
        lock(&mut tx, tenant.tenant_id).await?;
        // Another process deleted the tenant, and has already removed everything in this database.
        let Some(source) = self.source(tenant.tenant_id).await? else { return Ok(()) };
        // It was moved to another one since the caller read its row, and what is left of it here goes.
        if source.row.tenant.database != tenant.database {
            return Ok(());
        }
        let replica = Replica::look(&mut tx, &source.row.tenant).await?;
        // A tenant in deletion gets nothing back.
        if source.is_deleted() && replica.secret_hash.is_none() {
            return Ok(());
        }
        if replica.is_anothers(&source.row.tenant) {
            return Err(anothers(&source.row.tenant));
        }
        if source.row.was_made && replica.is_missing() {
            return Err(lost(&source.row.tenant));
        }
        schema::ensure_partitions_for(&database.pool, &source.classes()).await?;
        let is_new = self.make_roles(&mut tx, &source, &replica).await?;
        source.write(&mut tx).await?;
        tx.commit().await?;
        connection.close().await;
        hooks::point("tenant_database:replicate:after");
        if !source.row.was_made {
            const MADE: &str =
                "INSERT INTO oncebox.placed_tenant (tenant_id) VALUES ($1) ON CONFLICT DO NOTHING";
            sqlx::query(MADE).bind(tenant.tenant_id).execute(&self.0.pool).await?;
        }
        if is_new {
            self.restrict_logs(
                &database.pool,
                &source.row.tenant.login,
                &source.row.tenant.owner_login,
            )
            .await;
        }
        Ok(())
    }

    /// Writes the replica of a tenant into a database to which it is copied, in the transaction of
    /// the copy. The tenant is shut out there, whatever its row says meanwhile.
    pub(crate) async fn write_replica(
        &self,
        connection: &mut PgConnection,
        tenant: &Tenant,
    ) -> Result<(), InboxError> {
        match self.source(tenant.tenant_id).await? {
            Some(mut source) => {
                source.row.secret_hash.clear();
                (source.row.secret_hash_before, source.row.secret_before_until) = (None, None);
                source.write(connection).await
            }
            None => self.0.tenants().get(&tenant.name).await.map(drop),
        }
    }

    /// Returns the retention classes of a tenant's consumers.
    pub(crate) async fn classes_of(&self, tenant_id: i32) -> Result<Vec<i16>, InboxError> {
        Ok(self.source(tenant_id).await?.map(|source| source.classes()).unwrap_or_default())
    }

    async fn source(&self, tenant_id: i32) -> Result<Option<ReplicaSource>, InboxError> {
        const CONSUMERS: &str = "SELECT consumer_id, name, retention_class, generation, \
            generation_required, state, revision \
            FROM oncebox.consumer WHERE tenant_id = $1 ORDER BY consumer_id";
        const ROW: &str = "SELECT t.*, p.tenant_id IS NOT NULL AS was_made FROM oncebox.tenant t \
            LEFT JOIN oncebox.placed_tenant p USING (tenant_id) WHERE t.tenant_id = $1";
        let row = sqlx::query_as(ROW).bind(tenant_id).fetch_optional(&self.0.pool).await?;
        let Some(row) = row else { return Ok(None) };
        let consumers = sqlx::query_as(CONSUMERS).bind(tenant_id).fetch_all(&self.0.pool).await?;
        Ok(Some(ReplicaSource { row, consumers }))
    }

    /// Makes the tenant's roles and schema where they are missing, and sets their passwords where
    /// the secret differs. Returns whether it did so.
    async fn make_roles(
        &self,
        connection: &mut PgConnection,
        source: &ReplicaSource,
        replica: &Replica,
    ) -> Result<bool, InboxError> {
        let tenant = &source.row.tenant;
        let is_whole = replica.has_roles
            && replica.has_schema
            && replica.secret_hash.as_ref() == Some(&source.row.secret_hash);
        if is_whole || source.is_deleted() {
            return Ok(false);
        }
        lock_grants(connection).await?;
        let database_name: String = sqlx::query_scalar("SELECT quote_ident(current_database())")
            .fetch_one(&mut *connection)
            .await?;
        let mut statements = role_statements(
            &database_name,
            &tenant.schema_name,
            &tenant.login,
            &tenant.owner_login,
            &self.credentials(tenant)?,
        );
        if replica.has_schema && !replica.has_roles {
            // Roles belong to the server: a database that was restored elsewhere comes without them
            // and their rights.
            let (schema, login) = (&tenant.schema_name, &tenant.login);
            statements.push(format!(
                "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {login}"
            ));
            statements.push(format!("GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {login}"));
        }
        for statement in statements {
            connection.execute(sqlx::raw_sql(AssertSqlSafe(statement))).await?;
        }
        Ok(true)
    }
}

/// Locks a tenant's replica against writers in all processes, until the transaction ends.
pub(crate) async fn lock(connection: &mut PgConnection, tenant_id: i32) -> Result<(), InboxError> {
    locks::take(connection, HostLock::Replica(tenant_id)).await
}

impl Replica {
    /// Returns whether another tenant is there under the same number.
    fn is_anothers(&self, tenant: &Tenant) -> bool {
        self.schema_name.as_ref().is_some_and(|schema| *schema != tenant.schema_name)
    }

    /// Returns whether nothing of the tenant is there.
    fn is_missing(&self) -> bool {
        self.secret_hash.is_none() && !self.has_schema
    }

    async fn look(connection: &mut PgConnection, tenant: &Tenant) -> Result<Self, InboxError> {
        const LOOK: &str = "SELECT (SELECT t.secret_hash FROM oncebox.tenant t WHERE t.tenant_id = \
            $1) AS secret_hash, \
            (SELECT t.schema_name FROM oncebox.tenant t WHERE t.tenant_id = $1) AS schema_name, \
            (SELECT count(*) = 2 FROM pg_roles r WHERE r.rolname IN ($2, $3)) AS has_roles, \
            to_regnamespace($4) IS NOT NULL AS has_schema";
        let look = sqlx::query_as(LOOK)
            .bind(tenant.tenant_id)
            .bind(&tenant.login)
            .bind(&tenant.owner_login)
            .bind(&tenant.schema_name);
        Ok(look.fetch_one(connection).await?)
    }
}

/// Returns the error for a tenant whose number another one has in its database, with the messages
/// that the other one has handled.
fn anothers(tenant: &Tenant) -> InboxError {
    InboxError::Invalid(format!(
        "{} holds another tenant under the number of `{}`: the host's database was restored from a \
            backup of before that one; restore a newer one",
        tenant.database.as_deref().unwrap_or_default(),
        tenant.name
    ))
}

/// Returns the error for a tenant of which its database knows nothing any more.
fn lost(tenant: &Tenant) -> InboxError {
    InboxError::Invalid(format!(
        "database `{}` knows nothing of tenant `{}`, which was made there: it was restored from a backup of \
            before; restore a newer one, or delete the tenant and create it again",
        tenant.database.as_deref().unwrap_or_default(),
        tenant.name
    ))
}

impl ReplicaSource {
    /// Returns the retention classes of the consumers.
    fn classes(&self) -> Vec<i16> {
        self.consumers.iter().map(|consumer| consumer.retention_class).collect()
    }

    fn is_deleted(&self) -> bool {
        self.row.tenant.state.is_deleting()
    }

    /// Writes the tenant and its consumers to the replica, except rows that are equal already.
    async fn write(&self, connection: &mut PgConnection) -> Result<(), InboxError> {
        // The deletion of a tenant has locked it out there, and it stays locked out.
        if !self.is_deleted() {
            self.write_tenant(connection).await?;
        }
        self.write_consumers(connection).await
    }

    async fn write_tenant(&self, connection: &mut PgConnection) -> Result<(), InboxError> {
        // A tenant of this name whose deletion was not finished may have left its row.
        const FREE_NAME: &str = "UPDATE oncebox.tenant SET name = 'gone-' || tenant_id WHERE name \
            = $2 AND tenant_id <> $1";
        const WRITE: &str = "INSERT INTO oncebox.tenant AS t (tenant_id, name, schema_name, login, \
            owner_login, state, revision, secret_hash, \
                secret_hash_before, secret_before_until, created_at) \
            OVERRIDING SYSTEM VALUE VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) \
            ON CONFLICT (tenant_id) DO UPDATE SET name = excluded.name, schema_name = \
            excluded.schema_name, login = excluded.login, \
                owner_login = excluded.owner_login, state = excluded.state, revision = \
                excluded.revision, secret_hash = excluded.secret_hash, \
                secret_hash_before = excluded.secret_hash_before, secret_before_until = \
                excluded.secret_before_until \
            WHERE (t.name, t.schema_name, t.login, t.owner_login, t.state, t.revision, \
            t.secret_hash, t.secret_hash_before, t.secret_before_until) \
                IS DISTINCT FROM (excluded.name, excluded.schema_name, excluded.login, \
                excluded.owner_login, excluded.state, excluded.revision, \
                    excluded.secret_hash, excluded.secret_hash_before, \
                    excluded.secret_before_until)";
        let tenant = &self.row.tenant;
        sqlx::query(FREE_NAME)
            .bind(tenant.tenant_id)
            .bind(&tenant.name)
            .execute(&mut *connection)
            .await?;
        let write = sqlx::query(WRITE)
            .bind(tenant.tenant_id)
            .bind(&tenant.name)
            .bind(&tenant.schema_name)
            .bind(&tenant.login)
            .bind(&tenant.owner_login)
            .bind(tenant.state.as_str())
            .bind(tenant.revision)
            .bind(&self.row.secret_hash)
            .bind(&self.row.secret_hash_before)
            .bind(self.row.secret_before_until)
            .bind(tenant.created_at);
        write.execute(connection).await?;
        Ok(())
    }

    /// Writes the consumers to the replica, and deletes the others of the tenant. Policies are not
    /// copied: no host function reads them, and they may hold a broker's password.
    async fn write_consumers(&self, connection: &mut PgConnection) -> Result<(), InboxError> {
        const DELETE: &str =
            "DELETE FROM oncebox.consumer WHERE tenant_id = $1 AND consumer_id <> ALL ($2)";
        const WRITE: &str = "INSERT INTO oncebox.consumer AS c (tenant_id, policy, consumer_id, \
            name, retention_class, generation, \
                generation_required, state, revision) \
            OVERRIDING SYSTEM VALUE \
            SELECT $1, '{}', u.* FROM unnest($2::int[], $3::text[], $4::smallint[], $5::bigint[], \
            $6::bigint[], $7::text[], $8::bigint[]) AS u \
            ON CONFLICT (consumer_id) DO UPDATE SET name = excluded.name, retention_class = \
            excluded.retention_class, \
                generation = excluded.generation, generation_required = \
                excluded.generation_required, state = excluded.state, \
                revision = excluded.revision \
            WHERE (c.name, c.retention_class, c.generation, c.generation_required, c.state, \
            c.revision) IS DISTINCT FROM \
                (excluded.name, excluded.retention_class, excluded.generation, \
                excluded.generation_required, excluded.state, excluded.revision)";
        let (tenant_id, all) = (self.row.tenant.tenant_id, &self.consumers);
        let ids: Vec<_> = all.iter().map(|c| c.consumer_id).collect();
        sqlx::query(DELETE).bind(tenant_id).bind(&ids).execute(&mut *connection).await?;
        let write = sqlx::query(WRITE)
            .bind(tenant_id)
            .bind(&ids)
            .bind(all.iter().map(|c| c.name.as_str()).collect::<Vec<_>>())
            .bind(all.iter().map(|c| c.retention_class).collect::<Vec<_>>())
            .bind(all.iter().map(|c| c.generation).collect::<Vec<_>>())
            .bind(all.iter().map(|c| c.generation_required).collect::<Vec<_>>())
            .bind(all.iter().map(|c| c.state.as_str()).collect::<Vec<_>>())
            .bind(all.iter().map(|c| c.revision).collect::<Vec<_>>());
        write.execute(connection).await?;
        Ok(())
    }
}
