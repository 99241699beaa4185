//! Tells others of a comment: an event in a topic for everyone, and a request to a provider that
//! mails it. The host sends both after the commit of the webhook, or not at all.

use oncebox_github_webhook::{Webhook, audit};
use oncebox_guest::{Message, OrFail, Result, config, emit::Outgoing, handler, json};
use serde::Deserialize;

#[derive(Deserialize)]
struct Event {
    comment: Comment,
}

#[derive(Deserialize)]
struct Comment {
    id: i64,
    html_url: String,
}

#[handler]
fn commented(Event { comment }: Event, message: &Message) -> Result<()> {
    let Webhook { action, repository } = audit(message)?;
    let action = action.or_reject("the payload names no action")?;
    let repository = repository.or_reject("the payload names no repository")?;
    // All messages of a repository are in one lane, at each of both receivers.
    let key = repository.id.to_string();
    let told = json!({
        "repository": repository.id, "comment": comment.id, "url": comment.html_url,
    });
    Outgoing::json(format!("comment.{action}"), &told)
        .to(setting("tell_to", "kafka:comments"))
        .key(&key)
        .send()?;
    let text = format!("comment {action}: {}", comment.html_url);
    let mail = json!({ "to": repository.full_name, "text": text });
    Outgoing::json("comment.mail", &mail)
        .to(setting("mail_to", "http:mail"))
        .key(&key)
        .send()?;
    Ok(())
}

fn setting(name: &str, default: &str) -> String {
    config::get(name).unwrap_or_else(|| default.to_owned())
}

#[cfg(test)]
mod tests;
