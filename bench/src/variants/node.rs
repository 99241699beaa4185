//! (f): see `bench/node/consumer.js`.

use std::{path::PathBuf, process::Command};

use super::{Programs, Setting};

/// Returns the path of a copy of `bench/node` with its dependencies installed.
pub(super) fn dir(programs: &Programs) -> PathBuf {
    programs.root.join("target/bench/node")
}

pub(super) fn command(setting: &Setting<'_>) -> Command {
    let mut command = Command::new("node");
    command
        .arg("consumer.js")
        .current_dir(dir(setting.programs))
        .env("DATABASE_URL", &setting.database.url)
        .env("BROKERS", setting.servers.kafka.bootstrap())
        .env("TOPIC", setting.topic)
        .env("GROUP", setting.group)
        .env("PARTITIONS", setting.load.partitions.to_string())
        .env("NODE_ENV", "production");
    command
}
