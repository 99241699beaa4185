//! The content of the tables when every event had its effect exactly once, and what left them for
//! others.
//!
//! It is computed from the events' JSON alone, with no code in common with the handlers, so that
//! the two cannot be wrong in one way.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Value, json};

use super::input::{Event, Input, TENANTS};

/// Commits, pushes and stars of one repository.
pub(crate) type Activity = (i64, i64, i64);
/// Newest state of one issue or pull request, absent where no event named one, and the number of
/// its events.
pub(crate) type Progress = (Option<String>, i64);
/// Event, action and repository of one delivery, and the number of its rows, which is one.
pub(crate) type Audit = (String, Option<String>, Option<i64>, i64);

/// Event type and payload of the message that one delivery sends to a receiver, and the number of
/// its ids, which is one.
pub(crate) type SentMessage = (String, Value, i64);

/// One tenant's tables and what left them, ordered, so that two are compared with `==`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Expected {
    /// Activity by repository.
    pub(crate) repository_activity: BTreeMap<i64, Activity>,
    /// Issues by repository and number.
    pub(crate) issues: BTreeMap<(i64, i64), Progress>,
    /// Pull requests by repository and number.
    pub(crate) pull_requests: BTreeMap<(i64, i64), Progress>,
    /// Audit rows by delivery. A doubled effect shows as a number of rows above one.
    pub(crate) audit: BTreeMap<String, Audit>,
    /// Events in the tenant's topic, by the delivery that causes them.
    pub(crate) events: BTreeMap<String, SentMessage>,
    /// Calls of the provider for the tenant, by the delivery that causes them.
    pub(crate) calls: BTreeMap<String, SentMessage>,
}

/// Returns the expected tables of every tenant, by its index.
pub(crate) fn expected(input: &Input) -> serde_json::Result<Vec<Expected>> {
    let mut tenants = vec![ExpectedTenant::default(); TENANTS];
    for event in input.events() {
        tenants[event.tenant].add(&event)?;
    }
    Ok(tenants.into_iter().map(ExpectedTenant::finish).collect())
}

/// The members of any webhook that the tables depend on.
#[derive(Deserialize)]
struct Payload {
    action: Option<String>,
    repository: Option<Repository>,
    issue: Option<Numbered>,
    pull_request: Option<Numbered>,
    comment: Option<Comment>,
    #[serde(default)]
    commits: Vec<Commit>,
}

#[derive(Deserialize)]
struct Repository {
    id: i64,
    #[serde(default)]
    full_name: String,
}

#[derive(Deserialize)]
struct Comment {
    id: i64,
    html_url: String,
}

#[derive(Deserialize)]
struct Commit {}

#[derive(Deserialize)]
struct Numbered {
    number: i64,
    state: Option<String>,
    #[serde(default)]
    merged: Option<bool>,
    updated_at: String,
}

/// All events of one issue: pairs of time and state, and the number of events.
type History = (Vec<(String, String)>, i64);

/// A tenant's tables while events are added, in any order.
#[derive(Clone, Default)]
struct ExpectedTenant {
    tables: Expected,
    issues: BTreeMap<(i64, i64), History>,
    pull_requests: BTreeMap<(i64, i64), History>,
}

impl ExpectedTenant {
    fn add(&mut self, event: &Event) -> serde_json::Result<()> {
        let payload: Payload = serde_json::from_slice(&event.payload)?;
        let name = event.event_type.trim_start_matches("com.github.");
        let repository = payload.repository.as_ref().map(|it| it.id);
        if let Some(id) = repository {
            self.add_to_repository(id, name, &payload);
        }
        if name.ends_with("_comment") {
            self.send(&event.delivery, &payload);
        }
        let row = (name.to_owned(), payload.action, repository, 1);
        self.tables.audit.insert(event.delivery.clone(), row);
        Ok(())
    }

