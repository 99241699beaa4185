//! Reserves stock for an order: a business "no" is an answer, not a failure.
//!
//! Too little stock is a normal outcome of this message: it completes, writes nothing, and
//! its result says so. The check and the decrement are one statement, so two reservations
//! of the last item cannot both succeed.

use oncebox_guest_bindings::{Answer, Failure, Message, done, execute, handler, parse};
use serde::Deserialize;

handler!(reserve);

#[derive(Deserialize)]
struct Reservation {
    reservation_id: String,
    order_id: String,
    sku: String,
    quantity: i32,
}

fn reserve(message: Message) -> Answer {
    let wanted: Reservation = parse(&message)?;
    if wanted.quantity <= 0 {
        return Err(Failure::Reject("`quantity` must be positive".into()));
    }
    if !take_from_stock(&wanted)? {
        return done(r#"{"status":"insufficient_stock"}"#);
    }
    execute(
        "INSERT INTO inventory_reservations (reservation_id, order_id, sku, quantity)
         VALUES ($1, $2, $3, $4)",
        &[
            wanted.reservation_id.into(),
            wanted.order_id.into(),
            wanted.sku.into(),
            wanted.quantity.into(),
        ],
    )?;
    done(r#"{"status":"reserved"}"#)
}

/// A delta: run twice, it would take the goods twice. It is safe because the message is
/// completed in the same transaction.
fn take_from_stock(wanted: &Reservation) -> Result<bool, Failure> {
    let rows = execute(
        "UPDATE stock SET available = available - $2 WHERE sku = $1 AND available >= $2",
        &[(&wanted.sku).into(), wanted.quantity.into()],
    )?;
    Ok(rows == 1)
}
