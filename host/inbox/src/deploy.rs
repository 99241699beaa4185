//! Changes of what is live: deploy, canary, shadow, promote, roll back, end. Each is one
//! transaction that raises the consumer's generation; a host learns of it by asking, and switches
//! between two transactions of its own. What withdraws a version also raises the generation that
//! claims must show, so that no host, however far away, completes anything with it in a transaction
//! that begins later.

use serde_json::{Map, Value, json};
use sqlx::PgConnection;

use crate::{
    admin::{Admin, check_name},
    audit::Subject,
    deployment::{Deployment, Guard, NewDeployment, Role, Slot, select},
    error::InboxError,
    event_versions,
    policy::{Limits, OF_CONSUMER, Policy},
    standing::lock,
    subscription::Consumer,
    version::{self, Version},
};

/// What a rollback did.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Rollback {
    /// What was withdrawn.
    pub withdrawn: Deployment,
    /// What is live instead: for a canary, the stable deployment that was there.
    pub live: Deployment,
    /// Migrations that were applied since `live` was deployed first; they stay.
    pub migrations_kept: Vec<String>,
    /// Messages that the withdrawn version had failed and that run again now.
    pub redriven: u64,
}

/// How a deployment ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EndedHow {
    Superseded,
    RolledBack,
    Promoted,
    Ended,
}

impl EndedHow {
    fn name(self) -> &'static str {
        match self {
            Self::Superseded => "superseded",
            Self::RolledBack => "rolled_back",
            Self::Promoted => "promoted",
            Self::Ended => "ended",
        }
    }
}

/// A change of one consumer's deployments, under the lock of the consumer's row.
pub(crate) struct Change<'a> {
    pub(crate) connection: &'a mut PgConnection,
    pub(crate) consumer_id: i32,
    /// The generation that the change makes.
    pub(crate) generation: i64,
}

impl Admin {
    /// Make a version live in its slot, whatever its role.
    pub async fn deploy(
        &self,
        tenant: &str,
        consumer: &str,
        new: &NewDeployment,
    ) -> Result<Deployment, InboxError> {
        check(new)?;
        let consumer = self.consumer(tenant, consumer).await?;
        check_limits(&new.limits, &consumer.policy()?)?;
        if new.requires_migration.is_some() {
            self.copy_migrations(&self.tenant(&consumer.tenant).await?).await?;
        }
        let mut tx = self.pool.begin().await?;
        let mut change = Change::begin(&mut tx, &consumer).await?;
        let version =
            version::find(change.connection, consumer.tenant_id, &new.handler, &new.version)
                .await?;
        version.check_deployable()?;
        check_memory(&version, &limits(&consumer.policy()?, &Value::Object(new.limits.clone()))?)?;
        check_migration(change.connection, &consumer, new).await?;
        check_slot(&mut change, new, &version).await?;
        if new.role == Role::Stable {
            change.end_live(&new.slot, Role::Stable, EndedHow::Superseded, None).await?;
        }
        let deployment_id = self.insert(&mut change, new, version.version_id).await?;
        change.finish(false).await?;
        let details = json!({ "deployment_id": deployment_id, "role": new.role, "event_type": new.slot.event_type,
            "event_versions": new.slot.event_versions, "handler": new.handler, "digest": hex::encode(&version.digest), "percent": new.percent });
        self.audit(
            &mut tx,
            action(new.role),
            Subject::of(&consumer.tenant, &consumer.name),
            details,
        )
        .await?;
        tx.commit().await?;
        self.announce(&consumer).await;
        self.deployment(consumer.consumer_id, deployment_id).await
    }

