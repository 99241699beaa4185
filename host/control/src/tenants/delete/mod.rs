//! Deletion of a tenant. The tenant is first set to `deleting`, so that hosts stop its consumers.
//! Then everything of it is removed, in steps that may each be repeated; its row goes last. A
//! process that dies on the way leaves the rest to the next removal, by another host or by an
//! operator. The audit log stays.
//!
//! | step | why not earlier |
//! | --- | --- |
//! | hosts stop its consumers | batches that run finish |
//! | logins are shut, the secret is cleared, sessions end | until then a host may claim |
//! | tables, a few in a transaction, then the schema | one transaction would need too many locks |
//! | messages, a few thousand in a transaction | from here on none are added |
//! | consumers, deployments, versions, components of no other tenant, tokens | messages need them |
//! | roles, then the row | both name what is to be dropped |

pub(super) mod objects;
mod rows;

use std::time::Duration;

use oncebox_model::{error::InboxError, hooks, status::TenantState};
use serde_json::json;
use sqlx::{Connection, Executor, PgPool};
use tokio::time::{Instant, sleep};

use crate::{
    audit::Subject,
    database::locks::{self, HostLock},
    handles::Tenants,
    tenants::{
        Tenant, lock_grants,
        moves::refuse_unfinished,
        shut_out::{end_sessions, forget_secret, logins, shut_out},
        suspend::set_state,
    },
};

/// Longest wait for the deletion of the Kafka groups of its consumers.
const GROUPS_MAX: Duration = Duration::from_secs(30);
/// Interval between two checks.
const LOOK: Duration = Duration::from_millis(200);

/// The progress of a tenant's deletion.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct TenantRemoval {
    /// Names of hosts that still run a consumer of it.
    pub waiting_for: Vec<String>,
    /// Objects left in its schema: tables, functions and others.
    pub objects: i64,
    /// Messages left in its inbox; 100,001 stands for more than 100,000.
    pub messages: i64,
}

