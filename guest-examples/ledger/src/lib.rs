//! Books a captured payment: effects that are not idempotent, and a recovered statement.
//!
//! Nothing here protects itself against a second run: the balance is a delta and
//! `ledger_entry` has no unique key. That each payment is booked once is the host's work.
//! Opening an account that exists fails its statement; a savepoint lets the handler go on.

use oncebox_guest_bindings::{
    Answer, Failure, Message, Savepoint, SqlError, Value, done, execute, handler, parse, query,
};
use serde::Deserialize;

handler!(book);

#[derive(Deserialize)]
struct Payment {
    account: String,
    /// Decimal text: a JSON number would become a float.
    amount: String,
    /// Open the account when it does not exist yet.
    #[serde(default)]
    open_account: bool,
}

fn book(message: Message) -> Answer {
    let payment: Payment = parse(&message)?;
    let amount = Value::Numeric(checked(&payment.amount)?.into());
    if payment.open_account {
        open_account(&payment.account)?;
    }
    execute(
        "INSERT INTO ledger_entry (message_id, account, amount) VALUES ($1, $2, $3)",
        &[message.id.into(), (&payment.account).into(), amount.clone()],
    )?;
    let rows = query(
        "UPDATE account SET balance = balance + $1 WHERE account = $2 RETURNING balance",
        &[amount, (&payment.account).into()],
    )?;
    match rows.first() {
        Some(row) => done(format!(r#"{{"balance":"{}"}}"#, row.get::<String>(0)?)),
        // The entry written above goes with it.
        None => Err(Failure::Park(format!("no account `{}`", payment.account))),
    }
}

/// Digits with at most one decimal point; a minus sign is refused like any other text.
fn checked(amount: &str) -> Result<&str, Failure> {
    let (whole, fraction) = amount.split_once('.').unwrap_or((amount, "0"));
    let digits = |part: &str| !part.is_empty() && part.bytes().all(|it| it.is_ascii_digit());
    if amount.len() <= 40 && digits(whole) && digits(fraction) {
        return Ok(amount);
    }
    Err(Failure::Reject(format!(
        "`amount` must be a decimal without a sign, not `{amount}`"
    )))
}

fn open_account(account: &str) -> Result<(), SqlError> {
    let savepoint = Savepoint::open()?;
    match execute(
        "INSERT INTO account (account) VALUES ($1)",
        &[account.into()],
    ) {
        Err(error) if error.is_unique_violation() => savepoint.rollback(),
        other => other.and_then(|_| savepoint.release()),
    }
}
