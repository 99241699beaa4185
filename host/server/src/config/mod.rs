//! The host's configuration: one TOML file, each setting with an override from the environment.

mod archive;
mod database;
mod environment;
mod http;
mod http_destinations;
mod kafka;
mod keys;
mod log;
mod oidc;
mod references;
mod retention;
mod runtime;
mod schema_registry;
mod storage;
mod telemetry;

pub use archive::ArchiveSettings;
pub use database::{DatabaseSettings, NamedDatabaseSettings};
pub use http::{ApiSettings, HttpSettings, IngressSettings};
pub use http_destinations::HttpDestinationSettings;
pub use kafka::KafkaSettings;
pub use keys::KeySettings;
pub use log::{LogFormat, LogSettings, ShutdownSettings};
pub use oidc::OidcSettings;
pub use references::{ReferenceSettings, ReferenceStore};
pub use retention::{DailyWindow, RetentionSettings};
pub use runtime::RuntimeSettings;
pub use schema_registry::SchemaRegistrySettings;
pub use storage::StorageSettings;
pub use telemetry::TelemetrySettings;

use std::{path::Path, sync::Arc, time::Duration};

use anyhow::{Context, Result, anyhow, bail};
use oncebox_control::{Control, MasterKey, MigrationBounds, NamedDatabases};
use oncebox_inbox::{HostBounds, SessionSettings};
use oncebox_model::policy::toml_error;
use serde::Deserialize;
use sqlx::postgres::PgConnectOptions;

use self::{
    environment::{OVERRIDES, from_environment, set},
    keys::read_key,
};

/// The configuration of one host. Tenants, consumers and deployments are rows, not configuration.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The host's database.
    pub database: DatabaseSettings,
    /// Further databases, in which hosts place tenants.
    pub databases: Vec<NamedDatabaseSettings>,
    /// The brokers.
    pub kafka: KafkaSettings,
    /// The schema registry.
    pub schema_registry: SchemaRegistrySettings,
    /// The master key and the one before it.
    pub keys: KeySettings,
    /// Limits of running and compiling components.
    pub runtime: RuntimeSettings,
    /// The address of health and metrics.
    pub http: HttpSettings,
    /// The address and the certificate of the API.
    pub api: ApiSettings,
    /// The address at which messages over HTTP come.
    pub ingress: IngressSettings,
    /// The identity provider of the console.
    pub oidc: OidcSettings,
    /// The form and the level of log lines.
    pub log: LogSettings,
    /// The collector of spans and log lines.
    pub telemetry: TelemetrySettings,
    /// The removal of what is past its retention.
    pub retention: RetentionSettings,
    /// The place to which messages go before that.
    pub archive: ArchiveSettings,
    /// The stores from which payloads are fetched.
    pub references: ReferenceSettings,
    /// The hosts that outgoing messages may go to over HTTP.
    pub http_destinations: HttpDestinationSettings,
    /// The measurement of the size of inboxes.
    pub storage: StorageSettings,
    /// The drain at the end of the process.
    pub shutdown: ShutdownSettings,
}

impl Config {
    /// Reads the file, if there is one, and the environment over it.
    ///
    /// # Errors
    /// The file cannot be read, or a setting of the file or the environment does not fit.
    pub fn load(file: Option<&Path>) -> Result<Self> {
        let mut table = match file {
            None => toml::Table::new(),
            Some(path) => {
                let text = std::fs::read_to_string(path).with_context(|| {
                    format!("failed to read the configuration `{}`", path.display())
                })?;
                // The file alone is parsed first, so that an error points into the file.
                toml::from_str::<Self>(&text).map_err(|error| {
                    anyhow!(
                        "failed to read the configuration `{}`, {}",
                        path.display(),
                        toml_error(&text, &error)
                    )
                })?;
                toml::from_str(&text)?
            }
        };
        for (section, key, variable) in OVERRIDES {
            if let Ok(value) = std::env::var(variable) {
                set(&mut table, section, key, &value);
            }
        }
        let is_chosen = |section: &str| {
            table.get(section).is_some_and(|section| section.get("listen").is_some())
        };
        let (http, api) = (is_chosen("http"), is_chosen("api"));
        let mut config: Self = table.try_into().map_err(|error| from_environment(&error))?;
        (config.http.is_chosen, config.api.is_chosen) = (http, api);
        config.keys.master_key = std::env::var("ONCEBOX_MASTER_KEY").ok();
        config.keys.previous_master_key = std::env::var("ONCEBOX_PREVIOUS_MASTER_KEY").ok();
        Ok(config)
    }

