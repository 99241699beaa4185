//! Actions on tenants, and on what whoever runs the hosts keeps.

use axum::http::Method;
use oncebox_api::wire::Role;
use serde_json::{Map, Value, json};

use super::words::{named, number, options, with};
use crate::{
    action::{Action, Call},
    fields::Fields,
    refusal::Refusal,
};

pub(crate) const RETENTION_RUN: Action = Action {
    name: "retention-run",
    label: "Remove what is due",
    role: Role::Admin,
    is_platform: true,
    fields: &[],
    call: |_| Ok(Call::post(&["retention", "run"], json!({}))),
    command: |fields| named(&["retention", "run"], fields, &[], &[]),
};

pub(crate) const TENANT_SUSPEND: Action = Action {
    name: "tenant-suspend",
    label: "Suspend",
    role: Role::Admin,
    is_platform: true,
    fields: &["tenant"],
    call: |fields| tenant_call(fields, "suspend"),
    command: |fields| named(&["tenant", "suspend"], fields, &[], &["tenant"]),
};

pub(crate) const TENANT_RESUME: Action = Action {
    name: "tenant-resume",
    label: "Resume",
    role: Role::Admin,
    is_platform: true,
    fields: &["tenant"],
    call: |fields| tenant_call(fields, "resume"),
    command: |fields| named(&["tenant", "resume"], fields, &[], &["tenant"]),
};

pub(crate) const TENANT_ROTATE: Action = Action {
    name: "tenant-rotate-credentials",
    label: "Rotate credentials",
    role: Role::Admin,
    is_platform: false,
    fields: &["tenant"],
    call: |fields| tenant_call(fields, "rotate-credentials"),
    command: |fields| named(&["tenant", "rotate-credentials"], fields, &[], &["tenant"]),
};

/// Limits of a tenant that are numbers.
pub(crate) const LIMITS: [&str; 7] = [
    "weight",
    "connections_max",
    "transactions_max",
    "memory_bytes_max",
    "deadline_ms_max",
    "messages_per_second",
    "storage_budget_bytes",
];

pub(crate) const TENANT_LIMITS: Action = Action {
    name: "tenant-limits",
    label: "Set the limits",
    role: Role::Admin,
    is_platform: true,
    fields: &[
        "tenant",
        "weight",
        "connections_max",
        "transactions_max",
        "memory_bytes_max",
        "deadline_ms_max",
        "messages_per_second",
        "storage_budget_bytes",
    ],
    call: |fields| {
        let tenant = fields.need("tenant")?;
        let mut limits = Map::new();
        for name in LIMITS {
            // A form without the field leaves the limit as it is; an empty one removes it.
            if !fields.0.iter().any(|(given, _)| given == name) {
                continue;
            }
            let limit: Option<u64> = fields.get(name).map(|_| number(fields, name)).transpose()?;
            limits.insert(name.to_owned(), json!(limit));
        }
        let call = Call::post(&["tenants", tenant, "limits"], Value::Object(limits));
        Ok(Call { method: Method::PATCH, ..call })
    },
    command: |fields| {
        let mut words = named(&["tenant", "limits"], fields, &[], &["tenant"]);
        words.extend(options(&with(fields, &[("weight", "100")]), &LIMITS));
        words
    },
};

pub(crate) const ENDPOINT_TEST: Action = Action {
    name: "endpoint-test",
    label: "Test",
    role: Role::Admin,
    is_platform: false,
    fields: &["tenant", "endpoint"],
    call: |fields| {
        let (tenant, endpoint) = (fields.need("tenant")?, fields.need("endpoint")?);
        Ok(Call::post(&["tenants", tenant, "endpoints", endpoint, "test"], json!({})))
    },
    command: |fields| named(&["endpoint", "test"], fields, &["tenant"], &["endpoint"]),
};

pub(crate) const TOKEN_REVOKE: Action = Action {
    name: "token-revoke",
    label: "Revoke",
    role: Role::Admin,
    is_platform: false,
    fields: &["tenant", "token_id"],
    call: |fields| {
        let rest = ["tokens", fields.need("token_id")?];
        let path = match fields.get("tenant") {
            Some(tenant) => [&["tenants", tenant][..], &rest].concat(),
            None => rest.to_vec(),
        };
        Ok(Call { method: Method::DELETE, ..Call::post(&path, json!({})) })
    },
    command: |fields| named(&["token", "revoke"], fields, &["tenant"], &["token_id"]),
};

fn tenant_call(fields: &Fields, verb: &str) -> Result<Call, Refusal> {
    Ok(Call::post(&["tenants", fields.need("tenant")?, verb], json!({})))
}
