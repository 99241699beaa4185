//! Circuit breakers of endpoints, as hosts report them.

use chrono::{DateTime, Utc};
use oncebox_model::error::InboxError;

use crate::{handles::Endpoints, hosts::HEARTBEAT_TIMEOUT};

/// A circuit breaker that is not closed on a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointBreakerReport {
    /// Key of the tenant.
    pub tenant_id: i32,
    /// Name of the endpoint.
    pub endpoint: String,
    /// `open` or `half_open`.
    pub state: &'static str,
    /// Failures in a row so far.
    pub failures: u32,
    /// Milliseconds until the next probe; none where a message probes.
    pub probes_in_ms: Option<u64>,
}

/// A circuit breaker that is not closed on a live host, as it was reported.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, sqlx::FromRow)]
pub struct EndpointBreaker {
    /// Name of the endpoint.
    pub endpoint: String,
    /// Name of the host.
    pub host: String,
    /// `open` or `half_open`.
    pub state: String,
    /// Failures in a row so far.
    pub failures: i32,
    /// Time of the next probe; none where a message probes.
    pub probes_at: Option<DateTime<Utc>>,
}

impl Endpoints<'_> {
    /// Records the circuit breakers that are not closed on a host, in place of its report before.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn report_breakers(
        &self,
        host_id: i64,
        breakers: &[EndpointBreakerReport],
    ) -> Result<(), InboxError> {
        // The removal of a host or of an endpoint locks its row first, then those of this table.
        const LOCK_HOST: &str = "SELECT FROM oncebox.host h WHERE h.host_id = $1 FOR KEY SHARE";
        const LOCK_ENDPOINTS: &str = "SELECT FROM oncebox.endpoint e \
            WHERE (e.tenant_id, e.name) IN (SELECT u.tenant_id, u.name \
                FROM unnest($1::int[], $2::text[]) AS u(tenant_id, name)) \
            ORDER BY e.tenant_id, e.name FOR KEY SHARE";
        const CLEAR: &str = "DELETE FROM oncebox.host_endpoint WHERE host_id = $1";
        // An endpoint that was removed meanwhile has no breaker any more.
        const INSERT: &str = "INSERT INTO oncebox.host_endpoint (host_id, tenant_id, endpoint, \
                state, failures, probes_at) \
            SELECT h.host_id, e.tenant_id, e.name, u.state, u.failures, \
                now() + u.probes_in_ms * interval '1 millisecond' \
            FROM unnest($2::int[], $3::text[], $4::text[], $5::int[], $6::bigint[]) \
                AS u(tenant_id, endpoint, state, failures, probes_in_ms) \
            JOIN oncebox.endpoint e ON e.tenant_id = u.tenant_id AND e.name = u.endpoint \
            JOIN oncebox.host h ON h.host_id = $1 FOR KEY SHARE OF e, h";
        let whole = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        let tenants: Vec<i32> = breakers.iter().map(|of| of.tenant_id).collect();
        let endpoints: Vec<&str> = breakers.iter().map(|of| of.endpoint.as_str()).collect();
        let states: Vec<&str> = breakers.iter().map(|of| of.state).collect();
        let failures: Vec<i32> =
            breakers.iter().map(|of| i32::try_from(of.failures).unwrap_or(i32::MAX)).collect();
        let probes: Vec<Option<i64>> =
            breakers.iter().map(|of| of.probes_in_ms.map(whole)).collect();
        let mut tx = self.0.pool.begin().await?;
        sqlx::query(LOCK_HOST).bind(host_id).execute(&mut *tx).await?;
        let query = sqlx::query(LOCK_ENDPOINTS).bind(&tenants).bind(&endpoints);
        query.execute(&mut *tx).await?;
        sqlx::query(CLEAR).bind(host_id).execute(&mut *tx).await?;
        let query = sqlx::query(INSERT).bind(host_id).bind(tenants).bind(endpoints);
        query.bind(states).bind(failures).bind(probes).execute(&mut *tx).await?;
        Ok(tx.commit().await?)
    }

    /// Returns the circuit breakers of a tenant's endpoints that are not closed on a live host.
    ///
    /// # Errors
    /// `NotFound` where there is no such tenant, or an error of the host's database.
    pub async fn breakers(&self, tenant: &str) -> Result<Vec<EndpointBreaker>, InboxError> {
        let tenant = self.0.tenants().get(tenant).await?;
        let read = format!(
            "SELECT b.endpoint, h.name AS host, b.state, b.failures, b.probes_at \
                FROM oncebox.host_endpoint b JOIN oncebox.host h USING (host_id) \
                WHERE b.tenant_id = $1 AND h.seen_at > now() - {HEARTBEAT_TIMEOUT} \
                ORDER BY b.endpoint, h.host_id"
        );
        let query = sqlx::query_as(sqlx::AssertSqlSafe(read)).bind(tenant.tenant_id);
        Ok(query.fetch_all(&self.0.pool).await?)
    }
}
