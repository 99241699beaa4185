//! (b): see `bench/consumer/src/native.rs`.

use std::process::Command;

use anyhow::Result;
use oncebox_model::policy::RowForm;

use super::{Batch, Setting, host, ours};

pub(super) async fn command(setting: &Setting<'_>, batch: Batch) -> Result<Command> {
    host::create_consumer(setting, batch, RowForm::Full).await?;
    let mut command = ours(setting, "native");
    command.args([
        "--master-key",
        &setting.servers.master_key,
        "--tenant",
        &setting.servers.tenant.name,
        "--consumer",
        host::CONSUMER,
    ]);
    Ok(command)
}
