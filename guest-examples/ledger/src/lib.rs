//! Books a captured payment: effects that are not idempotent, and a recovered statement.
//!
//! Nothing here protects itself against a second run: the balance is a delta and
//! `ledger_entry` has no unique key. That each payment is booked once is the host's work.
//! Opening an account that exists fails its statement; a savepoint lets the handler go on.

use oncebox_guest::{
    Failure, Message, Numeric, Result, SqlError, enqueue, execute, handler, json, params, park,
    query_optional, savepoint,
};
use serde::Deserialize;

#[derive(Deserialize)]
struct Payment {
    account: String,
    /// Decimal text: a JSON number would become a float.
    amount: String,
    /// Open the account when it does not exist yet.
    #[serde(default)]
    open_account: bool,
}

#[handler]
fn book(payment: Payment, message: &Message) -> Result<serde_json::Value> {
    let Payment {
        account, amount, ..
    } = &payment;
    let amount = Numeric(checked(amount)?.into());
    if payment.open_account {
        open(account)?;
    }
    enqueue(
        "INSERT INTO ledger_entry (message_id, account, amount) VALUES ($1, $2, $3)",
        params![message.id, account, amount],
    )?;
    let balance: Option<Numeric> = query_optional(
        "UPDATE account SET balance = balance + $1 WHERE account = $2 RETURNING balance",
        params![amount, account],
    )?;
    let Some(balance) = balance else {
        // The entry written above goes with it.
        park!("no account `{account}`");
    };
    Ok(json!({ "balance": balance }))
}

/// Digits with at most one decimal point; a minus sign is refused like any other text.
fn checked(amount: &str) -> Result<&str> {
    let (whole, fraction) = amount.split_once('.').unwrap_or((amount, "0"));
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|it| it.is_ascii_digit());
    if amount.len() <= 40 && digits(whole) && digits(fraction) {
        return Ok(amount);
    }
    Err(Failure::Reject(format!(
        "`amount` must be a decimal without a sign, not `{amount}`"
    )))
}

fn open(account: &str) -> Result<(), SqlError> {
    let open = "INSERT INTO account (account) VALUES ($1)";
    match savepoint(|| execute(open, params![account])) {
        Err(error) if error.is_unique_violation() => Ok(()),
        other => other.map(drop),
    }
}
