//! Holds the servers that test processes share; the tests start it themselves.
//!
//! `services kafka` and `services postgres` run until nobody has used the server for a
//! while. `services hold-postgres <dir>` starts a private PostgreSQL, prints its process id,
//! and keeps it until standard input ends or it is killed.

use std::path::Path;

use anyhow::{Context, Result, bail};
use oncebox_devkit::local::postgres::{PostgresOptions, PrivatePostgres};
use oncebox_tests::kafka::KafkaServer;
use oncebox_tests::services::supervise;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["kafka"] => supervise::<KafkaServer>(),
        ["postgres"] => supervise::<PrivatePostgres>(),
        ["hold-postgres", dir] => hold_postgres(Path::new(dir)),
        _ => bail!("usage: services kafka | postgres | hold-postgres <dir>"),
    }
}

fn hold_postgres(dir: &Path) -> Result<()> {
    let server = PrivatePostgres::start(PostgresOptions::new(dir))?;
    println!("{}", server.pid().context("the server has ended")?);
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())
        .context("failed to read standard input")?;
    Ok(())
}
