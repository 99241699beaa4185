//! (d), (d64) and (d-outbox): see `bench/consumer/src/by_hand.rs`.

use std::process::Command;

use super::{Setting, ours};
use crate::sent::sent_topic;

pub(super) fn command(setting: &Setting<'_>, messages_max: usize, has_outbox: bool) -> Command {
    let mut command = ours(setting, "by-hand");
    command.args([
        "--topic",
        setting.topic,
        "--group",
        setting.group,
        "--partitions",
        &setting.load.partitions.to_string(),
        "--messages-max",
        &messages_max.to_string(),
    ]);
    if has_outbox {
        command.args(["--outbox-to", &sent_topic(setting.group)]);
    }
    command
}
