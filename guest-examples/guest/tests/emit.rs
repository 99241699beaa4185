//! The harness on a real PostgreSQL: what handlers send, and what becomes of it.
#![cfg(all(feature = "test", feature = "emit"))]

use std::time::Duration;

use oncebox_guest::{
    Batch, Failure, Message, Result, SqlError,
    emit::{Due, EmitError, Outgoing, cancel},
    execute, json, params, savepoint,
    test::{Database, Outcome, Sent},
};

fn message() -> Message {
    Message::new("m-1", "item.named", &json!(null))
}

/// Runs a handler; answers what became of its message, and what is sent.
fn run(work: impl Fn() -> Result<()>) -> (Outcome, Vec<Sent>) {
    let mut db = Database::from_env("CREATE TABLE item (id int PRIMARY KEY)");
    let outcome = db.run(|_: &Message| work(), &message());
    (outcome, db.take_sent())
}

fn confirmed(units: i32) -> Outgoing {
    Outgoing::json("item.confirmed", &json!({ "units": units })).to("kafka:items")
}

/// The units of what is sent.
fn units(sent: &[Sent]) -> Vec<i64> {
    sent.iter()
        .map(|sent| {
            sent.payload_as::<serde_json::Value>()["units"]
                .as_i64()
                .unwrap_or(-1)
        })
        .collect()
}

fn reason(outcome: &Outcome) -> &str {
    match outcome {
        Outcome::Failed { reason, .. } => reason,
        other => panic!("{other}"),
    }
}

#[test]
fn what_is_sent_is_as_it_was_made() {
    let (outcome, sent) = run(|| {
        let outgoing = confirmed(3).key("i-1").header("region", "north");
        outgoing
            .after(Duration::from_secs(5))
            .cancel_token("t")
            .send()?;
        Ok(())
    });
    assert_eq!(outcome, Outcome::ok(()));
    let [sent] = &sent[..] else {
        panic!("{sent:?}")
    };
    assert_eq!(
        (&*sent.destination, &*sent.event_type, &*sent.cause),
        ("kafka:items", "item.confirmed", "m-1")
    );
    assert_eq!(
        (sent.key.as_deref(), sent.due),
        (Some(&b"i-1"[..]), Due::After(Duration::from_secs(5)))
    );
    assert_eq!(sent.headers, [("region".to_owned(), b"north".to_vec())]);
    assert_eq!(sent.cancel_token.as_deref(), Some("t"));
}

/// What could go wrong: a message is sent although what it tells of did not happen.
#[test]
fn a_message_that_fails_sends_nothing_and_a_savepoint_takes_back() {
    let (outcome, sent) = run(|| {
        confirmed(1).send()?;
        Err(Failure::reject("why"))
    });
    assert_eq!((outcome, sent.len()), (Outcome::Reject("why".into()), 0));
    let (outcome, sent) = run(|| {
        confirmed(1).send()?;
        execute("INSERT INTO item VALUES (1)", params![])?;
        let again: Result<(), SqlError> = savepoint(|| {
            confirmed(2)
                .send()
                .map_err(|error| SqlError::Refused(error.to_string()))?;
            execute("INSERT INTO item VALUES (1)", params![]).map(drop)
        });
        assert!(again.is_err_and(|error| error.is_unique_violation()));
        confirmed(3).send()?;
        Ok(())
    });
    assert_eq!((outcome, units(&sent)), (Outcome::ok(()), vec![1, 3]));
}

/// What could go wrong: the id of a message is another one after a retry.
#[test]
fn ids_repeat_with_the_run_and_differ_within_it() {
    let ids = || {
        let (_, sent) = run(|| {
            confirmed(1).send()?;
            confirmed(1).send()?;
            Ok(())
        });
        sent.into_iter().map(|sent| sent.id).collect::<Vec<_>>()
    };
    let first = ids();
    assert_ne!(first[0], first[1]);
    assert_eq!(ids(), first);
}

