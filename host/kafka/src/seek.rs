//! Reading, setting and deleting a group's offsets, each with a client of its own that is no member
//! of the group.

use rdkafka::{
    ClientConfig,
    admin::{AdminClient, AdminOptions},
    client::DefaultClientContext,
    config::RDKafkaLogLevel,
    types::RDKafkaErrorCode,
};

use self::group_client::{ASK, GroupClient};
pub use self::target::{GroupPosition, SeekError, SeekTo};
use crate::{config::ConsumerConfig, error::ConsumerError};

mod group_client;
mod target;

/// Returns the positions of a consumer's group in each partition of its topics, with the offsets
/// that `to` stands for. With a horizon, in milliseconds since 1970, also returns the first offsets
/// of records that are not older.
///
/// # Errors
///
/// A [`SeekError`] when `to` cannot be met, a property is refused or brokers do not answer.
pub async fn positions(
    config: ConsumerConfig,
    to: SeekTo,
    horizon_ms: Option<i64>,
) -> Result<Vec<GroupPosition>, SeekError> {
    blocking(move || GroupClient::new(&config)?.positions(&config, &to, horizon_ms)).await
}

/// Sets offsets of a consumer's group, which must have no members, and checks the result. With
/// `only_forward`, a partition keeps an offset that is past the given one.
///
/// # Errors
///
/// A [`SeekError`] when the group has members, a property is refused or brokers do not answer.
pub async fn set_offsets(
    config: ConsumerConfig,
    mut offsets: Vec<(String, i32, i64)>,
    only_forward: bool,
) -> Result<(), SeekError> {
    blocking(move || {
        let asking = GroupClient::new(&config)?;
        if only_forward {
            asking.leave_behind(&mut offsets)?;
        }
        asking.set(&config, &offsets)
    })
    .await
}

/// Deletes a consumer's group with its offsets. Returns false if there was no group.
///
/// # Errors
///
/// A [`SeekError`] when the group has members, the broker is an embedded one, or brokers do not
/// answer.
pub async fn delete_group(config: &ConsumerConfig) -> Result<bool, SeekError> {
    let asking = config.clone();
    // librdkafka ends the process when a broker does not know how to delete a group.
    if blocking(move || Ok(GroupClient::new(&asking)?.is_embedded())).await? {
        return Err(SeekError::Broker {
            what: "the group stays",
            error: "an embedded broker cannot delete groups".to_owned(),
        });
    }
    let mut client = ClientConfig::new();
    client.set_log_level(RDKafkaLogLevel::Emerg);
    for (name, value) in config.connection_properties() {
        client.set(name, value);
    }
    let failed = |error| ConsumerError::from_creation(error, &config.secrets());
    let admin: AdminClient<DefaultClientContext> = client.create().map_err(failed)?;
    let group = config.group();
    let options = AdminOptions::new().request_timeout(Some(ASK)).operation_timeout(Some(ASK));
    let results = admin
        .delete_groups(&[&group], &options)
        .await
        .map_err(SeekError::broker("failed to delete the group"))?;
    match results.into_iter().next() {
        None | Some(Ok(_)) => Ok(true),
        Some(Err((_, RDKafkaErrorCode::GroupIdNotFound))) => Ok(false),
        Some(Err((group, RDKafkaErrorCode::NonEmptyGroup))) => Err(SeekError::HasMembers(group)),
        Some(Err((_, code))) => {
            Err(SeekError::Broker { what: "failed to delete the group", error: code.to_string() })
        }
    }
}

/// Runs a blocking request outside the runtime's threads.
async fn blocking<T: Send + 'static>(
    ask: impl FnOnce() -> Result<T, SeekError> + Send + 'static,
) -> Result<T, SeekError> {
    let asked = tokio::task::spawn_blocking(ask).await;
    asked.map_err(|error| SeekError::Broker {
        what: "the client's task did not end",
        error: error.to_string(),
    })?
}
