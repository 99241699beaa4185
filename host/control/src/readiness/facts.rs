//! The facts of a consumer's readiness that the host's database holds.

use oncebox_model::{
    error::InboxError,
    status::{ConsumerState, TenantState},
};
use serde_json::Value;

use crate::{
    consumers::Consumer, deployments::verification::Verification,
    endpoints::settings::TenantEndpoint, handles::Consumers, hosts::HEARTBEAT_TIMEOUT,
};

/// What hosts are to do for a consumer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DesiredRun {
    /// State of the consumer.
    pub state: ConsumerState,
    /// State of its tenant.
    pub tenant_state: TenantState,
    /// Number of the latest change of policy or state.
    pub revision: i64,
    /// Whether hosts do not start it, because its start ended one.
    pub is_quarantined: bool,
    /// Whether its group's offsets are to be set before it runs.
    pub is_sought: bool,
}

/// A version that runs messages of a consumer.
#[derive(Debug, Clone)]
pub struct LiveVersion {
    /// Name of the handler.
    pub handler: String,
    /// SHA-256 of the component, in hexadecimal digits.
    pub digest: String,
    /// Names of the component's imports; none where it was never inspected.
    pub imports: Option<Vec<String>>,
    /// The newest stored outcome of `oncebox verify`.
    pub verification: Option<Verification>,
}

/// A running host, with its report about the consumer and the last request for its metrics.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct LiveHost {
    /// Name of the host.
    pub name: String,
    /// Seconds since a heartbeat that followed an answer to `/metrics`; none where there was none.
    pub scraped_ago_s: Option<i64>,
    /// State of the consumer on the host: `starting`, `idle`, `running`, `stopped` or `failing`.
    pub status: String,
    /// Revision of the consumer that `status` is about; -1 before the first report.
    pub status_revision: i64,
}

/// Facts of a consumer and of its hosts.
#[derive(Debug, Clone)]
pub struct ReadinessFacts {
    /// What hosts are to do.
    pub desired: DesiredRun,
    /// Versions that run messages and have an effect: stable ones and canaries.
    pub versions: Vec<LiveVersion>,
    /// Hosts that run.
    pub hosts: Vec<LiveHost>,
    /// Endpoints of the tenant, to which handlers that emit may send.
    pub endpoints: Vec<TenantEndpoint>,
}

/// A live version with the report of its component.
#[derive(sqlx::FromRow)]
struct LiveVersionRow {
    version_id: i32,
    handler: String,
    digest: String,
    report: Option<Value>,
}

impl Consumers<'_> {
    /// Reads the facts of a consumer's readiness that the host's database holds. Changes nothing.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn readiness_facts(&self, consumer: &Consumer) -> Result<ReadinessFacts, InboxError> {
        Ok(ReadinessFacts {
            desired: DesiredRun {
                state: consumer.state,
                tenant_state: consumer.tenant_state,
                revision: consumer.revision,
                is_quarantined: consumer.quarantine.is_some(),
                is_sought: consumer.seek.is_some(),
            },
            versions: self.live_versions(consumer.consumer_id).await?,
            hosts: self.live_hosts(consumer.consumer_id).await?,
            endpoints: self.0.endpoints().list(&consumer.tenant).await?,
        })
    }

    async fn live_versions(&self, consumer_id: i32) -> Result<Vec<LiveVersion>, InboxError> {
        const LIVE: &str = "SELECT v.version_id, h.name AS handler, encode(v.digest, 'hex') AS \
            digest, c.report FROM oncebox.version v JOIN oncebox.handler h USING (handler_id) \
            JOIN oncebox.component c USING (digest) \
            WHERE v.version_id IN (SELECT d.version_id FROM oncebox.deployment d WHERE \
            d.consumer_id = $1 AND d.ended_at IS NULL AND d.role <> 'shadow') ORDER BY \
            v.version_id";
        const NEWEST: &str = "SELECT verification_id, at, actor, is_passed, messages, windows, \
            windows_failed, killed, warnings, seed, program_version FROM oncebox.verification \
            WHERE version_id = $1 ORDER BY verification_id DESC LIMIT 1";
        let rows: Vec<LiveVersionRow> =
            sqlx::query_as(LIVE).bind(consumer_id).fetch_all(&self.0.pool).await?;
        let mut versions = Vec::new();
        for row in rows {
            let newest = sqlx::query_as(NEWEST).bind(row.version_id);
            versions.push(LiveVersion {
                handler: row.handler,
                digest: row.digest,
                imports: row.report.as_ref().and_then(imports),
                verification: newest.fetch_optional(&self.0.pool).await?,
            });
        }
        Ok(versions)
    }

    async fn live_hosts(&self, consumer_id: i32) -> Result<Vec<LiveHost>, InboxError> {
        let hosts = format!(
            "SELECT h.name, extract(epoch FROM now() - h.scraped_at)::bigint AS scraped_ago_s, \
                coalesce(r.status, 'starting') AS status, \
                coalesce(r.status_revision, -1) AS status_revision FROM oncebox.host h LEFT JOIN \
                oncebox.host_consumer r ON r.host_id = h.host_id AND r.consumer_id = $1 WHERE \
                h.seen_at > now() - {HEARTBEAT_TIMEOUT} ORDER BY h.host_id"
        );
        let hosts = sqlx::query_as(sqlx::AssertSqlSafe(hosts)).bind(consumer_id);
        Ok(hosts.fetch_all(&self.0.pool).await?)
    }
}

/// Returns the imports in the report of a component.
fn imports(report: &Value) -> Option<Vec<String>> {
    let imports = report.get("imports")?.as_array()?;
    imports.iter().map(|import| import.as_str().map(str::to_owned)).collect()
}
