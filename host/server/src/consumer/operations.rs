//! Changes of a consumer that need more than stopping it: the end of a drain, a seek, a removal.
//! Any host carries them out. If a host dies on the way, another host does the rest.

use anyhow::{Context, Result};
use oncebox_control::{DeletionStep, DesiredState, LastOfConsumer, SeekInHand, SeekTurn};
use oncebox_kafka::{SeekError, delete_group, set_offsets};
use oncebox_model::{hooks, status::ConsumerState};
use serde_json::{Value, json};

use crate::context::HostContext;

/// Most attempts to delete a group that still has members, one a second: longer than sessions
/// usually last.
const GROUP_ATTEMPTS: u32 = 60;
/// Batches of rows that are deleted before other consumers' changes have their turn.
const BATCHES: usize = 20;

/// Carries out the next step of a consumer's change. Returns the text of what the change waits for,
/// if anything.
pub(crate) async fn carry_out(
    host: &HostContext,
    desired: &DesiredState,
) -> Result<Option<String>> {
    let _permit = host.changes.acquire().await.context("the host ends")?;
    match desired.state {
        ConsumerState::Deleting => remove(host, desired).await,
        ConsumerState::Draining => host
            .control
            .reconciliation()
            .finish_drain(desired)
            .await
            .map(|_| None)
            .map_err(Into::into),
        _ if desired.is_sought => seek(host, desired).await,
        _ => Ok(None),
    }
}

async fn seek(host: &HostContext, desired: &DesiredState) -> Result<Option<String>> {
    let hand = match host.control.reconciliation().seek_turn(desired.consumer_id).await? {
        SeekTurn::None => return Ok(None),
        SeekTurn::Waits(hosts) => {
            return Ok(Some(format!("the seek waits until it is stopped on {}", hosts.join(", "))));
        }
        SeekTurn::Ours(hand) => *hand,
    };
    hooks::point("consumer:seek:before");
    let SeekInHand { consumer, offsets, .. } = &hand;
    let policy = consumer.policy()?;
    let config = host.kafka.config(&consumer.tenant, &consumer.name, &policy);
    let offsets = offsets.iter().map(|to| (to.topic.clone(), to.partition, to.offset)).collect();
    if let Err(error) = set_offsets(config, offsets, !policy.replay.allowed).await {
        return Ok(Some(format!("the seek is tried again: {error}")));
    }
    hooks::point("consumer:seek:committed");
    tracing::info!(
        tenant = consumer.tenant,
        consumer = consumer.name,
        "the offsets of a consumer's group were set"
    );
    hand.done().await?;
    Ok(None)
}

async fn remove(host: &HostContext, desired: &DesiredState) -> Result<Option<String>> {
    for _ in 0..BATCHES {
        match host.control.reconciliation().delete_some(desired).await? {
            DeletionStep::None => return Ok(None),
            DeletionStep::Waits(hosts) => {
                return Ok(Some(format!(
                    "the end waits until it is stopped on {}",
                    hosts.join(", ")
                )));
            }
            DeletionStep::Removed(_) => {}
            DeletionStep::Last(last) => return end(host, *last).await,
        }
    }
    Ok(Some("the rows of its inbox are being deleted".to_owned()))
}

async fn end(host: &HostContext, last: LastOfConsumer) -> Result<Option<String>> {
    let (group, is_member_left) = remove_group(host, &last).await;
    if is_member_left && host.group_attempt(last.consumer.consumer_id) < GROUP_ATTEMPTS {
        return Ok(Some(format!(
            "the end waits for the kafka group: {}",
            group["error"].as_str().unwrap_or_default()
        )));
    }
    let (tenant, name) = (last.consumer.tenant.clone(), last.consumer.name.clone());
    last.remove(json!({ "kafka_group": group })).await?;
    tracing::info!(tenant, consumer = name, %group, "a consumer was deleted");
    Ok(None)
}

/// Deletes the consumer's Kafka group. Returns the result for the audit log, and whether the group
/// has members that may soon be gone.
async fn remove_group(host: &HostContext, last: &LastOfConsumer) -> (Value, bool) {
    let consumer = &last.consumer;
    let policy = match consumer.policy() {
        Ok(policy) => policy,
        Err(error) => return (json!({ "gone": false, "error": error.to_string() }), false),
    };
    let group = policy.group(&consumer.tenant, &consumer.name);
    match delete_group(&host.kafka.config(&consumer.tenant, &consumer.name, &policy)).await {
        Ok(_) => (json!({ "name": group, "gone": true }), false),
        Err(error) => {
            let text = error.to_string();
            (
                json!({ "name": group, "gone": false, "error": text }),
                matches!(error, SeekError::HasMembers(_)),
            )
        }
    }
}
