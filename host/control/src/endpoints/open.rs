//! An endpoint, opened for requests: by the relay of a host, and by a test of an operator.

use std::time::{Duration, Instant};

use oncebox_model::{error::InboxError, outgoing::AnswerMode};
use oncebox_sender::{Endpoint, Request, Verdict};
use serde_json::json;
use sqlx::AssertSqlSafe;

use super::{
    change::StoredEndpoint,
    request::invalid,
    settings::{SHOWN, TenantEndpoint},
};
use crate::{handles::Endpoints, tenants::Tenant};

/// Longest time of a test, which is shorter than a request to the API may take.
const TEST_MAX: Duration = Duration::from_secs(20);
/// Type of the event of a test.
const TEST_EVENT_TYPE: &str = "oncebox.test";

/// An endpoint with what a request needs, secrets included.
#[derive(Debug, Clone)]
pub struct OpenEndpoint {
    /// The place to which requests go, with the hosts that the tenant's limits allow now.
    pub endpoint: Endpoint,
    /// Its settings.
    pub shown: TenantEndpoint,
    /// What becomes of answers.
    pub answer: AnswerMode,
}

/// The result of a test of an endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointTest {
    /// Status of the answer; none where there was none.
    pub status: Option<u16>,
    /// What the relay would make of it: `delivered`, `refused`, `again` or `rate_limited`.
    pub verdict: &'static str,
    /// Why there was no answer.
    pub error: Option<String>,
    /// Milliseconds that the request took.
    pub took_ms: u64,
}

impl Endpoints<'_> {
    /// Opens an endpoint of a tenant; none where there is no such endpoint. The operator's list of
    /// hosts is compared by the sender, with each request.
    ///
    /// # Errors
    /// `Sealed` where no key of this process opens it, `Invalid` where a setting cannot be used, or
    /// an error of the host's database.
    pub async fn open(
        &self,
        tenant_id: i32,
        name: &str,
    ) -> Result<Option<OpenEndpoint>, InboxError> {
        const TENANT: &str = "SELECT * FROM oncebox.tenant WHERE tenant_id = $1";
        let read = format!(
            "SELECT {SHOWN}, e.request FROM oncebox.endpoint e WHERE e.tenant_id = $1 AND \
                e.name = $2"
        );
        let query = sqlx::query_as(AssertSqlSafe(read)).bind(tenant_id).bind(name);
        let stored: Option<StoredEndpoint> = query.fetch_optional(&self.0.pool).await?;
        let Some(stored) = stored else { return Ok(None) };
        let tenant: Option<Tenant> =
            sqlx::query_as(TENANT).bind(tenant_id).fetch_optional(&self.0.pool).await?;
        let Some(tenant) = tenant else { return Ok(None) };
        self.opened(&tenant, stored).map(Some)
    }

    fn opened(&self, tenant: &Tenant, stored: StoredEndpoint) -> Result<OpenEndpoint, InboxError> {
        let request = self.unsealed(tenant, &stored)?;
        let endpoint = request.endpoint(&stored.shown, tenant)?;
        let answer: AnswerMode = stored.shown.answer.parse().map_err(invalid)?;
        Ok(OpenEndpoint { endpoint, shown: stored.shown, answer })
    }

    /// Checks that the operator's settings of this process and the tenant's limits allow the host
    /// of an endpoint.
    ///
    /// # Errors
    /// `Invalid` with the list that does not have it.
    pub(crate) fn check_hosts(&self, endpoint: &Endpoint) -> Result<(), InboxError> {
        let sender = self.0.sender.as_ref().ok_or_else(not_allowed)?;
        sender.check(endpoint).map_err(|error| {
            InboxError::Invalid(format!(
                "{error}; an operator allows hosts in `[http_destinations] hosts_allowed` and with \
                    `oncebox tenant limits --endpoint-hosts-allowed`"
            ))
        })
    }

    /// Sends a test message to an endpoint, once, and returns what came of it.
    ///
    /// # Errors
    /// `NotFound` where there is no such tenant or endpoint, `Conflict` where the tenant is
    /// suspended or being deleted, `Sealed` or `Invalid` where the endpoint cannot be used.
    pub async fn test(&self, tenant: &str, name: &str) -> Result<EndpointTest, InboxError> {
        let row = self.0.tenants().get(tenant).await?;
        self.get(tenant, name).await?;
        let opened = self.open(row.tenant_id, name).await?.ok_or_else(not_allowed)?;
        let sender = self.0.sender.clone().ok_or_else(not_allowed)?;
        let mut tx = self.0.pool.begin().await?;
        let row = self.0.tenants().lock(&mut tx, tenant).await?;
        if !row.state.is_active() {
            return Err(InboxError::conflict(format!(
                "tenant `{tenant}` is suspended, and sends nothing; `oncebox tenant resume` ends \
                    that"
            )));
        }
        // The request is recorded before it is sent, and without a transaction open during it.
        self.record(&mut tx, "endpoint.test", tenant, name, json!({})).await?;
        tx.commit().await?;
        let request = Request {
            id: format!("test-{:032x}", rand::random::<u128>()),
            source: format!("oncebox:{tenant}"),
            event_type: TEST_EVENT_TYPE.to_owned(),
            content_type: Some("application/json".to_owned()),
            headers: Vec::new(),
            body: json!({ "test": true, "endpoint": name }).to_string().into(),
            trace_parent: None,
        };
        let begin = Instant::now();
        let sent = tokio::time::timeout(TEST_MAX, sender.send(&opened.endpoint, &request)).await;
        let took_ms = begin.elapsed().as_millis() as u64;
        let Ok(result) = sent else {
            let error = format!("no answer within {} s", TEST_MAX.as_secs());
            return Ok(EndpointTest {
                status: None,
                verdict: "again",
                error: Some(error),
                took_ms,
            });
        };
        let verdict = match Verdict::of(&result) {
            Verdict::Delivered => "delivered",
            Verdict::Refused => "refused",
            Verdict::Again { .. } => "again",
            Verdict::RateLimited { .. } => "rate_limited",
        };
        let (status, error) = match result {
            Ok(response) => (Some(response.status), None),
            Err(error) => (None, Some(error.to_string())),
        };
        Ok(EndpointTest { status, verdict, error, took_ms })
    }
}

fn not_allowed() -> InboxError {
    InboxError::Invalid(
        "the settings of this host allow no HTTP destination; an operator allows hosts in \
            `[http_destinations] hosts_allowed`"
            .to_owned(),
    )
}
