//! A change of the policy of an existing consumer: the differences, their consequences, and the
//! change itself.

use std::collections::BTreeMap;

use oncebox_model::{
    error::InboxError,
    policy::{Ack, Dedup, Policy, RowForm},
};
use serde_json::{Value, json};
use sqlx::PgConnection;

use crate::{
    audit::Subject,
    consumers::{Consumer, HIDDEN, group_is_free, lock_consumer, shown, state::lock},
    deployments::{check::check_limits, select},
    handles::Consumers,
};

/// One key of a policy that changes.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct PolicyDifference {
    /// Key, with dots.
    pub key: String,
    /// Value before; none where the key was absent. Values of `kafka.properties` are not shown.
    pub before: Option<Value>,
    /// Value after; none where the key is absent.
    pub after: Option<Value>,
}

/// A consequence of a change, beyond the changed value itself.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Consequence {
    /// Changed key that causes it.
    pub key: &'static str,
    /// Text for the operator.
    pub text: String,
}

/// A change of a policy, made or proposed.
#[derive(Debug, Clone)]
pub struct PolicyChange {
    /// Consumer; with the new policy where the change is made.
    pub consumer: Consumer,
    /// Keys that change.
    pub differences: Vec<PolicyDifference>,
    /// Consequences that an operator must accept first.
    pub consequences: Vec<Consequence>,
    /// Whether the change is made. A change with consequences is made only where they are accepted.
    pub is_made: bool,
}

impl Consumers<'_> {
    /// Sets the policy of a consumer. Hosts finish the batches that they run under the policy
    /// before.
    ///
    /// # Errors
    /// `NotFound` where there is no such consumer. `Conflict` where it is being deleted, or where
    /// its group is another consumer's.
    pub async fn set_policy(
        &self,
        tenant: &str,
        name: &str,
        mut policy: Policy,
        accept: bool,
    ) -> Result<PolicyChange, InboxError> {
        let consumer = self.get(tenant, name).await?;
        // Before the lock: a caller that waits for a slot holds neither a connection nor a row
        // lock.
        policy.check_apart().await?;
        let mut tx = self.0.pool.begin().await?;
        let (state, ..) = lock(&mut tx, &consumer).await?;
        if state.is_deleting() {
            return Err(InboxError::conflict(format!(
                "consumer `{tenant}/{name}` is being deleted"
            )));
        }
        // The row under the lock.
        let consumer = lock_consumer(&mut tx, &consumer).await?;
        keep_hidden(&mut policy, &consumer.policy)?;
        policy.check_but_schemas()?;
        // A policy that cannot be read is the one that needs a change most.
        let before = consumer.policy();
        let differences = differences(
            &before.as_ref().map_or_else(|_| consumer.policy.clone(), |before| json!(before)),
            &json!(policy),
        );
        let consequences =
            before.map(|before| consequences(&consumer, &before, &policy)).unwrap_or_default();
        if let Some(refused) = differences.iter().find(|difference| difference.key == "retention") {
            return Err(refuse_retention(&consumer, refused));
        }
        if differences.is_empty() || (!consequences.is_empty() && !accept) {
            let is_made = differences.is_empty();
            return Ok(PolicyChange { consumer, differences, consequences, is_made });
        }
        group_is_free(&mut tx, tenant, name, &policy).await?;
        check_deployments(&mut tx, &consumer, &policy).await?;
        const SET: &str = "UPDATE oncebox.consumer SET policy = $2, revision = revision + 1, \
            policy_revision = revision + 1 \
            WHERE consumer_id = $1";
        sqlx::query(SET).bind(consumer.consumer_id).bind(json!(policy)).execute(&mut *tx).await?;
        let details = json!({ "changes": differences, "accepted": consequences });
        self.0
            .audit()
            .record(&mut tx, "consumer.policy", Subject::of(tenant, name), details)
            .await?;
        tx.commit().await?;
        self.0.deployments().announce(&consumer).await;
        let consumer = self.get(tenant, name).await?;
        Ok(PolicyChange { consumer, differences, consequences, is_made: true })
    }
}

