//! `oncebox audit`

use anyhow::Result;
use clap::Args;
use oncebox_api::wire::AuditEntryBody;
use oncebox_devkit::{
    api::{Api, path, with_query},
    output,
};

use super::arguments;

#[derive(Args)]
pub(super) struct AuditArgs {
    /// Only what was about this tenant
    #[arg(long)]
    tenant: Option<String>,
    /// At most this many, newest first
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(i64).range(1..=1000))]
    limit: i64,
}

pub(super) async fn run(api: &Api, args: AuditArgs, json: bool) -> Result<()> {
    let tenant = arguments::named_or_own(api, args.tenant).await?;
    let path = tenant
        .as_ref()
        .map_or_else(|| path(&["audit"]), |tenant| path(&["tenants", tenant, "audit"]));
    let entries: Vec<AuditEntryBody> =
        api.get(&with_query(&path, &[("limit", Some(args.limit.to_string()))])).await?;
    if json {
        return output::json(&entries);
    }
    let cells = |entry: &AuditEntryBody| {
        vec![
            output::time(entry.at),
            entry.actor.clone(),
            entry.action.clone(),
            entry.subject.clone(),
            details(&entry.details),
        ]
    };
    output::table(
        &["AT", "ACTOR", "ACTION", "SUBJECT", "DETAILS"],
        &entries.iter().map(cells).collect::<Vec<_>>(),
    );
    Ok(())
}

/// Formats the details that have a value as `key=value`; digests in short.
fn details(details: &serde_json::Value) -> String {
    let shown = |key: &str, value: &serde_json::Value| match value.as_str() {
        Some(text) if key.ends_with("digest") => oncebox_devkit::upload::short(text).to_owned(),
        Some(text) => text.to_owned(),
        None => value.to_string(),
    };
    let given = details.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    given.map(|(key, value)| format!("{key}={}", shown(key, value))).collect::<Vec<_>>().join(" ")
}
