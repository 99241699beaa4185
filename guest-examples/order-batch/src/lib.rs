//! Books a whole batch of orders with three statements, whatever its size.
//!
//! Each message is answered for: a malformed one, or one whose account is not there, is
//! rejected and left out. Accounts are locked in the order of their ids, so two batches
//! cannot wait for each other.

use std::collections::HashSet;

use oncebox_guest::{Batch, Result, batch_handler, enqueue, params, query_as, reject};
use serde::Deserialize;

#[derive(Deserialize)]
struct Order {
    order_id: String,
    account: i32,
    amount: i64,
    note: String,
}

#[batch_handler]
fn place(batch: &mut Batch<Order>) -> Result<()> {
    let accounts: HashSet<i32> = lock_accounts(batch)?;
    batch.each(|order| {
        if !accounts.contains(&order.account) {
            reject!("no account {}", order.account);
        }
        Ok(())
    });
    let accounts = batch.column(|order| order.account);
    let amounts = batch.column(|order| order.amount);
    enqueue(
        "INSERT INTO orders (id, account, amount, note)
         SELECT * FROM unnest($1::text[], $2::int[], $3::bigint[], $4::text[])",
        params![
            batch.column(|order| &order.order_id),
            accounts,
            amounts,
            batch.column(|order| &order.note),
        ],
    )?;
    enqueue(
        "UPDATE account SET balance = balance + booked.total, n = n + booked.orders
         FROM (SELECT account, sum(amount)::bigint AS total, count(*) AS orders
               FROM unnest($1::int[], $2::bigint[]) AS placed (account, amount)
               GROUP BY account) AS booked
         WHERE id = booked.account",
        params![accounts, amounts],
    )?;
    Ok(())
}

/// Locks the accounts of the batch, and answers which there are.
fn lock_accounts(batch: &Batch<Order>) -> Result<HashSet<i32>> {
    let accounts = query_as(
        "SELECT id FROM account WHERE id = ANY ($1) ORDER BY id FOR UPDATE",
        params![batch.column(|order| order.account)],
    )?;
    Ok(accounts.into_iter().collect())
}

#[cfg(test)]
mod tests;
