//! The removal of what is left of a tenant in a database that is not its own, or not any more.

use oncebox_model::{error::InboxError, hooks};
use sqlx::{AssertSqlSafe, Connection, Executor};

use super::{
    carry::{Mover, Side},
    own_tables::languages_of,
    rows::{OWNED, OwnedKeys, Owner},
};
use crate::{
    consumers::delete::{remove_messages, remove_outgoing},
    database::tenant_database::{DatabaseLabel, TenantDatabase},
    tenants::{delete::objects, lock_grants, shut_out::logins},
};

/// Rows in one transaction.
const BATCH: i64 = 5_000;

/// No batch reads other tenants' rows.
const BY_INDEX: &str = "SET LOCAL enable_seqscan = off; SET LOCAL jit = off";

impl Mover<'_> {
    /// Removes everything of the tenant from a database, in steps that may each be repeated.
    /// Nobody uses it there: a host that comes late is refused.
    pub(super) async fn clean(&self, side: Side) -> Result<(), InboxError> {
        let place = self.place(side);
        if !self.is_place(side).await? {
            return Ok(());
        }
        objects::drop_all(&place.pool, &self.tenant.schema_name, Some(&self.guard)).await?;
        hooks::point("tenant:move:schema");
        let keys = OwnedKeys::of(self).await?;
        for consumer in &keys.consumers {
            self.remove_messages(place, *consumer).await?;
        }
        // What refers to others first.
        for table in OWNED.iter().rev() {
            match table.name {
                // Above, by their keys: these tables have partitions.
                "inbox" | "outgoing" => continue,
                // The host's own table of them is the source of what a tenant's database records.
                "tenant_migration" if !place.is_dedicated => continue,
                _ => {}
            }
            self.remove_rows(place, table.name, &keys.condition(table.owner)).await?;
        }
        self.remove_rows(place, "copying", &keys.condition(Owner::Consumer)).await?;
        hooks::point("tenant:move:rows");
        if place.is_dedicated {
            for table in ["consumer", "tenant"] {
                self.remove_rows(place, table, &keys.condition(Owner::Tenant)).await?;
            }
        }
        self.drop_roles(place).await?;
        hooks::point("tenant:move:roles_gone");
        Ok(())
    }

    /// Checks that a database is the one that the row of the move names. Returns false for one that
    /// was never taken for tenants.
    async fn is_place(&self, side: Side) -> Result<bool, InboxError> {
        let place = self.place(side);
        if !place.is_dedicated {
            return Ok(true);
        }
        let label = match side {
            Side::From => self.label.clone(),
            Side::To => {
                DatabaseLabel { tenant: None, database: Some(self.row.to_database.clone()) }
            }
        };
        let databases = self.control.tenant_databases();
        if databases.expected_mark(label.placed_in()).await?.is_none() {
            return Ok(false);
        }
        let mut connection = place.connect().await?;
        databases.check_is_ours(&mut connection, &label).await?;
        connection.close().await;
        Ok(true)
    }

    /// Removes a consumer's messages, and those that its handlers sent, in batches.
    async fn remove_messages(
        &self,
        place: &TenantDatabase,
        consumer: i32,
    ) -> Result<(), InboxError> {
        let mut connection = place.connect().await?;
        loop {
            let mut tx = connection.begin().await?;
            self.guard.hold_left(&mut tx).await?;
            tx.execute(BY_INDEX).await?;
            let mut removed = remove_messages(&mut tx, consumer).await?;
            if removed == 0 {
                removed = remove_outgoing(&mut tx, consumer).await?;
            }
            tx.commit().await?;
            if removed == 0 {
                break;
            }
            hooks::point("tenant:move:batch");
        }
        connection.close().await;
        Ok(())
    }

    /// Removes rows of a table, given by a condition on `r`, in batches.
    async fn remove_rows(
        &self,
        place: &TenantDatabase,
        table: &str,
        condition: &str,
    ) -> Result<(), InboxError> {
        // By their places in the table, which has no partitions.
        let remove = format!(
            "DELETE FROM oncebox.{table} WHERE ctid = ANY (ARRAY(SELECT r.ctid FROM \
                oncebox.{table} r WHERE {condition} LIMIT {BATCH}))"
        );
        let mut connection = place.connect().await?;
        loop {
            let mut tx = connection.begin().await?;
            self.guard.hold_left(&mut tx).await?;
            tx.execute(BY_INDEX).await?;
            let removed =
                sqlx::query(AssertSqlSafe(remove.clone())).execute(&mut *tx).await?.rows_affected();
            tx.commit().await?;
            if removed == 0 {
                break;
            }
        }
        connection.close().await;
        Ok(())
    }

    /// Takes the rights of the tenant's roles in a database away, and drops the roles where nothing
    /// else on that server is theirs: two databases may be on one server.
    async fn drop_roles(&self, place: &TenantDatabase) -> Result<(), InboxError> {
        let mut connection = place.connect().await?;
        let database: String = sqlx::query_scalar("SELECT quote_ident(current_database())")
            .fetch_one(&mut *connection)
            .await?;
        let mut tx = connection.begin().await?;
        self.guard.hold_left(&mut tx).await?;
        lock_grants(&mut tx).await?;
        for login in logins(&mut tx, &self.tenant).await? {
            let take = format!(
                "REVOKE ALL ON DATABASE {database} FROM {login}; \
                 REVOKE ALL ON SCHEMA oncebox_host FROM {login}; \
                 REVOKE ALL ON ALL FUNCTIONS IN SCHEMA oncebox_host FROM {login}"
            );
            tx.execute(sqlx::raw_sql(AssertSqlSafe(take))).await?;
            for language in languages_of(&mut tx, &login).await? {
                tx.execute(sqlx::raw_sql(AssertSqlSafe(tried(&format!(
                    "REVOKE ALL ON LANGUAGE {language} FROM {login}"
                )))))
                .await?;
            }
            let drop = tried(&format!("DROP ROLE {login}"));
            tx.execute(sqlx::raw_sql(AssertSqlSafe(drop))).await?;
        }
        tx.commit().await?;
        connection.close().await;
        Ok(())
    }
}

/// Returns a statement that may fail where something else on the server is the role's, or where this
/// login did not make it.
fn tried(statement: &str) -> String {
    format!(
        "DO $$ BEGIN {statement}; EXCEPTION WHEN dependent_objects_still_exist OR \
            insufficient_privilege THEN NULL; END $$"
    )
}
