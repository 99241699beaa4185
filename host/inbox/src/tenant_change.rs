//! Changes of a tenant while hosts run: rest, work again, other limits. Each raises the tenant's
//! revision in its own transaction; hosts compare that with what they do, and act.

use serde_json::{Map, Value, json};
use sqlx::PgConnection;

use crate::{
    admin::Admin,
    audit::Subject,
    deploy::CHANNEL,
    error::InboxError,
    policy::{is_pattern, topic_fault},
    tenant::{Tenant, TenantLimits},
};

impl Admin {
    /// Let all of a tenant's consumers rest: hosts finish the batches that they run and leave its
    /// groups. Its tokens only look from then on.
    pub async fn suspend_tenant(&self, name: &str) -> Result<Tenant, InboxError> {
        self.change_tenant_state(name, "suspended", "tenant.suspend").await
    }

    /// Let a suspended tenant's consumers go on where they were.
    pub async fn resume_tenant(&self, name: &str) -> Result<Tenant, InboxError> {
        self.change_tenant_state(name, "active", "tenant.resume").await
    }

    /// `active`, `suspended` or `deleting`; none for no tenant.
    pub async fn tenant_state(&self, name: &str) -> Result<Option<String>, InboxError> {
        let state =
            sqlx::query_scalar("SELECT state FROM oncebox.tenant WHERE name = $1").bind(name);
        Ok(state.fetch_optional(&self.pool).await?)
    }

    /// What is so already stays so, without a trace.
    async fn change_tenant_state(
        &self,
        name: &str,
        to: &str,
        action: &str,
    ) -> Result<Tenant, InboxError> {
        let mut tx = self.pool.begin().await?;
        let tenant = self.lock_tenant(&mut tx, name).await?;
        if tenant.state == to {
            tx.rollback().await?;
            return Ok(tenant);
        }
        let tenant = set_state(&mut tx, &tenant, to).await?;
        self.audit(&mut tx, action, Subject::tenant(name), json!({ "revision": tenant.revision }))
            .await?;
        tx.commit().await?;
        self.announce_tenant(&tenant).await;
        Ok(tenant)
    }

    /// Change some of a tenant's limits; `null` takes one away. What is not named stays.
    pub async fn limit_tenant(
        &self,
        name: &str,
        changes: &Map<String, Value>,
    ) -> Result<Tenant, InboxError> {
        const SET: &str = "UPDATE oncebox.tenant SET limits = $2, revision = revision + 1 WHERE \
            tenant_id = $1 RETURNING *";
        let mut tx = self.pool.begin().await?;
        let tenant = self.lock_tenant(&mut tx, name).await?;
        let limits = tenant.limits.changed(changes)?;
        if limits == tenant.limits {
            tx.rollback().await?;
            return Ok(tenant);
        }
        let tenant: Tenant = sqlx::query_as(SET)
            .bind(tenant.tenant_id)
            .bind(json!(limits))
            .fetch_one(&mut *tx)
            .await?;
        self.audit(&mut tx, "tenant.limits", Subject::tenant(name), Value::Object(changes.clone()))
            .await?;
        tx.commit().await?;
        self.announce_tenant(&tenant).await;
        Ok(tenant)
    }

    /// A tenant's row, locked against other changes; refused while the tenant is being deleted.
    pub(crate) async fn lock_tenant(
        &self,
        connection: &mut PgConnection,
        name: &str,
    ) -> Result<Tenant, InboxError> {
        // The weaker lock: whoever only refers to the row need not wait.
        const LOCK: &str = "SELECT * FROM oncebox.tenant WHERE name = $1 FOR NO KEY UPDATE";
        let tenant: Option<Tenant> =
            sqlx::query_as(LOCK).bind(name).fetch_optional(connection).await?;
        match tenant {
            Some(tenant) if tenant.state == "deleting" => Err(being_deleted(name)),
            Some(tenant) => Ok(tenant),
            None => self.tenant(name).await,
        }
    }

    /// Tell the hosts to look. Only a hint, after the commit, as for deployments.
    pub(crate) async fn announce_tenant(&self, tenant: &Tenant) {
        let notify = sqlx::query("SELECT pg_notify($1, $2)")
            .bind(CHANNEL)
            .bind(format!("tenant {}", tenant.tenant_id));
        if let Err(error) = notify.execute(&self.pool).await {
            tracing::debug!(%error, "hosts were not told of a change of a tenant; they find it by \
                themselves");
        }
    }
}

/// A new state, of which hosts hear for each consumer as well: what a host says of a consumer then
/// speaks of this state, and not of an older one.
pub(crate) async fn set_state(
    connection: &mut PgConnection,
    tenant: &Tenant,
    to: &str,
) -> Result<Tenant, InboxError> {
    const SET: &str = "UPDATE oncebox.tenant SET state = $2, revision = revision + 1 WHERE \
        tenant_id = $1 RETURNING *";
    const CONSUMERS: &str =
        "UPDATE oncebox.consumer SET revision = revision + 1 WHERE tenant_id = $1";
    sqlx::query(CONSUMERS).bind(tenant.tenant_id).execute(&mut *connection).await?;
    Ok(sqlx::query_as(SET).bind(tenant.tenant_id).bind(to).fetch_one(connection).await?)
}

