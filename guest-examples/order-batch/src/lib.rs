//! Books a whole batch of orders with two statements, whatever its size.
//!
//! Each message is answered for: a malformed one, or one whose account is not there, is
//! rejected and left out of the statements. Accounts are locked in the order of their ids,
//! so two batches cannot wait for each other.

use std::collections::HashSet;

use oncebox_guest_bindings::{
    Answer, Element, Failure, Message, Value, batch_handler, execute, parse, query,
};
use serde::Deserialize;

batch_handler!(place);

#[derive(Deserialize)]
struct Order {
    order_id: String,
    account: i32,
    amount: i64,
    note: String,
}

fn place(messages: Vec<Message>) -> Vec<Answer> {
    let orders: Vec<_> = messages.iter().map(parse::<Order>).collect();
    let booked = orders.iter().filter_map(|order| order.as_ref().ok());
    let accounts = match book(booked.collect()) {
        Ok(accounts) => accounts,
        // A failed statement is about nobody in particular.
        Err(failure) => return messages.iter().map(|_| Err(failure.clone())).collect(),
    };
    orders
        .into_iter()
        .map(|order| answer(order, &accounts))
        .collect()
}

fn answer(order: Result<Order, Failure>, accounts: &HashSet<i64>) -> Answer {
    match order? {
        order if accounts.contains(&order.account.into()) => Ok(None),
        order => Err(Failure::Reject(format!("no account {}", order.account))),
    }
}

/// Locks the accounts, inserts the orders and adds up; answers which accounts there are.
fn book(orders: Vec<&Order>) -> Result<HashSet<i64>, Failure> {
    let accounts = query(
        "SELECT id FROM account WHERE id = ANY ($1) ORDER BY id FOR UPDATE",
        &[array(&orders, |order| Element::Int4(order.account))],
    )?;
    let accounts = accounts
        .iter()
        .map(|row| row.get(0))
        .collect::<Result<HashSet<i64>, _>>()?;
    let orders: Vec<_> = orders
        .into_iter()
        .filter(|order| accounts.contains(&order.account.into()))
        .collect();
    execute(
        "INSERT INTO orders (id, account, amount, note)
         SELECT * FROM unnest($1::text[], $2::int[], $3::bigint[], $4::text[])",
        &[
            array(&orders, |order| Element::Text(order.order_id.clone())),
            array(&orders, |order| Element::Int4(order.account)),
            array(&orders, |order| Element::Int8(order.amount)),
            array(&orders, |order| Element::Text(order.note.clone())),
        ],
    )?;
    execute(
        "UPDATE account SET balance = balance + booked.amount, n = n + booked.n
         FROM (SELECT account, sum(amount)::bigint AS amount, count(*) AS n
               FROM unnest($1::int[], $2::bigint[]) AS placed (account, amount)
               GROUP BY account) AS booked
         WHERE id = booked.account",
        &[
            array(&orders, |order| Element::Int4(order.account)),
            array(&orders, |order| Element::Int8(order.amount)),
        ],
    )?;
    Ok(accounts)
}

fn array(orders: &[&Order], element: impl Fn(&Order) -> Element) -> Value {
    Value::Array(orders.iter().map(|order| element(order)).collect())
}