    /// Go back: to the version before, or to a named one that was deployed here before. Where a
    /// canary runs, it is the canary that is withdrawn. With `redrive`, what the withdrawn version
    /// failed runs again.
    pub async fn rollback(
        &self,
        tenant: &str,
        consumer: &str,
        slot: &Slot,
        to: Option<&str>,
        reason: Option<&str>,
        redrive: bool,
    ) -> Result<Rollback, InboxError> {
        let consumer = self.consumer(tenant, consumer).await?;
        let mut tx = self.pool.begin().await?;
        let mut change = Change::begin(&mut tx, &consumer).await?;
        let stable = change.live(slot, Role::Stable).await?.ok_or_else(|| nothing_live(slot))?;
        let canary = change.live(slot, Role::Canary).await?;
        let withdrawn = match (&canary, to) {
            (Some(canary), None) => canary.clone(),
            (Some(_), Some(_)) => return Err(canary_runs(slot)),
            (None, _) => stable.clone(),
        };
        let target =
            if canary.is_some() { stable } else { change.target(slot, &stable, to).await? };
        change.end(&withdrawn, EndedHow::RolledBack, reason).await?;
        let live_id = match canary {
            Some(_) => target.deployment_id,
            None => self.insert_again(&mut change, &target, Role::Stable).await?,
        };
        change.finish(true).await?;
        let migrations_kept = migrations_since(&mut tx, consumer.tenant_id, &target).await?;
        let details = json!({ "event_type": slot.event_type, "event_versions": slot.event_versions, "withdrawn": withdrawn.deployment_id,
            "withdrawn_digest": hex::encode(&withdrawn.digest), "digest": hex::encode(&target.digest), "reason": reason });
        self.audit(&mut tx, "rollback", Subject::of(&consumer.tenant, &consumer.name), details)
            .await?;
        let redriven = if redrive {
            self.redrive_withdrawn(&mut tx, &consumer, &withdrawn).await?
        } else {
            Some(0)
        };
        tx.commit().await?;
        self.announce(&consumer).await;
        self.fence_place(&consumer).await?;
        let redriven = match redriven {
            Some(redriven) => redriven,
            None => self.redriven(withdrawn.deployment_id).await?,
        };
        let live = self.deployment(consumer.consumer_id, live_id).await?;
        let withdrawn = self.deployment(consumer.consumer_id, withdrawn.deployment_id).await?;
        Ok(Rollback { withdrawn, live, migrations_kept, redriven })
    }

    /// Give a canary or a shadow another share. A canary's keys stay its keys while it grows.
    pub async fn set_percent(
        &self,
        tenant: &str,
        consumer: &str,
        deployment_id: i64,
        percent: f64,
    ) -> Result<Deployment, InboxError> {
        check_percent(percent)?;
        let consumer = self.consumer(tenant, consumer).await?;
        let mut tx = self.pool.begin().await?;
        let mut change = Change::begin(&mut tx, &consumer).await?;
        let deployment = change.live_by_id(deployment_id).await?;
        if deployment.role == Role::Stable {
            return Err(InboxError::Invalid(format!(
                "deployment {deployment_id} is stable and takes everything that no canary takes"
            )));
        }
        let set =
            sqlx::query("UPDATE oncebox.deployment SET percent = $2 WHERE deployment_id = $1")
                .bind(deployment_id)
                .bind(percent);
        set.execute(&mut *change.connection).await?;
        change.finish(false).await?;
        let details = json!({ "deployment_id": deployment_id, "from": deployment.percent, "percent": percent });
        self.audit(
            &mut tx,
            "deployment.percent",
            Subject::of(&consumer.tenant, &consumer.name),
            details,
        )
        .await?;
        tx.commit().await?;
        self.announce(&consumer).await;
        self.deployment(consumer.consumer_id, deployment_id).await
    }

    /// A canary takes everything of its slot.
    pub async fn promote(
        &self,
        tenant: &str,
        consumer: &str,
        deployment_id: i64,
    ) -> Result<Deployment, InboxError> {
        let consumer = self.consumer(tenant, consumer).await?;
        let mut tx = self.pool.begin().await?;
        let mut change = Change::begin(&mut tx, &consumer).await?;
        let canary = change.live_by_id(deployment_id).await?;
        if canary.role != Role::Canary {
            return Err(InboxError::Invalid(format!(
                "deployment {deployment_id} is no canary; `oncebox deploy` makes a version live"
            )));
        }
        change.end(&canary, EndedHow::Promoted, None).await?;
        change.end_live(&canary.slot, Role::Stable, EndedHow::Superseded, None).await?;
        let live = self.insert_again(&mut change, &canary, Role::Stable).await?;
        change.finish(false).await?;
        let details = json!({ "deployment_id": live, "canary": deployment_id, "digest": hex::encode(&canary.digest) });
        self.audit(
            &mut tx,
            "canary.promote",
            Subject::of(&consumer.tenant, &consumer.name),
            details,
        )
        .await?;
        tx.commit().await?;
        self.announce(&consumer).await;
        self.deployment(consumer.consumer_id, live).await
    }

