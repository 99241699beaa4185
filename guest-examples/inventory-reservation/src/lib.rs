//! Reserves stock for an order: a business "no" is an answer, not a failure.
//!
//! The check and the decrement are one statement, so two reservations of the last item cannot
//! both succeed. It is a delta, which is safe because the message completes with it.

use oncebox_guest::{Result, enqueue, execute, handler, params, reject};
use serde::{Deserialize, Serialize};

#[derive(Deserialize)]
struct Reservation {
    reservation_id: String,
    order_id: String,
    sku: String,
    quantity: i32,
}

#[derive(Serialize)]
#[serde(tag = "status", rename_all = "snake_case")]
enum Answer {
    Reserved,
    InsufficientStock,
}

#[handler]
fn reserve(it: Reservation) -> Result<Answer> {
    if it.quantity <= 0 {
        reject!("`quantity` must be positive");
    }
    let take = "UPDATE stock SET available = available - $2 WHERE sku = $1 AND available >= $2";
    if execute(take, params![it.sku, it.quantity])? == 0 {
        return Ok(Answer::InsufficientStock);
    }
    let note = "INSERT INTO inventory_reservations (reservation_id, order_id, sku, quantity)
                VALUES ($1, $2, $3, $4)";
    enqueue(
        note,
        params![it.reservation_id, it.order_id, it.sku, it.quantity],
    )?;
    Ok(Answer::Reserved)
}
