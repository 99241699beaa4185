//! Deployments: rows that say which version of a handler takes an event type, and which are live.

// Uploads.
pub(crate) mod version;
// Their compiled forms, and the hosts that compile them.
pub(crate) mod component;
// Outcomes of `oncebox verify` for a version.
pub(crate) mod verification;
// Checks of a new deployment.
pub(crate) mod check;
// Deploy, promote, end.
pub(crate) mod deploy;
// Rollback to an earlier version.
pub(crate) mod rollback;
// Deployments that can take one message under several consumers.
pub(crate) mod overlap;
// Comparison of a canary with the stable version, and its withdrawal.
pub(crate) mod canary;
// Triggers that capture row changes of a handler.
pub(crate) mod shadow_install;
// Results of a shadow.
pub(crate) mod shadow_report;

use oncebox_model::{contract, error::InboxError};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::handles::Deployments;

/// The purpose of a deployment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeploymentRole {
    /// The deployment for everything that no canary takes.
    Stable,
    /// A deployment for a share of the ordering keys.
    Canary,
    /// A deployment that runs on a share of the messages after the stable version, and never has an
    /// effect.
    Shadow,
}

impl DeploymentRole {
    /// Returns the name of the role in rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stable => "stable",
            Self::Canary => "canary",
            Self::Shadow => "shadow",
        }
    }
}

impl TryFrom<String> for DeploymentRole {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        [Self::Stable, Self::Canary, Self::Shadow]
            .into_iter()
            .find(|role| role.name() == name)
            .ok_or(name)
    }
}

/// The version that runs a message again after it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Retries {
    /// The version that is live at the time of the retry.
    #[default]
    Live,
    /// The version that failed the message, unless it was withdrawn.
    Pinned,
}

impl Retries {
    /// Returns the name of the choice in rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Pinned => "pinned",
        }
    }
}

impl TryFrom<String> for Retries {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        [Self::Live, Self::Pinned].into_iter().find(|retries| retries.name() == name).ok_or(name)
    }
}

/// A right of a deployment beyond the tables of its tenant, which an operator gives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Grant {
    /// Sends messages after its commits, and cancels those that are not being sent yet.
    Emit,
}

impl Grant {
    /// All grants.
    pub const ALL: [Self; 1] = [Self::Emit];

    /// Returns the name of the grant in rows, in the API and in commands.
    pub fn name(self) -> &'static str {
        match self {
            Self::Emit => "emit",
        }
    }

    /// Returns the interface that a component imports to use the grant, without its version.
    pub(crate) fn interface(self) -> &'static str {
        match self {
            Self::Emit => contract::EMIT,
        }
    }
}

impl std::fmt::Display for Grant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Grant {
    type Err = InboxError;

    fn from_str(name: &str) -> Result<Self, InboxError> {
        Self::ALL.into_iter().find(|grant| grant.name() == name).ok_or_else(|| {
            InboxError::Invalid(format!(
                "`{name:.60}` is no grant of a deployment; there is `emit`"
            ))
        })
    }
}

/// The condition that ends a canary: a failure rate over the window that exceeds the stable
/// version's by more than the margin.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Guard {
    /// Percentage points by which the canary's failure rate may exceed the stable version's.
    pub margin_percent: f64,
    /// Length of the window, seconds.
    pub window_s: u32,
    /// Runs of the canary within the window before a verdict.
    pub messages_min: u32,
}

impl Default for Guard {
    fn default() -> Self {
        Self { margin_percent: 5.0, window_s: 60, messages_min: 20 }
    }
}

/// The messages that a deployment is for: an event type and a range of event versions.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, sqlx::FromRow)]
pub struct Slot {
    /// Event type; `orders.*` for all that begin with `orders.`; `*` for all.
    pub event_type: String,
    /// Semantic-version requirement such as `>=2, <4`. None takes every version, and messages
    /// without one.
    pub event_versions: Option<String>,
}

impl std::fmt::Display for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.event_versions {
            Some(versions) => write!(f, "`{}` ({versions})", self.event_type),
            None => write!(f, "`{}`", self.event_type),
        }
    }
}

