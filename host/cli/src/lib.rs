//! The command line: one file per noun.

#[macro_use]
extern crate oncebox_devkit;

// The words of the command line.
mod arguments;
// Options that name a server.
mod server;
// The host.
mod keys;
mod migrate;
// Authors of handlers.
mod choose;
mod new;
mod dev;
mod send;
mod demo;
mod test;
mod verify;
mod component;
mod policy;
mod completions;
mod manual;
// Tenants and consumers.
mod tenant;
mod consumer;
// Versions and deployments.
mod version;
mod deploy;
mod canary;
mod shadow;
mod rights;
mod rollback;
mod deployments;
mod apply;
// Messages.
mod inbox;
mod outgoing;
mod endpoint;
mod job;
mod replay;
mod why;
mod erase;
// What the inbox remembers.
mod horizon;
// The installation.
mod databases;
mod hosts;
mod doctor;
mod retention;
mod archive;
mod storage;
mod token;
mod audit;

use std::{path::PathBuf, process::ExitCode};

use anyhow::Result;
use clap::{Parser, Subcommand};
use oncebox_devkit::{
    api::{Api, Remote, local_api},
    dev::{
        quiet,
        running::{filled_in, ready},
    },
    output,
};
use oncebox_server::{Config, error_text, logs, serve};

use self::{arguments::Arguments, server::ServerArgs};

/// Message handlers as WebAssembly components, each effect exactly once.
#[derive(Parser)]
#[command(name = "oncebox", version, max_term_width = 100)]
struct Cli {
    /// The host's configuration
    #[arg(long, short, global = true, env = "ONCEBOX_CONFIG")]
    config: Option<PathBuf>,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
    #[command(flatten)]
    server: ServerArgs,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a host: consume, run handlers, commit, ack
    Serve,
    /// Create the database where it does not exist, and bring it up to date
    Migrate(migrate::MigrateArgs),
    /// Print what an administrator of a PostgreSQL server gives the hosts' login, as SQL
    Rights(rights::RightsArgs),
    /// The master key
    #[command(subcommand)]
    Keys(keys::KeysCommand),
    /// Say which pattern makes an effect safe to repeat, by questions about it
    Choose(choose::ChooseArgs),
    /// Write a new handler's project: sources, build script, tables, messages
    New(new::NewArgs),
    /// Run a host with a PostgreSQL and a broker of its own
    Dev(dev::DevArgs),
    /// Publish the messages of a file
    Send(send::SendArgs),
    /// Run the main job on real input, kill it again and again, and count the effects
    Demo(demo::DemoArgs),
    /// Run a handler on messages and show what it does; nothing is kept
    Test(test::TestArgs),
    /// Kill a handler at every step, deliver its messages in every way, compare the effects
    Verify(verify::VerifyArgs),
    /// Components as files
    #[command(subcommand)]
    Component(component::ComponentCommand),
    /// Policies as files
    #[command(subcommand)]
    Policy(policy::PolicyCommand),
    /// Print the OpenAPI document of the HTTP API
    Openapi,
    /// Print a script that completes commands in a shell
    Completions(completions::CompletionsArgs),
    /// Write the manual pages of all commands into a folder
    Manual(manual::ManualArgs),
    #[command(flatten)]
    OfApi(ApiCommand),
}

