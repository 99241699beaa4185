//! The handler on a real PostgreSQL: `DATABASE_URL=… cargo test`.

use std::time::Duration;

use oncebox_guest::{
    Message,
    emit::Due,
    json, params,
    test::{Database, Outcome},
};

use super::handle;

const TABLES: &str = include_str!("../schema.sql");

fn event(id: &str, event_type: &str) -> Message {
    Message::new(id, event_type, &json!({ "order_id": "o-1", "amount": 250 }))
}

/// Whether the order is paid, and how often it was reminded of.
fn order(db: &mut Database) -> Vec<(bool, i32)> {
    db.query("SELECT is_paid, reminders FROM purchases", params![])
}

#[test]
fn an_order_is_confirmed_and_reminded_of() {
    let mut db = Database::from_env(TABLES);
    db.settings.insert("remind_after_s".into(), "60".into());
    let placed = event("m-1", "order.placed");
    assert_eq!(db.run(handle, &placed), Outcome::ok(()));
    let [confirmed, reminder] = db.sent() else {
        panic!("{:?}", db.sent())
    };
    assert_eq!(
        (
            &*confirmed.destination,
            &*confirmed.event_type,
            confirmed.due
        ),
        ("kafka:order-events", "order.confirmed", Due::Now)
    );
    assert_eq!(
        confirmed.payload.as_deref(),
        Some(&br#"{"amount":250,"order_id":"o-1"}"#[..])
    );
    assert_eq!(
        (&*reminder.destination, &*reminder.event_type, reminder.due),
        (
            "inbox:orders",
            "order.reminder",
            Due::After(Duration::from_secs(60))
        )
    );
    assert_eq!(confirmed.key, reminder.key, "one order, one lane");
    assert_eq!(confirmed.key.as_deref(), Some(&b"o-1"[..]));
}

#[test]
fn a_payment_withdraws_the_reminder() {
    let mut db = Database::from_env(TABLES);
    db.run(handle, &event("m-1", "order.placed"));
    assert_eq!(db.run(handle, &event("m-2", "order.paid")), Outcome::ok(()));
    let left: Vec<_> = db.sent().iter().map(|sent| &*sent.event_type).collect();
    assert_eq!(left, ["order.confirmed"]);
    assert_eq!(order(&mut db), [(true, 0)]);
}

/// What could go wrong: a reminder that was on its way already reminds of a paid order.
#[test]
fn a_reminder_that_comes_after_the_payment_does_nothing() {
    let mut db = Database::from_env(TABLES);
    db.run(handle, &event("m-1", "order.placed"));
    assert_eq!(db.take_sent().len(), 2);
    assert_eq!(
        db.run(handle, &event("m-2", "order.reminder")),
        Outcome::ok(())
    );
    assert_eq!(order(&mut db), [(false, 1)]);
    db.run(handle, &event("m-3", "order.paid"));
    assert_eq!(
        db.run(handle, &event("m-4", "order.reminder")),
        Outcome::ok(())
    );
    assert_eq!(order(&mut db), [(true, 1)]);
}

/// What could go wrong: an order that was not stored is confirmed.
#[test]
fn an_order_that_is_not_stored_sends_nothing() {
    let mut db = Database::from_env(TABLES);
    db.run(handle, &event("m-1", "order.placed"));
    db.take_sent();
    let again = db.run(handle, &event("m-2", "order.placed"));
    assert!(matches!(again, Outcome::Failed { .. }), "{again}");
    let unknown = Message::new("m-3", "order.paid", &json!({ "order_id": "o-9" }));
    assert_eq!(
        db.run(handle, &unknown),
        Outcome::Reject("no order o-9".into())
    );
    assert!(db.sent().is_empty());
}
