//! The business effect of every variant: an order is kept, and booked to its account.

use serde::Deserialize;

/// `INSERT` of an order.
pub(crate) const INSERT: &str =
    "INSERT INTO orders (id, account, amount, note) VALUES ($1, $2, $3, $4)";
/// `UPDATE` that books an order to its account.
pub(crate) const UPDATE: &str =
    "UPDATE account SET balance = balance + $2, n = n + 1 WHERE id = $1";

/// Payload of an `order.placed`.
#[derive(Deserialize)]
pub(crate) struct Order {
    pub(crate) order_id: String,
    pub(crate) account: i32,
    pub(crate) amount: i64,
    pub(crate) note: String,
}

impl Order {
    /// Keeps and books the order. Returns whether its account exists.
    pub(crate) async fn apply(
        &self,
        connection: &mut sqlx::PgConnection,
    ) -> Result<bool, sqlx::Error> {
        let Self { order_id, account, amount, note } = self;
        sqlx::query(INSERT)
            .bind(order_id)
            .bind(account)
            .bind(amount)
            .bind(note)
            .execute(&mut *connection)
            .await?;
        let updated =
            sqlx::query(UPDATE).bind(account).bind(amount).execute(&mut *connection).await?;
        Ok(updated.rows_affected() == 1)
    }
}