/// Commands that speak the API.
#[derive(Subcommand)]
enum ApiCommand {
    /// Tenants
    #[command(subcommand)]
    Tenant(tenant::TenantCommand),
    /// Consumers
    #[command(subcommand)]
    Consumer(consumer::ConsumerCommand),
    /// Versions of handlers
    #[command(subcommand)]
    Version(version::VersionCommand),
    /// Make a component the live handler of an event type
    Deploy(deploy::DeployArgs),
    /// Try a version on a share of the ordering keys
    #[command(subcommand)]
    Canary(canary::CanaryCommand),
    /// Try a version on live messages, without an effect
    #[command(subcommand)]
    Shadow(shadow::ShadowCommand),
    /// Go back to the version before, or to a named one
    Rollback(rollback::RollbackArgs),
    /// List what is deployed, and how far the hosts are with it
    Deployments(deployments::DeploymentsArgs),
    /// Make tenants, consumers and deployments what a file says
    Apply(apply::ApplyArgs),
    /// Look into the inbox
    #[command(subcommand)]
    Inbox(inbox::InboxCommand),
    /// Messages that handlers send after their commit
    #[command(subcommand)]
    Outgoing(outgoing::OutgoingCommand),
    /// Places outside to which handlers send
    #[command(subcommand)]
    Endpoint(endpoint::EndpointCommand),
    /// What redrives, retries and discards of many messages did, and how far they are
    #[command(subcommand)]
    Job(job::JobCommand),
    /// Run completed messages again, on purpose
    #[command(subcommand)]
    Replay(replay::ReplayCommand),
    /// Show the history of a message: what became of it, what it waits for, what to do
    Why(why::WhyArgs),
    /// Erase the payloads of a data subject, and prove it
    Erase(erase::EraseArgs),
    /// List the databases in which hosts place tenants
    Databases,
    /// List the hosts that run
    Hosts,
    /// Look whether the database keeps tenants apart, and say what to do where it does not
    Doctor,
    /// What is removed when, and removing it now
    #[command(subcommand)]
    Retention(retention::RetentionCommand),
    /// Messages that were archived before their removal
    #[command(subcommand)]
    Archive(archive::ArchiveCommand),
    /// Show how large the inboxes are, and how large they will be
    Storage(storage::StorageArgs),
    /// Who may use the API
    #[command(subcommand)]
    Token(token::TokenCommand),
    /// List who changed what
    Audit(audit::AuditArgs),
}

impl Command {
    /// Returns whether the command only asks and prints, so that nothing is left half done when it
    /// ends in the middle.
    fn is_short(&self) -> bool {
        matches!(
            self,
            Self::OfApi(_)
                | Self::Component(_)
                | Self::Policy(_)
                | Self::Choose(_)
                | Self::New(_)
                | Self::Openapi
                | Self::Completions(_)
        )
    }
}

/// Checks that words are a command line of this program, without its name.
///
/// # Errors
/// The error that a user sees.
pub fn check_command<'a>(words: impl IntoIterator<Item = &'a str>) -> Result<(), clap::Error> {
    Cli::try_parse_from(std::iter::once("oncebox").chain(words)).map(drop)
}

/// Parses the command line, runs the command, and ends with one clear line when something is wrong.
pub fn main() -> ExitCode {
    let mut words = std::env::args_os().skip(1);
    // A host and `verify` start these subcommands of this program; they are no commands of an
    // operator.
    match words.next().as_ref().and_then(|word| word.to_str()) {
        // The compiler needs neither a configuration nor our threads: it reads a component and
        // writes its code.
        Some(oncebox_runtime::COMPILE_SUBCOMMAND) => {
            return oncebox_runtime::compile_stdin(
                &words.next().unwrap_or_default().to_string_lossy(),
            );
        }
        Some(oncebox_devkit::verify::SUBCOMMAND) => {
            return on_executor(oncebox_devkit::verify::work());
        }
        _ => {}
    }
    let (cli, arguments) = arguments::parse();
    if cli.command.is_short() {
        // A reader that closes the pipe ends the command, as everywhere, and does not make it
        // panic.
        // SAFETY: no other thread runs yet, and the default action needs no handler.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    }
    on_executor(run(cli, arguments))
}

/// Runs a future to completion on an executor of its own.
fn on_executor(work: impl Future<Output = Result<()>>) -> ExitCode {
    let runtime = match oncebox_runtime::executor() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error.into()),
    };
    let outcome = runtime.block_on(work);
    // Tasks that still run after the drain's deadline hold no promise.
    runtime.shutdown_timeout(std::time::Duration::from_secs(1));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

fn fail(error: &anyhow::Error) -> ExitCode {
    let mut lines = error_text::lines(error).into_iter();
    eprintln!("error: {}", lines.next().unwrap_or_default());
    lines.for_each(|line| eprintln!("  {line}"));
    ExitCode::FAILURE
}

