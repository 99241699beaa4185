//! Which version of a handler takes an event type: what a deployment says, and what is live.

// Uploads.
pub(crate) mod version;
// Their compiled forms, and which host compiles.
pub(crate) mod component;
// What can be said against a deployment.
pub(crate) mod check;
// Deploy, promote, end.
pub(crate) mod deploy;
// Back to a version before.
pub(crate) mod rollback;
// Deployments that could take the same message.
pub(crate) mod overlap;
// Compare a canary with the stable version, and withdraw it.
pub(crate) mod canary;
// Triggers that capture what a handler changes.
pub(crate) mod shadow_install;
// What a shadow found.
pub(crate) mod shadow_report;

use oncebox_model::error::InboxError;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::control::Admin;

/// What a deployment is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Takes what no canary takes.
    Stable,
    /// Takes a share of the ordering keys.
    Canary,
    /// Runs on a share of the messages after the stable version, and never has an effect.
    Shadow,
}

impl Role {
    /// As rows say it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stable => "stable",
            Self::Canary => "canary",
            Self::Shadow => "shadow",
        }
    }
}

impl TryFrom<String> for Role {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        [Self::Stable, Self::Canary, Self::Shadow]
            .into_iter()
            .find(|role| role.name() == name)
            .ok_or(name)
    }
}

/// Which version runs a message again after it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Retries {
    /// The one that is live by then.
    #[default]
    Live,
    /// The one that failed, unless it was withdrawn.
    Pinned,
}

impl Retries {
    /// As rows say it.
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

/// What ends a canary by itself: over the window, a failure rate above the stable version's by more
/// than the margin.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Guard {
    /// Percentage points that the canary may fail more often than the stable version.
    pub margin_percent: f64,
    /// Seconds that are looked at.
    pub window_s: u32,
    /// Runs of the canary within the window before it is judged.
    pub messages_min: u32,
}

impl Default for Guard {
    fn default() -> Self {
        Self { margin_percent: 5.0, window_s: 60, messages_min: 20 }
    }
}

/// The place of a deployment: an event type and a range of event versions.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, sqlx::FromRow)]
pub struct Slot {
    /// The event type; `orders.*` for all that begin with `orders.`; `*` for all.
    pub event_type: String,
    /// A semantic-version requirement such as `>=2, <4`. None takes every version, and none.
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
    /// Where.
    pub slot: Slot,
    /// Name of the handler.
    pub handler: String,
    /// SHA-256 of the version's component in hexadecimal digits, or enough of the first of them.
    pub version: String,
    /// What the handler reads through `config`.
    pub settings: Map<String, Value>,
    /// Caps, where they are to be below the consumer's.
    pub limits: Map<String, Value>,
    /// Name of the migration that the tenant's schema must hold.
    pub requires_migration: Option<String>,
    /// Which version runs a message again.
    pub retries: Retries,
    /// What it is for.
    pub role: Role,
    /// Share of ordering keys of a canary, of messages of a shadow: more than 0, at most 100.
    pub percent: Option<f64>,
    /// What ends a canary by itself.
    pub guard: Option<Guard>,
}

