//! The chart of packaging/chart. What could go wrong: a value changes nothing, or a manifest that a
//! cluster refuses; a mistyped value is taken in silence; a secret stands in a manifest; a pod is
//! killed before its host has drained; the pod's command or a probe is none that the host knows.

mod compose;
mod pod;

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::LazyLock,
};

use oncebox_tests::temp_dir::TempDir;
use serde_json::{Value, json};

/// The program that renders the chart and checks it, built once by each process of tests. Go
/// builds only what has changed.
static CHECK: LazyLock<PathBuf> = LazyLock::new(|| {
    let built = Command::new(project().join("scripts/chart.sh")).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let printed = String::from_utf8(built.stdout).unwrap();
    PathBuf::from(printed.lines().last().expect("the path of the program"))
});

/// Settings of the host that other values of the chart decide, or that hold a secret.
const NOT_IN_CONFIG: [&str; 14] = [
    "database.url",
    "databases.url",
    "kafka.brokers",
    "keys.master_key_file",
    "keys.previous_master_key_file",
    "runtime.cache_dir",
    "http.listen",
    "api.listen",
    "api.tls_certificate_file",
    "api.tls_key_file",
    "ingress.listen",
    "ingress.tls_certificate_file",
    "ingress.tls_key_file",
    "shutdown.drain_ms",
];

/// Variables of the host that are no secrets, so that their values stand in the manifest.
const PLAIN_VARIABLES: [&str; 8] = [
    "ONCEBOX_HTTP_LISTEN",
    "ONCEBOX_API_LISTEN",
    "ONCEBOX_API_TLS_CERTIFICATE_FILE",
    "ONCEBOX_API_TLS_KEY_FILE",
    "ONCEBOX_INGRESS_LISTEN",
    "ONCEBOX_INGRESS_TLS_CERTIFICATE_FILE",
    "ONCEBOX_INGRESS_TLS_KEY_FILE",
    "ONCEBOX_RUNTIME_CACHE_DIR",
];

fn project() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn chart() -> PathBuf {
    project().join("packaging/chart/oncebox")
}

/// Values that no installation can do without.
fn required() -> Value {
    json!({
        "image": { "repository": "registry.example/oncebox" },
        "database": { "secret": { "name": "oncebox-database" } },
        "masterKey": { "secret": { "name": "oncebox-key" } },
        "kafka": { "brokers": "kafka.example:9092" },
    })
}