    fn add_to_repository(&mut self, id: i64, name: &str, payload: &Payload) {
        match (name, payload) {
            ("push", _) => self.count(id, (payload.commits.len() as i64, 1, 0)),
            ("star" | "watch", _) => self.count(id, (0, 0, stars(payload))),
            ("issues", Payload { issue: Some(issue), .. }) => remember(&mut self.issues, id, issue),
            ("pull_request", Payload { pull_request: Some(it), .. }) => {
                remember(&mut self.pull_requests, id, it);
            }
            _ => {}
        }
    }

    /// Adds the messages to others that a comment causes: an event and a mail.
    fn send(&mut self, delivery: &str, payload: &Payload) {
        let Payload {
            action: Some(action),
            repository: Some(repository),
            comment: Some(comment),
            ..
        } = payload
        else {
            return;
        };
        let url = &comment.html_url;
        let event = json!({ "repository": repository.id, "comment": comment.id, "url": url });
        let event = (format!("comment.{action}"), event, 1);
        self.tables.events.insert(delivery.to_owned(), event);
        let text = format!("comment {action}: {url}");
        let mail = json!({ "to": repository.full_name, "text": text });
        self.tables.calls.insert(delivery.to_owned(), ("comment.mail".to_owned(), mail, 1));
    }

    fn count(&mut self, repository: i64, (commits, pushes, stars): Activity) {
        let row = self.tables.repository_activity.entry(repository).or_default();
        row.0 += commits;
        row.1 += pushes;
        row.2 += stars;
    }

    fn finish(self) -> Expected {
        Expected {
            issues: newest(self.issues),
            pull_requests: newest(self.pull_requests),
            ..self.tables
        }
    }
}

fn stars(payload: &Payload) -> i64 {
    match payload.action.as_deref() {
        Some("deleted") => -1,
        _ => 1,
    }
}

fn remember(histories: &mut BTreeMap<(i64, i64), History>, repository: i64, said: &Numbered) {
    let (states, events) = histories.entry((repository, said.number)).or_default();
    *events += 1;
    let state = if said.merged == Some(true) { Some("merged") } else { said.state.as_deref() };
    states.extend(state.map(|it| (said.updated_at.clone(), it.to_owned())));
}