impl Tenants<'_> {
    /// Begins to delete a tenant: hosts stop its consumers, and further changes of it are refused.
    /// Repeating it changes nothing. [`Tenants::remove`] does the removal. Returns the tenant.
    ///
    /// # Errors
    /// `NotFound` where there is no such tenant, or an error of the host's database.
    pub async fn delete(&self, name: &str) -> Result<Tenant, InboxError> {
        let known = self.get(name).await?;
        if known.state.is_deleting() {
            return Ok(known);
        }
        let mut tx = self.0.pool.begin().await?;
        let tenant = self.lock(&mut tx, name).await?;
        let tenant = set_state(&mut tx, &tenant, TenantState::Deleting).await?;
        self.0
            .audit()
            .record(
                &mut tx,
                "tenant.delete",
                Subject::tenant(name),
                json!({ "schema": tenant.schema_name }),
            )
            .await?;
        tx.commit().await?;
        self.announce(&tenant).await;
        Ok(tenant)
    }

    /// Lists tenants whose deletion is not complete.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn being_deleted(&self) -> Result<Vec<Tenant>, InboxError> {
        const LIST: &str =
            "SELECT * FROM oncebox.tenant WHERE state = 'deleting' ORDER BY tenant_id";
        Ok(sqlx::query_as(LIST).fetch_all(&self.0.pool).await?)
    }

    /// Removes everything of a tenant that is being deleted. Safe to repeat after a crash at any
    /// step. Returns false where another process removes it, or where it is gone.
    ///
    /// # Errors
    /// An error of the host's database or of the tenant's.
    pub async fn remove(&self, tenant: &Tenant) -> Result<bool, InboxError> {
        const STANDS: &str = "SELECT EXISTS (SELECT FROM oncebox.tenant WHERE tenant_id = $1 AND \
            state = 'deleting')";
        // The lock has its own connection and ends with it, also when this future is dropped half
        // way.
        let mut turn = self.0.pool.acquire().await?.detach();
        let lock = HostLock::Removal(tenant.tenant_id);
        let is_ours = locks::try_for_session(&mut turn, lock).await?;
        let stands = is_ours
            && sqlx::query_scalar(STANDS).bind(tenant.tenant_id).fetch_one(&mut turn).await?;
        let removed = match stands {
            true => match refuse_unfinished(&mut turn, tenant).await {
                Ok(()) => self.remove_everything(tenant).await.map(|()| true),
                Err(unfinished) => Err(unfinished),
            },
            false => Ok(false),
        };
        if is_ours {
            // The server ends the session some time after the close.
            let _ = locks::release_for_session(&mut turn, lock).await;
        }
        let _ = turn.close().await; // the lock ends either way
        removed
    }

    async fn remove_everything(&self, tenant: &Tenant) -> Result<(), InboxError> {
        let database = self.0.tenant_databases().get(tenant)?;
        self.check_database(tenant).await?;
        self.hosts_let_go(tenant).await?;
        self.groups_are_gone(tenant).await?;
        hooks::point("tenant:delete:stopped");
        // The host's database, which is the source, comes first: a tenant's own database is made to
        // match it.
        forget_secret(&mut *self.0.pool.acquire().await?, tenant).await?;
        let mut tx = database.pool.begin().await?;
        shut_out(&mut tx, tenant).await?;
        tx.commit().await?;
        end_sessions(&database.pool, tenant).await?;
        hooks::point("tenant:delete:shut_out");
        objects::drop_all(&database.pool, &tenant.schema_name, None).await?;
        hooks::point("tenant:delete:schema");
        self.remove_messages(&database.pool, tenant).await?;
        hooks::point("tenant:delete:messages");
        self.0.tenant_databases().forget(tenant).await?;
        self.remove_rows(tenant).await?;
        hooks::point("tenant:delete:rows");
        drop_roles(&database.pool, tenant).await?;
        self.0.tenant_databases().forget(tenant).await?;
        hooks::point("tenant:delete:roles");
        self.remove_last(tenant).await
    }

    /// Refuses a database that is another one than the tenant is in.
    async fn check_database(&self, tenant: &Tenant) -> Result<(), InboxError> {
        let databases = self.0.tenant_databases();
        let database = databases.get(tenant)?;
        if !database.is_dedicated || databases.is_of(&database, tenant).await? {
            return Ok(());
        }
        let shown = tenant.database.as_deref().unwrap_or_default();
        Err(InboxError::conflict(format!(
            "the database of tenant `{}` at {shown} is another one now",
            tenant.name
        )))
    }

    /// Marks the tenant's consumers as `deleting`, and waits until live hosts have deleted them
    /// with their Kafka groups. A group that stays would make a later tenant of that name continue
    /// at this one's offsets. After [`GROUPS_MAX`] the removal continues: a group may still have a
    /// member that was killed, or brokers may be unreachable.
    async fn groups_are_gone(&self, tenant: &Tenant) -> Result<(), InboxError> {
        const DELETE: &str = "UPDATE oncebox.consumer SET state = 'deleting', seek = NULL, \
            revision = revision + 1 \
            WHERE tenant_id = $1 AND state <> 'deleting'";
        sqlx::query(DELETE).bind(tenant.tenant_id).execute(&self.0.pool).await?;
        self.announce(tenant).await;
        const LEFT: &str = "SELECT array_agg(c.name) FROM oncebox.consumer c WHERE c.tenant_id = \
            $1 AND c.generation > 0 \
            AND EXISTS (SELECT FROM oncebox.host h WHERE h.seen_at > now() - interval '10 \
            seconds')";
        let deadline = Instant::now() + GROUPS_MAX;
        loop {
            let left: Option<Vec<String>> =
                sqlx::query_scalar(LEFT).bind(tenant.tenant_id).fetch_one(&self.0.pool).await?;
            let Some(left) = left else { return Ok(()) };
            if Instant::now() > deadline {
                tracing::warn!(tenant = tenant.name, consumers = ?left, "kafka groups of a tenant \
                    that is deleted may be left");
                return Ok(());
            }
            sleep(LOOK).await;
        }
    }

    /// Returns the progress of a tenant's deletion.
    ///
    /// # Errors
    /// An error of the host's database or of the tenant's.
    pub async fn removal(&self, tenant: &Tenant) -> Result<TenantRemoval, InboxError> {
        let database = self.0.tenant_databases().get(tenant)?;
        Ok(TenantRemoval {
            waiting_for: if is_shut_out(&database.pool, tenant).await? {
                Vec::new()
            } else {
                self.late_hosts_of(tenant).await?
            },
            objects: objects::count(&database.pool, &tenant.schema_name).await?,
            messages: self.count_messages(&database.pool, tenant).await?,
        })
    }
}

async fn is_shut_out(pool: &PgPool, tenant: &Tenant) -> Result<bool, InboxError> {
    const SHUT: &str =
        "SELECT NOT EXISTS (SELECT FROM pg_roles WHERE rolname = $1 AND rolcanlogin)";
    Ok(sqlx::query_scalar(SHUT).bind(&tenant.login).fetch_one(pool).await?)
}

/// Drops the tenant's roles, with all that they own or were granted in this database.
async fn drop_roles(pool: &PgPool, tenant: &Tenant) -> Result<(), InboxError> {
    let mut tx = pool.begin().await?;
    lock_grants(&mut tx).await?;
    for login in logins(&mut tx, tenant).await? {
        let drop = format!("DROP OWNED BY {login} CASCADE; DROP ROLE {login}");
        tx.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(drop))).await?;
    }
    Ok(tx.commit().await?)
}
