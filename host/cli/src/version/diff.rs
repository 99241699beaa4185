//! Two versions, side by side.

use anyhow::Result;
use oncebox_api::wire::{DeploymentBody, VersionBody, VersionDiff};
use oncebox_devkit::{output, upload::short};
use serde_json::{Value, json};

use super::show::{names, tools};

/// A live deployment of either version, with its consumer.
pub(super) struct Live {
    pub(super) consumer: String,
    pub(super) deployment: DeploymentBody,
}

pub(super) fn json(diff: &VersionDiff, live: &[Live]) -> Result<()> {
    let mut value = serde_json::to_value(diff)?;
    let shown = |live: &Live| {
        let mut value = serde_json::to_value(&live.deployment)?;
        value["consumer"] = live.consumer.clone().into();
        Ok(value)
    };
    value["live"] = json!(live.iter().map(shown).collect::<Result<Vec<_>>>()?);
    output::json(&value)
}

pub(super) fn print(diff: &VersionDiff, live: &[Live]) {
    let (before, after) = (&diff.before, &diff.after);
    println!("             {:<28} {}", short(&before.digest), short(&after.digest));
    row("size", &output::bytes(before.size), &output::bytes(after.size));
    let imports = |version: &VersionBody| names(version.report.as_ref(), "imports");
    let (old, new) = (imports(before), imports(after));
    list("gained", new.iter().filter(|import| !old.contains(import)).cloned());
    list("lost", old.iter().filter(|import| !new.contains(import)).cloned());
    if old == new {
        println!("imports      the same");
    }
    for (name, keys) in [("language", &["languages"][..]), ("made with", &["processed_by", "sdks"])]
    {
        let of = |version: &VersionBody| {
            let report = version.report.clone().unwrap_or(Value::Null);
            keys.iter().flat_map(|key| tools(&report, key)).collect::<Vec<_>>().join(", ")
        };
        row(name, &of(before), &of(after));
    }
    let ms = |version: &VersionBody| {
        version.compile_ms.map_or_else(String::new, |ms| format!("{ms} ms"))
    };
    row("compiled in", &ms(before), &ms(after));
    for live in live {
        let deployment = &live.deployment;
        let settings = if deployment.settings.is_empty() {
            "no settings".to_owned()
        } else {
            Value::Object(deployment.settings.clone()).to_string()
        };
        let limits = if deployment.limits.is_empty() {
            String::new()
        } else {
            format!(", limits {}", Value::Object(deployment.limits.clone()))
        };
        println!(
            "{:<12} {} for `{}` of `{}`: {settings}{limits}",
            deployment.role,
            short(&deployment.digest),
            deployment.event_type,
            live.consumer
        );
    }
}

fn row(name: &str, before: &str, after: &str) {
    if before.is_empty() && after.is_empty() {
        return;
    }
    println!("{name:<12} {before:<28} {}", if before == after { "the same" } else { after });
}

fn list(name: &str, values: impl Iterator<Item = String>) {
    for (nth, value) in values.enumerate() {
        println!("{:<12} {value}", if nth == 0 { name } else { "" });
    }
}
