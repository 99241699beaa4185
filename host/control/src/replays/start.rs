//! The start of a planned replay, and what each kind of consumer asks for.

use chrono::{DateTime, Utc};
use oncebox_model::{
    error::InboxError,
    hooks::{self, Defect},
    policy::ReplayKind,
    status::ConsumerState,
};
use serde_json::json;
use sqlx::PgConnection;

use super::{ReplayTarget, job::ReplayJob, token::ReplayToken};
use crate::{
    consumers::state::{late_hosts, lock},
    handles::Replays,
    tenants::moves::check_may_begin,
};

/// The second step of a replay: the token of its plan, and what the operator says.
#[derive(Debug, Clone, Default)]
pub struct ReplayStart {
    /// Token of the plan.
    pub token: String,
    /// Reason; stored with each replayed message and in the audit log.
    pub reason: String,
    /// Number of messages that the plan found, confirmed.
    pub confirm: Option<i64>,
    /// Whether the derived tables were reset.
    pub reset_done: bool,
    /// Whether the operator knows that nothing which the replay emits is sent.
    pub effects_suppressed: bool,
}

/// A plan, as its row has it.
#[derive(sqlx::FromRow)]
struct PlanRow {
    state: String,
    kind: String,
    policy_revision: i64,
    generation: i64,
    token_hash: Option<Vec<u8>>,
    expires_at: DateTime<Utc>,
    found: i64,
    now: DateTime<Utc>,
}

/// The consumer's row in the host's database, under its lock.
struct LockedConsumer {
    state: ConsumerState,
    /// Whether no live host runs anything of it.
    is_at_rest: bool,
    generation: i64,
    policy_revision: i64,
}

impl Replays<'_> {
    /// Starts the replay of a plan. Hosts that run the consumer work on it from then on; a paused
    /// consumer is started for it alone.
    ///
    /// # Errors
    /// `Invalid` for a token that is none, or of another consumer, and where the operator does not
    /// say what the kind asks for. `Conflict` where the token is used, too old, or of a policy or
    /// deployments that have changed, and where another replay of the consumer is not over.
    pub async fn start(
        &self,
        tenant: &str,
        name: &str,
        start: &ReplayStart,
    ) -> Result<ReplayJob, InboxError> {
        let token = ReplayToken::parse(&start.token)?;
        if (&*token.tenant, &*token.consumer) != (tenant, name) {
            return Err(InboxError::Invalid(format!(
                "this token is not of consumer `{tenant}/{name}`"
            )));
        }
        let target = self.target(tenant, name).await?;
        // Hosts there must not run older deployments than those of the plan.
        self.0.tenant_databases().replicate_named(tenant).await?;
        let details = json!({ "replay_id": token.replay_id, "reason": start.reason });
        self.audit_before(&target, "replay.run", &details).await?;
        let mut host = self.0.pool.begin().await?;
        // From here on the consumer is neither resumed nor deployed to, and its policy stays, until
        // the replay runs.
        let locked = locked(&mut host, &target).await?;
        if target.database.is_dedicated {
            let mut tx = target.database.pool.begin().await?;
            self.start_in(&mut tx, &target, &locked, &token, start).await?;
            tx.commit().await?;
            host.rollback().await?; // it was begun for its lock
        } else {
            self.start_in(&mut host, &target, &locked, &token, start).await?;
            self.audit_with(&mut host, &target, "replay.run", &details).await?;
            host.commit().await?;
        }
        self.0.deployments().announce(&target.consumer).await;
        self.show(tenant, name, token.replay_id).await.map(|detail| detail.job)
    }

    /// Checks a plan under its lock, and lets it run.
    async fn start_in(
        &self,
        connection: &mut PgConnection,
        target: &ReplayTarget,
        locked: &LockedConsumer,
        token: &ReplayToken,
        start: &ReplayStart,
    ) -> Result<(), InboxError> {
        const LOCK: &str = "SELECT state, kind, policy_revision, generation, token_hash, \
                expires_at, found, now() AS now \
            FROM oncebox.replay WHERE replay_id = $1 AND consumer_id = $2 FOR UPDATE";
        const START: &str = "UPDATE oncebox.replay SET state = 'running', token_hash = NULL, \
            actor = $2, reason = $3, began_at = now() WHERE replay_id = $1";
        check_may_begin(&self.0.pool, connection, target.consumer.tenant_id).await?;
        let query = sqlx::query_as(LOCK).bind(token.replay_id).bind(target.consumer.consumer_id);
        let plan: Option<PlanRow> = query.fetch_optional(&mut *connection).await?;
        let plan = plan.filter(|plan| plan.token_hash.as_ref() == Some(&token.hash()));
        let plan = plan.ok_or_else(|| {
            InboxError::conflict(
                "this token starts nothing: it was used, or its plan is gone; plan again",
            )
        })?;
        check_fresh(&plan, locked)?;
        check_kind(&plan, locked, start)?;
        let query =
            sqlx::query(START).bind(token.replay_id).bind(&self.0.actor).bind(&start.reason);
        query.execute(connection).await.map_err(|error| already_open(error, target))?;
        Ok(())
    }
}