/// What could go wrong: a handler that does not look at an error passes here and fails on the host.
#[test]
fn a_refusal_that_was_swallowed_fails_the_message() {
    let long = "x".repeat(300);
    for (outgoing, part) in [
        (confirmed(1).to("orders"), "no destination"),
        (confirmed(1).to("kafka:"), "no destination"),
        (confirmed(1).to("inbox:Billing"), "no destination"),
        (confirmed(1).to(format!("kafka:{long}")), "306 bytes"),
        (confirmed(1).header("ce_id", "1"), "is the host's"),
        (confirmed(1).header("OnceBox-x", "1"), "is the host's"),
        (
            confirmed(1).header("a", vec![0_u8; 70_000]),
            "list of headers",
        ),
        (confirmed(1).key(vec![0_u8; 1025]), "the key"),
        (confirmed(1).cancel_token(""), "the cancel token"),
        (confirmed(1).content_type("a\nb"), "the content type"),
        (Outgoing::tombstone("").to("kafka:items"), "the event type"),
        (
            confirmed(1).after(Duration::from_secs(367 * 24 * 3600)),
            "366 days",
        ),
    ] {
        let (outcome, sent) = run(|| {
            let refused = outgoing.clone().send();
            assert!(
                matches!(&refused, Err(EmitError::Refused(text)) if text.contains(part)),
                "{refused:?} lacks `{part}`"
            );
            Ok(())
        });
        assert_eq!((reason(&outcome), sent.len()), ("statement_refused", 0));
    }
    let (outcome, _) = run(|| {
        for _ in 0..101 {
            let _ = confirmed(1).send();
        }
        Ok(())
    });
    assert_eq!(reason(&outcome), "limit");
    let (outcome, _) = run(|| {
        let _ = Outgoing::bytes("t", vec![0_u8; 2 << 20])
            .to("kafka:items")
            .send();
        Ok(())
    });
    assert_eq!(reason(&outcome), "limit");
}

#[test]
fn only_destinations_that_are_allowed_can_be_named() {
    let mut db = Database::from_env("");
    db.allow_destinations(&["kafka:items"]);
    let send = |to: String| -> Result<()> {
        Outgoing::tombstone("t").to(to).send()?;
        Ok(())
    };
    let to = |name: &str| Message::new(name, "t", &json!(name));
    assert_eq!(db.run(send, &to("kafka:items")), Outcome::ok(()));
    let outcome = db.run(send, &to("kafka:other"));
    assert_eq!(reason(&outcome), "statement_refused");
    assert_eq!(db.sent().len(), 1);
}

/// What could go wrong: what was cancelled is sent, or what a failed run cancelled is not.
#[test]
fn a_cancel_withdraws_what_is_not_on_its_way() {
    let mut db = Database::from_env("");
    let remind = |_: &Message| -> Result<bool> {
        confirmed(1).cancel_token("a").send()?;
        confirmed(2).cancel_token("b").send()?;
        Ok(cancel("b")?)
    };
    assert_eq!(db.run(remind, &message()), Outcome::ok(true));
    let withdraw = |_: &Message| -> Result<bool> { Ok(cancel("a")?) };
    let failing = |_: &Message| -> Result<()> {
        assert_eq!(cancel("a"), Ok(true));
        Err(Failure::park("why"))
    };
    assert_eq!(units(db.sent()), [1]);
    assert_eq!(db.run(failing, &message()), Outcome::Park("why".into()));
    assert_eq!(units(db.sent()), [1]);
    assert_eq!(db.run(withdraw, &message()), Outcome::ok(true));
    assert!(db.sent().is_empty());
    assert_eq!(db.run(withdraw, &message()), Outcome::ok(false));
    db.run(remind, &message());
    assert_eq!(db.take_sent().len(), 1);
    assert_eq!(
        db.run(withdraw, &message()),
        Outcome::ok(false),
        "it is sent"
    );
}

#[test]
fn a_batch_names_the_cause() {
    let mut db = Database::from_env("");
    let messages = ["a", "b"].map(|id| Message::new(id, "t", &json!(7)));
    let named = |batch: &mut Batch<i32>| -> Result<()> {
        for item in batch.iter() {
            confirmed(item.payload).caused_by(&item.message).send()?;
        }
        Ok(())
    };
    assert_eq!(
        db.run_batch(named, &messages),
        [Outcome::ok(()), Outcome::ok(())]
    );
    let causes: Vec<_> = db.take_sent().into_iter().map(|sent| sent.cause).collect();
    assert_eq!(causes, ["a", "b"]);
    let nameless = |batch: &mut Batch<i32>| -> Result<()> {
        let refused = confirmed(1).send();
        assert_eq!(refused.is_err(), batch.len() > 1, "{refused:?}");
        Ok(())
    };
    // The call of both fails, and each alone needs no cause.
    assert_eq!(
        db.run_batch(nameless, &messages),
        [Outcome::ok(()), Outcome::ok(())]
    );
    assert_eq!(db.sent().len(), 2);
}