/// A deployment to be made.
#[derive(Debug, Clone)]
pub struct NewDeployment {
    /// Event type and versions.
    pub slot: Slot,
    /// Name of the handler.
    pub handler: String,
    /// SHA-256 of the version's component in hexadecimal digits, or enough of its first digits.
    pub version: String,
    /// Settings that the handler reads through `config`.
    pub settings: Map<String, Value>,
    /// Limits below the consumer's.
    pub limits: Map<String, Value>,
    /// Names of its rights beyond the tenant's tables; see [`Grant`].
    pub grants: Vec<String>,
    /// Name of the migration that the tenant's schema must hold.
    pub requires_migration: Option<String>,
    /// Version that runs a failed message again.
    pub retries: Retries,
    /// Purpose of the deployment.
    pub role: DeploymentRole,
    /// Share of a canary's ordering keys, or of a shadow's messages: more than 0, at most 100.
    pub percent: Option<f64>,
    /// Condition that ends a canary.
    pub guard: Option<Guard>,
}

impl NewDeployment {
    /// Builds a stable deployment of a version for all versions of an event type, with defaults.
    pub fn stable(event_type: &str, handler: &str, version: &str) -> Self {
        Self {
            slot: Slot { event_type: event_type.to_owned(), event_versions: None },
            handler: handler.to_owned(),
            version: version.to_owned(),
            settings: Map::new(),
            limits: Map::new(),
            grants: Vec::new(),
            requires_migration: None,
            retries: Retries::Live,
            role: DeploymentRole::Stable,
            percent: None,
            guard: None,
        }
    }
}

/// A deployment's row.
#[derive(Debug, Clone, Serialize, sqlx::FromRow)]
pub struct Deployment {
    /// Key.
    pub deployment_id: i64,
    /// Event type and versions.
    #[sqlx(flatten)]
    #[serde(flatten)]
    pub slot: Slot,
    /// Purpose of the deployment.
    #[sqlx(try_from = "String")]
    pub role: DeploymentRole,
    /// Share of a canary or a shadow, percent.
    pub percent: Option<f64>,
    /// Name of the handler.
    pub handler: String,
    /// Key of the version.
    pub version_id: i32,
    /// SHA-256 of the component.
    #[serde(serialize_with = "hex::serde::serialize")]
    pub digest: Vec<u8>,
    /// Settings that the handler reads through `config`.
    pub settings: Value,
    /// Limits below the consumer's.
    pub limits: Value,
    /// Names of its rights beyond the tenant's tables; see [`Grant`].
    pub grants: Vec<String>,
    /// Name of the migration that the tenant's schema must hold.
    pub requires_migration: Option<String>,
    /// Version that runs a failed message again.
    #[sqlx(try_from = "String")]
    pub retries: Retries,
    /// Condition that ends a canary.
    #[sqlx(json(nullable))]
    pub guard: Option<Guard>,
    /// Generation of the consumer with which the deployment began. A host that runs this generation
    /// or a later one has loaded it.
    pub generation: i64,
    /// Time at which it began.
    pub created_at: chrono::DateTime<chrono::Utc>,
    /// Actor that made it.
    pub created_by: String,
    /// Time at which it ended; none while it is live.
    pub ended_at: Option<chrono::DateTime<chrono::Utc>>,
    /// Kind of its end: `superseded`, `rolled_back`, `promoted` or `ended`.
    pub ended_how: Option<String>,
    /// Reason for its end, where the operator or the guard gave one.
    pub ended_reason: Option<String>,
}

impl Deployment {
    /// Returns whether its handler may emit outgoing messages.
    pub fn may_emit(&self) -> bool {
        self.grants.iter().any(|grant| grant == Grant::Emit.name())
    }
}

/// The live deployments of a consumer, with their generation.
#[derive(Debug, Clone)]
pub struct LiveDeployments {
    /// Generation of the consumer; it grows with every change.
    pub generation: i64,
    /// Live deployments, one of each slot and role.
    pub live: Vec<Deployment>,
    /// Superseded deployments to which failed messages may be pinned, newest first.
    pub pinned: Vec<Deployment>,
}

pub(crate) const DEPLOYMENT: &str = "SELECT d.deployment_id, d.event_type, d.event_versions, \
    d.role, d.percent, h.name AS handler, \
    v.version_id, v.digest, d.settings, d.limits, d.grants, d.requires_migration, d.retries, \
    d.guard, d.generation, d.created_at, d.created_by, \
    d.ended_at, d.ended_how, d.ended_reason \
    FROM oncebox.deployment d JOIN oncebox.version v USING (version_id) JOIN oncebox.handler h \
    USING (handler_id) ";

/// Builds a query for deployments, with a condition.
pub(crate) fn select<'q>(
    condition: &str,
) -> sqlx::query::QueryAs<
    'q,
    sqlx::Postgres,
    Deployment,
    <sqlx::Postgres as sqlx::Database>::Arguments,
