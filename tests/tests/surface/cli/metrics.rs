//! The page of metrics, the rules for alerts and the dashboard, against the sources and each other.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

/// Labels that Prometheus gives to every series.
const OF_PROMETHEUS: [&str; 1] = ["instance"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap()
}

fn dashboard() -> Value {
    serde_json::from_str(&read("docs/dashboard.json")).unwrap()
}

/// The names of metrics that stand right behind a text.
fn names(text: &str, behind: &str) -> BTreeSet<String> {
    let begins = format!("{behind}oncebox_");
    let found = text.match_indices(&begins).map(|(at, _)| &text[at + behind.len()..]);
    found
        .map(|name| name.chars().take_while(|c| c.is_ascii_lowercase() || *c == '_').collect())
        .collect()
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

/// What could go wrong: a metric is nowhere explained, or the page or an alert speaks of one that
/// is not measured. S1-074 to S1-083.
#[test]
fn what_is_measured_is_documented_and_what_is_documented_is_measured() {
    let mut code = String::new();
    sources(&root().join("host"), &mut code);
    let measured: BTreeSet<_> = ["counter!(\"", "gauge!(\"", "histogram!(\""]
        .iter()
        .flat_map(|kind| names(&code, kind))
        .collect();
    assert!(measured.len() > 30, "{measured:?}");
    let documented: BTreeSet<_> = names(&read("docs/metrics.md"), "`")
        .into_iter()
        .filter(|name| !name.ends_with('_'))
        .collect();
    assert_eq!(documented, measured);
    let alerting = names(&read("docs/alerts.yml"), "(");
    assert!(alerting.len() >= 5 && alerting.is_subset(&measured), "{alerting:?}");
}

/// What stands in backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// The metrics of the page's tables, each with its labels.
fn documented(page: &str) -> BTreeMap<&str, BTreeSet<&str>> {
    let mut labels: BTreeSet<&str> = BTreeSet::new();
    let mut all = BTreeMap::new();
    for row in page.lines().filter(|line| line.starts_with("| `oncebox_")) {
        let cells: Vec<_> = row.split('|').collect();
        if !cells[2].contains("the same") {
            labels.clear();
        }
        labels.extend(quoted(cells[2]));
        all.extend(quoted(cells[1]).map(|metric| (metric, labels.clone())));
    }
    all
}

/// The series that a text names, each with what follows.
fn series(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.match_indices("oncebox_").map(move |(at, _)| {
        let name = &text[at..];
        name.split_at(
            name.find(|c: char| !c.is_ascii_lowercase() && c != '_').unwrap_or(name.len()),
        )
    })
}

/// The metric that a series is of: a histogram has three.
fn metric(series: &str) -> &str {
    ["_bucket", "_sum", "_count"]
        .into_iter()
        .find_map(|part| series.strip_suffix(part))
        .unwrap_or(series)
}

/// The labels in the braces that a text begins with, if it does.
fn chosen_by(text: &str) -> BTreeSet<&str> {
    let mut labels = BTreeSet::new();
    let Some(text) = text.strip_prefix('{') else { return labels };
    // Every second part is a value, in its quotes.
    for part in text.split('"').step_by(2) {
        let (label, is_last) =
            part.split_once('}').map_or((part, false), |(label, _)| (label, true));
        labels.insert(label.trim_matches(|c: char| !c.is_ascii_lowercase() && c != '_'));
        if is_last {
            break;
        }
    }
    labels.remove("");
    labels
}

/// The parentheses that a text begins with, up to the one that closes them.
fn in_parentheses(text: &str) -> &str {
    assert!(text.starts_with('('), "nothing is summed up: {text}");
    let mut depth = 0;
    let end = text.find(|c: char| {
        depth += match c {
            '(' => 1,
            ')' => -1,
            _ => 0,
        };
        depth == 0
    });
    &text[..end.unwrap()]
}

/// The series that a query asks for, each with labels that it chooses or sums it up by.
fn asked(query: &str) -> Vec<(&str, BTreeSet<&str>)> {
    let mut all: Vec<_> = series(query).map(|(name, behind)| (name, chosen_by(behind))).collect();
    for (at, by) in query.match_indices(" by (") {
        let (labels, of) = query[at + by.len()..].split_once(')').unwrap();
        let labels: BTreeSet<_> = labels.split(',').map(str::trim).collect();
        all.extend(series(in_parentheses(of.trim_start())).map(|(name, _)| (name, labels.clone())));
    }
    all
}

/// Every text of a document, with the key that it stands under.
fn texts<'a>(value: &'a Value, key: &'a str, found: &mut Vec<(&'a str, &'a str)>) {
    match value {
        Value::String(text) => found.push((key, text.as_str())),
        Value::Array(values) => values.iter().for_each(|value| texts(value, key, found)),
        Value::Object(fields) => fields.iter().for_each(|(key, value)| texts(value, key, found)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// What could go wrong: a panel or an alert asks for a metric or a label that is not there, and is
/// empty for ever; or a metric is on no panel, and nobody looks at it. S0-050.
#[test]
fn the_dashboard_shows_what_is_measured_and_nothing_else() {
    let (page, alerts, dashboard) = (read("docs/metrics.md"), read("docs/alerts.yml"), dashboard());
    let known = documented(&page);
    let mut said = Vec::new();
    texts(&dashboard, "", &mut said);
    for (key, text) in &said {
        for (name, _) in series(text) {
            assert!(
                known.contains_key(metric(name)),
                "`{name}` is not documented, under `{key}`: {text}"
            );
        }
    }
    let queries =
        said.iter().filter(|(key, _)| matches!(*key, "expr" | "query")).map(|(_, text)| *text);
    for (name, labels) in queries.chain([alerts.as_str()]).flat_map(asked) {
        let Some(its) = known.get(metric(name)) else { panic!("`{name}` is not documented") };
        let is_known = |label: &str| {
            its.contains(label)
                || OF_PROMETHEUS.contains(&label)
                || label == "le" && name.ends_with("_bucket")
        };
        assert!(
            labels.iter().all(|label| is_known(label)),
            "`{name}` has the labels {its:?} and not all of {labels:?}"
        );
    }
    let panels = said.iter().filter(|(key, _)| *key == "expr").flat_map(|(_, query)| series(query));
    let shown: BTreeSet<_> = panels.map(|(name, _)| metric(name)).collect();
    // S0-050, S1-085, S1-124.
    assert_eq!(shown, known.into_keys().collect::<BTreeSet<_>>());
}

/// What could go wrong: whoever is on call sees that something is bad and not what to do, or is
/// told to type what is no command. S0-050.
#[test]
fn every_panel_goes_on_with_a_command_that_is_there() {
    let dashboard = dashboard();
    let mut commands = BTreeSet::new();
    for panel in
        dashboard["panels"].as_array().unwrap().iter().filter(|panel| panel["type"] != "row")
    {
        let description = panel["description"].as_str().unwrap_or_default();
        let named: Vec<_> =
            quoted(description).filter(|text| text.starts_with("oncebox ")).collect();
        assert!(!named.is_empty(), "the panel {} names no command", panel["title"]);
        commands.extend(named);
    }
    for command in commands {
        let words: Vec<_> = command.split(' ').skip(1).collect();
        let verb = words.iter().take_while(|word| !word.starts_with(['-', '<']));
        let help = Command::new(super::program()).args(verb).arg("--help").output().unwrap();
        assert!(help.status.success(), "`{command}`: {}", String::from_utf8_lossy(&help.stderr));
        let help = String::from_utf8_lossy(&help.stdout);
        for option in words.iter().filter(|word| word.starts_with("--")) {
            assert!(help.contains(option), "`{command}`: there is no `{option}`:\n{help}");
        }
    }
}

/// What could go wrong: one panel covers another, or links to a panel lead to another.
#[test]
fn every_panel_has_a_place_and_a_number_of_its_own() {
    let dashboard = dashboard();
    let (mut numbers, mut places) = (BTreeSet::new(), BTreeMap::new());
    for panel in dashboard["panels"].as_array().unwrap() {
        let title = &panel["title"];
        assert!(numbers.insert(panel["id"].as_u64().unwrap()), "{title}: its id is another's");
        let [x, y, width, height] =
            ["x", "y", "w", "h"].map(|side| panel["gridPos"][side].as_u64().unwrap());
        assert!(x + width <= 24, "{title} is out of the grid");
        for place in (y..y + height).flat_map(|row| (x..x + width).map(move |column| (row, column)))
        {
            assert_eq!(places.insert(place, title), None, "{title} covers another");
        }
    }
}
