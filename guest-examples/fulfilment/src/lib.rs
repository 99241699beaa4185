//! Ships an order: the business key guards as well as the message id.
//!
//! The inbox drops a second delivery of the same message. It cannot know that two messages
//! with different ids mean the same order; the primary key of `shipments` can. The total is
//! a delta, so it moves only when the shipment was really inserted.

use oncebox_guest::{Message, Result, enqueue, handler, once::insert_once, params, reject};
use serde::{Deserialize, Serialize};

#[derive(Deserialize)]
struct Order {
    order_id: String,
    warehouse: String,
    units: i32,
}

#[derive(Serialize)]
#[serde(tag = "status", rename_all = "snake_case")]
enum Answer {
    Shipped,
    AlreadyShipped,
}

#[handler]
fn ship(order: Order, message: &Message) -> Result<Answer> {
    let Order {
        order_id,
        warehouse,
        units,
    } = order;
    if units <= 0 {
        reject!("`units` must be positive");
    }
    let shipment = insert_once(
        "INSERT INTO shipments (order_id, message_id, warehouse, units)
         VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING",
        params![order_id, message.id, warehouse, units],
    )?;
    if !shipment.is_new() {
        return Ok(Answer::AlreadyShipped);
    }
    enqueue(
        "INSERT INTO fulfilment_totals AS total (warehouse, shipments, units)
         VALUES ($1, 1, $2)
         ON CONFLICT (warehouse) DO UPDATE SET
             shipments = total.shipments + 1,
             units = total.units + excluded.units",
        params![warehouse, units],
    )?;
    Ok(Answer::Shipped)
}
