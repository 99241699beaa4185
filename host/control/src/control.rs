//! The host's access to its database. Its functions are those of the handles that it returns
//! (`handles.rs`). Every change leaves an audit row in its own transaction.

use chrono::{DateTime, Utc};
use sqlx::{Connection, PgPool, postgres::PgConnectOptions};
use std::{sync::Arc, time::Duration};

use oncebox_archive::ArchiveStore;
use oncebox_model::{error::InboxError, tx::bounded};
use oncebox_sender::Sender;

use crate::{
    database::{
        migration_bounds::MigrationBounds,
        reach,
        tenant_database::{named::NamedDatabases, open::OpenDatabases},
    },
    stores::settings::Stores,
    tenants::keys::MasterKey,
};

/// Maximum of connections of the host's own login for its own work. Requests from outside have
/// another pool of this size.
const CONNECTIONS_MAX: u32 = 8;
/// Longest wait of a request from outside for a lock.
const REQUEST_LOCK_TIMEOUT: &str = "20s";
/// Longest wait of such a request for a connection: longer than other requests may hold one while
/// they wait.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest wait of the host's own work for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The host's own access to its database, with the master key.
#[derive(Clone)]
pub struct Control {
    /// Connections of the host's login.
    pub pool: PgPool,
    pub(crate) options: PgConnectOptions,
    pub(crate) key: MasterKey,
    pub(crate) actor: String,
    pub(crate) tenant_databases: Arc<OpenDatabases>,
    /// Databases in which tenants are placed, as this process knows them.
    pub(crate) named_databases: Arc<NamedDatabases>,
    pub(crate) migrations: MigrationBounds,
    /// Place to which messages go before their removal, where this process has one.
    pub(crate) archive_store: Option<ArchiveStore>,
    /// Stores from which payloads are fetched, as this process knows them.
    pub(crate) stores: Arc<Stores>,
    /// Sender to endpoints, with the operator's list of hosts; none where this process sends
    /// nothing.
    pub(crate) sender: Option<Arc<Sender>>,
}

impl Control {
    /// Returns access for one actor. Opens no connection.
    pub fn new(options: PgConnectOptions, key: MasterKey, actor: impl Into<String>) -> Self {
        let options = reach::noticing_silence(options.application_name("oncebox host"));
        let migrations = MigrationBounds::default();
        Self {
            pool: pool(&options, CONNECT_TIMEOUT),
            options,
            key,
            actor: actor.into(),
            tenant_databases: Arc::default(),
            named_databases: Arc::default(),
            migrations,
            archive_store: None,
            stores: Arc::default(),
            sender: None,
        }
    }

    /// Returns this access with other bounds on tenants' migrations.
    pub fn bounding_migrations(self, migrations: MigrationBounds) -> Self {
        Self { migrations, ..self }
    }

    /// Returns this access with the databases in which tenants are placed.
    pub fn placing_in(self, databases: NamedDatabases) -> Self {
        Self { named_databases: Arc::new(databases), ..self }
    }

    /// Returns this access with a place to which messages go before their removal.
    pub fn archiving_at(self, store: ArchiveStore) -> Self {
        Self { archive_store: Some(store), ..self }
    }

    /// Returns this access with the stores from which payloads are fetched.
    pub fn fetching_from(self, stores: Stores) -> Self {
        Self { stores: Arc::new(stores), ..self }
    }

    /// Returns this access with a sender to endpoints, which has the operator's list of hosts.
    pub fn sending_with(self, sender: Arc<Sender>) -> Self {
        Self { sender: Some(sender), ..self }
    }

    /// Returns the sender to endpoints, where this process has one.
    pub fn sender(&self) -> Option<Arc<Sender>> {
        self.sender.clone()
    }

    /// Returns this access for requests from outside, with connections of their own. However many
    /// of them wait for one another, the host's own work waits for none. No request waits for ever.
    pub fn for_requests(&self) -> Self {
        let options = self.options.clone().options([("lock_timeout", REQUEST_LOCK_TIMEOUT)]);
        let named_databases = Arc::new(self.named_databases.for_requests());
        Self { pool: pool(&options, REQUEST_TIMEOUT), named_databases, ..self.clone() }
    }

    /// Returns this access for another actor, whose name the audit log keeps.
    pub fn acting_as(&self, actor: impl Into<String>) -> Self {
        Self { actor: actor.into(), ..self.clone() }
    }

    /// Checks that the database answers, and that connections to it begin with the requested
    /// options.
    ///
    /// # Errors
    /// `NoDatabase` or `Unreachable` where it does not answer, `OptionsLost` where a pooler drops
    /// options.
    pub async fn check_reach(&self) -> Result<(), InboxError> {
        let connection = reach::connect_to_own(&self.options).await?;
        let _ = connection.close().await; // the database exists
        reach::check_options_arrive(&self.options).await
    }

    /// Returns the time of the host's database.
    ///
    /// # Errors
    /// An error of the database, or its silence for too long.
    pub async fn now(&self) -> Result<DateTime<Utc>, InboxError> {
        Ok(bounded(sqlx::query_scalar("SELECT now()").fetch_one(&self.pool)).await?)
    }

    /// Checks that the database answers and holds the host's schema.
    ///
    /// # Errors
    /// `NotFound` where the schema is missing, `NoDatabase` or `Unreachable` where the database
    /// does not answer.
    pub async fn check(&self) -> Result<(), InboxError> {
        // Does not use the pool: it would retry until its time is up, and then report only that.
        let mut connection = reach::connect_to_own(&self.options).await?;
        let found: Option<String> = sqlx::query_scalar("SELECT to_regclass('oncebox.inbox')::text")
            .fetch_one(&mut connection)
            .await?;
        let _ = connection.close().await; // the answer has arrived
        found.map(drop).ok_or_else(|| {
            InboxError::NotFound(
                "the database holds no inbox; run `oncebox migrate` first".to_owned(),
            )
        })
    }
}

fn pool(options: &PgConnectOptions, patience: Duration) -> PgPool {
    reach::pool(CONNECTIONS_MAX, patience).connect_lazy_with(options.clone())
}

/// Checks that a tenant, or an object of a tenant, can have this name.
///
/// # Errors
/// `Invalid` where it cannot.
pub fn check_name(kind: &str, name: &str) -> Result<(), InboxError> {
    let sound = name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.len() <= 63
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
    if sound {
        return Ok(());
    }
    let article = if kind.starts_with('e') { "an" } else { "a" };
    Err(InboxError::Invalid(format!(
        "`{name}` cannot be the name of {article} {kind}; use a lower-case letter, then up to 62 \
            of a-z, 0-9 and `-`"
    )))
}

pub(crate) fn taken(error: sqlx::Error, kind: &str, name: &str) -> InboxError {
    match error.as_database_error().and_then(|e| e.constraint()) {
        Some("tenant_name_unique" | "consumer_name_unique") => {
            InboxError::conflict(format!("there is a {kind} `{name}` already"))
        }
        _ => error.into(),
    }
}
