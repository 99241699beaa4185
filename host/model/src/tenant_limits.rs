//! The limits of a tenant, and the rules for changing them.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::{
    error::InboxError,
    outgoing::destination_part_fault,
    policy::{Retention, is_pattern, topic_fault},
};

/// The limits that each host applies to a tenant, over all of its consumers. Over a limit messages
/// wait; they do not fail. The storage budget limits nothing: above it, operators are told.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TenantLimits {
    /// Share of a busy host against the other tenants', 1 to 10,000. Of two busy tenants, one with
    /// twice the weight gets twice the time.
    pub weight: u32,
    /// Database connections; none for the host's own bound.
    pub connections_max: Option<usize>,
    /// Concurrent transactions, hence instances of handlers; none for the host's own bound on a
    /// tenant.
    pub transactions_max: Option<usize>,
    /// Bytes of memory of all guests together; none for the host's own bound.
    pub memory_bytes_max: Option<u64>,
    /// Longest call of a handler, milliseconds, whatever a policy says; none for the host's own
    /// bound.
    pub deadline_ms_max: Option<u64>,
    /// Messages a second, over all of the tenant's consumers; none for no bound.
    pub messages_per_second: Option<u32>,
    /// Bytes that the tenant's inbox is meant to take at most, now and in 30 days; none for no
    /// budget. Above it there is an alert, and messages go on.
    pub storage_budget_bytes: Option<u64>,
    /// Longest retention class that tokens of the tenant may choose for a new consumer, also by a
    /// raise; none for no bound. The operator of the host is not bound by it.
    pub retention_max: Option<Retention>,
    /// Topics that tokens of the tenant may name in policies: whole names, or beginnings followed
    /// by `*`; none for `oncebox.<tenant>.*`. The operator of the host is not bound by it.
    pub topics_allowed: Option<Vec<String>>,
    /// Destinations that handlers of the tenant may send to: whole destinations, or beginnings of
    /// them followed by `*`; none for no destination.
    pub destinations_allowed: Option<Vec<String>>,
    /// Hosts that endpoints of the tenant may be on, as far as the operator's settings allow them
    /// too: names, `*.` and a name, or addresses, each with a port where it is not that of the
    /// scheme; none for no host.
    pub endpoint_hosts_allowed: Option<Vec<String>>,
}

impl TenantLimits {
    /// Returns the hosts that endpoints of the tenant may be on; empty for none.
    pub fn endpoint_hosts_allowed(&self) -> &[String] {
        self.endpoint_hosts_allowed.as_deref().unwrap_or_default()
    }

    /// Returns the destinations that handlers of the tenant may send to; empty for none.
    pub fn destinations_allowed(&self) -> &[String] {
        self.destinations_allowed.as_deref().unwrap_or_default()
    }

    /// Returns the topics that tokens of the tenant may name: the operator's list or, without one,
    /// the topics that bear the tenant's name. Brokers know nothing of tenants, so any other topic
    /// is the operator's alone to give.
    pub fn topics_allowed(&self, tenant: &str) -> Vec<String> {
        self.topics_allowed.clone().unwrap_or_else(|| vec![format!("oncebox.{tenant}.*")])
    }

    /// Returns whether a token of the tenant may name a topic. No regular expression is allowed,
    /// since it stands for unknown topics. Nor may a tenant choose what a regular expression
    /// compiles to.
    pub fn allows_topic(&self, tenant: &str, topic: &str) -> bool {
        let allowed = self.topics_allowed(tenant);
        let matches = |pattern: &String| match pattern.strip_suffix('*') {
            Some(beginning) => topic.starts_with(beginning),
            None => topic == pattern,
        };
        !is_pattern(topic) && allowed.iter().any(matches)
    }
}

impl Default for TenantLimits {
    fn default() -> Self {
        Self {
            weight: 100,
            connections_max: None,
            transactions_max: None,
            memory_bytes_max: None,
            deadline_ms_max: None,
            messages_per_second: None,
            storage_budget_bytes: None,
            retention_max: None,
            topics_allowed: None,
            destinations_allowed: None,
            endpoint_hosts_allowed: None,
        }
    }
}

/// Name of each limit, its least and greatest value, and whether it may be none.
const BOUNDS: &[(&str, u64, u64, bool)] = &[
    ("weight", 1, 10_000, false),
    ("connections_max", 1, 10_000, true),
    ("transactions_max", 1, 10_000, true),
    ("memory_bytes_max", 1 << 20, 1 << 40, true),
    ("deadline_ms_max", 1, 600_000, true),
    ("messages_per_second", 1, 10_000_000, true),
    ("storage_budget_bytes", 1, 1 << 50, true),
];