    /// Take a deployment away. Messages of a slot whose stable deployment is taken away go to a
    /// wider slot, or have no handler.
    pub async fn end_deployment(
        &self,
        tenant: &str,
        consumer: &str,
        deployment_id: i64,
        reason: Option<&str>,
    ) -> Result<Deployment, InboxError> {
        let consumer = self.consumer(tenant, consumer).await?;
        let mut tx = self.pool.begin().await?;
        let mut change = Change::begin(&mut tx, &consumer).await?;
        let deployment = change.live_by_id(deployment_id).await?;
        if deployment.role == Role::Stable {
            for role in [Role::Canary, Role::Shadow] {
                if let Some(other) = change.live(&deployment.slot, role).await? {
                    let text = format!(
                        "the {} {} runs beside it; end it first",
                        role.name(),
                        other.deployment_id
                    );
                    return Err(InboxError::conflict(text));
                }
            }
        }
        change.end(&deployment, EndedHow::Ended, reason).await?;
        change.finish(true).await?;
        let details =
            json!({ "deployment_id": deployment_id, "role": deployment.role, "reason": reason });
        self.audit(
            &mut tx,
            "deployment.end",
            Subject::of(&consumer.tenant, &consumer.name),
            details,
        )
        .await?;
        tx.commit().await?;
        self.announce(&consumer).await;
        self.fence_place(&consumer).await?;
        self.deployment(consumer.consumer_id, deployment_id).await
    }

    /// What a withdrawal requires of claims, also where the tenant's claims are made. Until it
    /// stands there, nobody is told that nothing begins with the withdrawn version any more; hosts
    /// repeat it.
    async fn fence_place(&self, consumer: &Consumer) -> Result<(), InboxError> {
        let text = || {
            format!(
                "the change of `{}/{}` is made, but the tenant's own database does not know of it \
                    yet: hosts that reach it may still \
                 complete messages with what was withdrawn; they tell it as soon as it answers, \
                 `oncebox deployments` shows what is live",
                consumer.tenant, consumer.name
            )
        };
        let fenced = self.mirror_of(&consumer.tenant).await;
        fenced.map_err(|source| InboxError::NotThereYet { text: text(), source: Box::new(source) })
    }

    /// Tell the hosts to look. Only a hint, and after the commit: they ask by themselves as well,
    /// and a queue of notifications that is full must not stop a deployment.
    pub(crate) async fn announce(&self, consumer: &Consumer) {
        let notify = sqlx::query("SELECT pg_notify($1, $2)")
            .bind(CHANNEL)
            .bind(consumer.consumer_id.to_string());
        if let Err(error) = notify.execute(&self.pool).await {
            tracing::debug!(%error, "hosts were not told of a deployment; they find it by \
                themselves");
        }
    }

    async fn insert(
        &self,
        change: &mut Change<'_>,
        new: &NewDeployment,
        version_id: i32,
    ) -> Result<i64, InboxError> {
        const INSERT: &str = "INSERT INTO oncebox.deployment (consumer_id, event_type, \
            event_versions, version_id, settings, limits, \
            requires_migration, retries, role, percent, guard, generation, created_by) \
            VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13) RETURNING \
            deployment_id";
        let guard =
            (new.role == Role::Canary).then(|| json!(new.guard.clone().unwrap_or_default()));
        let insert = sqlx::query_scalar(INSERT)
            .bind(change.consumer_id)
            .bind(&new.slot.event_type)
            .bind(&new.slot.event_versions)
            .bind(version_id)
            .bind(Value::Object(new.settings.clone()))
            .bind(Value::Object(new.limits.clone()))
            .bind(&new.requires_migration)
            .bind(new.retries.name())
            .bind(new.role.name())
            .bind(new.percent)
            .bind(guard)
            .bind(change.generation)
            .bind(&self.actor);
        Ok(insert.fetch_one(&mut *change.connection).await?)
    }

    /// The same version, settings and limits, as a new row.
    async fn insert_again(
        &self,
        change: &mut Change<'_>,
        of: &Deployment,
        role: Role,
    ) -> Result<i64, InboxError> {
        let object = |value: &Value| value.as_object().cloned().unwrap_or_default();
        let new = NewDeployment {
            slot: of.slot.clone(),
            handler: of.handler.clone(),
            version: hex::encode(&of.digest),
            settings: object(&of.settings),
            limits: object(&of.limits),
            requires_migration: of.requires_migration.clone(),
            retries: of.retries,
            role,
            percent: None,
            guard: None,
        };
        self.insert(change, &new, of.version_id).await
    }
}

/// What hosts listen to.
pub const CHANNEL: &str = "oncebox_deployments";

