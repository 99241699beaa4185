//! The handler on a real PostgreSQL: `cargo test`.

use oncebox_guest::{
    Message, json, params,
    test::{Database, Outcome, messages},
};

use super::place;

const TABLES: &str = include_str!("../schema.sql");
const MESSAGES: &str = include_str!("../messages.jsonl");

/// The balance of an account, and how many orders there are in all.
fn booked(db: &mut Database, account: i32) -> (i64, i64) {
    let both = "SELECT balance, (SELECT count(*) FROM orders) FROM account WHERE id = $1";
    db.query(both, params![account])[0]
}

#[test]
fn every_message_of_the_file_is_booked() {
    let mut db = Database::from_env(TABLES);
    for message in messages(MESSAGES) {
        assert_eq!(db.run(place, &message), Outcome::ok(()), "`{}`", message.id);
    }
    assert_eq!(booked(&mut db, 17), (4450, 3));
}

#[test]
fn an_order_on_an_unknown_account_leaves_nothing() {
    let mut db = Database::from_env(TABLES);
    let order = json!({ "order_id": "o-1", "account": 99, "amount": 250, "note": "" });
    let outcome = db.run(place, &Message::new("m-1", "order.placed", &order));
    assert_eq!(outcome, Outcome::Reject("no account 99".into()));
    assert_eq!(booked(&mut db, 17), (0, 0));
}
