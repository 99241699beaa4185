//! The handler on a real PostgreSQL: `DATABASE_URL=… cargo test`.

use std::time::Duration;

use oncebox_guest::{
    Message,
    emit::Due,
    json, params,
    test::{Database, Outcome, messages},
};

use super::handle;

const TABLES: &str = concat!(include_str!("../schema.sql"), include_str!("../rows.sql"));

/// A database with an order of 3 of 10 units that waits for its charge.
fn charging() -> Database {
    let mut db = Database::from_env(TABLES);
    assert_eq!(run(&mut db, &placed("m-1", 3)), Outcome::ok(()));
    assert_eq!(state(&mut db), ("charging".to_owned(), 7));
    db
}

fn run(db: &mut Database, message: &Message) -> Outcome {
    db.run(handle, message)
}

fn placed(id: &str, units: i32) -> Message {
    let order = json!({ "order_id": "o-1", "sku": "apple", "units": units, "amount": 250 });
    Message::new(id, "order.placed", &order)
}

fn timer(id: &str) -> Message {
    let payload = json!({ "order_id": "o-1" });
    Message::new(id, "order.payment_timed_out", &payload)
}

/// An answer to `charge` or `void`.
fn answer(id: &str, action: &str, status: u16) -> Message {
    let payload = json!({ "cancel_token": format!("{action}:o-1"), "status": status });
    Message::new(id, &format!("order.{action}.answered"), &payload)
}

/// The answer to a charge that was asked for again.
fn repeated(id: &str, status: u16) -> Message {
    let payload = json!({ "cancel_token": "charge:o-1", "status": status, "is_repeated": true });
    Message::new(id, "order.charge.answered", &payload)
}

/// The state of the order, and the units that are left.
fn state(db: &mut Database) -> (String, i32) {
    let rows = "SELECT o.state, s.units FROM orders o, stock s WHERE o.order_id = 'o-1'";
    db.query(rows, params![]).remove(0)
}

/// Destination and event type of what was sent since this was asked, as the relay takes it.
fn sent(db: &mut Database) -> Vec<(String, String)> {
    let taken = db.take_sent().into_iter();
    taken
        .map(|sent| (sent.destination, sent.event_type))
        .collect()
}

fn one(destination: &str, event_type: &str) -> Vec<(String, String)> {
    vec![(destination.to_owned(), event_type.to_owned())]
}

#[test]
fn an_order_reserves_its_stock_and_asks_for_the_money() {
    let mut db = Database::from_env(TABLES);
    db.delivery.consumer = "shop".into();
    db.settings.insert("payment_timeout_s".into(), "60".into());
    assert_eq!(run(&mut db, &placed("m-1", 3)), Outcome::ok(()));
    let [charge, timer] = db.sent() else {
        panic!("{:?}", db.sent())
    };
    assert_eq!(
        (&*charge.destination, &*charge.event_type, charge.due),
        ("http:pay", "order.charge", Due::Now)
    );
    let request = br#"{"action":"charge","amount":250,"order_id":"o-1"}"#;
    assert_eq!(charge.payload.as_deref(), Some(&request[..]));
    assert_eq!(
        (&*timer.destination, &*timer.event_type, timer.due),
        (
            "inbox:shop",
            "order.payment_timed_out",
            Due::After(Duration::from_secs(60))
        )
    );
    assert_eq!(charge.key, timer.key);
    // The same order under another message id.
    assert_eq!(run(&mut db, &placed("m-2", 3)), Outcome::ok(()));
    assert_eq!((state(&mut db).1, db.sent().len()), (7, 2));
}

#[test]
fn an_order_without_stock_is_rejected() {
    let mut db = Database::from_env(TABLES);
    assert_eq!(run(&mut db, &placed("m-1", 11)), Outcome::ok(()));
    assert_eq!(state(&mut db), ("rejected".to_owned(), 10));
    assert!(db.sent().is_empty());
    let none = run(&mut db, &placed("m-2", 0));
    assert!(matches!(none, Outcome::Reject(_)), "{none}");
}

#[test]
fn a_charged_order_is_shipped_and_its_timer_withdrawn() {
    let mut db = charging();
    assert_eq!(run(&mut db, &answer("a-1", "charge", 201)), Outcome::ok(()));
    let left: Vec<_> = db.sent().iter().map(|sent| &*sent.event_type).collect();
    assert_eq!(left, ["order.charge", "order.ship"]);
    sent(&mut db);
    // What comes again, or too late, changes nothing and sends nothing.
    for late in [
        answer("a-2", "charge", 201),
        answer("a-3", "charge", 402),
        timer("t-1"),
    ] {
        assert_eq!(run(&mut db, &late), Outcome::ok(()));
        assert_eq!(state(&mut db), ("charged".to_owned(), 7));
        assert!(sent(&mut db).is_empty());
    }
}

