//! Ships an order: the business key guards as well as the message id.
//!
//! The inbox drops a second delivery of the same message. It cannot know that two messages
//! with different ids mean the same order; the primary key of `shipments` can. The total is
//! a delta, so it moves only when the shipment was really inserted.

use oncebox_guest_bindings::{Answer, Failure, Message, done, execute, handler, parse};
use serde::Deserialize;

handler!(ship);

#[derive(Deserialize)]
struct Order {
    order_id: String,
    warehouse: String,
    units: i32,
}

fn ship(message: Message) -> Answer {
    let order: Order = parse(&message)?;
    if order.units <= 0 {
        return Err(Failure::Reject("`units` must be positive".into()));
    }
    let inserted = execute(
        "INSERT INTO shipments (order_id, message_id, warehouse, units)
         VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING",
        &[
            order.order_id.into(),
            message.id.into(),
            (&order.warehouse).into(),
            order.units.into(),
        ],
    )?;
    if inserted == 0 {
        return done(r#"{"status":"already_shipped"}"#);
    }
    execute(
        "INSERT INTO fulfilment_totals AS total (warehouse, shipments, units)
         VALUES ($1, 1, $2)
         ON CONFLICT (warehouse) DO UPDATE SET
             shipments = total.shipments + 1,
             units = total.units + excluded.units",
        &[order.warehouse.into(), order.units.into()],
    )?;
    done(r#"{"status":"shipped"}"#)
}
