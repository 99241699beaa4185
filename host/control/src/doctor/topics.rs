//! Topics. Brokers know nothing of tenants. Only the topics that a tenant's tokens may name, and
//! those that its consumers read, keep one tenant's payloads from another.

use std::collections::BTreeSet;

use oncebox_model::tenant_limits::TenantLimits;

use super::{Finding, Severity, place_name};
use crate::{consumers::Consumer, handles::Doctor, tenants::Tenant};

/// Maximum of names in a finding; further ones are counted.
const NAMES_MAX: usize = 10;

impl<'a> Doctor<'a> {
    /// Checks that every tenant's tokens and consumers name topics of that tenant alone.
    pub(super) async fn topics_are_apart(&self) -> Vec<Finding> {
        let place = place_name(&self.0.options);
        let finding = |severity, found: String| Finding {
            place: place.clone(),
            check: "topics",
            severity,
            found,
            sql: None,
            advice: None,
        };
        let (tenants, consumers) =
            match (self.0.tenants().list().await, self.0.consumers().list().await) {
                (Ok(tenants), Ok(consumers)) => (tenants, consumers),
                (Err(error), _) | (_, Err(error)) => {
                    return vec![finding(
                        Severity::Unknown,
                        format!("the database does not tell: {error}"),
                    )];
                }
            };
        let mut findings = Vec::new();
        for tenant in tenants.iter().filter(|tenant| !tenant.state.is_deleting()) {
            findings.extend(wide(tenant).map(|(severity, found)| {
                let fix = format!(
                    "UPDATE oncebox.tenant SET limits = limits - 'topics_allowed', revision = \
                        revision + 1 WHERE tenant_id = {}",
                    tenant.tenant_id
                );
                let advice = format!(
                    "or name what it is to read: `oncebox tenant limits {} \
                    --topics-allowed …`",
                    tenant.name
                );
                match severity {
                    Severity::Ok => finding(severity, found),
                    _ => finding(severity, found).fix(fix).advise(advice),
                }
            }));
            findings.extend(outside(tenant, &consumers).map(|found| {
                finding(Severity::Warning, found).advise(
                    "an operator put them there, or a token did that was not bound yet: see \
                        `oncebox audit`, and change the policies of those \
                     that are not meant",
                )
            }));
        }
        if findings.is_empty() {
            findings.push(finding(
                Severity::Ok,
                "tokens and consumers of every tenant name topics of their own alone".to_owned(),
            ));
        }
        findings
    }
}

/// Returns the topics outside a tenant's own names that its tokens may name, with a severity. A
/// warning means that they include names of other tenants.
fn wide(tenant: &Tenant) -> Option<(Severity, String)> {
    let own = format!("oncebox.{}.", tenant.name);
    let beside: Vec<_> = tenant
        .limits
        .topics_allowed(&tenant.name)
        .into_iter()
        .filter(|topic| !topic.starts_with(&own))
        .collect();
    if beside.is_empty() {
        return None;
    }
    // A prefix that `oncebox.` begins with also covers other tenants' names.
    let of_others = |topic: &String| {
        topic.strip_suffix('*').is_some_and(|begins| "oncebox.".starts_with(begins))
            || topic.starts_with("oncebox.")
    };
    let severity = if beside.iter().any(of_others) { Severity::Warning } else { Severity::Ok };
    let reach =
        if severity == Severity::Warning { ", which are other tenants' as well" } else { "" };
    Some((
        severity,
        format!("tokens of tenant `{}` may read {}{reach}", tenant.name, names(&beside)),
    ))
}

/// Returns the topics that a tenant's consumers read and its tokens may not name.
fn outside(tenant: &Tenant, consumers: &[Consumer]) -> Option<String> {
    let limits: &TenantLimits = &tenant.limits;
    let mut found = BTreeSet::new();
    for consumer in consumers.iter().filter(|consumer| consumer.tenant_id == tenant.tenant_id) {
        let topics = consumer
            .policy
            .get("topics")
            .and_then(serde_json::Value::as_array)
            .into_iter()
            .flatten();
        for topic in topics
            .filter_map(serde_json::Value::as_str)
            .filter(|topic| !limits.allows_topic(&tenant.name, topic))
        {
            found.insert(format!("{topic} (consumer {})", consumer.name));
        }
    }
    let found: Vec<_> = found.into_iter().collect();
    (!found.is_empty()).then(|| {
        format!(
            "consumers of tenant `{}` read what its tokens may not name: {}",
            tenant.name,
            names(&found)
        )
    })
}

fn names(all: &[String]) -> String {
    let shown: Vec<_> = all.iter().take(NAMES_MAX).map(|name| format!("`{name}`")).collect();
    match all.len().saturating_sub(NAMES_MAX) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}
