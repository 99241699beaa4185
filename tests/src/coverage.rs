//! The states and reasons of messages that the suite has reached. `scripts/states.py` compares them
//! with the page that says how to leave each.

use std::{collections::BTreeSet, fs, io::Write, sync::Mutex};

use sqlx::PgPool;

use crate::services::target_dir;

static SEEN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Records that a message was in a state, for a reason.
pub fn record_state(status: &str, reason: Option<&str>) {
    note(format!("state {status}"));
    if let Some(reason) = reason {
        note(format!("reason {}", reason.split(':').next().unwrap_or(reason)));
    }
}

/// Records the states and reasons of every message in a database, and of every failed run.
pub async fn record_inboxes(pool: &PgPool) {
    const REACHED: &str = "SELECT DISTINCT 'state ' || status FROM oncebox.inbox \
        UNION SELECT 'reason ' || split_part(reason, ':', 1) FROM oncebox.inbox WHERE reason IS \
        NOT NULL \
        UNION SELECT 'reason ' || split_part(reason, ':', 1) FROM oncebox.inbox_history WHERE \
        event = 'failed' AND reason IS NOT NULL";
    let reached: Vec<String> =
        sqlx::query_scalar(REACHED).fetch_all(pool).await.expect("what was reached");
    reached.into_iter().for_each(note);
}

fn note(line: String) {
    let mut seen = SEEN.lock().expect("no panic while held");
    if seen.insert(line.clone()) {
        let path = target_dir().join("reached.txt");
        let mut file = fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(path)
            .expect("target/reached.txt");
        file.write_all(format!("{line}\n").as_bytes()).expect("target/reached.txt");
    }
}
