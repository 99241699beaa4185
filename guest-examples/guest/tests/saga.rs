//! The harness on a real PostgreSQL: processes and their states.
#![cfg(feature = "test")]

use oncebox_guest::{
    Message, Result, json,
    once::Transition,
    params,
    saga::Saga,
    test::{Database, Outcome},
};
use serde::Deserialize;

const TABLES: &str = "
    CREATE TYPE phase AS ENUM ('open', 'paid', 'late');
    CREATE TABLE process (id int, phase phase NOT NULL, note text);
    INSERT INTO process VALUES (1, 'open', 'one'), (2, 'open', 'two');";
const PROCESSES: Saga = Saga::new("process", "id", "phase");

#[derive(Debug, PartialEq, Deserialize)]
struct Process {
    phase: String,
    note: Option<String>,
}

/// Runs a handler; answers what became of its message, and the phases that are left.
fn run(db: &mut Database, work: impl Fn() -> Result<()>) -> (Outcome, Vec<String>) {
    let message = Message::new("m-1", "process.moved", &json!(null));
    let outcome = db.run(|_: &Message| work(), &message);
    let phases = "SELECT phase::text FROM process ORDER BY id, note";
    (outcome, db.query(phases, params![]))
}

/// What could go wrong: a reply that is late, or comes again, moves a process that has moved on.
#[test]
fn a_process_moves_only_from_the_state_that_is_expected() {
    let mut db = Database::from_env(TABLES);
    let (outcome, left) = run(&mut db, || {
        let moved = [
            PROCESSES.advance(1, "open", "paid")?,
            PROCESSES.advance(1, "open", "paid")?,
            PROCESSES.advance(1, "open", "late")?,
            PROCESSES.advance(3, "open", "paid")?,
        ];
        // S3-021.
        let [first, again, late, unknown] = moved;
        assert_eq!(first, Transition::Moved);
        for other in [again, late, unknown] {
            assert_eq!(other, Transition::NotMoved);
        }
        Ok(())
    });
    assert_eq!(
        (outcome, left),
        (Outcome::ok(()), vec!["paid".into(), "open".into()])
    );
}

/// What could go wrong: a message acts on a process of another key, or on one that is not there.
#[test]
fn a_process_is_found_by_its_key() {
    let mut db = Database::from_env(TABLES);
    let (outcome, _) = run(&mut db, || {
        let two: Option<Process> = PROCESSES.load(2)?;
        let expected = Process {
            phase: "open".into(),
            note: Some("two".into()),
        };
        assert_eq!(two, Some(expected));
        assert_eq!(PROCESSES.load::<Process>(3)?, None);
        Ok(())
    });
    assert_eq!(outcome, Outcome::ok(()));
}

/// What could go wrong: a table without a unique key moves two processes at once.
#[test]
fn a_key_of_two_rows_fails_the_message() {
    let mut db = Database::from_env(TABLES);
    db.execute("UPDATE process SET id = 1", params![]);
    let is_failed = |outcome: &Outcome| matches!(outcome, Outcome::Failed { .. });
    let (outcome, left) = run(&mut db, || {
        let _ = PROCESSES.advance(1, "open", "paid")?;
        Ok(())
    });
    assert!(is_failed(&outcome), "{outcome}");
    assert_eq!(left, ["open", "open"]);
    let (outcome, _) = run(&mut db, || {
        PROCESSES.load::<Process>(1)?;
        Ok(())
    });
    assert!(is_failed(&outcome), "{outcome}");
}
