//! Books an order on an account: an insert, and a delta on a row that many messages share.
//!
//! Both are written in the transaction that also marks the message as done, so they are there
//! once, however often the message is delivered.

use oncebox_guest::{Result, execute, handler, params, reject};
use serde::Deserialize;

/// The payload. What does not fit it is rejected before the handler is called.
#[derive(Deserialize)]
struct Order {
    order_id: String,
    account: i32,
    amount: i64,
    note: String,
}

#[handler]
fn place(order: Order) -> Result<()> {
    execute(
        "INSERT INTO orders (id, account, amount, note) VALUES ($1, $2, $3, $4)",
        params![order.order_id, order.account, order.amount, order.note],
    )?;
    let booked = execute(
        "UPDATE account SET balance = balance + $2, n = n + 1 WHERE id = $1",
        params![order.account, order.amount],
    )?;
    if booked == 0 {
        // It can never succeed, and the order inserted above goes with it.
        reject!("no account {}", order.account);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
