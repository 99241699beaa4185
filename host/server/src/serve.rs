//! One host, from its configuration to the end of its last transaction.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, Result};
use metrics_exporter_prometheus::PrometheusHandle;
use oncebox_api::{Limits, listen::Listener};
use oncebox_control::{Control, DatabaseLabel, MigrationPlan, schema};
use oncebox_kafka::Drained;
use oncebox_model::InboxError;
use oncebox_runtime::{RuntimeConfig, WasmRuntime};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
    task::{JoinHandle, JoinSet},
};
use tokio_util::sync::CancellationToken;

use crate::{
    Config,
    brokers::BrokerAccess,
    compile::{Compilations, Uploads},
    context::HostContext,
    http, ingress, jobs,
    reconcile::Supervisor,
    retention, startup, storage,
    telemetry::push,
    tenants::{deletion, moves},
};

/// Longest time that open requests of the API may take at the end.
const API_GRACE: Duration = Duration::from_secs(5);

/// Longest time that a page of a job may take at the end.
const JOBS_GRACE: Duration = Duration::from_secs(5);

/// Serves until SIGTERM or SIGINT, then drains.
pub async fn serve(config: &Config) -> Result<()> {
    let stop = CancellationToken::new();
    let signals = cancel_on_signal(stop.clone())?;
    let outcome = serve_until(config, stop).await;
    signals.abort();
    outcome
}

/// Serves until told to stop, then drains. An error of the configuration ends it at once; it waits
/// for a database or a broker that is unavailable.
pub async fn serve_until(config: &Config, stop: CancellationToken) -> Result<()> {
    let (metrics, scrapes) = (http::recorder()?, Arc::<http::Scrapes>::default());
    let pushing = push::begin(&config.telemetry, metrics.clone(), scrapes.clone())?;
    let served = work_until(config, stop, metrics, scrapes).await;
    if let Some(pushing) = pushing {
        pushing.end().await;
    }
    served
}

async fn work_until(
    config: &Config,
    stop: CancellationToken,
    metrics: PrometheusHandle,
    scrapes: Arc<http::Scrapes>,
) -> Result<()> {
    let control = config.control()?;
    let kafka = BrokerAccess::of(config)?;
    let brokers = startup::brokers(kafka.properties())?;
    let listener = http::bind(config.http.listen).await?;
    let address = listener.local_addr()?;
    let api_listener =
        Listener::bind_api(config.api.listen, config.api.certificate()?, config.api.mode).await?;
    let api_url = api_listener.url();
    let ingress_listener = ingress::bind(&config.ingress).await?;
    let runtime = runtime(config)?;
    let (decoder, oidc) = (config.schema_registry.decoder()?, config.oidc.options()?);
    let (readiness, ready) = watch::channel(Err("starting".to_owned()));
    let http_stop = CancellationToken::new();
    let http =
        tokio::spawn(http::serve(listener, metrics, scrapes.clone(), ready, http_stop.clone()));
    let is_whole = tokio::select! {
        biased;
        () = stop.cancelled() => false,
        waited = whole(config, &readiness, &brokers) => waited.map(|()| true)?,
    };
    // On another thread: dropping a client waits for its threads.
    tokio::task::spawn_blocking(move || drop(brokers));
    if !is_whole {
        http_stop.cancel();
        return Ok(());
    }
    let components = Compilations::new(control.clone(), runtime, config.runtime.compile_workers);
    let compiling = tokio::spawn({
        let (components, stop) = (components.clone(), stop.clone());
        async move { components.run(stop).await }
    });
    let api = api(config, &control, components.clone(), kafka.clone());
    let pages = if config.api.console {
        oncebox_console::router(api.clone(), api_listener.is_encrypted(), oidc, http_stop.clone())?
    } else {
        axum::Router::new()
    };
    let api_serving =
        tokio::spawn(api_listener.serve_api(api, pages, http_stop.clone(), API_GRACE));
    let host = HostContext::new(config, control, components, kafka, decoder, scrapes);
    let background = background(config, &host);
    let taking = ingress_listener
        .map(|listener| tokio::spawn(ingress::serve(listener, &host, stop.clone())));
    let working = tokio::spawn(jobs::keep(
        host.control.clone(),
        host.owner.clone(),
        host.job_notes.clone(),
        stop.clone(),
    ));
    let supervisor = Supervisor::new(host, readiness);
    tracing::info!(http = %address, api = api_url, brokers = config.kafka.brokers, "oncebox {} \
        serves", env!("CARGO_PKG_VERSION"));
    let drained = supervisor.run(stop, Duration::from_millis(config.shutdown.drain_ms)).await;
    drop(background);
    if let Some(taking) = taking {
        ended_within(2 * ingress::GRACE, taking).await?;
    }
    // Else the leases run out.
    ended_within(JOBS_GRACE, working).await?;
    http_stop.cancel();
    compiling.await?;
    // A client that keeps its request open does not keep the process from ending.
    ended_within(Duration::from_secs(1), http).await?;
    ended_within(2 * API_GRACE, api_serving).await?;
    match drained {
        Drained::Clean => tracing::info!("drained"),
        Drained::Unfinished => {
            tracing::warn!("the drain's time was up; what still ran is redelivered")
        }
    }
    Ok(())
}

