//! An order as a process of several messages: reserve the stock, charge the customer over HTTP,
//! ship; and undo what was done where the charge is refused, or is not answered in time.
//!
//! The row of the order has its state. Each step moves it from the state that the message answers
//! to, and does nothing else if the row has moved on: so a reply and a timer that race, come late
//! or come again are harmless, in any order.

use std::time::Duration;

use oncebox_guest::{
    Context, Message, OrFail, Result, config,
    emit::{Outgoing, cancel},
    enqueue, execute, handler, json,
    once::insert_once,
    params, park, reject,
    saga::Saga,
    trace::Span,
};
use serde::Deserialize;

const ORDERS: Saga = Saga::new("orders", "order_id", "state");

// States of an order. guest-examples/README.md has them as a table.
const PLACED: &str = "placed";
const REJECTED: &str = "rejected";
const CHARGING: &str = "charging";
const CHARGED: &str = "charged";
const REFUSED: &str = "refused";
const TIMED_OUT: &str = "timed_out";
const VOIDED: &str = "voided";

/// Seconds in which a charge has to be answered, where the deployment does not say.
const PAYMENT_TIMEOUT_S: u64 = 900;

/// An order as it is placed, and as its row has it.
#[derive(Deserialize)]
struct Order {
    order_id: String,
    sku: String,
    units: i32,
    amount: i64,
}

/// The timer of an order.
#[derive(Deserialize)]
struct Timer {
    order_id: String,
}

/// The answer of the payment provider, as the host delivers it.
#[derive(Deserialize)]
struct Answer {
    /// The token of what is answered, which has the order's id: the correlation key.
    cancel_token: String,
    /// Status of HTTP.
    status: u16,
    /// Whether an earlier request may have arrived, and may have been acted on.
    #[serde(default)]
    is_repeated: bool,
}

impl Answer {
    /// The order of a token that begins like this.
    fn order_id(&self, kind: &str) -> Result<&str> {
        let id = self.cancel_token.strip_prefix(kind);
        id.or_reject(format!("`{}` is no token `{kind}…`", self.cancel_token))
    }

    fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }
}

#[handler]
fn handle(message: &Message, context: Context) -> Result<()> {
    match message.event_type.as_str() {
        "order.placed" => place(&message.payload_as::<Order>()?, &context),
        "order.charge.answered" => charge_answered(&message.payload_as::<Answer>()?),
        "order.payment_timed_out" => time_out(&message.payload_as::<Timer>()?),
        "order.void.answered" => void_answered(&message.payload_as::<Answer>()?),
        other => reject!("no event of an order: `{other}`"),
    }
}

/// Reserves the units and asks for the money. Without enough units the order is rejected.
fn place(order: &Order, context: &Context) -> Result<()> {
    if order.units < 1 || order.amount < 1 {
        reject!("order {} has no units or no amount", order.order_id);
    }
    let stored = insert_once(
        "INSERT INTO orders (order_id, sku, units, amount, state) VALUES ($1, $2, $3, $4, $5)
         ON CONFLICT (order_id) DO NOTHING",
        params![order.order_id, order.sku, order.units, order.amount, PLACED],
    )?;
    if !stored.is_new() {
        return Ok(());
    }
    let span = Span::begin("reserve stock");
    span.set("sku", &order.sku);
    let reserved = execute(
        "UPDATE stock SET units = units - $2 WHERE sku = $1 AND units >= $2",
        params![order.sku, order.units],
    )?;
    drop(span);
    if reserved == 0 {
        step(order, PLACED, REJECTED)?;
        return Ok(());
    }
    step(order, PLACED, CHARGING)?;
    charge(order, context)
}

/// Asks the provider for the money, and this consumer itself to look again after the timeout.
fn charge(order: &Order, context: &Context) -> Result<()> {
    to_provider("charge", order)?;
    let after = config::parse("payment_timeout_s")?.unwrap_or(PAYMENT_TIMEOUT_S);
    Outgoing::json(
        "order.payment_timed_out",
        &json!({ "order_id": order.order_id }),
    )
    .to(format!("inbox:{}", context.consumer()))
    .key(&order.order_id)
    .after(Duration::from_secs(after))
    .cancel_token(token("timeout", &order.order_id))
    .send()?;
    Ok(())
}