/// Returns the newest state of each: the latest time, and of equal times the last state by name.
/// Times are all UTC in one format, so their text has their order.
fn newest(histories: BTreeMap<(i64, i64), History>) -> BTreeMap<(i64, i64), Progress> {
    let last =
        |(states, events): History| (states.into_iter().max().map(|(_, state)| state), events);
    histories.into_iter().map(|(key, history)| (key, last(history))).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test, a panic is the report")]
mod tests {
    use super::*;

    fn event(delivery: usize, name: &str, payload: Value) -> Event {
        Event {
            tenant: 0,
            delivery: delivery.to_string(),
            event_type: format!("com.github.{name}"),
            key: String::new(),
            payload: payload.to_string().into_bytes(),
        }
    }

    fn tables(events: &[(&str, Value)]) -> Expected {
        let mut tenant = ExpectedTenant::default();
        for (index, (name, payload)) in events.iter().enumerate() {
            tenant.add(&event(index, name, payload.clone())).unwrap();
        }
        tenant.finish()
    }

    fn issue(state: Option<&str>, minute: u32) -> (&'static str, Value) {
        let updated_at = format!("2024-05-15T15:{minute:02}:00Z");
        let issue = json!({ "number": 3, "state": state, "updated_at": updated_at });
        ("issues", json!({ "action": "edited", "repository": { "id": 1 }, "issue": issue }))
    }

    fn check_state(events: [(&'static str, Value); 3], state: Option<&str>) {
        let [a, b, c] = events;
        for order in [[&a, &b, &c], [&c, &b, &a], [&b, &a, &c]] {
            let tables = tables(&order.map(Clone::clone));
            assert_eq!(tables.issues[&(1, 3)], (state.map(Into::into), 3));
        }
    }

    #[test]
    fn the_newest_state_wins_in_any_order() {
        check_state(
            [issue(Some("open"), 1), issue(Some("closed"), 9), issue(Some("open"), 5)],
            Some("closed"),
        );
        check_state(
            [issue(Some("open"), 5), issue(Some("closed"), 5), issue(Some("closed"), 5)],
            Some("open"),
        );
        check_state(
            [issue(Some("open"), 1), issue(None, 9), issue(Some("closed"), 5)],
            Some("closed"),
        );
        check_state([issue(None, 1), issue(None, 2), issue(None, 3)], None);
    }

    #[test]
    fn a_merged_pull_request_is_more_than_closed() {
        let pull = json!({ "number": 2, "state": "closed", "merged": true, "updated_at": "2024-05-15T15:00:00Z" });
        let tables =
            tables(&[("pull_request", json!({ "repository": { "id": 1 }, "pull_request": pull }))]);
        assert_eq!(tables.pull_requests[&(1, 2)], (Some("merged".into()), 1));
        assert!(tables.issues.is_empty());
    }

    #[test]
    fn pushes_and_stars_add_up() {
        let repository = json!({ "id": 1 });
        let tables = tables(&[
            (
                "push",
                json!({ "repository": repository, "commits": [{ "id": "a" }, { "id": "b" }] }),
            ),
            ("push", json!({ "repository": repository, "commits": [] })),
            ("star", json!({ "repository": repository, "action": "created" })),
            ("star", json!({ "repository": repository, "action": "deleted" })),
            ("watch", json!({ "repository": repository, "action": "started" })),
        ]);
        assert_eq!(tables.repository_activity, BTreeMap::from([(1, (2, 2, 1))]));
    }

    #[test]
    fn each_event_has_one_audit_row_even_without_a_repository() {
        let tables = tables(&[("ping", json!({})), ("fork", json!({ "repository": { "id": 5 } }))]);
        assert_eq!(tables.audit["0"], ("ping".into(), None, None, 1));
        assert_eq!(tables.audit["1"], ("fork".into(), None, Some(5), 1));
    }

    #[test]
    fn a_comment_causes_an_event_and_a_mail() {
        let comment = json!({ "id": 7, "html_url": "https://github.com/octo/r#7" });
        let payload = |repository: Value| {
            let comment = &comment;
            json!({ "action": "edited", "repository": repository, "comment": comment })
        };
        let repository = json!({ "id": 1, "full_name": "octo/r" });
        let tables = tables(&[
            ("issue_comment", payload(repository.clone())),
            ("issue_comment", payload(Value::Null)),
            ("issues", payload(repository)),
        ]);
        let event = json!({ "repository": 1, "comment": 7, "url": "https://github.com/octo/r#7" });
        let mail = json!({ "to": "octo/r", "text": "comment edited: https://github.com/octo/r#7" });
        let sent = |event_type: &str, payload| {
            BTreeMap::from([("0".to_owned(), (event_type.to_owned(), payload, 1))])
        };
        assert_eq!(tables.events, sent("comment.edited", event));
        assert_eq!(tables.calls, sent("comment.mail", mail));
    }

    #[test]
    fn the_demos_input_fills_every_table_of_both_tenants() {
        let input = Input::new(7, 2_960).unwrap();
        let all = expected(&input).unwrap();
        let sum = |count: fn(&Expected) -> i64| all.iter().map(count).sum::<i64>();
        assert_eq!(sum(|it| it.audit.len() as i64), 2_960);
        assert_eq!(sum(|it| it.events.len() as i64), 19 * 20);
        assert_eq!(sum(|it| it.calls.len() as i64), 19 * 20);
        assert_eq!(sum(|it| it.issues.values().map(|row| row.1).sum()), 29 * 20);
        assert_eq!(sum(|it| it.pull_requests.values().map(|row| row.1).sum()), 29 * 20);
        assert_eq!(sum(|it| it.repository_activity.values().map(|row| row.1).sum()), 7 * 20);
        assert_eq!(sum(|it| it.repository_activity.values().map(|row| row.0).sum()), 2 * 20);
        assert_eq!(sum(|it| it.repository_activity.values().map(|row| row.2).sum()), 4 * 20);
        assert!(
            all.iter()
                .all(|it| { it.issues.values().any(|row| row.0.as_deref() == Some("closed")) })
        );
        assert_ne!(all[0], all[1]);
    }
}
