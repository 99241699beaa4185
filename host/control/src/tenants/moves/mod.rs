//! The move of a tenant to another database of the settings, in steps that may each be repeated: a
//! process that dies on the way leaves the rest to any host. Kafka keeps the tenant's messages
//! meanwhile.
//!
//! | step | what it leaves | a crash after it leaves |
//! | --- | --- | --- |
//! | begin | the row of the move | a tenant that runs |
//! | prepare | roles and an empty schema in the other database; its tables, rolled back | a tenant that runs |
//! | stop | the tenant is suspended | a tenant whose messages wait in Kafka |
//! | shut out | its secret is cleared, first in the host's database | the same |
//! | copy | everything of it in the other database, shut out there as well | a copy that the next host finds |
//! | switch | the tenant's row names the other database, and it is as it was before | a tenant that runs there |
//! | clean | a part of what is left in the first database; the row of the move last | the rest of it |
//!
//! The switch is one change of one row of the host's database, so that no two databases ever count
//! as the tenant's. Before it an operator may cancel the move: the row of the move is then of the
//! step `cancelled`, no host can switch any more, and the copy is removed.
//!
//! Between shut-out and switch nobody changes the tenant's rows, on either side. Its own sessions
//! are refused, since no secret fits, and end; the host's login asks `oncebox.is_here` in each
//! transaction that changes them. Each transaction of the host's login in a move holds the replica's
//! lock of that database and checks that its host still has the move ([`guard`]).

// The transactions of one host's work on a move.
pub(crate) mod guard;
// The steps, in order.
mod carry;
// The shut-out from the database that the tenant leaves.
mod fence;
// The copy, whose last transaction makes it count as whole.
mod copy;
// The rows of the tenant in the host's tables.
pub(crate) mod rows;
// The time partitions that these rows need.
mod partitions;
// The tenant's own tables.
mod own_tables;
// The removal of what is left in one of the databases.
mod clean;

use chrono::{DateTime, Utc};
use oncebox_model::{error::InboxError, status::TenantState};
use serde_json::json;
use sqlx::{PgConnection, PgPool};

use crate::{
    audit::Subject,
    handles::Tenants,
    tenants::{Tenant, keys::secret_hash, shut_out::logins, suspend::set_state},
};

/// Step of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, sqlx::Type)]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub enum MoveStep {
    /// The tenant runs, and the move is tried as far as that stops nothing.
    Preparing,
    /// Its consumers stop.
    Stopping,
    /// It is shut out of the database that it leaves, and its rows are copied.
    Copying,
    /// It is in the other database, and what is left in the first is removed.
    Moved,
    /// It stays where it is, and what is left of it in the other database is removed.
    Cancelled,
}

impl MoveStep {
    /// Returns the name in rows and in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Preparing => "preparing",
            Self::Stopping => "stopping",
            Self::Copying => "copying",
            Self::Moved => "moved",
            Self::Cancelled => "cancelled",
        }
    }

    /// Returns whether the tenant stands still.
    fn stands_still(self) -> bool {
        matches!(self, Self::Stopping | Self::Copying)
    }
}

/// The move of a tenant that is under way.
#[derive(Debug, Clone, sqlx::FromRow)]
pub struct TenantMove {
    /// Key of the tenant.
    pub(crate) tenant_id: i32,
    /// Step.
    pub step: MoveStep,
    /// Database of the tenant before the move, as its row names it; none for the host's.
    pub from_database: Option<String>,
    from_database_url: Option<Vec<u8>>,
    /// Name of the other database.
    pub to_database: String,
    is_made: bool,
    state_before: Option<String>,
    revision: Option<i64>,
    epoch: i64,
    /// Host that works on it, or worked on it last.
    pub host: Option<String>,
    /// Time of the begin.
    pub began_at: DateTime<Utc>,
    /// Bytes that the copy under way has read.
    pub copied_bytes: i64,
    /// Error that ended the last try.
    pub error: Option<String>,
}

impl TenantMove {
    /// Returns the name of the database that the tenant leaves, for readers.
    pub fn from_shown(&self) -> &str {
        self.from_database.as_deref().unwrap_or("the host's database")
    }

    /// Returns whether something of the tenant may be in the other database, and the tenant is not.
    fn has_begun(&self) -> bool {
        self.step.stands_still() || (self.step == MoveStep::Preparing && self.is_made)
    }

    /// Returns the state of the tenant before it stood still.
    fn state_before(&self) -> TenantState {
        match self.state_before.as_deref() {
            Some("suspended") => TenantState::Suspended,
            _ => TenantState::Active,
        }
    }
}

