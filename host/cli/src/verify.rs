//! `oncebox verify`: every crash window and every kind of delivery, for one handler.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use oncebox_devkit::{
    messages,
    scratch::interruptible,
    verify::{Request, verify},
};
use oncebox_devkit::{output, slot::handler_name, test};
use oncebox_server::Config;

use super::deploy::setting;

#[derive(Args)]
pub(super) struct VerifyArgs {
    /// The component
    component: PathBuf,
    /// File of messages, JSON objects one after another; `-` is standard input
    #[arg(long, short)]
    message: PathBuf,
    /// SQL files with the handler's tables and what is to be in them
    #[arg(long)]
    schema: Vec<PathBuf>,
    /// A setting that the handler reads, `key=value`
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = setting)]
    settings: Vec<(String, String)>,
    /// Chooses orders and repetitions; the same seed makes the same ones
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Fail for warnings too
    #[arg(long)]
    strict: bool,
}

pub(super) async fn run(config: &Config, args: VerifyArgs, json: bool) -> Result<()> {
    let messages = messages::read(&args.message)?;
    let component = test::read_component(&args.component)?;
    let name = handler_name(&args.component);
    let request = Request {
        path: &args.component,
        handler: test::valid_name(&name),
        component: &component,
        messages,
        schema: &args.schema,
        settings: &args.settings,
        seed: args.seed,
        cache_dir: test::cache_dir(config),
    };
    let report = interruptible(verify(request)).await?;
    if json {
        output::json(&report.json(args.strict))?;
    } else {
        report.print();
    }
    report.verdict(args.strict)
}
