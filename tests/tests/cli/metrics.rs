//! The page of metrics and the rules for alerts, against the sources.

use std::{collections::BTreeSet, fs, path::Path};

/// The names of metrics that stand right behind a text.
fn names(text: &str, behind: &str) -> BTreeSet<String> {
    let begins = format!("{behind}oncebox_");
    let found = text.match_indices(&begins).map(|(at, _)| &text[at + behind.len()..]);
    found.map(|name| name.chars().take_while(|c| c.is_ascii_lowercase() || *c == '_').collect()).collect()
}

fn sources(folder: &Path, text: &mut String) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, text);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            text.push_str(&fs::read_to_string(path).unwrap());
        }
    }
}

/// What could go wrong: a metric is nowhere explained, or the page or an alert speaks of one that is not measured. S1-074 to
/// S1-083.
#[test]
fn what_is_measured_is_documented_and_what_is_documented_is_measured() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap();
    let mut code = String::new();
    for part in ["inbox", "kafka", "runtime", "admin", "server"] {
        sources(&root.join("host").join(part).join("src"), &mut code);
    }
    let measured: BTreeSet<_> = ["counter!(\"", "gauge!(\"", "histogram!(\""].iter().flat_map(|kind| names(&code, kind)).collect();
    assert!(measured.len() > 30, "{measured:?}");
    let documented: BTreeSet<_> = names(&read("docs/metrics.md"), "`").into_iter().filter(|name| !name.ends_with('_')).collect();
    assert_eq!(documented, measured);
    let alerting = names(&read("docs/alerts.yml"), "(");
    assert!(alerting.len() >= 5 && alerting.is_subset(&measured), "{alerting:?}");
}