impl<'a> Change<'a> {
    /// Lock the consumer: changes of its deployments come one after the other.
    pub(crate) async fn begin(
        connection: &'a mut PgConnection,
        consumer: &Consumer,
    ) -> Result<Self, InboxError> {
        let (state, generation, _) = lock(&mut *connection, consumer).await?;
        if state == "deleting" {
            return Err(InboxError::conflict(format!(
                "consumer `{}/{}` is being deleted",
                consumer.tenant, consumer.name
            )));
        }
        Ok(Self { connection, consumer_id: consumer.consumer_id, generation: generation + 1 })
    }

    /// The live deployment of a slot and role.
    pub(crate) async fn live(
        &mut self,
        slot: &Slot,
        role: Role,
    ) -> Result<Option<Deployment>, InboxError> {
        const LIVE: &str = "WHERE d.consumer_id = $1 AND d.event_type = $2 AND d.event_versions IS \
            NOT DISTINCT FROM $3 AND d.role = $4 AND d.ended_at IS NULL";
        let query = select(LIVE)
            .bind(self.consumer_id)
            .bind(&slot.event_type)
            .bind(&slot.event_versions)
            .bind(role.name());
        Ok(query.fetch_optional(&mut *self.connection).await?)
    }

    /// A deployment that has not ended.
    pub(crate) async fn live_by_id(
        &mut self,
        deployment_id: i64,
    ) -> Result<Deployment, InboxError> {
        const ONE: &str = "WHERE d.consumer_id = $1 AND d.deployment_id = $2";
        let found = select(ONE)
            .bind(self.consumer_id)
            .bind(deployment_id)
            .fetch_optional(&mut *self.connection)
            .await?;
        let found = found.ok_or_else(|| {
            InboxError::NotFound(format!("this consumer has no deployment {deployment_id}"))
        })?;
        match &found.ended_how {
            Some(how) => {
                Err(InboxError::conflict(format!("deployment {deployment_id} has ended: {how}")))
            }
            None => Ok(found),
        }
    }

    /// What a rollback goes to.
    async fn target(
        &mut self,
        slot: &Slot,
        live: &Deployment,
        to: Option<&str>,
    ) -> Result<Deployment, InboxError> {
        const EARLIER: &str = "WHERE d.consumer_id = $1 AND d.event_type = $2 AND d.event_versions \
            IS NOT DISTINCT FROM $3 \
            AND d.role = 'stable' AND d.ended_at IS NOT NULL \
            AND CASE WHEN $4::text IS NULL THEN d.ended_how <> 'rolled_back' AND (d.version_id, \
            d.settings, d.limits) <> ($5, $6, $7) \
                     AND NOT EXISTS (SELECT FROM oncebox.deployment w WHERE w.consumer_id = \
                     d.consumer_id AND w.event_type = d.event_type \
                         AND w.event_versions IS NOT DISTINCT FROM d.event_versions AND \
                         w.ended_how = 'rolled_back' AND w.deployment_id > d.deployment_id \
                         AND (w.version_id, w.settings, w.limits) = (d.version_id, d.settings, \
                         d.limits)) \
                     ELSE encode(v.digest, 'hex') LIKE $4 || '%' END \
            ORDER BY d.deployment_id DESC LIMIT 1";
        let to = to.map(version::check_prefix).transpose()?;
        let query = select(EARLIER)
            .bind(self.consumer_id)
            .bind(&slot.event_type)
            .bind(&slot.event_versions)
            .bind(&to)
            .bind(live.version_id)
            .bind(&live.settings)
            .bind(&live.limits);
        let found = query.fetch_optional(&mut *self.connection).await?;
        found.ok_or_else(|| {
            InboxError::NotFound(match to {
                Some(to) => format!(
                    "version `{to}` was never live for {slot}; `oncebox deploy \
                    --version {to}` makes it so"
                ),
                None => format!(
                    "there is no version before the live one of {slot} to go back to; `oncebox \
                        deployments --history` shows what there was"
                ),
            })
        })
    }

    /// End the live deployment of a slot and role, where there is one.
    async fn end_live(
        &mut self,
        slot: &Slot,
        role: Role,
        how: EndedHow,
        reason: Option<&str>,
    ) -> Result<(), InboxError> {
        match self.live(slot, role).await? {
            Some(live) => self.end(&live, how, reason).await,
            None => Ok(()),
        }
    }

