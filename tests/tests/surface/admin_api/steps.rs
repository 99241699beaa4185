//! Every operation once, with what it takes, in an order in which each succeeds.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::fixture::{ApiFixture, sha256};

/// A request that its operation takes.
#[derive(Clone)]
pub struct Step {
    pub method: &'static str,
    pub template: &'static str,
    pub body: Body,
    digest: String,
}

#[derive(Clone)]
pub enum Body {
    None,
    Json(Value),
    Wasm(Vec<u8>),
}

impl Body {
    pub fn bytes(&self) -> Vec<u8> {
        match self {
            Self::None => Vec::new(),
            Self::Json(value) => serde_json::to_vec(value).unwrap(),
            Self::Wasm(bytes) => bytes.clone(),
        }
    }

    pub fn media_type(&self) -> &'static str {
        match self {
            Self::None => "",
            Self::Json(_) => "application/json",
            Self::Wasm(_) => "application/wasm",
        }
    }
}

impl Step {
    /// Its path, with names that are there.
    pub fn path(&self, fixture: &ApiFixture) -> String {
        let path = fill(&self.template.replace("{digest}", &self.digest), fixture.deployment_id());
        // What is deleted for good is named twice.
        if (self.method, self.template) == ("DELETE", CONSUMER) {
            format!("{path}?confirm=orders")
        } else {
            path
        }
    }
}

const CONSUMER: &str = "/v1/tenants/{tenant}/consumers/{consumer}";
const INGRESS_SECRET: &str = "/v1/tenants/{tenant}/consumers/{consumer}/ingress-secret";
const ENDPOINT: &str = "/v1/tenants/{tenant}/endpoints/{endpoint}";

/// The token of the plan that the fixture has inserted.
pub const REPLAY_TOKEN: &str = "acme/orders/1-secret";

/// A path with names that are there.
pub fn fill(template: &str, deployment_id: i64) -> String {
    let (one, two) = (sha256(b"version 1"), sha256(b"version 2"));
    [
        ("{tenant}", "acme"),
        ("{consumer}", "orders"),
        ("{handler}", "ledger"),
        ("{digest}", &one),
        ("{other}", &two[..8]),
        ("{endpoint}", "pay"),
        ("{store}", "docs"),
        ("{message_id}", "m%2F1"),
        ("{replay_id}", "1"),
        ("{job_id}", "1"),
        ("{id}", "o-1"),
        ("{token_id}", "1"),
        ("{deployment_id}", &deployment_id.to_string()),
    ]
    .iter()
    .fold(template.to_owned(), |path, (name, value)| path.replace(name, value))
}

/// The operations of the document, with what each asks for.
pub fn operations() -> BTreeMap<(String, String), String> {
    let document = serde_json::to_value(oncebox_api::document()).unwrap();
    let mut all = BTreeMap::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let role = operation["x-role"]
                .as_str()
                .unwrap_or_else(|| panic!("{method} {path} says nothing of its role"));
            all.insert((method.to_uppercase(), path.clone()), role.to_owned());
        }
    }
    all
}

/// An upload of a real component.
pub fn upload(_: &ApiFixture) -> Step {
    let bytes = include_bytes!("../../../../guest-examples/components/ledger.wasm").to_vec();
    let digest = sha256(&bytes);
    Step {
        method: "PUT",
        template: "/v1/tenants/{tenant}/handlers/{handler}/versions/{digest}",
        body: Body::Wasm(bytes),
        digest,
    }
}

