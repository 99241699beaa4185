//! The steps of a move, in order.

use std::time::Duration;

use oncebox_model::{error::InboxError, hooks, status::TenantState};
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};
use uuid::Uuid;

use super::{
    MoveStep, TenantMove, find,
    guard::{MoveGuard, lost},
    own_tables, refuse_older_hosts,
};
use crate::{
    audit::Subject,
    control::Control,
    database::{
        locks::{self, HostLock},
        tenant_database::{DatabaseLabel, TenantDatabase, identity::keep_id, open::WorkConnection},
    },
    handles::Tenants,
    tenants::{
        Tenant,
        suspend::{being_deleted, set_state},
    },
};

/// Pause between two looks for leases of outgoing messages that are not over.
const LOOK: Duration = Duration::from_millis(200);

/// One host's work on a move.
pub(super) struct Mover<'c> {
    pub(super) control: &'c Control,
    pub(super) tenant: Tenant,
    pub(super) row: TenantMove,
    pub(super) guard: MoveGuard,
    /// Words for the database that the tenant leaves.
    pub(super) label: DatabaseLabel,
    /// That database.
    pub(super) from: TenantDatabase,
    /// Database to which it goes.
    pub(super) to: TenantDatabase,
}

/// One of the two databases of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    /// The one that the tenant leaves.
    From,
    /// The other one.
    To,
}

/// Sessions that keep time partitions of databases as they are.
struct Quiet(Vec<WorkConnection>);

/// Time after which a host that stands still loses the move, and the interval at which one at work
/// says that it is there.
const ABSENCE_MAX: &str = "SET idle_session_timeout = '60s'";
const AWAKE: Duration = Duration::from_secs(10);

impl Tenants<'_> {
    /// Carries out the move of a tenant, as far as that can be done now. Safe to repeat after a
    /// crash at any step. Returns false where another process works on it, or where there is none.
    ///
    /// # Errors
    /// An error of one of the databases, or of what the tenant has there; the row of the move keeps
    /// it for readers.
    pub async fn carry_move(&self, tenant: &Tenant) -> Result<bool, InboxError> {
        const NOTE: &str = "UPDATE oncebox.tenant_move SET error = $3 WHERE tenant_id = $1 AND \
            epoch = $2";
        // The lock has its own connection and ends with it, also when this future is dropped half
        // way.
        let mut turn = self.0.pool.acquire().await?.detach();
        let lock = HostLock::Removal(tenant.tenant_id);
        let is_ours = locks::try_for_session(&mut turn, lock).await?;
        let known = match is_ours {
            true => find(&mut turn, tenant.tenant_id).await?,
            false => None,
        };
        // A host that does not name the other database leaves the move to those that do.
        let named = known.filter(|known| self.0.named_databases.get(&known.to_database).is_ok());
        if named.is_none() {
            if is_ours {
                let _ = locks::release_for_session(&mut turn, lock).await;
            }
            let _ = turn.close().await; // the lock ends either way
            return Ok(false);
        }
        turn.execute(ABSENCE_MAX).await?;
        let row = self.take_over(tenant.tenant_id).await?;
        let epoch = row.epoch;
        let carried = tokio::select! {
            // On the heap: the steps together are large.
            carried = Box::pin(self.carry(&tenant.name, row)) => carried,
            error = stay_awake(vec![&mut turn]) => Err(error),
        };
        if let Err(error) = &carried {
            let note = sqlx::query(NOTE).bind(tenant.tenant_id).bind(epoch);
            let _ = note.bind(error.to_string()).execute(&self.0.pool).await;
        }
        // The server ends the session some time after the close; the next host need not wait for it.
        let _ = locks::release_for_session(&mut turn, lock).await;
        let _ = turn.close().await; // the lock ends either way
        carried.map(|()| true)
    }

    /// Takes a move over from the host that worked on it before.
    async fn take_over(&self, tenant_id: i32) -> Result<TenantMove, InboxError> {
        const TAKE: &str = "UPDATE oncebox.tenant_move SET epoch = \
            nextval('oncebox.tenant_move_epoch'), host = $2 WHERE tenant_id = $1 RETURNING *";
        let take = sqlx::query_as(TAKE).bind(tenant_id).bind(&self.0.actor);
        take.fetch_optional(&self.0.pool).await?.ok_or_else(lost)
    }

    async fn carry(&self, name: &str, row: TenantMove) -> Result<(), InboxError> {
        let databases = self.0.tenant_databases();
        let tenant = self.get(name).await?;
        let before = Tenant {
            database: row.from_database.clone(),
            database_url: row.from_database_url.clone(),
            ..tenant.clone()
        };
        let guard =
            MoveGuard { pool: self.0.pool.clone(), tenant_id: row.tenant_id, epoch: row.epoch };
        let mut mover = Mover {
            control: self.0,
            label: before.label(),
            from: databases.get(&before)?,
            to: self.0.named_databases.get(&row.to_database)?.database.clone(),
            tenant,
            row,
            guard,
        };
        if mover.row.step == MoveStep::Preparing && mover.tenant.state.is_deleting() {
            mover.give_up().await?;
        }
        match mover.row.step {
            MoveStep::Preparing | MoveStep::Stopping | MoveStep::Copying => {
                let id = mover.take().await?;
                let mut quiet = mover.quiet(&[&mover.from, &mover.to]).await?;
                let moved = tokio::select! {
                    moved = Box::pin(mover.forward_and_clean(id)) => moved,
                    error = stay_awake(quiet.sessions()) => Err(error),
                };
                quiet.end().await;
                moved
            }
            MoveStep::Moved => mover.clean_left(Side::From).await,
            MoveStep::Cancelled => mover.clean_left(Side::To).await,
        }?;
        mover.end().await
    }
}