impl Tenants<'_> {
    /// Begins to move a tenant to the database of this name; hosts carry the move out. Repeating
    /// it changes nothing. Returns none where the tenant is there already.
    ///
    /// # Errors
    /// `NotFound` where there is no such tenant or database. `Conflict` where the tenant is being
    /// deleted or moved elsewhere, and while hosts of release 0.1.0 run.
    pub async fn begin_move(&self, name: &str, to: &str) -> Result<Option<TenantMove>, InboxError> {
        const BEGIN: &str = "INSERT INTO oncebox.tenant_move (tenant_id, from_database, \
            from_database_url, to_database, began_by) VALUES ($1, $2, $3, $4, $5) RETURNING *";
        self.0.named_databases.get(to)?;
        if let Some(known) = self.move_of(name).await? {
            let goes_on = known.step != MoveStep::Cancelled && known.to_database == to;
            return if goes_on { Ok(Some(known)) } else { Err(being_moved(name, &known)) };
        }
        let mut tx = self.0.pool.begin().await?;
        let tenant = self.lock(&mut tx, name).await?;
        if tenant.database_name() == Some(to) {
            return Ok(None);
        }
        refuse_older_hosts(&mut tx).await?;
        if let Some(known) = find(&mut tx, tenant.tenant_id).await? {
            return Err(being_moved(name, &known));
        }
        let begun = sqlx::query_as(BEGIN)
            .bind(tenant.tenant_id)
            .bind(&tenant.database)
            .bind(&tenant.database_url)
            .bind(to)
            .bind(&self.0.actor)
            .fetch_one(&mut *tx)
            .await?;
        let details = json!({ "from": tenant.database, "to": to });
        self.0.audit().record(&mut tx, "tenant.move", Subject::tenant(name), details).await?;
        tx.commit().await?;
        Ok(Some(begun))
    }

    /// Returns the move of a tenant that is under way; none where it is not being moved and nothing
    /// of it is left elsewhere.
    ///
    /// # Errors
    /// `NotFound` where there is no such tenant. An error of the host's database.
    pub async fn move_of(&self, name: &str) -> Result<Option<TenantMove>, InboxError> {
        let tenant = self.get(name).await?;
        find(&mut *self.0.pool.acquire().await?, tenant.tenant_id).await
    }

    /// Lists the tenants with a move under way.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn being_moved(&self) -> Result<Vec<Tenant>, InboxError> {
        const LIST: &str = "SELECT t.* FROM oncebox.tenant t JOIN oncebox.tenant_move m USING \
            (tenant_id) ORDER BY m.step = 'preparing', m.began_at";
        Ok(sqlx::query_as(LIST).fetch_all(&self.0.pool).await?)
    }

    /// Cancels a move: the tenant stays where it is, in the state that it had. Where the move has
    /// come to its end but for what is left in a database, it gives up the removal of that.
    /// Returns the move as it is then; none where nothing of it is left to do.
    ///
    /// # Errors
    /// `NotFound` where no move of the tenant is under way. `NotPropagated` where the database of
    /// the tenant does not answer; hosts tell it later.
    pub async fn cancel_move(&self, name: &str) -> Result<Option<TenantMove>, InboxError> {
        const GIVE_UP: &str = "DELETE FROM oncebox.tenant_move WHERE tenant_id = $1";
        const CANCEL: &str = "UPDATE oncebox.tenant_move SET step = 'cancelled', error = NULL, \
            epoch = nextval('oncebox.tenant_move_epoch') WHERE tenant_id = $1";
        let mut tx = self.0.pool.begin().await?;
        let tenant = self.lock_row(&mut tx, name).await?;
        let Some(known) = find(&mut tx, tenant.tenant_id).await? else {
            return Err(InboxError::NotFound(format!("tenant `{name}` is not being moved")));
        };
        let stood_still = known.step.stands_still();
        let sql = if known.has_begun() { CANCEL } else { GIVE_UP };
        sqlx::query(sql).bind(tenant.tenant_id).execute(&mut *tx).await?;
        if stood_still {
            self.let_in(&mut tx, &tenant).await?;
            set_state(&mut tx, &tenant, known.state_before()).await?;
            if tenant.database_url.is_none() {
                open_logins(&mut tx, &tenant).await?;
            }
        }
        let details = json!({ "to": known.to_database, "step": known.step.as_str() });
        self.0
            .audit()
            .record(&mut tx, "tenant.move_cancel", Subject::tenant(name), details)
            .await?;
        tx.commit().await?;
        let tenant = self.get(name).await?;
        self.announce(&tenant).await;
        let replicated = self.0.tenant_databases().replicate(&tenant).await;
        replicated.map_err(|source| InboxError::NotPropagated {
            text: format!(
                "tenant `{name}` stays, and its database does not know that yet; hosts tell it as \
                    soon as it answers"
            ),
            source: Box::new(source),
        })?;
        self.move_of(name).await
    }

    /// Makes the tenant's secret count again in the host's database.
    async fn let_in(
        &self,
        connection: &mut PgConnection,
        tenant: &Tenant,
    ) -> Result<(), InboxError> {
        const LET_IN: &str = "UPDATE oncebox.tenant SET secret_hash = $2 WHERE tenant_id = $1";
        let credentials = self.0.key.credentials(tenant)?;
        let hash = secret_hash(&credentials.secret);
        sqlx::query(LET_IN).bind(tenant.tenant_id).bind(hash).execute(connection).await?;
        Ok(())
    }
}