pub(crate) fn being_deleted(name: &str) -> InboxError {
    InboxError::conflict(format!(
        "tenant `{name}` is being deleted; `oncebox tenant delete {name} --confirm {name}` says \
            how far that is"
    ))
}

/// A limit's name with the least and the most it can be, and whether it can be none.
const BOUNDS: &[(&str, u64, u64, bool)] = &[
    ("weight", 1, 10_000, false),
    ("connections_max", 1, 10_000, true),
    ("transactions_max", 1, 10_000, true),
    ("memory_bytes_max", 1 << 20, 1 << 40, true),
    ("deadline_ms_max", 1, 600_000, true),
    ("messages_per_second", 1, 10_000_000, true),
];

impl TenantLimits {
    /// These limits with some changed. Every problem is named.
    pub fn changed(&self, changes: &Map<String, Value>) -> Result<Self, InboxError> {
        let problems: Vec<_> =
            changes.iter().filter_map(|(name, value)| problem(name, value)).collect();
        if !problems.is_empty() {
            return Err(InboxError::Invalid(problems.join("; ")));
        }
        let mut limits = json!(self);
        if let Some(limits) = limits.as_object_mut() {
            limits.extend(changes.clone());
        }
        serde_json::from_value(limits).map_err(|error| {
            InboxError::Invalid(format!("the tenant's limits are not readable: {error}"))
        })
    }
}

/// Whether a name of a topic may be this, or begin so.
fn is_topic_part(text: &str) -> bool {
    !is_pattern(text) && (topic_fault(text).is_none() || [".", ".."].contains(&text))
}

/// Topics that a tenant's tokens may name, at most.
const TOPICS_MAX: usize = 1_000;

fn problem(name: &str, value: &Value) -> Option<String> {
    if name == "topics_allowed" {
        // A regular expression would say nothing of the topics that a policy names.
        let is_beginning = |topic: &str| {
            topic.strip_suffix('*').is_some_and(|begins| begins.is_empty() || is_topic_part(begins))
        };
        let is_topic = |topic: &Value| {
            topic.as_str().is_some_and(|topic| is_topic_part(topic) || is_beginning(topic))
        };
        let fits = value.is_null()
            || value
                .as_array()
                .is_some_and(|all| all.len() <= TOPICS_MAX && all.iter().all(is_topic));
        let wanted = format!(
            "it must be a list of at most {TOPICS_MAX} topics, or beginnings of topics with `*` \
                behind them, or none"
        );
        return (!fits)
            .then(|| format!("`topics_allowed` is {:.200}; {wanted}", value.to_string()));
    }
    let Some((_, min, max, can_be_none)) = BOUNDS.iter().find(|(known, ..)| *known == name) else {
        let known = BOUNDS.iter().map(|(known, ..)| *known).chain(["topics_allowed"]);
        let known = known.map(|known| format!("`{known}`")).collect::<Vec<_>>().join(", ");
        return Some(format!("`{name}` is not a limit of a tenant; there are {known}"));
    };
    let fits = value.is_null() && *can_be_none
        || value.as_u64().is_some_and(|value| (*min..=*max).contains(&value));
    let or_none = if *can_be_none { ", or none" } else { "" };
    (!fits).then(|| format!("`{name}` is {value}; it must be {min} to {max}{or_none}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(changes: Value) -> Result<TenantLimits, String> {
        let changes = changes.as_object().expect("an object").clone();
        let limits = TenantLimits { connections_max: Some(3), ..TenantLimits::default() };
        limits.changed(&changes).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_not_named_stays_and_null_takes_away() {
        let limits = changed(json!({ "weight": 7, "messages_per_second": 50 })).expect("limits");
        assert_eq!(
            (limits.weight, limits.messages_per_second, limits.connections_max),
            (7, Some(50), Some(3))
        );
        assert_eq!(
            changed(json!({ "connections_max": null })).expect("limits"),
            TenantLimits::default()
        );
        let limits = changed(json!({ "topics_allowed": ["acme.*", "shared"] })).expect("limits");
        let allowed = ["acme.orders", "shared", "acme", "shared.too", "^acme.*", "oncebox.t.a"]
            .map(|topic| limits.allows_topic("t", topic));
        assert_eq!(allowed, [true, true, false, false, false, false]);
        let limits = TenantLimits::default();
        let allowed = ["oncebox.t.a", "oncebox.t", "oncebox.tt.a", "acme", "^oncebox.t.a"]
            .map(|topic| limits.allows_topic("t", topic));
        assert_eq!(
            allowed,
            [true, false, false, false, false],
            "nothing but its own until more is said"
        );
    }

    #[test]
    fn every_problem_is_named() {
        let said = changed(
            json!({ "weight": 0, "connections_max": "many", "memory_bytes_max": 4096, "cpu": 1 }),
        )
        .expect_err("problems");
        for part in [
            "`weight` is 0; it must be 1 to 10000",
            "`connections_max` is \"many\"; it must be 1 to 10000, or none",
            "`memory_bytes_max` is 4096; it must be 1048576",
            "`cpu` is not a limit of a tenant; there are `weight`, ",
        ] {
            assert!(said.contains(part), "{said}");
        }
        assert!(changed(json!({ "weight": null })).is_err(), "a share there is always");
        for wrong in [json!("acme.*"), json!([""]), json!(["^.*"]), json!([1])] {
            assert!(changed(json!({ "topics_allowed": wrong })).is_err(), "{wrong}");
        }
    }
}
