//! The handler on a real PostgreSQL: `DATABASE_URL=… cargo test`.

use oncebox_guest::{
    Message, json, params,
    test::{Database, Outcome},
};

use super::place;

const TABLES: &str = include_str!("../schema.sql");

fn order(id: &str, account: i32, amount: i64) -> Message {
    let payload = json!({ "order_id": id, "account": account, "amount": amount, "note": "n" });
    Message::new(id, "order.placed", &payload)
}

/// Accounts 1 and 2.
fn database() -> Database {
    let mut db = Database::from_env(TABLES);
    db.execute("INSERT INTO account (id) VALUES (1), (2)", params![]);
    db
}

fn orders(db: &mut Database) -> Vec<String> {
    db.query("SELECT id FROM orders ORDER BY id", params![])
}

fn accounts(db: &mut Database) -> Vec<(i32, i64, i64)> {
    db.query("SELECT id, balance, n FROM account ORDER BY id", params![])
}

#[test]
fn a_batch_is_booked_at_once() {
    let mut db = database();
    let batch = [order("a", 1, 10), order("b", 2, 20), order("c", 1, 30)];
    assert_eq!(db.run_batch(place, &batch), vec![Outcome::ok(()); 3]);
    assert_eq!(orders(&mut db), ["a", "b", "c"]);
    assert_eq!(accounts(&mut db), [(1, 40, 2), (2, 20, 1)]);
}

/// What could go wrong: one bad message takes its neighbours along, or is booked.
#[test]
fn bad_messages_are_rejected_and_the_others_booked() {
    let mut db = database();
    let mut malformed = order("b", 1, 20);
    malformed.payload = Some(br#"{"order_id": "b"}"#.to_vec());
    let batch = [
        order("a", 1, 10),
        malformed,
        order("c", 3, 30),
        order("d", 2, 40),
    ];
    let outcomes = db.run_batch(place, &batch);
    let missing = "malformed payload: missing field `account` at line 1 column 17";
    let expected = [
        Outcome::ok(()),
        Outcome::Reject(missing.into()),
        Outcome::Reject("no account 3".into()),
        Outcome::ok(()),
    ];
    assert_eq!(outcomes, expected);
    assert_eq!(orders(&mut db), ["a", "d"]);
    assert_eq!(accounts(&mut db), [(1, 10, 1), (2, 40, 1)]);
}

/// What could go wrong: a failed statement, which is about nobody in particular, fails all.
#[test]
fn a_failed_statement_fails_only_the_message_it_is_about() {
    let mut db = database();
    let taken = "INSERT INTO orders VALUES ('b', 1, 0, '')";
    db.execute(taken, params![]);
    let outcomes = db.run_batch(
        place,
        &[order("a", 1, 10), order("b", 1, 20), order("c", 2, 30)],
    );
    assert_eq!([&outcomes[0], &outcomes[2]], [&Outcome::ok(()); 2]);
    let is_taken =
        matches!(&outcomes[1], Outcome::Failed { reason, .. } if reason == "sql_error:23505");
    assert!(is_taken, "{}", outcomes[1]);
    assert_eq!(orders(&mut db), ["a", "b", "c"]);
    assert_eq!(accounts(&mut db), [(1, 10, 1), (2, 30, 1)]);
}