impl TenantLimits {
    /// Returns these limits with some changed.
    ///
    /// # Errors
    ///
    /// [`InboxError::Invalid`] with every problem of the changes.
    pub fn changed(&self, changes: &Map<String, Value>) -> Result<Self, InboxError> {
        let problems: Vec<_> =
            changes.iter().filter_map(|(name, value)| problem(name, value)).collect();
        if !problems.is_empty() {
            return Err(InboxError::Invalid(problems.join("; ")));
        }
        let mut limits = json!(self);
        if let Some(limits) = limits.as_object_mut() {
            limits.extend(changes.clone());
        }
        serde_json::from_value(limits).map_err(|error| {
            InboxError::Invalid(format!("the tenant's limits are not readable: {error}"))
        })
    }
}

/// Returns whether a text may be the name of a topic, or the beginning of one.
fn is_topic_part(text: &str) -> bool {
    !is_pattern(text) && (topic_fault(text).is_none() || [".", ".."].contains(&text))
}

/// Maximum number of entries of `topics_allowed`, `destinations_allowed` and
/// `endpoint_hosts_allowed`.
const TOPICS_MAX: usize = 1_000;

/// Names of the limits that are no numbers.
const NOT_NUMBERS: [&str; 4] =
    ["retention_max", "topics_allowed", "destinations_allowed", "endpoint_hosts_allowed"];

/// Maximum bytes of an entry of `endpoint_hosts_allowed`: a name and a port.
const HOST_BYTES_MAX: usize = 262;

/// Returns the problem of a value of `endpoint_hosts_allowed`; none where its form is valid. What
/// the entries stand for is read by who sends.
fn hosts_problem(value: &Value) -> Option<String> {
    let is_host = |entry: &Value| {
        entry.as_str().is_some_and(|entry| {
            (1..=HOST_BYTES_MAX).contains(&entry.len())
                && !entry.chars().any(|c| c.is_control() || c.is_whitespace() || c == '/')
        })
    };
    let fits = value.is_null()
        || value.as_array().is_some_and(|all| all.len() <= TOPICS_MAX && all.iter().all(is_host));
    (!fits).then(|| {
        format!(
            "`endpoint_hosts_allowed` is {:.200}; it must be a list of at most {TOPICS_MAX} hosts, \
                such as `hooks.example`, `hooks.example:8443` or `*.example.com`, or none",
            value.to_string()
        )
    })
}

/// Returns the problem of a value of `destinations_allowed`; none where it is valid.
fn destinations_problem(value: &Value) -> Option<String> {
    let wanted = || {
        format!(
            "`destinations_allowed` is {:.200}; it must be a list of at most {TOPICS_MAX} \
                destinations, or beginnings of destinations with `*` behind them, such as \
                `kafka:acme.*`, or none",
            value.to_string()
        )
    };
    let Some(entries) = value.as_array().filter(|entries| entries.len() <= TOPICS_MAX) else {
        return (!value.is_null()).then(wanted);
    };
    entries.iter().find_map(|entry| match entry.as_str() {
        Some(entry) => {
            destination_part_fault(entry).map(|fault| format!("`destinations_allowed`: {fault}"))
        }
        None => Some(wanted()),
    })
}