/// Restores hidden values. A caller that changes a policy that it was shown sends back the
/// placeholder, which leaves the stored value.
fn keep_hidden(policy: &mut Policy, before: &Value) -> Result<(), InboxError> {
    for (name, value) in policy.kafka.properties.iter_mut().filter(|(_, value)| *value == HIDDEN) {
        let known = before
            .pointer("/kafka/properties")
            .and_then(|properties| properties.get(name))
            .and_then(Value::as_str);
        *value = known.map(str::to_owned).ok_or_else(|| {
            InboxError::Invalid(format!(
                "`kafka.properties.{name}` is `{HIDDEN}`, which stands for \
                the value that is there; there is none"
            ))
        })?;
    }
    Ok(())
}

/// Returns the keys that differ, in order.
pub fn differences(before: &Value, after: &Value) -> Vec<PolicyDifference> {
    let (old, new) = (leaves(before), leaves(after));
    let (old_shown, new_shown) = (leaves(&shown(before)), leaves(&shown(after)));
    let keys: std::collections::BTreeSet<_> = old.keys().chain(new.keys()).collect();
    let differs = keys.into_iter().filter(|key| old.get(*key) != new.get(*key));
    let difference = |key: &String| PolicyDifference {
        key: key.clone(),
        before: old_shown.get(key).cloned(),
        after: new_shown.get(key).cloned(),
    };
    differs.map(difference).collect()
}

/// Collects the values that are not objects, by their dotted keys.
fn leaves(value: &Value) -> BTreeMap<String, Value> {
    fn walk(prefix: &str, value: &Value, found: &mut BTreeMap<String, Value>) {
        match value {
            Value::Object(members) => members.iter().for_each(|(name, member)| {
                let key = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
                walk(&key, member, found);
            }),
            other => drop(found.insert(prefix.to_owned(), other.clone())),
        }
    }
    let mut found = BTreeMap::new();
    walk("", value, &mut found);
    found
}

/// Returns the consequences of a change of policy that an operator must accept first.
fn consequences(consumer: &Consumer, before: &Policy, after: &Policy) -> Vec<Consequence> {
    let mut all = Vec::new();
    of_identity(consumer, before, after, &mut all);
    of_ingress(before, after, &mut all);
    of_topics(before, after, &mut all);
    of_ack(before, after, &mut all);
    of_order(before, after, &mut all);
    of_dedup(before, after, &mut all);
    of_inbox(before, after, &mut all);
    all
}

/// Adds the consequences of another group and other message ids.
fn of_identity(consumer: &Consumer, before: &Policy, after: &Policy, all: &mut Vec<Consequence>) {
    let mut say = |key, text: String| all.push(Consequence { key, text });
    let group = |policy: &Policy| policy.group(&consumer.tenant, &consumer.name);
    if group(before) != group(after) {
        say(
            "kafka.group",
            format!(
                "the group `{}` goes on at its own committed offsets, and without any at the \
                    beginning of what the brokers keep: what the \
                 inbox remembers is a duplicate without effect, and what is older than `retention` \
                 runs again; the offsets of `{}` stay \
                 in the brokers",
                group(after),
                group(before)
            ),
        );
    }
    if before.identity != after.identity {
        say(
            "identity",
            "message ids are made in another way: a message that completed under its old id is not \
                known under its new one, so what is \
             delivered again, or was produced twice, around the change has its effect again; pause \
             first and let producers settle"
                .to_owned(),
        );
    }
}

/// Adds the consequences of another scheme of messages over HTTP, or of none.
fn of_ingress(before: &Policy, after: &Policy, all: &mut Vec<Consequence>) {
    let Some(known) = &before.ingress else { return };
    let text = match &after.ingress {
        None => "requests of senders over HTTP are refused; what is in the inbox is run",
        Some(new) if new.verify != known.verify => {
            "requests are verified in another way, and are refused until the consumer has a secret \
                of that kind; the id of a message over HTTP may be found at another place, so that \
                what is sent again around the change has its effect again"
        }
        Some(_) => return,
    };
    all.push(Consequence { key: "ingress.verify", text: text.to_owned() });
}

/// Adds the consequences of more or fewer topics.
fn of_topics(before: &Policy, after: &Policy, all: &mut Vec<Consequence>) {
    let mut say = |key, text: String| all.push(Consequence { key, text });
    let added: Vec<_> = after
        .topics
        .iter()
        .filter(|topic| !before.topics.contains(topic))
        .map(|topic| format!("`{topic}`"))
        .collect();
    if !added.is_empty() {
        say(
            "topics",
            format!(
                "{} is read from the group's offsets there, and without any from the beginning",
                added.join(", ")
            ),
        );
    }
    let gone: Vec<_> = before
        .topics
        .iter()
        .filter(|topic| !after.topics.contains(topic))
        .map(|topic| format!("`{topic}`"))
        .collect();
    if !gone.is_empty() {
        say(
            "topics",
            format!(
                "what is still unread of {} is not read any more; what is in the inbox is run",
                gone.join(", ")
            ),
        );
    }
}

