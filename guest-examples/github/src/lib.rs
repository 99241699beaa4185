//! What the GitHub handlers share: the parts common to every webhook, and the audit row.

use oncebox_guest::{Message, OrFail, Result, enqueue, params};
use serde::Deserialize;

/// The members that most webhooks have.
#[derive(Deserialize)]
pub struct Webhook {
    pub action: Option<String>,
    pub repository: Option<Repository>,
}

#[derive(Deserialize)]
pub struct Repository {
    pub id: i64,
    pub full_name: String,
}

/// Writes the audit row and answers the common members.
///
/// The table has no unique key on the delivery, so an effect that happened twice shows as
/// two rows.
pub fn audit(message: &Message) -> Result<Webhook> {
    let webhook: Webhook = message.payload_as()?;
    let repository = webhook.repository.as_ref().map(|it| it.id);
    enqueue(
        "INSERT INTO audit (delivery, event, action, repository) VALUES ($1, $2, $3, $4)",
        params![message.id, event(message), webhook.action, repository],
    )?;
    Ok(webhook)
}

/// GitHub's own name of the event: `push` for `com.github.push`.
fn event(message: &Message) -> &str {
    let name = &message.event_type;
    name.strip_prefix("com.github.").unwrap_or(name)
}

impl Webhook {
    /// The repository, for the events that cannot do without.
    pub fn repository(self) -> Result<Repository> {
        self.repository.or_reject("the payload names no repository")
    }
}
