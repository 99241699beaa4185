//! Actions on consumers and their deployments.

use axum::http::Method;
use oncebox_api::wire::Role;
use serde_json::{Value, json};

use super::{
    OPERATORS,
    words::{ANY, named, number, of_consumer, with},
};
use crate::{
    action::{Action, Call},
    fields::Fields,
    refusal::Refusal,
};

pub(crate) const CONSUMER_PAUSE: Action = Action {
    name: "consumer-pause",
    label: "Pause",
    call: |fields| consumer_call(fields, "pause"),
    command: |fields| consumer_command(fields, "pause"),
    ..OPERATORS
};

pub(crate) const CONSUMER_RESUME: Action = Action {
    name: "consumer-resume",
    label: "Resume",
    call: |fields| consumer_call(fields, "resume"),
    command: |fields| consumer_command(fields, "resume"),
    ..OPERATORS
};

pub(crate) const CONSUMER_DRAIN: Action = Action {
    name: "consumer-drain",
    label: "Drain",
    call: |fields| consumer_call(fields, "drain"),
    command: |fields| consumer_command(fields, "drain"),
    ..OPERATORS
};

pub(crate) const SEEK_CANCEL: Action = Action {
    name: "seek-cancel",
    label: "Give up the seek",
    call: |fields| {
        let mut call = of_consumer(fields, &["seek"], Value::Null)?;
        call.method = Method::DELETE;
        Ok(call)
    },
    command: |fields| named(&["consumer", "seek"], fields, &["tenant"], &["consumer", "=--cancel"]),
    ..OPERATORS
};

pub(crate) const ROLLBACK: Action = Action {
    name: "rollback",
    label: "Roll back",
    fields: &["tenant", "consumer", "event_type", "event_versions", "to", "reason", "redrive"],
    call: |fields| {
        let body = json!({
            "event_type": fields.need("event_type")?,
            "event_versions": fields.get("event_versions"),
            "to": fields.get("to"),
            "reason": fields.get("reason"),
            "redrive": fields.get("redrive").is_some(),
        });
        of_consumer(fields, &["rollbacks"], body)
    },
    command: |fields| {
        let options = ["tenant", "consumer", "event_type", "event_versions"];
        named(&["rollback"], fields, &options, &[])
    },
    ..OPERATORS
};

pub(crate) const CANARY_GROW: Action = Action {
    name: "canary-grow",
    label: "Change the share",
    fields: &["tenant", "consumer", "deployment_id", "event_type", "event_versions", "percent"],
    call: |fields| {
        let percent: f64 = number(fields, "percent")?;
        let id = fields.need("deployment_id")?;
        let mut call = of_consumer(fields, &["deployments", id], json!({ "percent": percent }))?;
        call.method = Method::PATCH;
        Ok(call)
    },
    command: |fields| {
        let options = ["tenant", "consumer", "event_type", "event_versions", "percent"];
        named(&["canary", "grow"], &with(fields, &[("percent", "50")]), &options, &[])
    },
    ..OPERATORS
};

pub(crate) const CANARY_PROMOTE: Action = Action {
    name: "canary-promote",
    label: "Promote",
    role: Role::Deployer,
    fields: &["tenant", "consumer", "deployment_id", "event_type", "event_versions"],
    call: |fields| {
        let id = fields.need("deployment_id")?;
        of_consumer(fields, &["deployments", id, "promote"], json!({}))
    },
    command: |fields| {
        let options = ["tenant", "consumer", "event_type", "event_versions"];
        named(&["canary", "promote"], fields, &options, &[])
    },
    ..OPERATORS
};

pub(crate) const DEPLOYMENT_END: Action = Action {
    name: "deployment-end",
    label: "Take away",
    fields: &[
        "tenant",
        "consumer",
        "deployment_id",
        "role",
        "event_type",
        "event_versions",
        "reason",
    ],
    call: |fields| {
        let id = fields.need("deployment_id")?;
        let body = json!({ "reason": fields.get("reason") });
        of_consumer(fields, &["deployments", id, "end"], body)
    },
    command: |fields| {
        let role = fields.get("role").unwrap_or("canary");
        let options = ["tenant", "consumer", "event_type", "event_versions"];
        named(&[role, "stop"], fields, &options, &[])
    },
    ..OPERATORS
};

pub(crate) const DEPLOY: Action = Action {
    name: "deploy",
    label: "Deploy",
    role: Role::Deployer,
    fields: &["tenant", "consumer", "handler", "version", "event_type", "event_versions", "emit"],
    call: |fields| {
        let grants: &[&str] = if fields.get("emit").is_some() { &["emit"] } else { &[] };
        let body = json!({
            "event_type": fields.need("event_type")?,
            "event_versions": fields.get("event_versions"),
            "handler": fields.need("handler")?,
            "version": fields.need("version")?,
            "grants": grants,
        });
        of_consumer(fields, &["deployments"], body)
    },
    command: |fields| {
        let options = ["tenant", "consumer", "handler", "version", "event_type", "event_versions"];
        named(
            &["deploy"],
            &with(fields, &[("consumer", ANY), ("event_type", ANY), ("version", "000000")]),
            &options,
            &[],
        )
    },
    ..OPERATORS
};

fn consumer_call(fields: &Fields, verb: &str) -> Result<Call, Refusal> {
    of_consumer(fields, &[verb], json!({}))
}

fn consumer_command(fields: &Fields, verb: &str) -> Vec<String> {
    named(&["consumer", verb], fields, &["tenant"], &["consumer"])
}