/// Adds the consequences of another time of the ack.
fn of_ack(before: &Policy, after: &Policy, all: &mut Vec<Consequence>) {
    let mut say = |key, text: String| all.push(Consequence { key, text });
    match (before.ack, after.ack) {
        (Ack::AfterCommit, Ack::AfterInsert) => say(
            "ack",
            "messages are acked before they run: the backlog is in the inbox, the broker's lag no \
                longer shows it, and messages of one \
             partition may run at the same time"
                .to_owned(),
        ),
        (Ack::AfterInsert, Ack::AfterCommit) => {
            say(
                "ack",
                "what is stored and has not run yet is run by retry workers, beside and \
                after messages that come later"
                    .to_owned(),
            );
        }
        _ => {}
    }
}

/// Adds the consequences of another order or sequence.
fn of_order(before: &Policy, after: &Policy, all: &mut Vec<Consequence>) {
    let mut say = |key, text: String| all.push(Consequence { key, text });
    if before.order != after.order {
        say(
            "order",
            "what is in the inbox and did not complete yet stays in the order that it came with, \
                and is in order with nothing that comes \
             after the change: drain the consumer first where that matters"
                .to_owned(),
        );
    }
    if before.sequence != after.sequence {
        say(
            "sequence",
            "what is in the inbox and did not complete yet keeps the place that it came with, and \
                aggregates stay at the versions that \
             were counted last, also where none were counted meanwhile: drain the consumer first \
             where that matters"
                .to_owned(),
        );
    }
}

/// Adds the consequences of deduplication switched on or off.
fn of_dedup(before: &Policy, after: &Policy, all: &mut Vec<Consequence>) {
    let mut say = |key, text: String| all.push(Consequence { key, text });
    match (before.dedup, after.dedup) {
        (Dedup::Inbox, Dedup::Off) => say(
            "dedup",
            "a message that is delivered again has its effect again, also one that completed"
                .to_owned(),
        ),
        (Dedup::Off, Dedup::Inbox) => {
            say(
                "dedup",
                "what completed before the change is not known: delivered again, it has \
                its effect once more"
                    .to_owned(),
            );
        }
        _ => {}
    }
}

/// Adds the consequences of another form of the rows of completed messages. Rows that exist stay as
/// they are.
fn of_inbox(before: &Policy, after: &Policy, all: &mut Vec<Consequence>) {
    let mut say = |key, text: String| all.push(Consequence { key, text });
    match (before.inbox, after.inbox) {
        (RowForm::Full, RowForm::Light) => say(
            "inbox",
            "what completes from now on leaves its id, its position and its times, and cannot be \
                found by key or type; another payload under its id passes for a duplicate"
                .to_owned(),
        ),
        (RowForm::Light, RowForm::Full) => say(
            "inbox",
            "what completed before the change keeps its light row: another payload under its id \
                still passes for a duplicate"
                .to_owned(),
        ),
        _ => {}
    }
}

/// Returns the error for a change of `retention`. Rows stay in their retention class, and a claim
/// looks only there. If rows moved while an unreachable host still claims in the former class, they
/// would be claimed twice.
fn refuse_retention(consumer: &Consumer, difference: &PolicyDifference) -> InboxError {
    let text =
        |value: &Option<Value>| value.as_ref().and_then(Value::as_str).unwrap_or("7d").to_owned();
    InboxError::conflict(format!(
        "`retention` is {} and cannot become {}: the rows of a consumer stay in their class. Drain \
            `{2}/{3}`, create another consumer \
         with the retention that you want, and seek it to where the group of `{3}` stands \
         (`oncebox consumer show {3} --tenant {2}`)",
        text(&difference.before),
        text(&difference.after),
        consumer.tenant,
        consumer.name
    ))
}