/// Lets the tenant's roles log in again, which a shut-out has denied.
async fn open_logins(connection: &mut PgConnection, tenant: &Tenant) -> Result<(), InboxError> {
    use sqlx::Executor;
    for login in logins(connection, tenant).await? {
        let open = format!("ALTER ROLE {login} LOGIN");
        connection.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(open))).await?;
    }
    Ok(())
}

/// Returns the row of a tenant's move.
async fn find(
    connection: &mut PgConnection,
    tenant_id: i32,
) -> Result<Option<TenantMove>, InboxError> {
    const FIND: &str = "SELECT * FROM oncebox.tenant_move WHERE tenant_id = $1";
    Ok(sqlx::query_as(FIND).bind(tenant_id).fetch_optional(connection).await?)
}

/// Refuses to move tenants while hosts run that do not know of moves: they would change rows that
/// were copied already.
async fn refuse_older_hosts(own: &mut PgConnection) -> Result<(), InboxError> {
    const OLDER: &str = "SELECT name FROM oncebox.host WHERE seen_at > now() - interval '10 \
        seconds' AND version IS NULL LIMIT 1";
    let older: Option<String> = sqlx::query_scalar(OLDER).fetch_optional(own).await?;
    older.map_or(Ok(()), |host| {
        Err(InboxError::conflict(format!(
            "host `{host}` is of release 0.1.0, which does not know of moves; replace it first"
        )))
    })
}

/// Refuses a change of a tenant that stands still for a move.
pub(crate) async fn refuse_moving(
    connection: &mut PgConnection,
    tenant: &Tenant,
) -> Result<(), InboxError> {
    match find(connection, tenant.tenant_id).await? {
        Some(known) if known.step.stands_still() => Err(being_moved(&tenant.name, &known)),
        _ => Ok(()),
    }
}

/// Refuses the removal of a tenant of which something is left in another database.
pub(crate) async fn refuse_unfinished(
    connection: &mut PgConnection,
    tenant: &Tenant,
) -> Result<(), InboxError> {
    match find(connection, tenant.tenant_id).await? {
        Some(known) if known.step != MoveStep::Preparing || known.is_made => {
            Err(being_moved(&tenant.name, &known))
        }
        _ => Ok(()),
    }
}

/// Returns whether the inbox of a consumer's tenant is in this database and is not being copied to
/// another one. It stays so until the transaction ends, which changes rows of the consumer by the
/// host's login.
pub(crate) async fn is_here(
    connection: &mut PgConnection,
    consumer_id: i32,
) -> Result<bool, InboxError> {
    const IS_HERE: &str =
        "SELECT oncebox.is_here(c.tenant_id) FROM oncebox.consumer c WHERE c.consumer_id = $1";
    let is_here: Option<bool> =
        sqlx::query_scalar(IS_HERE).bind(consumer_id).fetch_optional(connection).await?;
    Ok(is_here == Some(true))
}

/// Checks the same.
///
/// # Errors
/// `Conflict` where it is not here.
pub(crate) async fn check_is_here(
    connection: &mut PgConnection,
    consumer_id: i32,
) -> Result<(), InboxError> {
    if is_here(connection, consumer_id).await? { Ok(()) } else { Err(is_away()) }
}

/// Checks the same of a tenant, before the begin of work that may take long. It does not begin while
/// the tenant stands still for a move, nor while something of the tenant is left in another database,
/// which it would not reach.
///
/// # Errors
/// `Conflict` where it must not begin.
pub(crate) async fn check_may_begin(
    own: &PgPool,
    connection: &mut PgConnection,
    tenant_id: i32,
) -> Result<(), InboxError> {
    const MOVES: &str = "SELECT EXISTS (SELECT FROM oncebox.tenant_move WHERE tenant_id = $1 AND \
        step <> 'preparing')";
    let is_here: bool = sqlx::query_scalar("SELECT oncebox.is_here($1)")
        .bind(tenant_id)
        .fetch_one(connection)
        .await?;
    // After it: a move stops a tenant under the lock that `is_here` shares.
    if is_here && !sqlx::query_scalar(MOVES).bind(tenant_id).fetch_one(own).await? {
        return Ok(());
    }
    Err(is_away())
}

fn is_away() -> InboxError {
    InboxError::conflict(
        "the tenant is being moved to another database, or deleted; try again when that is over",
    )
}

fn being_moved(name: &str, known: &TenantMove) -> InboxError {
    let TenantMove { to_database: to, .. } = known;
    let from = known.from_shown();
    InboxError::conflict(match known.step {
        MoveStep::Preparing | MoveStep::Stopping | MoveStep::Copying => format!(
            "tenant `{name}` is being moved to `{to}`; `oncebox tenant move {name}` says how far \
                that is, and `oncebox tenant move {name} --cancel` lets it stay"
        ),
        MoveStep::Moved => format!(
            "tenant `{name}` was moved to `{to}`, and what is left of it in {from} is being \
                removed; wait for that, or let `oncebox tenant move {name} --cancel` leave it there"
        ),
        MoveStep::Cancelled => format!(
            "a move of tenant `{name}` to `{to}` was cancelled, and what is left of it there is \
                being removed; wait for that, or let `oncebox tenant move {name} --cancel` leave \
                it there"
        ),
    })
}
