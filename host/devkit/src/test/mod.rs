//! `oncebox test`: runs a handler on messages, shows everything it does, and keeps none of it.

mod report;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context, Result, bail};
use oncebox_control::{Consumer, Control};
use oncebox_inbox::{Budget, ConsumerInbox, Rehearsal, Rehearsed, Sessions};
use oncebox_model::{
    handler::{Handler, Handlers},
    message::Message,
    policy::Policy,
    record::Record,
};
use oncebox_runtime::{
    HandlerSettings, LoadedComponent, Recorder, RunRecord, RuntimeConfig, WasmRuntime,
};

use self::report::TestReport;
use crate::{
    messages::{self, FileMessage, IDENTITY},
    scratch::{Furnished, Scratch, TriedHandler, interruptible},
    tables::{self, RowChange, Snapshot, Table},
};
use oncebox_server::Config;

/// Options of `oncebox test`.
pub struct TestOptions {
    /// File of the component.
    pub component: PathBuf,
    /// File of messages; `-` is standard input.
    pub message: PathBuf,
    /// SQL files with the handler's tables.
    pub schema: Vec<PathBuf>,
    /// URL of the database to run in; none for a scratch one.
    pub database_url: Option<String>,
    /// Tenant whose tables are used, with a database URL.
    pub tenant: Option<String>,
    /// Consumer whose limits and inbox are used, where the tenant has several.
    pub consumer: Option<String>,
    /// Settings that the handler reads.
    pub settings: Vec<(String, String)>,
    /// Whether every message is delivered a second time.
    pub twice: bool,
    /// Outcome that every message must have: `ok`, or the kind of failure that its inbox row names.
    pub expect: String,
}

/// Topic that records claim to come from.
const TOPIC: &str = "test";

/// All that is known of one message.
struct Tried<'a> {
    message: &'a FileMessage,
    first: Rehearsed,
    run: RunRecord,
    changes: Vec<RowChange>,
    /// Outcome of the second delivery, and the changes that it made.
    second: Option<(Rehearsed, Vec<RowChange>)>,
}

/// Runs the messages and prints the report.
pub async fn run(config: &Config, args: TestOptions, json: bool) -> Result<()> {
    let file = messages::read(&args.message)?;
    let component = read_component(&args.component)?;
    let runtime = WasmRuntime::new(RuntimeConfig {
        instances_max: 1,
        count_fuel: true,
        cache_dir: cache_dir(config),
        component_bytes_max: config.runtime.component_bytes_max,
        ..RuntimeConfig::default()
    })?;
    let loaded = runtime
        .load(&component)
        .await
        .with_context(|| format!("`{}` cannot be run", args.component.display()))?;
    interruptible(try_out(config, &args, &file, &component, (&runtime, &loaded), json)).await
}

async fn try_out(
    config: &Config,
    args: &TestOptions,
    file: &[FileMessage],
    component: &[u8],
    (runtime, loaded): (&WasmRuntime, &LoadedComponent),
    json: bool,
) -> Result<()> {
    let scratch = if args.database_url.is_some() { None } else { Some(Scratch::start().await?) };
    let place = match &scratch {
        None => given(config, args).await?,
        Some(scratch) => {
            let handler = crate::slot::handler_name(&args.component);
            let policy =
                Policy::parse(&format!("topics = ['{TOPIC}']\nack = 'after_commit'\n{IDENTITY}"))?;
            let subject = TriedHandler {
                handler: valid_name(&handler),
                component,
                schema: &args.schema,
                settings: &args.settings,
                policy: &policy,
            };
            scratch.furnish(&subject).await?
        }
    };
    let recorder = Recorder::default();
    let handler = handler(&place, args, (runtime, loaded), recorder.clone())?;
    let inbox = inbox(config, &place, handler).await?;
    let mut rehearsal = inbox.rehearse().await?;
    let delivered = deliver(&mut rehearsal, file, &recorder, args.twice).await;
    rehearsal.end().await;
    let (tables, tried, too_large) = delivered?;
    let report =
        TestReport { tables: &tables, tried: &tried, expect: &args.expect, too_large: &too_large };
    if json {
        crate::output::json(&report.json(&place_name(args), loaded.imports()))?;
    } else {
        report.print(&place_name(args));
    }
    report.verdict()
}

/// Returns the name of the place where the messages ran, for the report.
fn place_name(args: &TestOptions) -> String {
    match &args.tenant {
        Some(tenant) => format!("the tables of tenant `{tenant}`"),
        None => "a scratch database".to_owned(),
    }
}

/// Reads a component's file.
pub fn read_component(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path)
        .with_context(|| format!("failed to read the component `{}`", path.display()))
}

/// Returns the folder of compiled code: the host's, else that of the `oncebox dev` of this folder.
pub fn cache_dir(config: &Config) -> Option<PathBuf> {
    let dev = Path::new(".oncebox/dev/cache");
    config.runtime.cache_dir.clone().or_else(|| dev.is_dir().then(|| dev.to_owned()))
}

/// Returns the name, if a handler can have it, else another one. A handler's name shows nowhere
/// here, and a file may be called anything.
pub fn valid_name(name: &str) -> &str {
    let sound = name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.len() <= 63
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
    if sound { name } else { "handler" }
}

