//! Writes the audit row and nothing else: the smallest handler, and one handler for many
//! event types.

use oncebox_github_webhook::audit;
use oncebox_guest::{Message, Result, handler};

#[handler]
fn heard(message: &Message) -> Result<()> {
    audit(message)?;
    Ok(())
}