/// Locks the consumer's row and reads what a token depends on.
async fn locked(
    connection: &mut PgConnection,
    target: &ReplayTarget,
) -> Result<LockedConsumer, InboxError> {
    const REVISIONS: &str =
        "SELECT policy_revision, revision FROM oncebox.consumer WHERE consumer_id = $1";
    let consumer_id = target.consumer.consumer_id;
    let (state, generation, _) = lock(&mut *connection, &target.consumer).await?;
    if state.is_deleting() {
        return Err(InboxError::conflict(format!(
            "consumer `{}` is being deleted",
            target.shown()
        )));
    }
    let query = sqlx::query_as(REVISIONS).bind(consumer_id);
    let (policy_revision, revision): (i64, i64) = query.fetch_one(&mut *connection).await?;
    let late = late_hosts(connection, consumer_id, revision, true).await?;
    Ok(LockedConsumer { state, is_at_rest: late.is_empty(), generation, policy_revision })
}

/// Refuses a plan that is too old, or of a policy or deployments that have changed.
fn check_fresh(plan: &PlanRow, locked: &LockedConsumer) -> Result<(), InboxError> {
    let is_stale = if plan.state != "planned" {
        "was used"
    } else if plan.expires_at < plan.now {
        "is older than 15 minutes"
    } else if plan.policy_revision != locked.policy_revision {
        "is of a policy that was changed"
    } else if plan.generation != locked.generation {
        "is of deployments that were changed"
    } else {
        return Ok(());
    };
    Err(InboxError::conflict(format!("this token {is_stale}; plan again")))
}

/// Refuses a start that lacks what the kind of the consumer asks for.
fn check_kind(
    plan: &PlanRow,
    locked: &LockedConsumer,
    start: &ReplayStart,
) -> Result<(), InboxError> {
    if hooks::sabotage(Defect::ReplayKindIgnored) {
        return Ok(());
    }
    let lacks = match ReplayKind::named(&plan.kind) {
        Some(ReplayKind::Projection | ReplayKind::Cache) => None,
        Some(ReplayKind::Analytics) if locked.state != ConsumerState::Paused => {
            return Err(InboxError::conflict(
                "a replay of the kind `analytics` begins while the consumer is paused: pause it, \
                    reset its derived tables, then plan again",
            ));
        }
        // What a host still runs would add to the tables after their reset.
        Some(ReplayKind::Analytics) if !locked.is_at_rest => {
            return Err(InboxError::conflict(
                "hosts still finish what they run of the paused consumer: wait until it is at \
                    rest, reset its derived tables, then plan again",
            ));
        }
        Some(ReplayKind::Analytics) => (!start.reset_done)
            .then(|| "say with `reset_done` that its derived tables were reset".to_owned()),
        Some(ReplayKind::Audit) => (start.confirm != Some(plan.found))
            .then(|| format!("confirm the number of messages, {}, with `confirm`", plan.found)),
        Some(ReplayKind::Notification | ReplayKind::Workflow) => {
            (!start.effects_suppressed).then(|| {
                "say with `effects_suppressed` that you know: nothing that it emits is sent, and \
                    what its statements write is written again"
                    .to_owned()
            })
        }
        None => Some("use the release that planned it".to_owned()),
    };
    match lacks {
        None => Ok(()),
        Some(lacks) => Err(InboxError::Invalid(format!(
            "a replay of the kind `{}` is not started like that: {lacks}",
            plan.kind
        ))),
    }
}