fn problem(name: &str, value: &Value) -> Option<String> {
    if name == "retention_max" {
        let names = Retention::ALL.map(Retention::name);
        let fits = value.is_null() || value.as_str().is_some_and(|text| names.contains(&text));
        return (!fits).then(|| {
            let names = names.map(|name| format!("`{name}`")).join(", ");
            format!("`retention_max` is {:.200}; it must be {names}, or none", value.to_string())
        });
    }
    if name == "destinations_allowed" {
        return destinations_problem(value);
    }
    if name == "endpoint_hosts_allowed" {
        return hosts_problem(value);
    }
    if name == "topics_allowed" {
        // A regular expression would say nothing of the topics that a policy names.
        let is_beginning = |topic: &str| {
            topic.strip_suffix('*').is_some_and(|begins| begins.is_empty() || is_topic_part(begins))
        };
        let is_topic = |topic: &Value| {
            topic.as_str().is_some_and(|topic| is_topic_part(topic) || is_beginning(topic))
        };
        let fits = value.is_null()
            || value
                .as_array()
                .is_some_and(|all| all.len() <= TOPICS_MAX && all.iter().all(is_topic));
        let wanted = format!(
            "it must be a list of at most {TOPICS_MAX} topics, or beginnings of topics with `*` \
                behind them, or none"
        );
        return (!fits)
            .then(|| format!("`topics_allowed` is {:.200}; {wanted}", value.to_string()));
    }
    let Some((_, min, max, can_be_none)) = BOUNDS.iter().find(|(known, ..)| *known == name) else {
        let known = BOUNDS.iter().map(|(known, ..)| *known).chain(NOT_NUMBERS);
        let known = known.map(|known| format!("`{known}`")).collect::<Vec<_>>().join(", ");
        return Some(format!("`{name}` is not a limit of a tenant; there are {known}"));
    };
    let fits = value.is_null() && *can_be_none
        || value.as_u64().is_some_and(|value| (*min..=*max).contains(&value));
    let or_none = if *can_be_none { ", or none" } else { "" };
    (!fits).then(|| format!("`{name}` is {value}; it must be {min} to {max}{or_none}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(changes: Value) -> Result<TenantLimits, String> {
        let changes = changes.as_object().expect("an object").clone();
        let limits = TenantLimits { connections_max: Some(3), ..TenantLimits::default() };
        limits.changed(&changes).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_not_named_stays_and_null_takes_away() {
        let limits = changed(json!({ "weight": 7, "messages_per_second": 50 })).expect("limits");
        assert_eq!(
            (limits.weight, limits.messages_per_second, limits.connections_max),
            (7, Some(50), Some(3))
        );
        let limits = changed(json!({ "storage_budget_bytes": 1_u64 << 50 })).expect("limits");
        assert_eq!(limits.storage_budget_bytes, Some(1 << 50));
        assert!(changed(json!({ "storage_budget_bytes": 0 })).is_err(), "null takes it away");
        assert_eq!(
            changed(json!({ "connections_max": null })).expect("limits"),
            TenantLimits::default()
        );
        let limits = changed(json!({ "retention_max": "30d" })).expect("limits");
        assert_eq!(limits.retention_max, Some(Retention::ThirtyDays));
        let limits = changed(json!({ "topics_allowed": ["acme.*", "shared"] })).expect("limits");
        let allowed = ["acme.orders", "shared", "acme", "shared.too", "^acme.*", "oncebox.t.a"]
            .map(|topic| limits.allows_topic("t", topic));
        assert_eq!(allowed, [true, true, false, false, false, false]);
        let limits = changed(json!({ "destinations_allowed": ["kafka:acme.*", "inbox:billing"] }))
            .expect("limits");
        assert_eq!(limits.destinations_allowed(), ["kafka:acme.*", "inbox:billing"]);
        assert!(TenantLimits::default().destinations_allowed().is_empty(), "nothing unless told");
        let limits = TenantLimits::default();
        let allowed = ["oncebox.t.a", "oncebox.t", "oncebox.tt.a", "acme", "^oncebox.t.a"]
            .map(|topic| limits.allows_topic("t", topic));
        assert_eq!(
            allowed,
            [true, false, false, false, false],
            "nothing but its own until more is said"
        );
    }

    #[test]
    fn every_problem_is_named() {
        let said = changed(
            json!({ "weight": 0, "connections_max": "many", "memory_bytes_max": 4096, "cpu": 1,
                "retention_max": "40d" }),
        )
        .expect_err("problems");
        for part in [
            "`weight` is 0; it must be 1 to 10000",
            "`connections_max` is \"many\"; it must be 1 to 10000, or none",
            "`memory_bytes_max` is 4096; it must be 1048576",
            "`retention_max` is \"40d\"; it must be `7d`, `30d`, `1y`, `permanent`, or none",
            "`cpu` is not a limit of a tenant; there are `weight`, ",
        ] {
            assert!(said.contains(part), "{said}");
        }
        assert!(changed(json!({ "weight": null })).is_err(), "a share there is always");
        for wrong in [json!("acme.*"), json!([""]), json!(["^.*"]), json!([1])] {
            assert!(changed(json!({ "topics_allowed": wrong })).is_err(), "{wrong}");
        }
        for wrong in [
            json!("kafka:acme.*"),
            json!([1]),
            json!(["*"]),
            json!(["acme.*"]),
            json!(["kafka:^.*"]),
            json!(["http://example.com"]),
            json!(["https://example.com"]),
        ] {
            let said = changed(json!({ "destinations_allowed": wrong })).expect_err("a problem");
            assert!(said.contains("`destinations_allowed`"), "{wrong}: {said}");
        }
        for wrong in [json!("a.example"), json!([1]), json!([""]), json!(["https://a.example"])] {
            let said = changed(json!({ "endpoint_hosts_allowed": wrong })).expect_err("a problem");
            assert!(said.contains("`endpoint_hosts_allowed`"), "{wrong}: {said}");
        }
        let hosts = json!({ "endpoint_hosts_allowed": ["a.example:8443", "*.b.example"] });
        let limits = changed(hosts).expect("limits");
        assert_eq!(limits.endpoint_hosts_allowed(), ["a.example:8443", "*.b.example"]);
        assert!(TenantLimits::default().endpoint_hosts_allowed().is_empty(), "no host unless told");
    }
}
