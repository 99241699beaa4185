//! The transactions of one host's work on a move.

use oncebox_model::error::InboxError;
use sqlx::{PgConnection, PgPool};

use crate::database::tenant_database::replica;

/// The right of one host to work on a move, until another host takes the move over.
pub(crate) struct MoveGuard {
    /// Connections to the host's database, with the row of the move.
    pub(super) pool: PgPool,
    pub(super) tenant_id: i32,
    pub(super) epoch: i64,
}

impl MoveGuard {
    /// Locks the tenant's replica in a database until the transaction ends, and checks that this
    /// host still has the move. A host that takes the move over waits for that transaction before
    /// it changes anything there.
    ///
    /// # Errors
    /// `Conflict` where another host has taken the move over, or where it was cancelled.
    pub(crate) async fn hold(&self, connection: &mut PgConnection) -> Result<(), InboxError> {
        replica::lock(connection, self.tenant_id).await?;
        self.check(&mut *self.pool.acquire().await?).await
    }

    /// Locks and checks the same before a removal: nothing of a tenant goes that counts in this
    /// database.
    ///
    /// # Errors
    /// `Conflict` as well where the tenant's inbox is here.
    pub(crate) async fn hold_left(&self, connection: &mut PgConnection) -> Result<(), InboxError> {
        const COUNTS: &str = "SELECT EXISTS (SELECT FROM oncebox.tenant WHERE tenant_id = $1 AND \
            secret_hash <> '' AND database_url IS NULL)";
        self.hold(connection).await?;
        let counts: bool =
            sqlx::query_scalar(COUNTS).bind(self.tenant_id).fetch_one(connection).await?;
        if !counts {
            return Ok(());
        }
        Err(InboxError::conflict(
            "the tenant's inbox is in the database from which it is to be removed; nothing goes",
        ))
    }

    /// Checks that this host still has the move.
    pub(super) async fn check(&self, own: &mut PgConnection) -> Result<(), InboxError> {
        const HAS: &str = "SELECT EXISTS (SELECT FROM oncebox.tenant_move WHERE tenant_id = $1 \
            AND epoch = $2)";
        let has: bool =
            sqlx::query_scalar(HAS).bind(self.tenant_id).bind(self.epoch).fetch_one(own).await?;
        if has { Ok(()) } else { Err(lost()) }
    }
}

/// Returns the error of a host that does not have the move any more.
pub(super) fn lost() -> InboxError {
    InboxError::conflict("the move was cancelled, or another host has taken it over")
}
