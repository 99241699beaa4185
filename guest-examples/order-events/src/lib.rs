//! Tells others of an order, and reminds itself of one that is not paid: outgoing messages, which
//! are sent after the commit of the message that causes them, or not at all.

use std::time::Duration;

use oncebox_guest::{
    Message, Result, config,
    emit::{Outgoing, cancel},
    enqueue, execute, handler, json, params, reject,
};
use serde::Deserialize;

/// Seconds until an order that is not paid is reminded of, where the deployment does not say.
const REMIND_AFTER_S: u64 = 3_600;

#[derive(Deserialize)]
struct Order {
    order_id: String,
    #[serde(default)]
    amount: i64,
}

#[handler]
fn handle(order: Order, message: &Message) -> Result<()> {
    match message.event_type.as_str() {
        "order.placed" => place(&order),
        "order.paid" => pay(&order),
        "order.reminder" => remind(&order),
        other => reject!("no event of an order: `{other}`"),
    }
}

/// Stores the order, confirms it to everyone, and sends a reminder to this consumer itself.
fn place(order: &Order) -> Result<()> {
    enqueue(
        "INSERT INTO purchases (order_id, amount) VALUES ($1, $2)",
        params![order.order_id, order.amount],
    )?;
    let told = json!({ "order_id": order.order_id, "amount": order.amount });
    Outgoing::json("order.confirmed", &told)
        .to(setting("confirm_to", "kafka:order-events"))
        .key(&order.order_id)
        .send()?;
    let after = config::parse("remind_after_s")?.unwrap_or(REMIND_AFTER_S);
    Outgoing::json("order.reminder", &json!({ "order_id": order.order_id }))
        .to(setting("remind_to", "inbox:orders"))
        .key(&order.order_id)
        .after(Duration::from_secs(after))
        .cancel_token(token(order))
        .send()?;
    Ok(())
}

/// Withdraws the reminder. It may be on its way already, so `remind` looks at the order again.
fn pay(order: &Order) -> Result<()> {
    let paid = execute(
        "UPDATE purchases SET is_paid = true WHERE order_id = $1",
        params![order.order_id],
    )?;
    if paid == 0 {
        reject!("no order {}", order.order_id);
    }
    cancel(&token(order))?;
    Ok(())
}

fn remind(order: &Order) -> Result<()> {
    enqueue(
        "UPDATE purchases SET reminders = reminders + 1 WHERE order_id = $1 AND NOT is_paid",
        params![order.order_id],
    )?;
    Ok(())
}

fn setting(name: &str, default: &str) -> String {
    config::get(name).unwrap_or_else(|| default.to_owned())
}

/// One reminder of an order can be withdrawn by its name.
fn token(order: &Order) -> String {
    format!("reminder:{}", order.order_id)
}

#[cfg(test)]
mod tests;