async fn run(cli: Cli, arguments: Arguments) -> Result<()> {
    let config = Config::load(cli.config.as_deref())?;
    let json = cli.json;
    if !matches!(cli.command, Command::OfApi(_)) {
        cli.server.refuse()?;
    }
    match cli.command {
        Command::Serve => {
            let telemetry = logs::start(&config.log, &config.telemetry)?;
            let served = serve::serve(&config).await;
            telemetry.end().await;
            served
        }
        Command::Migrate(args) => migrate::run(&config, &args, json).await,
        Command::Rights(args) => rights::run(&args, json),
        Command::Keys(command) => keys::run(&ready(&config).await?, command, json).await,
        Command::Choose(args) => choose::run(&args, json),
        Command::New(args) => new::run(args, json),
        Command::Dev(args) => {
            let telemetry = logs::start(&quiet(&config.log), &config.telemetry)?;
            let ended = dev::run(config, args).await;
            telemetry.end().await;
            ended
        }
        Command::Send(args) => send::run(&config, args, json).await,
        Command::Demo(args) => demo::run(args, json).await,
        Command::Test(args) => test::run(&config, args, json).await,
        Command::Verify(args) => verify::run(&config, args, json).await,
        Command::Component(command) => component::run(command, json),
        Command::Policy(command) => policy::run(command, json),
        Command::Openapi => output::json(&oncebox_api::document()),
        Command::Completions(args) => completions::run(&args),
        Command::Manual(args) => manual::run(&args, json),
        command @ Command::OfApi(_) => {
            let api = api(&config, &cli.server).await?;
            match arguments.complete(&api, command).await? {
                Command::OfApi(command) => speak(&api, command, json).await,
                _ => unreachable!("names alone were added"),
            }
        }
    }
}

async fn speak(api: &Api, command: ApiCommand, json: bool) -> Result<()> {
    match command {
        ApiCommand::Tenant(command) => tenant::run(api, command, json).await,
        ApiCommand::Consumer(command) => consumer::run(api, command, json).await,
        ApiCommand::Version(command) => version::run(api, command, json).await,
        ApiCommand::Deploy(args) => deploy::run(api, args, json).await,
        ApiCommand::Canary(command) => canary::run(api, command, json).await,
        ApiCommand::Shadow(command) => shadow::run(api, command, json).await,
        ApiCommand::Rollback(args) => rollback::run(api, args, json).await,
        ApiCommand::Deployments(args) => deployments::run(api, args, json).await,
        ApiCommand::Apply(args) => apply::run(api, args, json).await,
        ApiCommand::Inbox(command) => inbox::run(api, command, json).await,
        ApiCommand::Outgoing(command) => outgoing::run(api, command, json).await,
        ApiCommand::Endpoint(command) => endpoint::run(api, command, json).await,
        ApiCommand::Job(command) => job::run(api, command, json).await,
        ApiCommand::Replay(command) => replay::run(api, command, json).await,
        ApiCommand::Why(args) => why::run(api, args, json).await,
        ApiCommand::Erase(args) => erase::run(api, args, json).await,
        ApiCommand::Databases => databases::run(api, json).await,
        ApiCommand::Hosts => hosts::run(api, json).await,
        ApiCommand::Doctor => doctor::run(api, json).await,
        ApiCommand::Retention(command) => retention::run(api, command, json).await,
        ApiCommand::Archive(command) => archive::run(api, command, json).await,
        ApiCommand::Storage(args) => storage::run(api, args, json).await,
        ApiCommand::Token(command) => token::run(api, command, json).await,
        ApiCommand::Audit(args) => audit::run(api, args, json).await,
    }
}

/// Returns the API of the server that is named, else that of this process, over the database.
async fn api(config: &Config, server: &ServerArgs) -> Result<Api> {
    match &server.server {
        Some(url) => {
            Ok(Api::There(Remote::new(url, &server.remote(), std::env::var("ONCEBOX_TOKEN").ok())?))
        }
        None => {
            server.refuse()?;
            let config = filled_in(config).await?;
            local_api(&config, ready(&config).await?)
        }
    }
}