/// Ships an order that is charged, and gives up one whose charge is refused.
fn charge_answered(answer: &Answer) -> Result<()> {
    let order = load(answer.order_id("charge:")?)?;
    if !answer.is_success() {
        return refuse(&order, answer.is_repeated);
    }
    if !step(&order, CHARGING, CHARGED)? {
        // It was charged after it was given up.
        return void(&order);
    }
    cancel(&token("timeout", &order.order_id))?;
    let shipment = json!({
        "order_id": order.order_id, "sku": order.sku, "units": order.units
    });
    Outgoing::json("order.ship", &shipment)
        .to(setting("ship_to", "kafka:shipments"))
        .key(&order.order_id)
        .send()?;
    Ok(())
}

/// Gives up an order whose charge is refused. The refusal of a repeated request may hide a charge
/// that an earlier one made: then the void follows.
fn refuse(order: &Order, is_repeated: bool) -> Result<()> {
    if step(order, CHARGING, REFUSED)? {
        cancel(&token("timeout", &order.order_id))?;
        release(order)?;
        if is_repeated {
            to_provider("void", order)?;
        }
    }
    Ok(())
}

/// Gives up an order whose charge is not answered. A charge that can be cancelled was never sent, or
/// the provider has put it off. Any other one may have been made, or may still be: its void goes
/// behind it, in the same lane.
fn time_out(timer: &Timer) -> Result<()> {
    let order = load(&timer.order_id)?;
    if !step(&order, CHARGING, TIMED_OUT)? {
        return Ok(());
    }
    release(&order)?;
    if cancel(&token("charge", &order.order_id))? {
        return Ok(());
    }
    void(&order)
}

/// Asks for the money back, once, if the order was given up.
fn void(order: &Order) -> Result<()> {
    if step(order, TIMED_OUT, VOIDED)? {
        to_provider("void", order)?;
    }
    Ok(())
}

/// The order has ended. A void that is refused leaves money where it should not be.
fn void_answered(answer: &Answer) -> Result<()> {
    let order_id = answer.order_id("void:")?;
    if !answer.is_success() {
        park!(
            "the void of order {order_id} is refused with status {}; settle it with the provider",
            answer.status
        );
    }
    Ok(())
}

/// Sends a request of an order to the provider. All of an order have its key: one lane, in which
/// the void never overtakes the charge where the policy has `[outgoing] on_parked = "stop"`.
fn to_provider(action: &str, order: &Order) -> Result<()> {
    let request = json!({
        "action": action, "order_id": order.order_id, "amount": order.amount
    });
    Outgoing::json(format!("order.{action}"), &request)
        .to(setting("pay_to", "http:pay"))
        .key(&order.order_id)
        .cancel_token(token(action, &order.order_id))
        .send()?;
    Ok(())
}

/// Puts the units back.
fn release(order: &Order) -> Result<()> {
    enqueue(
        "UPDATE stock SET units = units + $2 WHERE sku = $1",
        params![order.sku, order.units],
    )?;
    Ok(())
}

fn load(order_id: &str) -> Result<Order> {
    let order: Option<Order> = ORDERS.load(order_id)?;
    order.or_reject(format!("no order {order_id}"))
}

/// Whether the order was in the first state, and is in the second.
fn step(order: &Order, from: &str, to: &str) -> Result<bool> {
    Ok(ORDERS.advance(&order.order_id, from, to)?.is_moved())
}

fn token(kind: &str, order_id: &str) -> String {
    format!("{kind}:{order_id}")
}

fn setting(name: &str, default: &str) -> String {
    config::get(name).unwrap_or_else(|| default.to_owned())
}

#[cfg(test)]
mod tests;
