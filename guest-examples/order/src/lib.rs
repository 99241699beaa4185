//! Books an order on an account: an insert, and a delta on a row that many messages share.

use oncebox_guest_bindings::{Answer, Failure, Message, execute, handler, parse};
use serde::Deserialize;

handler!(place);

#[derive(Deserialize)]
struct Order {
    order_id: String,
    account: i32,
    amount: i64,
    note: String,
}

fn place(message: Message) -> Answer {
    let order: Order = parse(&message)?;
    execute(
        "INSERT INTO orders (id, account, amount, note) VALUES ($1, $2, $3, $4)",
        &[
            order.order_id.into(),
            order.account.into(),
            order.amount.into(),
            order.note.into(),
        ],
    )?;
    let booked = execute(
        "UPDATE account SET balance = balance + $2, n = n + 1 WHERE id = $1",
        &[order.account.into(), order.amount.into()],
    )?;
    if booked == 0 {
        return Err(Failure::Reject(format!("no account {}", order.account)));
    }
    Ok(None)
}