pub fn steps(fixture: &ApiFixture) -> Vec<Step> {
    let (one, two) = (sha256(b"version 1"), sha256(b"version 2"));
    let get = |template| Step { method: "GET", template, body: Body::None, digest: one.clone() };
    let delete = |template| Step { method: "DELETE", ..get(template) };
    let post = |template, body| Step { method: "POST", body: Body::Json(body), ..get(template) };
    let patch = |template, body| Step { method: "PATCH", ..post(template, body) };
    let deployment = |version: &str| json!({ "event_type": "paid", "handler": "ledger", "version": version, "settings": { "a": 1 } });
    let shared = |version: &str, percent: f64| {
        let mut deployment = deployment(version);
        deployment["percent"] = json!(percent);
        deployment
    };
    const TENANT: &str = "/v1/tenants/{tenant}";
    const DEPLOYMENTS: &str = "/v1/tenants/{tenant}/consumers/{consumer}/deployments";
    const DEPLOYMENT: &str =
        "/v1/tenants/{tenant}/consumers/{consumer}/deployments/{deployment_id}";
    const CANARIES: &str = "/v1/tenants/{tenant}/consumers/{consumer}/canaries";
    let ingress = json!({ "verify": "bearer" });
    let policy = json!({ "topics": ["oncebox.acme.t"], "ack": "after_commit", "ingress": ingress });
    vec![
        get("/openapi.json"),
        get("/v1/whoami"),
        get("/v1/tenants"),
        post("/v1/tenants", json!({ "name": "new" })),
        get(TENANT),
        patch("/v1/tenants/{tenant}/limits", json!({ "weight": 200, "connections_max": 4 })),
        post("/v1/tenants/{tenant}/suspend", json!({})),
        post("/v1/tenants/{tenant}/resume", json!({})),
        post("/v1/tenants/{tenant}/rotate-credentials", json!({})),
        get("/v1/tenants/{tenant}/move"),
        post("/v1/tenants/{tenant}/move", json!({ "to": "db2" })),
        delete("/v1/tenants/{tenant}/move"),
        get("/v1/tenants/{tenant}/migrations"),
        post(
            "/v1/tenants/{tenant}/migrations",
            json!({ "name": "m-1", "sql": "CREATE TABLE more (n int)" }),
        ),
        Step {
            method: "PUT",
            ..post(
                "/v1/tenants/{tenant}/stores/{store}",
                json!({ "bucket": "kept", "access_key_id": "AKIA", "secret_access_key": "k" }),
            )
        },
        get("/v1/tenants/{tenant}/stores"),
        delete("/v1/tenants/{tenant}/stores/{store}"),
        Step {
            method: "PUT",
            ..post(
                ENDPOINT,
                json!({ "url": "http://127.0.0.1:1/hook", "receiver_deduplicates": true }),
            )
        },
        get("/v1/tenants/{tenant}/endpoints"),
        get(ENDPOINT),
        post("/v1/tenants/{tenant}/endpoints/{endpoint}/rotate", json!({})),
        post("/v1/tenants/{tenant}/endpoints/{endpoint}/test", json!({})),
        delete(ENDPOINT),
        get("/v1/tenants/{tenant}/consumers"),
        post("/v1/tenants/{tenant}/consumers", json!({ "name": "more", "policy": policy.clone() })),
        // Before deployments: the token is of the generation at its plan.
        post(
            "/v1/tenants/{tenant}/consumers/{consumer}/replays/plan",
            json!({ "filter": { "event_type": "paid" } }),
        ),
        post(
            "/v1/tenants/{tenant}/consumers/{consumer}/replays",
            json!({ "token": REPLAY_TOKEN, "reason": "the projection was wrong" }),
        ),
        get("/v1/tenants/{tenant}/replays"),
        get("/v1/tenants/{tenant}/consumers/{consumer}/replays/{replay_id}"),
        post("/v1/tenants/{tenant}/consumers/{consumer}/replays/{replay_id}/pause", json!({})),
        post("/v1/tenants/{tenant}/consumers/{consumer}/replays/{replay_id}/resume", json!({})),
        post("/v1/tenants/{tenant}/consumers/{consumer}/replays/{replay_id}/cancel", json!({})),
        get(CONSUMER),
        upload(fixture),
        get("/v1/tenants/{tenant}/handlers"),
        get("/v1/tenants/{tenant}/handlers/{handler}/versions"),
        get("/v1/tenants/{tenant}/handlers/{handler}/versions/{digest}"),
        get("/v1/tenants/{tenant}/handlers/{handler}/versions/{digest}/diff/{other}"),
        post(
            "/v1/tenants/{tenant}/handlers/{handler}/versions/{digest}/verifications",
            json!({
                "is_passed": true, "messages": 3, "windows": 17, "windows_failed": 0, "killed": 11,
                "warnings": 0, "seed": 1, "program_version": "0.1.0"
            }),
        ),
        get("/v1/tenants/{tenant}/handlers/{handler}/versions/{digest}/verifications"),
        post(DEPLOYMENTS, deployment(&one)),
        post(CANARIES, shared(&two, 10.0)),
        get(DEPLOYMENTS),
        get(DEPLOYMENT),
        patch(DEPLOYMENT, json!({ "percent": 20.0 })),
        post(
            "/v1/tenants/{tenant}/consumers/{consumer}/deployments/{deployment_id}/promote",
            json!({}),
        ),
        post(
            "/v1/tenants/{tenant}/consumers/{consumer}/rollbacks",
            json!({ "event_type": "paid", "reason": "it was worse" }),
        ),
        post("/v1/tenants/{tenant}/consumers/{consumer}/shadows", shared(&two, 50.0)),
        get("/v1/tenants/{tenant}/consumers/{consumer}/deployments/{deployment_id}/differences"),
        post(
            "/v1/tenants/{tenant}/consumers/{consumer}/deployments/{deployment_id}/end",
            json!({ "reason": "seen enough" }),
        ),
        get("/v1/tenants/{tenant}/consumers/{consumer}/inbox"),
        get("/v1/tenants/{tenant}/consumers/{consumer}/inbox/{message_id}"),
        get("/v1/tenants/{tenant}/consumers/{consumer}/inbox/{message_id}/history"),
        get("/v1/tenants/{tenant}/consumers/{consumer}/backlog"),
        get("/v1/tenants/{tenant}/consumers/{consumer}/export"),
        post(
            "/v1/tenants/{tenant}/consumers/{consumer}/inbox/{message_id}/unmask",
            json!({ "reason": "the producer asks" }),
        ),
        post(
            "/v1/tenants/{tenant}/consumers/{consumer}/inbox/{message_id}/edit",
            json!({ "reason": "a typo", "payload": "y" }),
        ),
        get("/v1/tenants/{tenant}/outgoing"),
        get("/v1/tenants/{tenant}/outgoing/messages/{id}"),
        get("/v1/tenants/{tenant}/outgoing/stats"),
        post(
            "/v1/tenants/{tenant}/jobs/estimate",
            json!({ "action": "outgoing_redrive", "reason": "the topic is there",
                "filter": { "status": "parked" } }),
        ),
        post(
            "/v1/tenants/{tenant}/jobs",
            json!({ "action": "redrive", "consumer": "orders", "reason": "mended",
                "filter": { "reason": "trap" } }),
        ),
        get("/v1/tenants/{tenant}/jobs"),
        get("/v1/tenants/{tenant}/jobs/{job_id}"),
        post("/v1/tenants/{tenant}/jobs/{job_id}/pause", json!({})),
        post("/v1/tenants/{tenant}/jobs/{job_id}/resume", json!({})),
        post("/v1/tenants/{tenant}/jobs/{job_id}/cancel", json!({})),
        post(
            "/v1/tenants/{tenant}/erase",
            json!({ "reason": "they asked for it", "message_id": "m/1", "consumer": "orders" }),
        ),
        post("/v1/tenants/{tenant}/consumers/{consumer}/drain", json!({})),
        post("/v1/tenants/{tenant}/consumers/{consumer}/pause", json!({})),
        post("/v1/tenants/{tenant}/consumers/{consumer}/resume", json!({})),
        post(
            "/v1/tenants/{tenant}/consumers/{consumer}/seek",
            json!({ "to": "beginning", "accept": true }),
        ),
        delete("/v1/tenants/{tenant}/consumers/{consumer}/seek"),
        get("/v1/tenants/{tenant}/consumers/{consumer}/horizon"),
        get("/v1/tenants/{tenant}/consumers/{consumer}/lag"),
        get("/v1/tenants/{tenant}/consumers/{consumer}/readiness"),
        Step {
            method: "PUT",
            ..post(
                "/v1/tenants/{tenant}/consumers/{consumer}/policy",
                json!({ "policy": policy, "accept": true }),
            )
        },
        Step { method: "PUT", ..post(INGRESS_SECRET, json!({})) },
        get(INGRESS_SECRET),
        post(
            "/v1/tenants/{tenant}/consumers/{consumer}/ingress-secret/rotate",
            json!({ "secret": "0123456789abcdef0123456789abcdef" }),
        ),
        delete(INGRESS_SECRET),
        delete(CONSUMER),
        get("/v1/tokens"),
        post("/v1/tokens", json!({ "name": "someone", "role": "viewer" })),
        delete("/v1/tokens/{token_id}"),
        get("/v1/tenants/{tenant}/tokens"),
        post("/v1/tenants/{tenant}/tokens", json!({ "name": "someone", "role": "viewer" })),
        Step {
            template: "/v1/tenants/{tenant}/tokens/{token_id}",
            ..delete("/v1/tenants/{tenant}/tokens/{token_id}")
        },
        get("/v1/audit"),
        get("/v1/tenants/{tenant}/audit"),
        get("/v1/databases"),
        get("/v1/hosts"),
        get("/v1/doctor"),
        get("/v1/retention"),
        post("/v1/retention/run", json!({})),
        get("/v1/storage"),
        get("/v1/tenants/{tenant}/storage"),
        get("/v1/archive"),
        post("/v1/archive/forget", json!({ "before": "2020-01-01T00:00:00Z" })),
        get("/v1/tenants/{tenant}/archive"),
        get("/v1/tenants/{tenant}/archive/messages/{message_id}"),
        delete("/v1/archive"),
        // Last: nothing of the tenant is left for others.
        Step { method: "DELETE", ..post(TENANT, json!({ "confirm": "acme" })) },
    ]
}