impl NewDeployment {
    /// A version, for a slot, with nothing special about it.
    pub fn stable(event_type: &str, handler: &str, version: &str) -> Self {
        Self {
            slot: Slot { event_type: event_type.to_owned(), event_versions: None },
            handler: handler.to_owned(),
            version: version.to_owned(),
            settings: Map::new(),
            limits: Map::new(),
            requires_migration: None,
            retries: Retries::Live,
            role: Role::Stable,
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
    /// Where.
    #[sqlx(flatten)]
    #[serde(flatten)]
    pub slot: Slot,
    /// What it is for.
    #[sqlx(try_from = "String")]
    pub role: Role,
    /// Share that it takes, where it is no stable one.
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
    /// Caps below the consumer's.
    pub limits: Value,
    /// The migration that the tenant's schema must hold.
    pub requires_migration: Option<String>,
    /// Which version runs a message again.
    #[sqlx(try_from = "String")]
    pub retries: Retries,
    /// What ends a canary by itself.
    #[sqlx(json(nullable))]
    pub guard: Option<Guard>,
    /// Generation of the consumer that it began with: a host that runs this one or a later one has
    /// it.
    pub generation: i64,
    /// When it began.
    pub created_at: chrono::DateTime<chrono::Utc>,
    /// Who made it.
    pub created_by: String,
    /// When it ended.
    pub ended_at: Option<chrono::DateTime<chrono::Utc>>,
    /// `superseded`, `rolled_back`, `promoted` or `ended`.
    pub ended_how: Option<String>,
    /// Why, where someone said.
    pub ended_reason: Option<String>,
}

/// The live deployments of a consumer, and their generation.
#[derive(Debug, Clone)]
pub struct Deployments {
    /// Grows with every change.
    pub generation: i64,
    /// One of each slot and role.
    pub live: Vec<Deployment>,
    /// What live ones superseded and messages that failed on it may be pinned to, newest first.
    pub pinned: Vec<Deployment>,
}

pub(crate) const DEPLOYMENT: &str = "SELECT d.deployment_id, d.event_type, d.event_versions, \
    d.role, d.percent, h.name AS handler, \
    v.version_id, v.digest, d.settings, d.limits, d.requires_migration, d.retries, d.guard, \
    d.generation, d.created_at, d.created_by, \
    d.ended_at, d.ended_how, d.ended_reason \
    FROM oncebox.deployment d JOIN oncebox.version v USING (version_id) JOIN oncebox.handler h \
    USING (handler_id) ";

/// A query for deployments.
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

impl Admin {
    /// What a host loads for a consumer.
    pub async fn deployments(&self, consumer_id: i32) -> Result<Deployments, InboxError> {
        const LIVE: &str =
            "WHERE d.consumer_id = $1 AND d.ended_at IS NULL ORDER BY d.deployment_id";
        // The version before the live one may still fail messages on another host; older ones count
        // as long as a message waits for them.
        const PINNED: &str = "WHERE d.consumer_id = $1 AND d.role = 'stable' AND d.retries = \
            'pinned' AND d.ended_how = 'superseded' \
            AND (d.ended_at > now() - interval '10 minutes' OR d.version_id = ANY ($2)) ORDER BY \
            d.deployment_id DESC";
        let awaited = self.versions_awaited(consumer_id).await?;
        // One snapshot: the generation speaks for exactly these rows.
        let mut tx =
            self.pool.begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
        let generation =
            sqlx::query_scalar("SELECT generation FROM oncebox.consumer WHERE consumer_id = $1");
        let generation = generation.bind(consumer_id).fetch_one(&mut *tx).await?;
        let live = select(LIVE).bind(consumer_id).fetch_all(&mut *tx).await?;
        let pinned = select(PINNED).bind(consumer_id).bind(awaited).fetch_all(&mut *tx).await?;
        tx.commit().await?;
        Ok(Deployments { generation, live, pinned })
    }

    /// Versions that were live, that retries are pinned to, and that a message waits for.
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
            sqlx::query_scalar(PINNED).bind(consumer_id).fetch_all(&self.pool).await?;
        if pinned.is_empty() {
            return Ok(pinned);
        }
        let place =
            self.place(&sqlx::query_as(TENANT).bind(consumer_id).fetch_one(&self.pool).await?)?;
        let awaited = sqlx::query_scalar(AWAITED)
            .bind(consumer_id)
            .bind(&pinned)
            .fetch_all(&place.pool)
            .await;
        match awaited {
            Err(_) if place.is_own => Ok(pinned), // it does not answer: all of them may be waited for
            awaited => Ok(awaited?),
        }
    }

    /// The deployments of a consumer, newest first: those that are live, or all there ever were.
    pub async fn deployment_list(
        &self,
        consumer_id: i32,
        history: bool,
    ) -> Result<Vec<Deployment>, InboxError> {
        const LIST: &str = "WHERE d.consumer_id = $1 AND (d.ended_at IS NULL OR $2) ORDER BY \
            d.deployment_id DESC LIMIT 1000";
        Ok(select(LIST).bind(consumer_id).bind(history).fetch_all(&self.pool).await?)
    }

    /// One deployment of a consumer.
    pub async fn deployment(
        &self,
        consumer_id: i32,
        deployment_id: i64,
    ) -> Result<Deployment, InboxError> {
        const ONE: &str = "WHERE d.consumer_id = $1 AND d.deployment_id = $2";
        let found =
            select(ONE).bind(consumer_id).bind(deployment_id).fetch_optional(&self.pool).await?;
        found.ok_or_else(|| {
            InboxError::NotFound(format!("this consumer has no deployment {deployment_id}"))
        })
    }
}