/// Returns the tenant of a given database, and one of its consumers.
async fn given(config: &Config, args: &TestOptions) -> Result<Furnished> {
    let mut config = config.clone();
    config.database.url = args.database_url.clone().unwrap_or_default();
    let control = crate::dev::running::ready(&config).await?;
    let name = args.tenant.as_deref().unwrap_or_default();
    let tenant = control.tenants().get(name).await?;
    let consumer = match &args.consumer {
        Some(consumer) => control.consumers().get(name, consumer).await?,
        None => only_consumer(&control, name).await?,
    };
    Ok(Furnished { control, tenant, consumer })
}

async fn only_consumer(control: &Control, tenant: &str) -> Result<Consumer> {
    let mut consumers: Vec<_> = control
        .consumers()
        .list()
        .await?
        .into_iter()
        .filter(|consumer| consumer.tenant == tenant)
        .collect();
    let names: Vec<_> = consumers.iter().map(|consumer| format!("`{}`", consumer.name)).collect();
    match consumers.pop() {
        None => bail!("tenant `{tenant}` has no consumer; make one with `oncebox consumer create`"),
        Some(_) if !consumers.is_empty() => {
            bail!(
                "tenant `{tenant}` has several consumers; choose one with `--consumer`: {}",
                names.join(", ")
            )
        }
        Some(consumer) => Ok(consumer),
    }
}

/// Resolver of the one handler, for any event type, with the generation of the consumer.
struct Only {
    handler: Arc<dyn Handler>,
    generation: i64,
}

impl Handlers for Only {
    fn resolve(&self, _message: &Message, _failed: Option<i32>) -> Option<Arc<dyn Handler>> {
        Some(self.handler.clone())
    }

    fn generation(&self) -> i64 {
        self.generation
    }
}

fn handler(
    place: &Furnished,
    args: &TestOptions,
    (runtime, loaded): (&WasmRuntime, &LoadedComponent),
    recorder: Recorder,
) -> Result<Only> {
    let settings = HandlerSettings {
        version: 0,
        limits: place.consumer.policy()?.limits,
        config: args.settings.clone(),
        random_key: place.control.tenant_databases().credentials(&place.tenant)?.random_key,
        // Nothing that is emitted here is ever sent.
        may_emit: true,
    };
    let handler = runtime.handler(loaded, settings).recorded_by(recorder);
    Ok(Only { handler: Arc::new(handler), generation: place.consumer.generation })
}

/// Returns the consumer's inbox, except that it identifies messages the way a file has them.
async fn inbox(config: &Config, place: &Furnished, handler: Only) -> Result<Arc<ConsumerInbox>> {
    let Furnished { control, tenant, consumer } = place;
    let identity =
        Policy::parse(&format!("topics = ['{TOPIC}']\nack = 'after_commit'\n{IDENTITY}"))?.identity;
    let policy = Policy { identity, ..consumer.policy()? };
    let sessions = Sessions::of(
        control.tenant_databases().session_target(tenant)?,
        &config.session_settings(),
        Budget::new(2),
    );
    let (tenant, name) = (consumer.tenant.clone(), consumer.name.clone());
    Ok(ConsumerInbox::new(
        consumer.consumer_id,
        tenant,
        name,
        policy,
        "oncebox test".to_owned(),
        sessions,
        Arc::new(handler),
    ))
}

/// Delivers every message, and compares the tables before and after.
async fn deliver<'a>(
    rehearsal: &mut Rehearsal<'_>,
    file: &'a [FileMessage],
    recorder: &Recorder,
    twice: bool,
) -> Result<(Vec<Table>, Vec<Tried<'a>>, Vec<String>)> {
    let tables = tables::read(rehearsal.tx()).await?;
    let mut tried = Vec::with_capacity(file.len());
    let mut before = Snapshot::take(rehearsal.tx(), &tables).await?;
    let too_large = before.too_large().map(str::to_owned).collect();
    for (message, offset) in file.iter().zip(0_i64..) {
        let first = offer(rehearsal, message, offset).await?;
        let run = recorder.take().pop().unwrap_or_default();
        let after = Snapshot::take(rehearsal.tx(), &tables).await?;
        // Changes that a lost transaction took with it are not this message's doing.
        let is_lost = matches!(first, Rehearsed::Failed { is_transaction_lost: true, .. });
        let changes = if is_lost { Vec::new() } else { tables::changes(&tables, &before, &after) };
        before = after;
        let mut second = None;
        if twice {
            let answer = offer(rehearsal, message, offset + file.len() as i64).await?;
            let after = Snapshot::take(rehearsal.tx(), &tables).await?;
            second = Some((answer, tables::changes(&tables, &before, &after)));
            before = after;
        }
        recorder.take();
        tried.push(Tried { message, first, run, changes, second });
    }
    Ok((tables, tried, too_large))
}

async fn offer(
    rehearsal: &mut Rehearsal<'_>,
    message: &FileMessage,
    offset: i64,
) -> Result<Rehearsed> {
    let record: Record = message.record(&TOPIC.into(), 0, offset);
    rehearsal
        .deliver(record)
        .await
        .with_context(|| format!("message `{}` could not be delivered", message.id))
}
