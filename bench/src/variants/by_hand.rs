//! (d): see `bench/consumer/src/by_hand.rs`.

use std::process::Command;

use super::{Setting, ours};

pub(super) fn command(setting: &Setting<'_>) -> Command {
    let mut command = ours(setting, "by-hand");
    command.args([
        "--topic",
        setting.topic,
        "--group",
        setting.group,
        "--partitions",
        &setting.load.partitions.to_string(),
    ]);
    command
}
