//! Actions on messages, jobs and replays.

use serde_json::{Map, Value, json};

use super::{
    OPERATORS,
    words::{ANY, named, number, of_consumer, options, with},
};
use crate::{
    action::{Action, Call},
    fields::Fields,
    refusal::Refusal,
};

/// Fields of a job's filter.
pub(crate) const JOB_FILTER: [&str; 10] = [
    "status",
    "reason",
    "event_type",
    "key",
    "error",
    "version",
    "since",
    "until",
    "destination",
    "cause",
];

pub(crate) const JOB_START: Action = Action {
    name: "job-start",
    label: "Start the job",
    fields: &[
        "tenant",
        "consumer",
        "action",
        "because",
        "rate",
        "id",
        "status",
        "reason",
        "event_type",
        "key",
        "error",
        "version",
        "since",
        "until",
        "destination",
        "cause",
    ],
    call: |fields| Ok(Call::post(&["tenants", fields.need("tenant")?, "jobs"], new_job(fields)?)),
    command: job_command,
    ..OPERATORS
};

/// Returns the body of the request that starts a job, or estimates it.
pub(crate) fn new_job(fields: &Fields) -> Result<Value, Refusal> {
    let filter = JOB_FILTER.iter().filter_map(|name| Some(((*name).to_owned(), fields.get(name)?)));
    let mut filter: Map<String, Value> = filter.map(|(n, v)| (n, json!(v))).collect();
    let ids: Vec<_> = fields.0.iter().filter(|(name, _)| name == "id").map(|(_, v)| v).collect();
    if !ids.is_empty() {
        filter.insert("ids".to_owned(), json!(ids));
    }
    let rate: Option<u32> = fields.get("rate").map(|_| number(fields, "rate")).transpose()?;
    Ok(json!({
        "action": fields.need("action")?,
        "consumer": fields.get("consumer"),
        "filter": filter,
        "reason": fields.need("because")?,
        "rate": rate,
    }))
}

fn job_command(fields: &Fields) -> Vec<String> {
    let action = fields.get("action").unwrap_or("redrive");
    let (noun, verb) = match action.strip_prefix("outgoing_") {
        Some(verb) => ("outgoing", verb),
        None => ("inbox", action),
    };
    let mut words = named(&[noun, verb], fields, &["tenant", "consumer"], &[]);
    words.extend(options(fields, &JOB_FILTER));
    let ids: Vec<_> = fields.0.iter().filter(|(n, _)| n == "id").map(|(_, v)| v.clone()).collect();
    if ids.is_empty() && JOB_FILTER.iter().all(|name| fields.get(name).is_none()) {
        words.push("--all".to_owned());
    }
    words.extend(options(&with(fields, &[("because", ANY)]), &["because", "rate"]));
    if !ids.is_empty() {
        words.push("--".to_owned());
    }
    words.extend(ids);
    words
}

pub(crate) const JOB_PAUSE: Action = Action {
    name: "job-pause",
    label: "Pause",
    fields: &["tenant", "job_id"],
    call: |fields| job_call(fields, "pause"),
    command: |fields| named(&["job", "pause"], fields, &["tenant"], &["job_id"]),
    ..OPERATORS
};

pub(crate) const JOB_RESUME: Action = Action {
    name: "job-resume",
    label: "Resume",
    fields: &["tenant", "job_id"],
    call: |fields| job_call(fields, "resume"),
    command: |fields| named(&["job", "resume"], fields, &["tenant"], &["job_id"]),
    ..OPERATORS
};

pub(crate) const JOB_CANCEL: Action = Action {
    name: "job-cancel",
    label: "Cancel",
    fields: &["tenant", "job_id"],
    call: |fields| job_call(fields, "cancel"),
    command: |fields| named(&["job", "cancel"], fields, &["tenant"], &["job_id"]),
    ..OPERATORS
};

pub(crate) const REPLAY_PAUSE: Action = Action {
    name: "replay-pause",
    label: "Pause",
    fields: &["tenant", "consumer", "replay_id"],
    call: |fields| replay_call(fields, "pause"),
    command: |fields| replay_command(fields, "pause"),
    ..OPERATORS
};

pub(crate) const REPLAY_RESUME: Action = Action {
    name: "replay-resume",
    label: "Resume",
    fields: &["tenant", "consumer", "replay_id"],
    call: |fields| replay_call(fields, "resume"),
    command: |fields| replay_command(fields, "resume"),
    ..OPERATORS
};

pub(crate) const REPLAY_CANCEL: Action = Action {
    name: "replay-cancel",
    label: "Cancel",
    fields: &["tenant", "consumer", "replay_id"],
    call: |fields| replay_call(fields, "cancel"),
    command: |fields| replay_command(fields, "cancel"),
    ..OPERATORS
};

pub(crate) const MESSAGE_EDIT: Action = Action {
    name: "message-edit",
    label: "Edit and run again",
    fields: &["tenant", "consumer", "id", "payload_base64", "because", "as_of"],
    call: |fields| {
        let id = fields.need("id")?;
        let body = json!({
            "reason": fields.need("because")?,
            "payload_base64": fields.need("payload_base64")?,
            "as_of": fields.get("as_of"),
        });
        of_consumer(fields, &["inbox", id, "edit"], body)
    },
    command: |fields| {
        let mut words = named(&["inbox", "edit"], fields, &["tenant", "consumer"], &[]);
        words.extend(options(&with(fields, &[("because", ANY)]), &["because"]));
        words.extend(["--payload".to_owned(), "payload.json".to_owned(), "--".to_owned()]);
        words.extend(fields.get("id").map(str::to_owned));
        words
    },
    ..OPERATORS
};

fn job_call(fields: &Fields, verb: &str) -> Result<Call, Refusal> {
    let (tenant, job_id) = (fields.need("tenant")?, fields.need("job_id")?);
    Ok(Call::post(&["tenants", tenant, "jobs", job_id, verb], json!({})))
}

fn replay_call(fields: &Fields, verb: &str) -> Result<Call, Refusal> {
    of_consumer(fields, &["replays", fields.need("replay_id")?, verb], json!({}))
}

fn replay_command(fields: &Fields, verb: &str) -> Vec<String> {
    named(&["replay", verb], fields, &["tenant", "consumer"], &["replay_id"])
}