/// Returns the error of a start beside another replay that is not over.
pub(super) fn already_open(error: sqlx::Error, target: &ReplayTarget) -> InboxError {
    match error.as_database_error().and_then(|error| error.constraint()) {
        Some("replay_open") => InboxError::conflict(format!(
            "another replay of `{}` is not over; `oncebox replay list` shows it",
            target.shown()
        )),
        _ => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(kind: &str) -> PlanRow {
        PlanRow {
            state: "planned".to_owned(),
            kind: kind.to_owned(),
            policy_revision: 3,
            generation: 2,
            token_hash: None,
            expires_at: DateTime::UNIX_EPOCH + chrono::TimeDelta::minutes(15),
            found: 7,
            now: DateTime::UNIX_EPOCH,
        }
    }

    fn consumer(state: ConsumerState) -> LockedConsumer {
        LockedConsumer { state, is_at_rest: true, generation: 2, policy_revision: 3 }
    }

    // What could go wrong: an old plan runs after the handler, the policy or its kind was changed,
    // or a token runs twice.
    #[test]
    fn a_stale_token_starts_nothing() {
        let running = consumer(ConsumerState::Running);
        assert!(check_fresh(&plan("cache"), &running).is_ok());
        let used = PlanRow { state: "running".to_owned(), ..plan("cache") };
        let late = PlanRow {
            expires_at: DateTime::UNIX_EPOCH - chrono::TimeDelta::seconds(1),
            ..plan("cache")
        };
        let of_policy = PlanRow { policy_revision: 2, ..plan("cache") };
        let of_deployments = PlanRow { generation: 1, ..plan("cache") };
        for (plan, part) in [
            (used, "was used"),
            (late, "15 minutes"),
            (of_policy, "a policy that was changed"),
            (of_deployments, "deployments that were changed"),
        ] {
            let error = check_fresh(&plan, &running).expect_err(part).to_string();
            assert!(error.contains(part) && error.contains("plan again"), "{error}");
        }
    }

    // What could go wrong: a kind is replayed without what makes it safe. S1-056, S1-058.
    #[test]
    fn each_kind_asks_for_its_own() {
        let said = ReplayStart::default();
        let (running, paused) = (consumer(ConsumerState::Running), consumer(ConsumerState::Paused));
        let refused = |kind: &str, locked: &LockedConsumer, start: &ReplayStart, part: &str| {
            let error = check_kind(&plan(kind), locked, start).expect_err(kind).to_string();
            assert!(error.contains(part), "{error}");
        };
        for kind in ["projection", "cache"] {
            assert!(check_kind(&plan(kind), &running, &said).is_ok());
        }
        let reset = ReplayStart { reset_done: true, ..said.clone() };
        refused("analytics", &running, &reset, "paused");
        refused("analytics", &paused, &said, "`reset_done`");
        let stopping = LockedConsumer { is_at_rest: false, ..consumer(ConsumerState::Paused) };
        refused("analytics", &stopping, &reset, "at rest");
        assert!(check_kind(&plan("analytics"), &paused, &reset).is_ok());
        refused("audit", &running, &said, "7, with `confirm`");
        let wrong = ReplayStart { confirm: Some(6), ..said.clone() };
        refused("audit", &running, &wrong, "7, with `confirm`");
        let confirmed = ReplayStart { confirm: Some(7), ..said.clone() };
        assert!(check_kind(&plan("audit"), &running, &confirmed).is_ok());
        let known = ReplayStart { effects_suppressed: true, ..said.clone() };
        for kind in ["notification", "workflow"] {
            refused(kind, &running, &said, "`effects_suppressed`");
            // S1-056, S1-058.
            assert!(check_kind(&plan(kind), &running, &known).is_ok());
        }
        refused("search", &paused, &known, "release that planned it");
    }
}