    pub(crate) async fn end(
        &mut self,
        deployment: &Deployment,
        how: EndedHow,
        reason: Option<&str>,
    ) -> Result<(), InboxError> {
        const END: &str = "UPDATE oncebox.deployment SET ended_at = now(), ended_how = $2, \
            ended_reason = $3 WHERE deployment_id = $1";
        let end = sqlx::query(END).bind(deployment.deployment_id).bind(how.name()).bind(reason);
        end.execute(&mut *self.connection).await?;
        Ok(())
    }

    /// The new generation; with `fence`, claims of older ones are refused from the commit on.
    pub(crate) async fn finish(&mut self, fence: bool) -> Result<(), InboxError> {
        const RAISE: &str = "UPDATE oncebox.consumer SET generation = $2, \
            generation_required = CASE WHEN $3 THEN $2 ELSE generation_required END WHERE \
            consumer_id = $1";
        let raise = sqlx::query(RAISE).bind(self.consumer_id).bind(self.generation).bind(fence);
        raise.execute(&mut *self.connection).await?;
        Ok(())
    }
}

fn action(role: Role) -> &'static str {
    match role {
        Role::Stable => "deploy",
        Role::Canary => "canary.start",
        Role::Shadow => "shadow.start",
    }
}

/// What can be said of a deployment without a look at the database.
fn check(new: &NewDeployment) -> Result<(), InboxError> {
    check_name("handler", &new.handler)?;
    check_event_type(&new.slot.event_type)?;
    if let Some(versions) = &new.slot.event_versions {
        event_versions::parse(versions)?;
    }
    match (new.role, new.percent) {
        (Role::Stable, None) => {}
        (Role::Stable, Some(_)) => {
            return Err(InboxError::Invalid("`percent` is for a canary or a shadow".to_owned()));
        }
        (_, None) => {
            return Err(InboxError::Invalid(format!(
                "a {} needs `percent`, the share that it takes",
                new.role.name()
            )));
        }
        (_, Some(percent)) => check_percent(percent)?,
    }
    new.guard.as_ref().map_or(Ok(()), check_guard)
}

fn check_event_type(event_type: &str) -> Result<(), InboxError> {
    if event_type.is_empty() {
        return Err(InboxError::Invalid(
            "the event type is empty; use `*` for those that no other deployment takes".to_owned(),
        ));
    }
    let stem = event_type.strip_suffix(".*").unwrap_or(event_type);
    if event_type != "*" && (stem.contains('*') || stem.is_empty()) {
        return Err(InboxError::Invalid(format!(
            "`{event_type}` is no event type: `*` stands alone or after the last dot, as in \
                `orders.*`"
        )));
    }
    if event_type.len() > 512 || event_type.chars().any(char::is_control) {
        return Err(InboxError::Invalid(
            "an event type has at most 512 bytes and no control characters".to_owned(),
        ));
    }
    Ok(())
}

fn check_percent(percent: f64) -> Result<(), InboxError> {
    if percent > 0.0 && percent <= 100.0 {
        return Ok(());
    }
    Err(InboxError::Invalid(format!(
        "`percent` is {percent}; it must be more than 0 and at most 100"
    )))
}

fn check_guard(guard: &Guard) -> Result<(), InboxError> {
    if !(0.0..=100.0).contains(&guard.margin_percent) {
        return Err(InboxError::Invalid(format!(
            "`guard.margin_percent` is {}; it must be 0 to 100",
            guard.margin_percent
        )));
    }
    for (key, value, max) in
        [("window_s", guard.window_s, 86_400), ("messages_min", guard.messages_min, 1_000_000)]
    {
        if value == 0 || value > max {
            return Err(InboxError::Invalid(format!(
                "`guard.{key}` is {value}; it must be 1 to {max}"
            )));
        }
    }
    Ok(())
}

/// A deployment may run under less than its consumer allows, never under more.
pub(crate) fn check_limits(limits: &Map<String, Value>, policy: &Policy) -> Result<(), InboxError> {
    let allowed = json!(policy.limits);
    for (key, value) in limits {
        if OF_CONSUMER.contains(&key.as_str()) {
            let text = format!(
                "`limits.{key}` is a limit of the consumer, over all of its deployments; set it in \
                    its policy"
            );
            return Err(InboxError::Invalid(text));
        }
        let bound = allowed.get(key).and_then(Value::as_u64);
        let bound =
            bound.ok_or_else(|| InboxError::Invalid(format!("`limits.{key}` is not a limit")))?;
        match value.as_u64() {
            Some(wanted) if wanted > 0 && wanted <= bound => {}
            _ => {
                return Err(InboxError::Invalid(format!(
                    "`limits.{key}` is {value}; it must be 1 to the consumer's own {bound}"
                )));
            }
        }
    }
    Ok(())
}

