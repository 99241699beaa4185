//! Which states and reasons of messages the suite has come by, for `scripts/states.py` to compare
//! with the page that says how to get out of each.

use std::{collections::BTreeSet, fs, io::Write, sync::Mutex};

use sqlx::PgPool;

use crate::services::target_dir;

static SEEN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// A message was seen in a state, for a reason.
pub fn saw(status: &str, reason: Option<&str>) {
    note(format!("state {status}"));
    if let Some(reason) = reason {
        note(format!("reason {}", reason.split(':').next().unwrap_or(reason)));
    }
}

/// Whatever the inboxes of a database hold, and what runs have failed of.
pub async fn look(pool: &PgPool) {
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
