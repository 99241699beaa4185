//! Books an order on an account: an insert, and a delta on a row that many messages share. Neither
//! waits for its answer.

use oncebox_guest::{Failure, Result, enqueue, enqueue_expecting, handler, params};
use serde::Deserialize;

#[derive(Deserialize)]
struct Order {
    order_id: String,
    account: i32,
    amount: i64,
    note: String,
}

#[handler]
fn place(order: Order) -> Result<()> {
    enqueue(
        "INSERT INTO orders (id, account, amount, note) VALUES ($1, $2, $3, $4)",
        params![order.order_id, order.account, order.amount, order.note],
    )?;
    enqueue_expecting(
        "UPDATE account SET balance = balance + $2, n = n + 1 WHERE id = $1",
        params![order.account, order.amount],
        1,
        Failure::reject(format_args!("no account {}", order.account)),
    )?;
    Ok(())
}

#[cfg(test)]
mod tests;