> {
    sqlx::query_as(sqlx::AssertSqlSafe([DEPLOYMENT, condition].concat()))
}

impl Deployments<'_> {
    /// Returns the deployments that a host loads for a consumer, from one snapshot.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn live(&self, consumer_id: i32) -> Result<LiveDeployments, InboxError> {
        const LIVE: &str =
            "WHERE d.consumer_id = $1 AND d.ended_at IS NULL ORDER BY d.deployment_id";
        // The version before the live one may still fail messages on another host. Older ones count
        // as long as a message waits for them.
        const PINNED: &str = "WHERE d.consumer_id = $1 AND d.role = 'stable' AND d.retries = \
            'pinned' AND d.ended_how = 'superseded' \
            AND (d.ended_at > now() - interval '10 minutes' OR d.version_id = ANY ($2)) ORDER BY \
            d.deployment_id DESC";
        let awaited = self.versions_awaited(consumer_id).await?;
        // One snapshot, so that the generation belongs to exactly these rows.
        let mut tx =
            self.0.pool.begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
        let generation =
            sqlx::query_scalar("SELECT generation FROM oncebox.consumer WHERE consumer_id = $1");
        let generation = generation.bind(consumer_id).fetch_one(&mut *tx).await?;
        let live = select(LIVE).bind(consumer_id).fetch_all(&mut *tx).await?;
        let pinned = select(PINNED).bind(consumer_id).bind(awaited).fetch_all(&mut *tx).await?;
        tx.commit().await?;
        Ok(LiveDeployments { generation, live, pinned })
    }

    /// Lists superseded versions to which retries are pinned and for which a message waits. Lists
    /// all pinned versions while a tenant's own database does not answer.
    async fn versions_awaited(&self, consumer_id: i32) -> Result<Vec<i32>, InboxError> {
        const PINNED: &str = "SELECT DISTINCT version_id FROM oncebox.deployment \
            WHERE consumer_id = $1 AND role = 'stable' AND retries = 'pinned' AND ended_how = \
            'superseded'";
        const AWAITED: &str = "SELECT u.version_id FROM unnest($2::int[]) AS u(version_id) WHERE \
            EXISTS (SELECT FROM oncebox.inbox i \
            WHERE i.consumer_id = $1 AND i.version_id = u.version_id AND i.status IN ('received', \
            'in_progress', 'failed_retryable'))";
        const TENANT: &str = "SELECT t.* FROM oncebox.tenant t JOIN oncebox.consumer c USING \
            (tenant_id) WHERE c.consumer_id = $1";
        let pinned: Vec<i32> =
            sqlx::query_scalar(PINNED).bind(consumer_id).fetch_all(&self.0.pool).await?;
        if pinned.is_empty() {
            return Ok(pinned);
        }
        let database = self
            .0
            .tenant_databases()
            .get(&sqlx::query_as(TENANT).bind(consumer_id).fetch_one(&self.0.pool).await?)?;
        let awaited = sqlx::query_scalar(AWAITED)
            .bind(consumer_id)
            .bind(&pinned)
            .fetch_all(&database.pool)
            .await;
        match awaited {
            // It does not answer: all of them may be waited for.
            Err(_) if database.is_dedicated => Ok(pinned),
            awaited => Ok(awaited?),
        }
    }

    /// Lists the deployments of a consumer, newest first: the live ones, or with `history` also
    /// those that ended. At most 1,000.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn list(
        &self,
        consumer_id: i32,
        history: bool,
    ) -> Result<Vec<Deployment>, InboxError> {
        const LIST: &str = "WHERE d.consumer_id = $1 AND (d.ended_at IS NULL OR $2) ORDER BY \
            d.deployment_id DESC LIMIT 1000";
        Ok(select(LIST).bind(consumer_id).bind(history).fetch_all(&self.0.pool).await?)
    }

    /// Returns one deployment of a consumer.
    ///
    /// # Errors
    /// `NotFound` where the consumer has no such deployment.
    pub async fn get(
        &self,
        consumer_id: i32,
        deployment_id: i64,
    ) -> Result<Deployment, InboxError> {
        const ONE: &str = "WHERE d.consumer_id = $1 AND d.deployment_id = $2";
        let found =
            select(ONE).bind(consumer_id).bind(deployment_id).fetch_optional(&self.0.pool).await?;
        found.ok_or_else(|| {
            InboxError::NotFound(format!("this consumer has no deployment {deployment_id}"))
        })
    }
}