#[test]
fn a_refused_order_gives_its_stock_back_once() {
    let mut db = charging();
    for (id, status) in [("a-1", 402), ("a-2", 402), ("a-3", 201)] {
        assert_eq!(run(&mut db, &answer(id, "charge", status)), Outcome::ok(()));
        assert_eq!(state(&mut db), ("refused".to_owned(), 10));
    }
    assert_eq!(run(&mut db, &timer("t-1")), Outcome::ok(()));
    assert_eq!(state(&mut db), ("refused".to_owned(), 10));
    assert_eq!(sent(&mut db), one("http:pay", "order.charge"));
}

/// What could go wrong: a provider that does not recognise a key refuses what it has done, and
/// keeps the money; or it is given back twice.
#[test]
fn a_repeated_charge_that_is_refused_is_voided_once() {
    let mut db = charging();
    sent(&mut db);
    for late in [repeated("a-1", 409), repeated("a-2", 409), timer("t-1")] {
        assert_eq!(run(&mut db, &late), Outcome::ok(()));
        assert_eq!(state(&mut db), ("refused".to_owned(), 10));
    }
    assert_eq!(sent(&mut db), one("http:pay", "order.void"));
}

#[test]
fn a_repeated_charge_that_is_made_is_no_other_than_a_first_one() {
    let mut db = charging();
    sent(&mut db);
    assert_eq!(run(&mut db, &repeated("a-1", 201)), Outcome::ok(()));
    assert_eq!(state(&mut db), ("charged".to_owned(), 7));
    assert_eq!(sent(&mut db), one("kafka:shipments", "order.ship"));
}

/// What could go wrong: a charge that may have been made is forgotten, or given back twice.
#[test]
fn a_charge_that_was_sent_is_voided_once_when_its_time_is_over() {
    let mut db = charging();
    sent(&mut db);
    for late in [
        timer("t-1"),
        timer("t-2"),
        answer("a-1", "charge", 201),
        answer("a-2", "charge", 402),
    ] {
        assert_eq!(run(&mut db, &late), Outcome::ok(()));
        assert_eq!(state(&mut db), ("voided".to_owned(), 10));
    }
    assert_eq!(sent(&mut db), one("http:pay", "order.void"));
    assert_eq!(run(&mut db, &answer("v-1", "void", 200)), Outcome::ok(()));
    let refused = run(&mut db, &answer("v-2", "void", 500));
    assert!(matches!(refused, Outcome::Park(_)), "{refused}");
}

/// What could go wrong: a charge that was never made is voided; or one that was made all the same
/// is not.
#[test]
fn a_charge_that_is_withdrawn_needs_no_void_until_it_is_answered() {
    let mut db = charging();
    assert_eq!(run(&mut db, &timer("t-1")), Outcome::ok(()));
    assert_eq!(state(&mut db), ("timed_out".to_owned(), 10));
    let charges = db.sent().iter();
    assert_eq!(
        charges
            .filter(|sent| sent.destination == "http:pay")
            .count(),
        0
    );
    sent(&mut db);
    for id in ["a-1", "a-2"] {
        assert_eq!(run(&mut db, &answer(id, "charge", 201)), Outcome::ok(()));
        assert_eq!(state(&mut db), ("voided".to_owned(), 10));
    }
    assert_eq!(sent(&mut db), one("http:pay", "order.void"));
}

#[test]
fn what_belongs_to_no_order_is_rejected() {
    let mut db = Database::from_env(TABLES);
    let other = json!({ "cancel_token": "reminder:o-1", "status": 200 });
    for message in [
        timer("t-1"),
        answer("a-1", "charge", 201),
        Message::new("a-2", "order.charge.answered", &other),
        Message::new("m-1", "order.lost", &json!({})),
    ] {
        let outcome = run(&mut db, &message);
        assert!(matches!(outcome, Outcome::Reject(_)), "{outcome}");
    }
}

/// The messages of the file, in which a timer and an answer come in both orders.
#[test]
fn the_sample_messages_end_in_every_way() {
    let mut db = Database::from_env(TABLES);
    for message in messages(include_str!("../messages.jsonl")) {
        assert_eq!(run(&mut db, &message), Outcome::ok(()), "{}", message.id);
    }
    let states: Vec<String> = db.query("SELECT state FROM orders ORDER BY order_id", params![]);
    // S3-021, S1-054.
    assert_eq!(states, ["charged", "voided", "refused", "rejected"]);
    assert_eq!(
        db.query::<i32>("SELECT units FROM stock", params![]),
        [10 - 3]
    );
}