/// Says at intervals that the sessions are in use. Ends with the error of one that was lost.
async fn stay_awake(mut sessions: Vec<&mut PgConnection>) -> InboxError {
    loop {
        tokio::time::sleep(AWAKE).await;
        for session in &mut sessions {
            if let Err(error) = session.ping().await {
                return error.into();
            }
        }
    }
}

impl Quiet {
    /// Lets time partitions change again.
    async fn end(self) {
        for mut session in self.0 {
            let _ = locks::release_for_session(&mut session, HostLock::Retention).await;
            session.close().await; // the lock ends either way
        }
    }

    fn sessions(&mut self) -> Vec<&mut PgConnection> {
        self.0.iter_mut().map(|session| &mut **session).collect()
    }
}

impl Mover<'_> {
    /// Returns one of the databases.
    pub(super) fn place(&self, side: Side) -> &TenantDatabase {
        match side {
            Side::From => &self.from,
            Side::To => &self.to,
        }
    }

    /// Takes the other database for tenants, unless that was done before.
    async fn take(&self) -> Result<Option<Uuid>, InboxError> {
        let name = &self.row.to_database;
        let named = self.control.named_databases.get(name)?;
        self.control.tenant_databases().take(&self.to, &named.named.url, Some(name)).await
    }

    async fn forward_and_clean(&mut self, id: Option<Uuid>) -> Result<(), InboxError> {
        self.forward(id).await?;
        Box::pin(self.clean(Side::From)).await
    }

    /// Removes what is left in a database, while time partitions stay as they are.
    async fn clean_left(&self, side: Side) -> Result<(), InboxError> {
        let mut quiet = self.quiet(&[self.place(side)]).await?;
        let cleaned = tokio::select! {
            cleaned = Box::pin(self.clean(side)) => cleaned,
            error = stay_awake(quiet.sessions()) => Err(error),
        };
        quiet.end().await;
        cleaned
    }

    /// Moves the tenant, from the step at which it is until it runs in the other database.
    async fn forward(&mut self, id: Option<Uuid>) -> Result<(), InboxError> {
        if self.row.step == MoveStep::Preparing {
            self.refuse_open_work(&mut *self.from.connect().await?).await?;
            own_tables::try_schema(self).await?;
            hooks::point("tenant:move:prepared");
            self.stop().await?;
        }
        self.control.tenants().hosts_let_go(&self.tenant).await?;
        hooks::point("tenant:move:stopped");
        self.shut_out().await?;
        hooks::point("tenant:move:shut_out");
        self.relays_let_go().await?;
        Box::pin(self.copy()).await?;
        hooks::point("tenant:move:copied");
        self.switch(id).await?;
        hooks::point("tenant:move:switched");
        Ok(())
    }

    /// Keeps time partitions of databases as they are, until the sessions are closed: a message that
    /// is copied is in a partition that stays, and what is removed is not archived meanwhile.
    async fn quiet(&self, places: &[&TenantDatabase]) -> Result<Quiet, InboxError> {
        let mut sessions = Vec::new();
        for place in places {
            let mut session = place.connect().await?;
            session.execute(ABSENCE_MAX).await?;
            if !locks::try_for_session(&mut session, HostLock::Retention).await? {
                return Err(InboxError::conflict(
                    "another process removes time partitions of one of the databases, or moves \
                        another tenant",
                ));
            }
            sessions.push(session);
        }
        Ok(Quiet(sessions))
    }

    /// Refuses a database from which retention removes messages that are out of the inbox, and what
    /// stands beside them is not gone yet.
    pub(super) async fn refuse_removal(&self, from: &mut PgConnection) -> Result<(), InboxError> {
        const DETACHED: &str =
            "SELECT partition_name FROM oncebox.removal WHERE state = 'counted' LIMIT 1";
        let detached: Option<String> = sqlx::query_scalar(DETACHED).fetch_optional(from).await?;
        detached.map_or(Ok(()), |partition| {
            Err(InboxError::conflict(format!(
                "retention removes `{partition}` from {}, which comes first; `oncebox retention` \
                    says how far it is",
                self.row.from_shown()
            )))
        })
    }

    /// Ends a move that has not stopped anything.
    async fn give_up(&mut self) -> Result<(), InboxError> {
        self.set("step = 'cancelled'").await?;
        self.reload().await
    }

    /// Notes that something of the tenant may be in the other database from now on.
    pub(super) async fn note_made(&self) -> Result<(), InboxError> {
        self.set("is_made = true").await
    }

    /// Changes the row of a move that stops nothing yet.
    async fn set(&self, change: &str) -> Result<(), InboxError> {
        let set = format!(
            "UPDATE oncebox.tenant_move SET {change} WHERE tenant_id = $1 AND epoch = $2 AND step = \
                'preparing'"
        );
        let set = sqlx::query(AssertSqlSafe(set)).bind(self.tenant.tenant_id);
        let done = set.bind(self.guard.epoch).execute(&self.control.pool).await?;
        if done.rows_affected() == 0 { Err(lost()) } else { Ok(()) }
    }

    /// Suspends the tenant, so that hosts stop its consumers.
    async fn stop(&mut self) -> Result<(), InboxError> {
        const STOP: &str = "UPDATE oncebox.tenant_move SET step = 'stopping', state_before = $3, \
            revision = $4, error = NULL WHERE tenant_id = $1 AND epoch = $2 AND step = 'preparing'";
        // Secrets that are derived from the key are found by their hash, which is cleared next.
        const SEAL: &str = "UPDATE oncebox.tenant SET credentials = $2 WHERE tenant_id = $1";
        let tenants = self.control.tenants();
        // Under it nothing begins to work on messages of the tenant; what comes after it sees the
        // step.
        let mut connection = self.from.connect_for_long().await?;
        let mut held = connection.begin().await?;
        self.take_copy_lock(&mut held).await?;
        self.refuse_open_work(&mut held).await?;
        self.refuse_removal(&mut held).await?;
        let mut tx = self.control.pool.begin().await?;
        let tenant = tenants.lock_row(&mut tx, &self.tenant.name).await?;
        if tenant.state.is_deleting() {
            return Err(being_deleted(&tenant.name));
        }
        refuse_older_hosts(&mut tx).await?;
        self.refuse_changes(&mut tx).await?;
        if tenant.credentials.is_none() {
            let credentials = self.control.key.credentials(&tenant)?;
            let sealed = credentials.sealed(&self.control.key, &tenant.login);
            sqlx::query(SEAL).bind(tenant.tenant_id).bind(sealed).execute(&mut *tx).await?;
        }
        self.tenant = set_state(&mut tx, &tenant, TenantState::Suspended).await?;
        let stopped = sqlx::query(STOP)
            .bind(tenant.tenant_id)
            .bind(self.guard.epoch)
            .bind(tenant.state.as_str())
            .bind(self.tenant.revision)
            .execute(&mut *tx)
            .await?;
        if stopped.rows_affected() == 0 {
            return Err(lost());
        }
        tx.commit().await?;
        held.rollback().await?; // it was begun for its lock
        connection.close().await;
        tenants.announce(&self.tenant).await;
        self.reload().await
    }

    /// Refuses to stop a tenant with a change in hand that hosts still bring to its database.
    async fn refuse_changes(&self, own: &mut PgConnection) -> Result<(), InboxError> {
        const CHANGES: &str = "SELECT format('consumer `%s` is being deleted', c.name) FROM \
                oncebox.consumer c WHERE c.tenant_id = $1 AND c.state = 'deleting' \
            UNION ALL SELECT format('messages of a withdrawn version of consumer `%s` are being \
                redriven', c.name) FROM oncebox.consumer c JOIN oncebox.deployment d USING \
                (consumer_id) WHERE c.tenant_id = $1 AND d.redrive_pending LIMIT 1";
        let change: Option<String> =
            sqlx::query_scalar(CHANGES).bind(self.tenant.tenant_id).fetch_optional(own).await?;
        change.map_or(Ok(()), |change| Err(InboxError::conflict(change)))
    }

    async fn reload(&mut self) -> Result<(), InboxError> {
        let mut own = self.control.pool.acquire().await?;
        self.row = find(&mut own, self.tenant.tenant_id).await?.ok_or_else(lost)?;
        Ok(())
    }

    /// Waits until no relay is at work on an outgoing message of the tenant: one that is sent and
    /// not marked yet would be sent from the other database once more.
    async fn relays_let_go(&self) -> Result<(), InboxError> {
        const LEASED: &str = "SELECT EXISTS (SELECT FROM oncebox.outgoing WHERE consumer_id = ANY \
            ($1) AND status = 'in_progress' AND locked_until > now())";
        let consumers = self.consumers().await?;
        loop {
            let leased: bool =
                sqlx::query_scalar(LEASED).bind(&consumers).fetch_one(&self.from.pool).await?;
            if !leased {
                return Ok(());
            }
            tokio::time::sleep(LOOK).await;
            self.guard.check(&mut *self.control.pool.acquire().await?).await?;
        }
    }

    /// Returns the keys of the tenant's consumers.
    pub(super) async fn consumers(&self) -> Result<Vec<i32>, InboxError> {
        const IDS: &str =
            "SELECT consumer_id FROM oncebox.consumer WHERE tenant_id = $1 ORDER BY consumer_id";
        let ids = sqlx::query_scalar(IDS).bind(self.tenant.tenant_id);
        Ok(ids.fetch_all(&self.control.pool).await?)
    }

    /// Makes the other database the tenant's, in the state that it had before.
    async fn switch(&mut self, id: Option<Uuid>) -> Result<(), InboxError> {
        const SWITCH: &str = "UPDATE oncebox.tenant SET database = $2, database_url = $3 WHERE \
            tenant_id = $1";
        const MOVED: &str = "UPDATE oncebox.tenant_move SET step = 'moved', moved_at = now(), \
            error = NULL WHERE tenant_id = $1 AND epoch = $2 AND step = 'copying'";
        const MADE: &str =
            "INSERT INTO oncebox.placed_tenant (tenant_id) VALUES ($1) ON CONFLICT DO NOTHING";
        let (tenants, databases) = (self.control.tenants(), self.control.tenant_databases());
        let to = &self.row.to_database;
        let mut tx = self.control.pool.begin().await?;
        let tenant = tenants.lock_row(&mut tx, &self.tenant.name).await?;
        let moved = sqlx::query(MOVED)
            .bind(tenant.tenant_id)
            .bind(self.guard.epoch)
            .execute(&mut *tx)
            .await?;
        if moved.rows_affected() == 0 {
            return Err(lost());
        }
        if let Some(id) = id {
            keep_id(&mut tx, to, id).await?;
        }
        let switch = sqlx::query(SWITCH)
            .bind(tenant.tenant_id)
            .bind(to)
            .bind(databases.sealed_name(&tenant));
        switch.execute(&mut *tx).await?;
        tenants.let_in(&mut tx, &tenant).await?;
        sqlx::query(MADE).bind(tenant.tenant_id).execute(&mut *tx).await?;
        self.tenant = set_state(&mut tx, &tenant, self.row.state_before()).await?;
        let details = json!({ "from": self.row.from_database, "to": to });
        let subject = Subject::tenant(&tenant.name);
        self.control.audit().record(&mut tx, "tenant.moved", subject, details).await?;
        tx.commit().await?;
        tracing::info!(tenant = tenant.name, from = self.row.from_shown(), to, "tenant moved");
        // Hosts do the same when they see the change.
        if let Err(error) = databases.replicate(&self.tenant).await {
            tracing::warn!(tenant = tenant.name, %error, "its new database does not know yet that \
                a tenant runs there; hosts tell it");
        }
        // What the copy left out, since the owner of the tables may not make it.
        if let Err(error) = self.control.shadows().reconcile_capture(&self.tenant).await {
            tracing::warn!(tenant = tenant.name, %error, "triggers for shadows are not there yet; \
                hosts make them");
        }
        tenants.announce(&self.tenant).await;
        Ok(())
    }

    /// Ends the move: nothing is left to do.
    async fn end(&self) -> Result<(), InboxError> {
        const END: &str = "DELETE FROM oncebox.tenant_move WHERE tenant_id = $1 AND epoch = $2";
        let end = sqlx::query(END).bind(self.tenant.tenant_id).bind(self.guard.epoch);
        end.execute(&self.control.pool).await?;
        hooks::point("tenant:move:ended");
        Ok(())
    }

    /// Notes how much the copy has read. Fails where the move was cancelled, or another host has it.
    pub(super) async fn note_copied(&self, bytes: u64) -> Result<(), InboxError> {
        const NOTE: &str = "UPDATE oncebox.tenant_move SET copied_bytes = $3, error = NULL WHERE \
            tenant_id = $1 AND epoch = $2 AND step = 'copying'";
        let note = sqlx::query(NOTE).bind(self.tenant.tenant_id).bind(self.guard.epoch);
        let noted = note.bind(bytes as i64).execute(&self.control.pool).await?;
        if noted.rows_affected() == 0 { Err(lost()) } else { Ok(()) }
    }
}