/// Waits until the database and the brokers answer.
async fn whole(
    config: &Config,
    readiness: &watch::Sender<http::Readiness>,
    brokers: &Arc<startup::Client>,
) -> Result<()> {
    startup::wait(readiness, || startup::database(config)).await?;
    startup::wait(readiness, || startup::answered(brokers.clone(), &config.kafka.brokers)).await
}

/// Waits for the end of a task for a limited time.
async fn ended_within<T>(limit: Duration, task: JoinHandle<T>) -> Result<()> {
    match tokio::time::timeout(limit, task).await {
        Ok(ended) => Ok(ended.map(drop)?),
        Err(_) => Ok(()),
    }
}

/// Begins what a host does beside its consumers. Another host continues it where it is interrupted,
/// so that it ends with the set.
fn background(config: &Config, host: &HostContext) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    tasks.spawn(deletion::carry_on(host.control.clone()));
    let control = host.control.acting_as(host.owner.clone());
    tasks.spawn(moves::carry_on(control.clone()));
    tasks.spawn(retention::keep(control, config.retention.clone()));
    tasks.spawn(storage::keep(host.control.clone(), config.storage.clone()));
    tasks
}

/// Creates the runtime of the host's components.
fn runtime(config: &Config) -> Result<WasmRuntime> {
    Ok(WasmRuntime::new(RuntimeConfig {
        // A transaction that was admitted never waits for an instance, which would count against
        // its deadline; neither does it while components are started for a trial.
        instances_max: config
            .runtime
            .instances_max
            .max((config.connections_max() + config.runtime.compile_workers) as u32),
        component_bytes_max: config.runtime.component_bytes_max,
        cache_dir: config.runtime.cache_dir.clone(),
        compilations_max: config.runtime.compile_workers,
        compiler: Some(config.runtime.compiler()),
        ..RuntimeConfig::default()
    })?)
}

fn api(
    config: &Config,
    control: &Control,
    components: Compilations,
    kafka: BrokerAccess,
) -> oncebox_api::Api {
    let limits = Limits {
        component_bytes_max: config.runtime.component_bytes_max,
        request_timeout: Duration::from_millis(config.api.request_timeout_ms),
        connections_max: config.database.connections_max,
        outgoing_days: config.retention.outgoing_days,
        ..Limits::default()
    };
    oncebox_api::Api::new(
        control.for_requests(),
        Arc::new(Uploads { components }),
        limits,
        config.api.mode,
    )
    .with_brokers(Arc::new(kafka))
}

/// Creates the database, unless it exists, and returns its name where it was created. It creates
/// none for a configuration that could not serve with it.
pub async fn create_database(config: &Config) -> Result<Option<String>> {
    let options = config.connect_options()?;
    config.master_key()?;
    schema::create_database(&options).await.context("failed to prepare the database")
}

/// Returns what [`migrate`] would do, to the host's database and to the others with an inbox.
///
/// # Errors
///
/// Fails if the host's database does not exist or does not answer.
pub async fn migration_plans(
    config: &Config,
) -> Result<Vec<(DatabaseLabel, Result<MigrationPlan, InboxError>)>> {
    let control = config.control()?;
    control.check_reach().await.context("failed to read the database")?;
    Ok(control.tenant_databases().migration_plans().await?)
}

/// Brings the database up to date and logs the privileges that could not be revoked.
pub async fn migrate(config: &Config) -> Result<()> {
    let (options, control) = (config.connect_options()?, config.control()?);
    // Before anything is made: a pooler in between would drop the options of connections.
    control.check_reach().await.context("failed to prepare the database")?;
    let open = schema::migrate(&options).await.context("failed to prepare the database")?;
    for what in &open {
        tracing::warn!(what, "the database is less closed than it should be");
    }
    control.tenant_databases().check_host_database().await?;
    schema::ensure_partitions(&control.pool)
        .await
        .context("failed to make the inbox's partitions")?;
    Ok(())
}

/// Begins to listen for SIGTERM and SIGINT, and returns the task that cancels the token on the
/// first. Before this, SIGTERM kills the process, or is ignored where it is the first of a container.
///
/// # Errors
///
/// Fails if the process cannot listen for signals.
pub fn cancel_on_signal(stop: CancellationToken) -> Result<JoinHandle<()>> {
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Ok(tokio::spawn(async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
        tracing::info!("draining");
        stop.cancel();
    }))
}