/// Puts values over others, as Helm does.
fn merge(under: &mut Value, over: &Value) {
    match (under, over) {
        (Value::Object(under), Value::Object(over)) => {
            for (key, value) in over {
                merge(under.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        (under, over) => *under = over.clone(),
    }
}

/// Renders the chart with values over the required ones. Returns the manifests, which are valid, or
/// what the program said.
fn render(values: &Value) -> Result<Vec<Value>, String> {
    render_as("oncebox", values)
}

fn render_as(release: &str, values: &Value) -> Result<Vec<Value>, String> {
    let mut all = required();
    merge(&mut all, values);
    render_file(release, &all)
}

/// Renders the chart with these values alone.
fn render_file(release: &str, values: &Value) -> Result<Vec<Value>, String> {
    let folder = TempDir::new("chart");
    fs::create_dir_all(folder.path()).unwrap();
    let file = folder.path().join("values.yaml");
    fs::write(&file, values.to_string()).unwrap(); // JSON is YAML
    let output = Command::new(&*CHECK).arg(chart()).arg(&file).arg(release).output().unwrap();
    if output.status.success() {
        Ok(serde_json::from_slice(&output.stdout).unwrap())
    } else {
        Err(String::from_utf8(output.stderr).unwrap())
    }
}

/// The manifest of a kind, or null. `oncebox.toml` is the host's file in the ConfigMap.
fn manifest(manifests: &[Value], kind: &str) -> Value {
    if kind == "oncebox.toml" {
        let text = manifest(manifests, "ConfigMap")["data"]["oncebox.toml"].clone();
        let table: toml::Table = toml::from_str(text.as_str().unwrap()).unwrap();
        return serde_json::to_value(table).unwrap();
    }
    manifests.iter().find(|manifest| manifest["kind"] == kind).cloned().unwrap_or_default()
}

/// The field at a path of keys; in a list a key is the index or the `name` of an element. A field
/// that is not there is null. `~` stands for a slash in a key.
fn at(value: &Value, path: &str) -> Value {
    let mut found = value;
    for key in path.split('/').filter(|key| !key.is_empty()) {
        let key = key.replace('~', "/");
        found = match found {
            Value::Array(list) => list
                .iter()
                .find(|element| element["name"] == key.as_str())
                .or_else(|| list.get(key.parse::<usize>().ok()?))
                .unwrap_or(&Value::Null),
            _ => &found[key.as_str()],
        };
    }
    found.clone()
}

/// Paths of the chart's values: everything in values.yaml that is no object with keys of its own.
fn leaves(values: &Value, path: &str, found: &mut BTreeSet<String>) {
    match values.as_object().filter(|object| !object.is_empty()) {
        Some(object) => {
            for (key, value) in object {
                leaves(value, &format!("{path}/{key}"), found);
            }
        }
        None => {
            found.insert(path.to_owned());
        }
    }
}

fn own_values() -> Value {
    let output = Command::new(&*CHECK).arg("--values").arg(chart()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The field at a path that begins with a kind. `POD` is the hosts' pod, `HOST` its container, and
/// `JOB` the container of the Job.
fn field(manifests: &[Value], path: &str) -> Value {
    let path = path.replacen("JOB/", "Job/spec/template/spec/containers/migrate/", 1);
    let path = path.replacen("HOST/", "POD/containers/oncebox/", 1);
    let path = path.replacen("POD/", "Deployment/spec/template/spec/", 1);
    let (kind, rest) = path.split_once('/').unwrap_or((path.as_str(), ""));
    at(&manifest(manifests, kind), rest)
}

fn table(text: &str) -> Vec<Value> {
    serde_json::from_str(text).unwrap()
}

/// A case sets values and says what they change. No field has that content by default, and no value
/// of values.yaml is without a case.
#[test]
fn every_value_changes_its_field_of_a_valid_manifest() {
    let (own, default) = (own_values(), render(&json!({})).unwrap());
    let mut not_set = BTreeSet::new();
    leaves(&own, "", &mut not_set);
    for case in table(include_str!("chart/cases.json")) {
        let values = &case["values"];
        let manifests = render(values).unwrap_or_else(|error| panic!("{values}: {error}"));
        let then = case["then"].as_object().unwrap();
        assert!(!then.is_empty(), "{values}: nothing is compared");
        for (path, expected) in then {
            assert_eq!(field(&manifests, path), *expected, "{values}: {path}");
            assert_ne!(field(&default, path), *expected, "{values}: {path} is so by default");
        }
        not_set.retain(|leaf| {
            let set = values.pointer(leaf);
            set.is_none() || set == own.pointer(leaf)
        });
    }
    assert!(not_set.is_empty(), "no case changes {not_set:?}");
}

#[test]
fn values_that_do_not_fit_are_refused_by_their_names() {
    for case in table(include_str!("chart/refused.json")) {
        let (values, says) = (&case["values"], case["says"].as_str().unwrap());
        match render(values) {
            Ok(_) => panic!("{values} is taken"),
            Err(error) => assert!(error.contains(says), "{values}: {error}"),
        }
    }
    for missing in ["image", "database", "masterKey", "kafka"] {
        let mut values = required();
        values.as_object_mut().unwrap().remove(missing);
        let error = render_file("oncebox", &values).unwrap_err();
        assert!(error.contains(&format!("'/{missing}/")), "without {missing}: {error}");
    }
}

/// What could go wrong: the budget of a single host blocks each drain of its node for ever.
#[test]
fn a_disruption_budget_is_for_two_hosts_and_more() {
    for replicas in 1..=3 {
        let manifests = render(&json!({ "replicas": replicas })).unwrap();
        let budget = manifest(&manifests, "PodDisruptionBudget");
        assert_eq!(!budget.is_null(), replicas >= 2, "{replicas} replicas: {budget}");
        assert_eq!(field(&manifests, "Deployment/spec/replicas"), json!(replicas));
    }
}

/// What could go wrong: Kubernetes kills a host that still drains.
#[test]
fn the_grace_period_is_longer_than_the_drain() {
    for seconds in [1, 25, 60, 3_600] {
        let manifests = render(&json!({ "drainSeconds": seconds })).unwrap();
        let drain_ms = field(&manifests, "oncebox.toml/shutdown/drain_ms").as_i64().unwrap();
        let grace = field(&manifests, "POD/terminationGracePeriodSeconds").as_i64().unwrap();
        assert_eq!(drain_ms, seconds * 1_000);
        assert!(grace * 1_000 >= drain_ms + 10_000, "{drain_ms} ms of drain, {grace} s of grace");
    }
}

/// Values with which everything is there that a pod can have.
fn everything() -> Value {
    json!({
        "masterKey": { "previousSecret": { "name": "oncebox-old-key" } },
        "kafka": { "propertiesSecret": { "name": "kafka-properties" } },
        "api": { "tlsSecret": "api-tls" },
        "ingress": { "enabled": true, "tlsSecret": "ingress-tls" },
        "secretEnv": {
            "ONCEBOX_SCHEMA_REGISTRY_PASSWORD": { "name": "registry", "key": "password" },
        },
        "secretFiles": ["database-ca"],
        "serviceMonitor": { "enabled": true },
        "networkPolicy": {
            "metricsFrom": [{ "podSelector": {} }],
            "apiFrom": [{ "podSelector": {} }],
            "ingressFrom": [{ "podSelector": {} }],
            "egress": [{}],
        },
    })
}

fn containers(pod: &Value) -> Vec<Value> {
    let lists = [&pod["initContainers"], &pod["containers"]];
    lists.iter().filter_map(|list| list.as_array()).flatten().cloned().collect()
}

/// What could go wrong: a container that the policy `restricted` of a namespace refuses, a token of
/// the cluster in a pod, or a secret in a manifest that everyone may read.
#[test]
fn pods_are_restricted_and_secrets_are_references() {
    let manifests = render(&everything()).unwrap();
    assert!(manifest(&manifests, "Secret").is_null(), "a secret is made from values");
    let account = manifest(&manifests, "ServiceAccount");
    assert_eq!(account["automountServiceAccountToken"], json!(false));
    let mut seen = BTreeSet::new();
    for kind in ["Deployment", "Job"] {
        let pod = field(&manifests, &format!("{kind}/spec/template/spec"));
        assert_eq!(pod["automountServiceAccountToken"], json!(false), "{kind}");
        // A Service called `oncebox` would make variables that the host takes for settings.
        assert_eq!(pod["enableServiceLinks"], json!(false), "{kind}");
        assert_eq!(pod["securityContext"]["runAsNonRoot"], json!(true), "{kind}");
        let seccomp = &pod["securityContext"]["seccompProfile"]["type"];
        assert_eq!(*seccomp, json!("RuntimeDefault"), "{kind}");
        for container in containers(&pod) {
            let (name, context) = (&container["name"], &container["securityContext"]);
            seen.insert(name.as_str().unwrap().to_owned());
            assert_eq!(
                *context,
                json!({
                    "allowPrivilegeEscalation": false,
                    "readOnlyRootFilesystem": true,
                    "capabilities": { "drop": ["ALL"] },
                }),
                "{name}"
            );
            for variable in container["env"].as_array().into_iter().flatten() {
                let is_plain = PLAIN_VARIABLES.contains(&variable["name"].as_str().unwrap());
                let is_reference = !variable["valueFrom"]["secretKeyRef"].is_null();
                assert!(is_plain != is_reference, "{name}: {variable}");
            }
        }
    }
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), ["migrate", "oncebox", "settings"]);
}

/// What could go wrong: two releases in one namespace, or a long name, make objects of one name.
#[test]
fn objects_are_named_for_their_release() {
    let long = "a".repeat(53); // the longest that Helm takes
    for (release, name) in [
        ("oncebox", "oncebox".to_owned()),
        ("orders", "orders-oncebox".to_owned()),
        ("oncebox-orders", "oncebox-orders".to_owned()),
        (long.as_str(), format!("{}-oncebox", "a".repeat(42))),
    ] {
        let manifests = render_as(release, &everything()).unwrap();
        assert_eq!(field(&manifests, "Deployment/metadata/name"), json!(name));
        assert_eq!(field(&manifests, "POD/serviceAccountName"), json!(name));
        assert_eq!(field(&manifests, "Job/metadata/name"), json!(format!("{name}-migrate")));
        let selected = "Service/spec/selector/app.kubernetes.io~instance";
        assert_eq!(field(&manifests, selected), json!(release));
    }
}

/// The settings of a sample or of the schema, as `section.key`.
fn settings<'a>(sections: impl Iterator<Item = (&'a String, Vec<String>)>) -> BTreeSet<String> {
    let paths = sections.flat_map(|(section, keys)| {
        keys.into_iter().map(move |key| format!("{section}.{key}")).collect::<Vec<_>>()
    });
    paths.collect()
}

/// What could go wrong: the chart refuses a setting that the host has since, or takes one that the
/// host refuses.
#[test]
fn the_schema_has_every_setting_of_the_host() {
    let sample = fs::read_to_string(project().join("host/server/oncebox.sample.toml")).unwrap();
    let lines: Vec<_> =
        sample.lines().map(|line| line.strip_prefix("#: ").unwrap_or(line)).collect();
    let sample: toml::Table = toml::from_str(&lines.join("\n")).unwrap();
    let mut of_host = settings(sample.iter().map(|(section, value)| {
        // A list of tables shows one.
        let table = value.as_array().map_or(value, |tables| &tables[0]);
        (section, table.as_table().unwrap().keys().cloned().collect())
    }));
    for path in NOT_IN_CONFIG {
        assert!(of_host.remove(path), "the host has no `{path}`");
    }
    let schema = fs::read(chart().join("values.schema.json")).unwrap();
    let schema: Value = serde_json::from_slice(&schema).unwrap();
    let sections = schema["properties"]["config"]["properties"].as_object().unwrap();
    let of_chart = settings(sections.iter().map(|(section, value)| {
        let table = value.get("items").unwrap_or(value);
        (section, table["properties"].as_object().unwrap().keys().cloned().collect())
    }));
    assert_eq!(of_chart, of_host);
}

/// What could go wrong: a value that no page tells of. A row may be for a value with all below it.
#[test]
fn the_page_has_every_value() {
    let page = fs::read_to_string(project().join("docs/kubernetes.md")).unwrap();
    let rows: BTreeSet<_> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.split(" | ").next())
        .flat_map(|cell| cell.split('`').skip(1).step_by(2))
        .collect();
    let mut values = BTreeSet::new();
    leaves(&own_values(), "", &mut values);
    for path in &values {
        let name = path.trim_start_matches('/').replace('/', ".");
        let mut beginnings = name.match_indices('.').map(|(end, _)| &name[..end]);
        assert!(
            rows.contains(name.as_str()) || beginnings.any(|beginning| rows.contains(beginning)),
            "docs/kubernetes.md has no row of `{name}`"
        );
    }
}
