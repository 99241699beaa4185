//! `oncebox inbox edit`

use std::{io::Read, path::PathBuf};

use anyhow::{Context, Result};
use base64::{Engine, engine::general_purpose::STANDARD};
use clap::Args;
use oncebox_api::wire::{InboxDetailBody, NewEdit};

use super::{Api, output, path};

#[derive(Args)]
pub(crate) struct EditArgs {
    /// The message id
    message_id: String,
    /// The tenant
    #[arg(long)]
    tenant: String,
    /// The consumer
    #[arg(long)]
    consumer: String,
    /// File with the payload that it is to have; `-` for the standard input
    #[arg(long, value_name = "FILE")]
    payload: PathBuf,
    /// Why: kept with the message and in the audit log
    #[arg(long, value_name = "TEXT")]
    because: String,
}

pub(super) async fn edit(api: &Api, wanted: EditArgs, as_json: bool) -> Result<()> {
    let EditArgs { message_id, tenant, consumer, payload: file, because } = wanted;
    let bytes = read(&file)
        .with_context(|| format!("failed to read the payload from `{}`", file.display()))?;
    let (payload, payload_base64) = match String::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => (Some(text), None),
        Ok(text) => (None, Some(STANDARD.encode(text))),
        Err(error) => (None, Some(STANDARD.encode(error.into_bytes()))),
    };
    let request = NewEdit { reason: because, payload, payload_base64, as_of: None };
    let path = path(&["tenants", &tenant, "consumers", &consumer, "inbox", &message_id, "edit"]);
    let message: InboxDetailBody = api.post(&path, &request).await?;
    if as_json {
        return output::json(&message);
    }
    println!("message `{message_id}` has another payload and is run again");
    Ok(())
}

fn read(file: &PathBuf) -> std::io::Result<Vec<u8>> {
    if file.as_os_str() != "-" {
        return std::fs::read(file);
    }
    let mut bytes = Vec::new();
    std::io::stdin().lock().read_to_end(&mut bytes)?;
    Ok(bytes)
}