/// The consumer's limits with a deployment's over them.
pub fn limits(policy: &Policy, over: &Value) -> Result<Limits, InboxError> {
    let mut limits = json!(policy.limits);
    if let (Some(limits), Some(over)) = (limits.as_object_mut(), over.as_object()) {
        limits.extend(over.clone());
    }
    serde_json::from_value(limits).map_err(|error| {
        InboxError::Invalid(format!("the deployment's limits are not readable: {error}"))
    })
}

/// A component that has more memory at its start than it may use would fail every message.
fn check_memory(version: &Version, limits: &Limits) -> Result<(), InboxError> {
    let needed = version
        .report
        .as_ref()
        .and_then(|report| report["memory_bytes_min"].as_u64())
        .unwrap_or_default();
    let allowed = limits.memory_bytes as u64;
    if needed <= allowed {
        return Ok(());
    }
    let text = format!(
        "the component begins with {needed} bytes of memory; `limits.memory_bytes` allows {allowed}"
    );
    Err(InboxError::Conflict { code: "component_refused", text })
}

async fn check_migration(
    connection: &mut PgConnection,
    consumer: &Consumer,
    new: &NewDeployment,
) -> Result<(), InboxError> {
    let Some(name) = &new.requires_migration else { return Ok(()) };
    const HELD: &str =
        "SELECT EXISTS (SELECT FROM oncebox.tenant_migration WHERE tenant_id = $1 AND name = $2)";
    let held: bool =
        sqlx::query_scalar(HELD).bind(consumer.tenant_id).bind(name).fetch_one(connection).await?;
    if held {
        return Ok(());
    }
    let text = format!(
        "the schema of tenant `{0}` does not hold migration `{name}`; apply it with `oncebox \
            tenant schema apply {0}` first",
        consumer.tenant
    );
    Err(InboxError::Conflict { code: "migration_missing", text })
}

/// Whether the slot has room for the role.
async fn check_slot(
    change: &mut Change<'_>,
    new: &NewDeployment,
    version: &Version,
) -> Result<(), InboxError> {
    let canary = change.live(&new.slot, Role::Canary).await?;
    if new.role == Role::Stable {
        return if canary.is_some() { Err(canary_runs(&new.slot)) } else { Ok(()) };
    }
    let stable =
        change.live(&new.slot, Role::Stable).await?.ok_or_else(|| nothing_live(&new.slot))?;
    let same_settings = stable.settings == Value::Object(new.settings.clone())
        && stable.limits == Value::Object(new.limits.clone());
    if stable.version_id == version.version_id && same_settings {
        return Err(InboxError::conflict(format!("this version is live for {} already", new.slot)));
    }
    if new.role == Role::Shadow {
        let live = version::by_id(change.connection, stable.version_id).await?;
        if let Some(batch) = [version, &live].into_iter().find(|version| version.takes_batches()) {
            let text = format!(
                "version `{}` takes the messages of a transaction in one call, so that no effect \
                    can be told to be of one message; a shadow needs handlers that take one \
                    message at a time",
                &hex::encode(&batch.digest)[..12]
            );
            return Err(InboxError::Invalid(text));
        }
    }
    if let Some(other) = change.live(&new.slot, new.role).await? {
        let text = format!(
            "the {} {} runs for {} already; end it first",
            new.role.name(),
            other.deployment_id,
            new.slot
        );
        return Err(InboxError::conflict(text));
    }
    Ok(())
}

fn canary_runs(slot: &Slot) -> InboxError {
    InboxError::conflict(format!(
        "a canary runs for {slot}; promote it, end it or roll it back first"
    ))
}

fn nothing_live(slot: &Slot) -> InboxError {
    InboxError::NotFound(format!(
        "nothing is live for {slot}; `oncebox deploy` makes a version live"
    ))
}

async fn migrations_since(
    connection: &mut PgConnection,
    tenant_id: i32,
    target: &Deployment,
) -> Result<Vec<String>, InboxError> {
    const SINCE: &str = "SELECT name FROM oncebox.tenant_migration WHERE tenant_id = $1 AND \
        applied_at > $2 ORDER BY applied_at, name";
    let ended = target.ended_at.unwrap_or(target.created_at);
    Ok(sqlx::query_scalar(SINCE)
        .bind(tenant_id)
        .bind(ended.min(target.created_at))
        .fetch_all(connection)
        .await?)
}
