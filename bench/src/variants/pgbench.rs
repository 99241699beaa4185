//! (a): the statements of the effect without broker, consumer and duplicates. It is the floor under
//! a transaction per message, for any client.

use std::{path::PathBuf, process::Command};

use anyhow::{Context, Result};

use super::Setting;

/// Finds the program in the search path or in Debian's folder for it.
pub fn program() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let beside_the_server = std::fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path().join("bin"));
    std::env::split_paths(&path)
        .chain(beside_the_server)
        .map(|dir| dir.join("pgbench"))
        .find(|path| path.is_file())
}

pub(super) fn command(setting: &Setting<'_>) -> Result<Command> {
    let script = setting.log.with_extension("sql");
    std::fs::write(&script, statements(setting))
        .with_context(|| format!("failed to write `{}`", script.display()))?;
    let clients = setting.load.partitions.to_string();
    let each = setting.load.messages / setting.load.partitions as usize;
    let mut command = Command::new(program().context("there is no `pgbench`")?);
    command
        .args(["--no-vacuum", "--protocol=prepared", "--client", &clients, "--jobs", &clients])
        .args(["--transactions", &each.to_string(), "--define", "i=0", "--file"])
        .arg(script)
        .arg(&setting.database.url);
    Ok(command)
}

fn statements(setting: &Setting<'_>) -> String {
    let note = "x".repeat(setting.load.payload_bytes.saturating_sub(80));
    let last = setting.load.workload.accounts() - 1;
    format!(
        "\\set i :i + 1\n\
         \\set account random(0, {last})\n\
         \\set amount random(1, 999)\n\
         BEGIN;\n\
         INSERT INTO processed (message_id) VALUES ('m-' || :client_id || '-' || :i) ON CONFLICT \
         DO NOTHING;\n\
         INSERT INTO orders (id, account, amount, note) VALUES ('o-' || :client_id || '-' || :i, \
         :account, :amount, '{note}');\n\
         UPDATE account SET balance = balance + :amount, n = n + 1 WHERE id = :account;\n\
         UPDATE processed SET done = true WHERE message_id = 'm-' || :client_id || '-' || :i;\n\
         COMMIT;\n"
    )
}
