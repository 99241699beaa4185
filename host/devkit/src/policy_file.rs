//! Policies as files.

use std::path::Path;

use anyhow::{Context, Result};
use oncebox_model::policy::Policy;
use oncebox_server::brokers::check_kafka;

use crate::migration::{Open, read_text};

/// Reads and checks the policy of a file.
pub fn read_policy(tenant: &str, name: &str, path: &Path, open: Open<'_>) -> Result<Policy> {
    let text = read_text(path, open)
        .with_context(|| format!("failed to read the policy `{}`", path.display()))?;
    let invalid = || format!("the policy `{}` is not valid", path.display());
    let policy = Policy::parse(&text).with_context(invalid)?;
    check_kafka(tenant, name, &policy).with_context(invalid)?;
    Ok(policy)
}

/// Returns a policy as the API takes it.
pub fn policy_object(policy: &Policy) -> Result<serde_json::Map<String, serde_json::Value>> {
    serde_json::from_value(serde_json::to_value(policy)?).context("a policy is an object")
}