    /// Returns the options of a connection to the database.
    ///
    /// # Errors
    /// `database.url` is missing or is not a PostgreSQL URL.
    pub fn connect_options(&self) -> Result<PgConnectOptions> {
        if self.database.url.is_empty() {
            bail!(
                "no database is configured; set `database.url` or ONCEBOX_DATABASE_URL, or start \
                    `oncebox dev` in this folder"
            );
        }
        // The parser accepts any scheme, and its own message would repeat the URL and the password
        // in it.
        let is_ours = ["postgres://", "postgresql://"]
            .iter()
            .any(|scheme| self.database.url.starts_with(scheme));
        let options = is_ours.then(|| self.database.url.parse().ok()).flatten();
        options.context(
            "`database.url` is not a PostgreSQL URL; it looks like \
            postgres://user:password@host:5432/database",
        )
    }

    /// Returns the master key, with the one before it where there is one.
    ///
    /// # Errors
    /// No master key is configured, or a key cannot be read.
    pub fn master_key(&self) -> Result<MasterKey> {
        let KeySettings {
            master_key,
            master_key_file,
            previous_master_key,
            previous_master_key_file,
        } = &self.keys;
        let key = read_key(master_key, master_key_file, "the master key")?.context(
            "no master key is configured; set `keys.master_key_file` or ONCEBOX_MASTER_KEY (make \
                one with `openssl rand -hex 32`)",
        )?;
        Ok(
            match read_key(
                previous_master_key,
                previous_master_key_file,
                "the previous master key",
            )? {
                Some(previous) => key.with_previous(&previous),
                None => key,
            },
        )
    }

    /// Returns the administration that an operator's commands use, with the user's name as the
    /// actor.
    ///
    /// # Errors
    /// The database or the master key is not configured, or a further database, the archive, a store
    /// or a list of hosts cannot be used.
    pub fn control(&self) -> Result<Control> {
        let actor = std::env::var("USER").unwrap_or_else(|_| "cli".to_owned());
        let DatabaseSettings {
            migration_lock_timeout_ms,
            migration_attempts_max,
            migration_statement_timeout_ms,
            ..
        } = self.database;
        let migrations = MigrationBounds {
            lock_timeout_ms: migration_lock_timeout_ms.max(1),
            attempts_max: migration_attempts_max,
            statement_timeout_ms: migration_statement_timeout_ms,
        };
        let control = Control::new(self.connect_options()?, self.master_key()?, actor)
            .bounding_migrations(migrations)
            .placing_in(NamedDatabases::new(
                self.databases
                    .iter()
                    .map(NamedDatabaseSettings::database)
                    .collect::<Result<Vec<_>>>()?,
            )?)
            .fetching_from(self.references.stores()?)
            .sending_with(Arc::new(self.http_destinations.sender()?));
        Ok(match self.archive.store()? {
            Some(store) => control.archiving_at(store),
            None => control,
        })
    }

    /// Returns the connections of all tenants together, to every database.
    pub(crate) fn connections_max(&self) -> usize {
        let named: usize = self.databases.iter().map(|database| database.connections_max).sum();
        self.database.connections_max + named
    }

    /// Returns the bounds that the tenants share whose database has so many connections: of
    /// transactions and guests' memory, the part that these connections are of all.
    pub(crate) fn host_bounds(&self, connections_max: usize) -> HostBounds {
        let all = self.connections_max().max(1);
        let part = |of: u64| (of as u128 * connections_max as u128).div_ceil(all as u128) as u64;
        let transactions_max = self
            .runtime
            .transactions_max
            .map_or(connections_max, |most| part(most as u64) as usize)
            .clamp(1, connections_max.max(1));
        let of_tenant =
            self.runtime.tenant_transactions_max.unwrap_or(transactions_max.div_ceil(2));
        HostBounds {
            transactions_max,
            memory_bytes_max: part(self.runtime.memory_bytes_max),
            tenant_transactions_max: Some(of_tenant.max(1)),
            deadline_max: Some(Duration::from_millis(self.runtime.deadline_ms_max.max(1))),
        }
    }

