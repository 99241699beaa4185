//! `oncebox test`

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, ValueEnum};
use oncebox_devkit::test::{self, TestOptions};
use oncebox_server::Config;

use super::deploy::setting;

#[derive(Args)]
pub(super) struct TestArgs {
    /// The component
    component: PathBuf,
    /// File of messages, JSON objects one after another; `-` is standard input
    #[arg(long, short)]
    message: PathBuf,
    /// SQL files with the handler's tables and what is to be in them
    #[arg(long, conflicts_with = "database_url")]
    schema: Vec<PathBuf>,
    /// Run in this database instead of a scratch one; nothing is kept there either. Needs the
    /// master key
    #[arg(long, requires = "tenant")]
    database_url: Option<String>,
    /// Tenant whose tables are used, with `--database-url`
    #[arg(long, requires = "database_url")]
    tenant: Option<String>,
    /// Consumer whose limits and inbox are used, where the tenant has several
    #[arg(long, requires = "database_url")]
    consumer: Option<String>,
    /// A setting that the handler reads, `key=value`
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = setting)]
    settings: Vec<(String, String)>,
    /// Deliver every message a second time and show that nothing happens
    #[arg(long)]
    twice: bool,
    /// How every message is to end
    #[arg(long, value_enum, default_value_t = Outcome::Ok)]
    expect: Outcome,
}

/// How a message can end: ok, or the kind of failure that its inbox row names.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Outcome {
    Ok,
    Retry,
    Reject,
    Park,
    Other,
    Trap,
    Deadline,
    OutOfMemory,
    StatementRefused,
    SqlError,
    Limit,
    Contention,
    BadResult,
}

impl Outcome {
    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// Runs the messages and prints the report.
pub(super) async fn run(config: &Config, args: TestArgs, json: bool) -> Result<()> {
    let TestArgs {
        component,
        message,
        schema,
        database_url,
        tenant,
        consumer,
        settings,
        twice,
        expect,
    } = args;
    let options = TestOptions {
        component,
        message,
        schema,
        database_url,
        tenant,
        consumer,
        settings,
        twice,
        expect: expect.name(),
    };
    test::run(config, options, json).await
}
