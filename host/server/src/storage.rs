//! The size of inboxes, as this host measures and shows it. Every host does so: each reads the same
//! sample, and none depends on another.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use oncebox_control::{ConsumerStorage, Control, DatabaseLabel, InboxDatabase, StorageReport};
use oncebox_model::MessageStatus;
use tokio::{sync::Semaphore, task::JoinSet, time::sleep};

use crate::{config::StorageSettings, context::answered};

/// Pause before the first measurement, so that a start is not slowed.
const FIRST: Duration = Duration::from_secs(10);
/// Databases that are measured at a time.
const AT_ONCE: usize = 4;

/// Measures until aborted.
pub(crate) async fn keep(control: Control, settings: StorageSettings) {
    let pause = Duration::from_millis(settings.measure_ms);
    let mut shown = ShownStorage::default();
    sleep(FIRST.min(pause)).await;
    loop {
        match answered(control.tenant_databases().all()).await {
            Ok(databases) => {
                shown.show(reports(&control, databases).await);
                shown.show_budgets(&control).await;
            }
            Err(error) => tracing::debug!(%error, "the databases with an inbox are not known"),
        }
        sleep(pause).await;
    }
}

/// Measures each database. Returns the reports by database; none where one failed.
async fn reports(
    control: &Control,
    databases: Vec<InboxDatabase>,
) -> BTreeMap<DatabaseLabel, Option<StorageReport>> {
    let (at_once, mut reads) = (Arc::new(Semaphore::new(AT_ONCE)), JoinSet::new());
    let mut reports: BTreeMap<_, _> =
        databases.iter().map(|database| (database.label.clone(), None)).collect();
    for database in databases {
        let (control, at_once) = (control.clone(), at_once.clone());
        reads.spawn(async move {
            let _permit = at_once.acquire_owned().await;
            (database.label.clone(), control.storage().report(&database).await)
        });
    }
    while let Some(read) = reads.join_next().await {
        match read {
            Ok((label, Ok(report))) => {
                reports.insert(label, Some(report));
            }
            Ok((DatabaseLabel { tenant, database }, Err(error))) => {
                tracing::debug!(tenant, database, %error, "storage not measured");
            }
            Err(error) => tracing::error!(%error, "storage not measured"),
        }
    }
    reports
}

/// Tenant and name of a consumer.
type NamedConsumer = (String, String);
/// Statuses that a host shows of a consumer: `completed`, and those that messages had at some
/// measurement. One that none has any more is shown as 0.
type ShownStatuses = BTreeMap<NamedConsumer, BTreeSet<MessageStatus>>;

/// The series that this host shows. Those of consumers and budgets that are no more end.
#[derive(Default)]
struct ShownStorage {
    /// Consumers, by their database.
    consumers: BTreeMap<DatabaseLabel, ShownStatuses>,
    /// Tenants with a budget.
    budgets: BTreeSet<String>,
}

impl ShownStorage {
    /// Shows what was measured. What a database that failed had shown stays.
    fn show(&mut self, reports: BTreeMap<DatabaseLabel, Option<StorageReport>>) {
        self.consumers.retain(|database, consumers| {
            let is_known = reports.contains_key(database);
            if !is_known {
                consumers.iter().for_each(end);
            }
            is_known
        });
        // What ended comes first: a tenant that moved is in another database now.
        for (database, report) in &reports {
            let shown = self.consumers.entry(database.clone()).or_default();
            let Some(report) = report else { continue };
            let present: BTreeSet<(&str, &str)> = report
                .tenants
                .iter()
                .flat_map(|of| of.consumers.iter().map(|it| (&*of.tenant, &*it.consumer)))
                .collect();
            shown
                .extract_if(.., |(tenant, consumer), _| !present.contains(&(tenant, consumer)))
                .for_each(|(consumer, statuses)| end((&consumer, &statuses)));
        }
        for (database, report) in reports {
            let Some(report) = report else { continue };
            let shown = self.consumers.entry(database).or_default();
            for tenant in &report.tenants {
                for storage in &tenant.consumers {
                    let consumer = (tenant.tenant.clone(), storage.consumer.clone());
                    let statuses = shown.entry(consumer.clone()).or_default();
                    statuses.insert(MessageStatus::Completed);
                    statuses.extend(storage.messages_by_status.keys());
                    show(&consumer, storage, statuses);
                }
            }
        }
    }

    /// Shows the budgets of tenants.
    async fn show_budgets(&mut self, control: &Control) {
        let tenants = match answered(control.tenants().list()).await {
            Ok(tenants) => tenants,
            Err(error) => return tracing::debug!(%error, "storage budgets not known"),
        };
        let mut present = BTreeSet::new();
        for tenant in tenants {
            if let Some(budget_bytes) = tenant.limits.storage_budget_bytes {
                show_budget(&tenant.name, budget_bytes as f64);
                present.insert(tenant.name);
            }
        }
        self.budgets.difference(&present).for_each(|tenant| show_budget(tenant, f64::NAN));
        self.budgets = present;
    }
}

/// Shows the storage of a consumer.
fn show(consumer: &NamedConsumer, storage: &ConsumerStorage, statuses: &BTreeSet<MessageStatus>) {
    let ConsumerStorage { messages_by_status, bytes, bytes_per_day, bytes_in_30_days, .. } =
        storage;
    let figures = [*bytes, *bytes_per_day, *bytes_in_30_days];
    set_gauges(consumer, figures.map(|figure| figure as f64));
    for status in statuses {
        let messages = messages_by_status.get(status).copied().unwrap_or(0);
        set_messages(consumer, *status, messages as f64);
    }
}

/// Ends the series of a consumer. Gauges that are not a number are not shown.
fn end((consumer, statuses): (&NamedConsumer, &BTreeSet<MessageStatus>)) {
    set_gauges(consumer, [f64::NAN; 3]);
    statuses.iter().for_each(|status| set_messages(consumer, *status, f64::NAN));
}

fn set_gauges((tenant, consumer): &NamedConsumer, figures: [f64; 3]) {
    let [bytes, bytes_per_day, bytes_in_30_days] = figures;
    let labels = [("tenant", tenant.clone()), ("consumer", consumer.clone())];
    metrics::gauge!("oncebox_storage_bytes", &labels).set(bytes);
    metrics::gauge!("oncebox_storage_growth_bytes_per_day", &labels).set(bytes_per_day);
    metrics::gauge!("oncebox_storage_forecast_bytes", &labels).set(bytes_in_30_days);
}

fn set_messages((tenant, consumer): &NamedConsumer, status: MessageStatus, messages: f64) {
    let labels = [
        ("tenant", tenant.clone()),
        ("consumer", consumer.clone()),
        ("status", status.to_string()),
    ];
    metrics::gauge!("oncebox_storage_messages", &labels).set(messages);
}

fn show_budget(tenant: &str, budget_bytes: f64) {
    metrics::gauge!("oncebox_storage_budget_bytes", "tenant" => tenant.to_owned())
        .set(budget_bytes);
}
