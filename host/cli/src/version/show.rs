//! Output of a version, for operators.

use oncebox_api::wire::VersionBody;
use oncebox_devkit::output;
use serde_json::Value;

/// Returns the imports of a component, which are all that it can do.
pub(crate) fn imports(version: &VersionBody) -> String {
    let imports = names(version.report.as_ref(), "imports");
    if imports.is_empty() { "nothing".to_owned() } else { imports.join(", ") }
}

/// Prints everything that is known of a version.
pub(super) fn print(version: &VersionBody) {
    let report = version.report.as_ref();
    line("handler", &version.handler);
    line("version", &version.digest);
    if let Some(source) = &version.source_digest {
        line("made of", &format!("core module {source}"));
    }
    line("state", &version.state);
    lines("problem", version.problems.iter().map(|problem| problem.text.clone()));
    line("size", &output::bytes(version.size));
    if let Some(report) = report {
        if let Some(world) = report["world"].as_str() {
            line(
                "takes",
                if world == "batch" {
                    "all messages of a transaction in one call"
                } else {
                    "one message in a call"
                },
            );
        }
        if let Some(contract) = report["contract"].as_str() {
            line("contract", contract);
        }
        let imports = names(Some(report), "imports");
        lines(
            "imports",
            if imports.is_empty() { vec!["nothing".to_owned()] } else { imports }.into_iter(),
        );
        lines("language", tools(report, "languages").into_iter());
        lines("made with", ["processed_by", "sdks"].iter().flat_map(|key| tools(report, key)));
        if report["memories"].is_number() {
            line("memory", &memory(report));
        }
    }
    if let Some(ms) = version.compile_ms {
        line("compiled in", &format!("{ms} ms"));
    }
    line("uploaded", &format!("{} by {}", output::time(version.created_at), version.created_by));
}

fn line(name: &str, value: &str) {
    println!("{name:<12} {value}");
}

/// Prints values below each other.
fn lines(name: &str, values: impl Iterator<Item = String>) {
    for (nth, value) in values.enumerate() {
        line(if nth == 0 { name } else { "" }, &value);
    }
}

pub(super) fn names(report: Option<&Value>, key: &str) -> Vec<String> {
    let names = report.and_then(|report| report[key].as_array()).into_iter().flatten();
    names.filter_map(|name| name.as_str().map(str::to_owned)).collect()
}

/// Returns tools with their versions.
pub(super) fn tools(report: &Value, key: &str) -> Vec<String> {
    let shown = |tool: &Value| {
        let part = |key: &str| tool[key].as_str().unwrap_or_default().to_owned();
        format!("{} {}", part("name"), part("version")).trim().to_owned()
    };
    report[key].as_array().into_iter().flatten().map(shown).collect()
}

fn memory(report: &Value) -> String {
    let number = |key: &str| report[key].as_i64().unwrap_or(0);
    let plural = |count: i64, one: &str, many: &str| {
        format!("{count} {}", if count == 1 { one } else { many })
    };
    let memories = plural(number("memories"), "memory", "memories");
    format!(
        "{memories} of {} at the start, {}",
        output::bytes(number("memory_bytes_min")),
        plural(number("tables"), "table", "tables")
    )
}