    /// Returns the settings of tenants' sessions.
    pub fn session_settings(&self) -> SessionSettings {
        let DatabaseSettings {
            statement_timeout_ms,
            lock_timeout_ms,
            idle_in_transaction_timeout_ms,
            ..
        } = self.database;
        SessionSettings { statement_timeout_ms, lock_timeout_ms, idle_in_transaction_timeout_ms }
    }
}

#[cfg(test)]
mod tests {
    use super::Config;

    // The sample lists every setting with its default; uncommented, it is the default.
    #[test]
    fn the_sample_is_complete_and_says_the_defaults() {
        let sample = include_str!("../../oncebox.sample.toml");
        let text: String = sample
            .lines()
            .map(|line| line.strip_prefix("#: ").unwrap_or(line))
            .collect::<Vec<_>>()
            .join("\n");
        let config: Config = toml::from_str(&text).expect("the sample parses");
        let mut default = Config::default();
        default.keys.master_key_file = config.keys.master_key_file.clone();
        default.keys.previous_master_key_file = config.keys.previous_master_key_file.clone();
        default.runtime.transactions_max = config.runtime.transactions_max;
        default.runtime.tenant_transactions_max = config.runtime.tenant_transactions_max;
        default.runtime.cache_dir = config.runtime.cache_dir.clone();
        default.api.tls_certificate_file = config.api.tls_certificate_file.clone();
        default.api.tls_key_file = config.api.tls_key_file.clone();
        default.retention.window = config.retention.window;
        default.archive = config.archive.clone();
        default.references.stores = config.references.stores.clone();
        default.http_destinations.ca_file = config.http_destinations.ca_file.clone();
        default.kafka = config.kafka.clone();
        default.databases = config.databases.clone();
        default.telemetry.endpoint = config.telemetry.endpoint.clone();
        default.schema_registry = config.schema_registry.clone();
        default.oidc = config.oidc.clone();
        default.ingress = config.ingress.clone();
        assert_eq!(format!("{config:?}"), format!("{default:?}"));
        for (section, key, variable) in super::environment::OVERRIDES {
            assert!(
                sample.contains(&format!("[{section}]")) && sample.contains(&format!("{key} = ")),
                "`{section}.{key}` is missing"
            );
            assert!(sample.contains(variable), "`{variable}` is missing");
        }
    }

    // What could go wrong: the databases of one host have together more than the host has, or a
    // database without a number of its own gets nothing.
    #[test]
    fn databases_divide_what_the_host_has_by_their_connections() {
        let text = "[database]\nconnections_max = 8\n\
            [runtime]\nmemory_bytes_max = 1000\ntransactions_max = 20\n\
            [[databases]]\nname = 'a'\nconnections_max = 32\n[[databases]]\nname = 'b'";
        let config: Config = toml::from_str(text).expect("a configuration");
        assert_eq!(config.connections_max(), 8 + 32 + 32);
        let [own, named] = [8, 32].map(|connections| config.host_bounds(connections));
        assert_eq!((own.memory_bytes_max, named.memory_bytes_max), (112, 445));
        assert_eq!((own.transactions_max, named.transactions_max), (3, 9));
        assert_eq!(named.tenant_transactions_max, Some(5));
        // One database has everything.
        let bounds = Config::default().host_bounds(32);
        assert_eq!((bounds.transactions_max, bounds.memory_bytes_max), (32, 4 << 30));
    }

    #[test]
    fn unknown_keys_are_named() {
        let error = toml::from_str::<Config>("[database]\nurll = 'x'").expect_err("an unknown key");
        assert!(error.to_string().contains("urll"), "{error}");
    }
}