/// Checks that no live deployment has a limit above the policy's. A deployment may run under lower
/// limits than its consumer, never under higher ones.
async fn check_deployments(
    connection: &mut PgConnection,
    consumer: &Consumer,
    policy: &Policy,
) -> Result<(), InboxError> {
    let live = select("WHERE d.consumer_id = $1 AND d.ended_at IS NULL")
        .bind(consumer.consumer_id)
        .fetch_all(connection)
        .await?;
    for deployment in live {
        let limits = deployment.limits.as_object().cloned().unwrap_or_default();
        if let Err(error) = check_limits(&limits, policy) {
            return Err(InboxError::conflict(format!(
                "deployment {} of {} has limits of its own, which stay: {error}; deploy it again \
                    with lower ones first",
                deployment.deployment_id, deployment.slot
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

    use super::*;

    fn policy(text: &str) -> Policy {
        Policy::parse(&format!("topics = ['t']\n{text}")).unwrap()
    }

    fn consumer() -> Consumer {
        Consumer {
            consumer_id: 1,
            tenant_id: 1,
            tenant: "acme".to_owned(),
            name: "orders".to_owned(),
            policy: Value::Null,
            state: oncebox_model::status::ConsumerState::Running,
            revision: 0,
            generation: 0,
            seek: None,
            tenant_state: oncebox_model::status::TenantState::Active,
            quarantine: None,
            created_at: chrono::DateTime::UNIX_EPOCH,
        }
    }

    #[track_caller]
    fn check(before: &str, after: &str, keys: &[&str], asked: &[&str]) {
        let (before, after) = (policy(before), policy(after));
        let found: Vec<_> = differences(&json!(before), &json!(after))
            .into_iter()
            .map(|difference| difference.key)
            .collect();
        assert_eq!(found, keys);
        let asks: Vec<_> = consequences(&consumer(), &before, &after)
            .into_iter()
            .map(|consequence| consequence.key)
            .collect();
        assert_eq!(asks, asked);
    }

    #[test]
    fn what_has_consequences_says_so() {
        const PLAIN: &str = "ack = 'after_commit'";
        check(PLAIN, PLAIN, &[], &[]);
        check(PLAIN, "ack = 'after_commit'\nbatch.messages_max = 64", &[], &[]);
        check(
            PLAIN,
            "ack = 'after_commit'\nbatch.messages_max = 32\nretry.workers = 4",
            &["batch.messages_max", "retry.workers"],
            &[],
        );
        check(PLAIN, "ack = 'after_insert'", &["ack"], &["ack"]);
        check(PLAIN, "ack = 'after_commit'\ndedup = 'off'", &["dedup"], &["dedup"]);
        check(PLAIN, "ack = 'after_commit'\ninbox = 'light'", &["inbox"], &["inbox"]);
        check("ack = 'after_commit'\ninbox = 'light'", PLAIN, &["inbox"], &["inbox"]);
        check(PLAIN, "ack = 'after_commit'\norder = 'key'", &["order"], &["order"]);
        check(
            "ack = 'after_commit'\norder = 'key'",
            "ack = 'after_commit'\norder = 'key'\nsequence.version.header = 'v'",
            &["sequence.gap", "sequence.gap_wait_ms", "sequence.version.header"],
            &["sequence"],
        );
        check(PLAIN, "ack = 'after_commit'\nkafka.group = 'g'", &["kafka.group"], &["kafka.group"]);
        check(
            PLAIN,
            "ack = 'after_commit'\nkafka.group = 'oncebox.acme.orders'",
            &["kafka.group"],
            &[],
        );
        // S1-043.
        check(
            PLAIN,
            "ack = 'after_commit'\nidentity.scoped_by_event_type = true",
            &["identity.scoped_by_event_type"],
            &["identity"],
        );
    }

    #[test]
    fn values_of_properties_are_not_shown_but_their_change_is() {
        let of = |value: &str| {
            json!(policy(&format!(
                "ack = 'after_commit'\nkafka.properties = {{ 'sasl.password' = '{value}' }}"
            )))
        };
        let found = differences(&of("hunter2"), &of("hunter3"));
        assert_eq!(found.len(), 1);
        assert!(!format!("{found:?}").contains("hunter"), "{found:?}");
        let mut again =
            policy("ack = 'after_commit'\nkafka.properties = { 'sasl.password' = '…' }");
        keep_hidden(&mut again, &of("hunter2")).unwrap();
        assert_eq!(again.kafka.properties["sasl.password"], "hunter2");
        let mut new = policy("ack = 'after_commit'\nkafka.properties = { 'sasl.username' = '…' }");
        assert!(keep_hidden(&mut new, &of("hunter2")).is_err());
    }
}
