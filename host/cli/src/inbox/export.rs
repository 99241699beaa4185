//! `oncebox inbox export`

use std::{
    fs::File,
    io::{BufWriter, ErrorKind, Write},
    path::PathBuf,
};

use anyhow::{Context, Result};
use clap::Args;
use oncebox_api::wire::InboxExport;
use oncebox_control::Cursor;

use super::{Api, Narrowed, consumers, path, with_query};

/// Messages per request.
const PAGE: i64 = 100;

#[derive(Args)]
pub(crate) struct Export {
    /// Only this tenant
    #[arg(long)]
    tenant: Option<String>,
    /// Only this consumer
    #[arg(long)]
    consumer: Option<String>,
    #[command(flatten)]
    narrowed: Box<Narrowed>,
    /// Also key, headers and payload, where the policy keeps them
    #[arg(long)]
    payload: bool,
    /// Write to this file, which must not be there yet; by default to the standard output
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Writes the messages of one consumer after another, newest first. A message that arrives after a
/// consumer's turn began is newer, and is left out.
pub(super) async fn export(api: &Api, wanted: Export) -> Result<()> {
    let Export { tenant, consumer, narrowed, payload, output } = wanted;
    let unwritten = || match &output {
        Some(file) => format!("failed to write `{}`", file.display()),
        None => "failed to write to the standard output".to_owned(),
    };
    let mut out: Box<dyn Write> = match &output {
        Some(file) => Box::new(BufWriter::new(File::create_new(file).with_context(unwritten)?)),
        None => Box::new(BufWriter::new(std::io::stdout())),
    };
    let mut exported = 0;
    for (tenant, consumer) in consumers(api, &tenant, &consumer).await? {
        let path = path(&["tenants", &tenant, "consumers", &consumer, "export"]);
        let mut after: Option<Cursor> = None;
        loop {
            let mut query = narrowed.query(after.take(), PAGE);
            query.push(("payload", payload.then(|| "true".to_owned())));
            let page: Vec<InboxExport> = api.get(&with_query(&path, &query)).await?;
            let Some(last) = page.last() else { break };
            let row = &last.message.row;
            after = Some(Cursor {
                received_at: row.received_at,
                message_id: Some(row.message_id.clone()),
            });
            match write(&mut out, &page) {
                // The reader has closed the pipe.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
                written => written.with_context(unwritten)?,
            }
            exported += page.len();
            if output.is_some() && exported % 1_000 < page.len() {
                eprintln!("exported {exported}");
            }
        }
    }
    if output.is_some() {
        eprintln!("exported {exported}");
    }
    Ok(())
}

fn write(out: &mut dyn Write, page: &[InboxExport]) -> std::io::Result<()> {
    for message in page {
        serde_json::to_writer(&mut *out, message)?;
        out.write_all(b"\n")?;
    }
    out.flush()
}
