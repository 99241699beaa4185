//! The handler on a real PostgreSQL: `DATABASE_URL=… cargo test`.

use oncebox_guest::{
    Message, json, params,
    test::{Database, Outcome},
};

use super::place;

const TABLES: &str = include_str!("../schema.sql");

fn order(id: &str, account: i32) -> Message {
    let payload = json!({ "order_id": id, "account": account, "amount": 250, "note": "a gift" });
    Message::new(id, "order.placed", &payload)
}

fn database() -> Database {
    let mut db = Database::from_env(TABLES);
    db.execute("INSERT INTO account (id) VALUES (17)", params![]);
    db
}

fn booked(db: &mut Database) -> Vec<(i64, i64, i64)> {
    db.query(
        "SELECT balance, n, (SELECT count(*) FROM orders) FROM account",
        params![],
    )
}

#[test]
fn an_order_is_booked() {
    let mut db = database();
    assert_eq!(db.run(place, &order("o-1", 17)), Outcome::ok(()));
    assert_eq!(booked(&mut db), [(250, 1, 1)]);
}

#[test]
fn an_order_on_no_account_leaves_nothing() {
    let mut db = database();
    let outcome = db.run(place, &order("o-1", 18));
    assert_eq!(outcome, Outcome::Reject("no account 18".into()));
    assert_eq!(booked(&mut db), [(0, 0, 0)]);
}
