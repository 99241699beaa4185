//! The host's configuration: one TOML file, each setting with an override from the environment.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use oncebox_control::{Admin, MasterKey, MigrationBounds};
use oncebox_inbox::{HostBounds, SessionSettings};
use oncebox_model::policy::toml_error;
use oncebox_registry::{Decoder, HttpRegistry, HttpRegistryOptions};
use oncebox_runtime::Compiler;
use serde::Deserialize;
use sqlx::postgres::PgConnectOptions;

/// The configuration of one host. Tenants, consumers and deployments are rows, not configuration.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The database of the inbox.
    pub database: Database,
    /// The brokers.
    pub kafka: Kafka,
    /// The schema registry.
    pub schema_registry: SchemaRegistry,
    /// The master key and the one before it.
    pub keys: Keys,
    /// Limits of running and compiling components.
    pub runtime: Runtime,
    /// The address of health and metrics.
    pub http: Http,
    /// The address and the certificate of the API.
    pub api: Api,
    /// The form and the level of log lines.
    pub log: Log,
    /// The drain at the end of the process.
    pub shutdown: Shutdown,
}

/// `[database]`
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Database {
    /// URL of the host's own login.
    pub url: String,
    /// Most connections of all tenants together.
    pub connections_max: usize,
    /// Longest statement of a guest, in milliseconds.
    pub statement_timeout_ms: u64,
    /// Longest wait for a lock, in milliseconds.
    pub lock_timeout_ms: u64,
    /// Longest pause between two statements of an open transaction, in milliseconds.
    pub idle_in_transaction_timeout_ms: u64,
    /// Longest wait of a tenant's migration for a lock, in milliseconds; messages queue behind it.
    pub migration_lock_timeout_ms: u64,
    /// Most tries of a tenant's migration that meets locks of other sessions.
    pub migration_attempts_max: u32,
    /// Longest statement of a tenant's migration, in milliseconds.
    pub migration_statement_timeout_ms: u64,
    /// Time without reach of a consumer's database, in milliseconds, after which this host leaves
    /// the consumer's group; 0 for never.
    pub leave_after_ms: u64,
}

impl Default for Database {
    fn default() -> Self {
        let SessionSettings {
            statement_timeout_ms,
            lock_timeout_ms,
            idle_in_transaction_timeout_ms,
        } = SessionSettings::default();
        let MigrationBounds {
            lock_timeout_ms: migration_lock_timeout_ms,
            attempts_max,
            statement_timeout_ms: longest,
        } = MigrationBounds::default();
        Self {
            url: String::new(),
            connections_max: 32,
            statement_timeout_ms,
            lock_timeout_ms,
            idle_in_transaction_timeout_ms,
            migration_lock_timeout_ms,
            migration_attempts_max: attempts_max,
            migration_statement_timeout_ms: longest,
            leave_after_ms: 4_000,
        }
    }
}

/// The URL holds a password.
impl std::fmt::Debug for Database {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Database")
            .field("connections_max", &self.connections_max)
            .finish_non_exhaustive()
    }
}

/// `[kafka]`
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Kafka {
    /// `bootstrap.servers` of every client.
    pub brokers: String,
    /// Idle time, in milliseconds, after which a consumer leaves its group until it has records to
    /// read; 0 for never.
    pub idle_after_ms: u64,
    /// Any properties of librdkafka, for every consumer.
    pub properties: BTreeMap<String, String>,
}

impl Default for Kafka {
    fn default() -> Self {
        Self { brokers: String::new(), idle_after_ms: 60_000, properties: BTreeMap::new() }
    }
}

/// Values of properties may be passwords.
impl std::fmt::Debug for Kafka {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<_> = self.properties.keys().collect();
        f.debug_struct("Kafka")
            .field("brokers", &self.brokers)
            .field("idle_after_ms", &self.idle_after_ms)
            .field("properties", &names)
            .finish()
    }
}

/// `[schema_registry]`
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SchemaRegistry {
    /// URL below which `/schemas/ids/…` is; empty for none.
    pub url: String,
    /// User of basic authentication; empty for none.
    pub username: String,
    /// File with the user's password; else ONCEBOX_SCHEMA_REGISTRY_PASSWORD holds it.
    pub password_file: Option<PathBuf>,
    /// Certificates (PEM) of authorities to trust, beside the system's.
    pub ca_file: Option<PathBuf>,
}

impl SchemaRegistry {
    /// Returns the decoder of payloads, where a registry is configured.
    pub(crate) fn decoder(&self) -> Result<Option<Decoder>> {
        if self.url.is_empty() {
            return Ok(None);
        }
        let options = HttpRegistryOptions {
            url: self.url.clone(),
            credentials: self.credentials()?,
            ca_file: self.ca_file.clone(),
        };
        let registry = HttpRegistry::new(&options)
            .context("`schema_registry` (ONCEBOX_SCHEMA_REGISTRY_URL) cannot be used")?;
        Ok(Some(Decoder::new(Arc::new(registry))))
    }

    fn credentials(&self) -> Result<Option<(String, String)>> {
        if self.username.is_empty() {
            ensure!(
                self.password_file.is_none(),
                "`schema_registry.password_file` is set and `schema_registry.username` is not"
            );
            return Ok(None);
        }
        let password = match &self.password_file {
            Some(file) => {
                let read = std::fs::read_to_string(file);
                read.with_context(|| {
                    format!(
                        "failed to read `schema_registry.password_file`, \
                    `{}`",
                        file.display()
                    )
                })?
                .trim_end()
                .to_owned()
            }
            None => std::env::var("ONCEBOX_SCHEMA_REGISTRY_PASSWORD").context(
                "`schema_registry.username` is set; set ONCEBOX_SCHEMA_REGISTRY_PASSWORD or \
                    `schema_registry.password_file` too",
            )?,
        };
        Ok(Some((self.username.clone(), password)))
    }
}

/// `[keys]`
#[derive(Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Keys {
    /// File with the master key, 64 hexadecimal digits.
    pub master_key_file: Option<PathBuf>,
    /// The master key itself; only from the environment.
    #[serde(skip)]
    pub master_key: Option<String>,
    /// File with the key before this one, while `oncebox keys rotate` changes it.
    pub previous_master_key_file: Option<PathBuf>,
    /// The previous master key itself; only from the environment.
    #[serde(skip)]
    pub previous_master_key: Option<String>,
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keys")
            .field("master_key_file", &self.master_key_file)
            .field("previous_master_key_file", &self.previous_master_key_file)
            .finish_non_exhaustive()
    }
}

/// `[runtime]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Runtime {
    /// Most component instances at a time; never less than the connections.
    pub instances_max: u32,
    /// Most transactions of all tenants at a time. None stands for the number of connections, which
    /// is also the upper limit.
    pub transactions_max: Option<usize>,
    /// Most transactions of one tenant at a time, where its limits say nothing and the host has
    /// other tenants. None stands for half of all.
    pub tenant_transactions_max: Option<usize>,
    /// Longest call of a handler, in milliseconds, whatever a policy says. A tenant's limits may
    /// say less.
    pub deadline_ms_max: u64,
    /// Most bytes of all guests' memory together; each instance counts with the limit of its
    /// consumer.
    pub memory_bytes_max: u64,
    /// Folder of the cache of compiled code; none keeps it in memory only.
    pub cache_dir: Option<PathBuf>,
    /// Largest component, in bytes.
    pub component_bytes_max: usize,
    /// Most components that are compiled at a time.
    pub compile_workers: usize,
    /// Address space of a process that compiles, in bytes.
    pub compile_memory_bytes_max: u64,
    /// Longest compilation, in milliseconds.
    pub compile_timeout_ms: u64,
}

impl Default for Runtime {
    fn default() -> Self {
        Self {
            instances_max: 128,
            transactions_max: None,
            tenant_transactions_max: None,
            deadline_ms_max: 60_000,
            memory_bytes_max: 4 << 30,
            cache_dir: None,
            component_bytes_max: 64 << 20,
            compile_workers: 1,
            compile_memory_bytes_max: 4 << 30,
            compile_timeout_ms: 300_000,
        }
    }
}

impl Runtime {
    /// Returns the process that compiles for this host: a second run of this program.
    pub(crate) fn compiler(&self) -> Compiler {
        Compiler::own(self.compile_memory_bytes_max, Duration::from_millis(self.compile_timeout_ms))
    }
}

/// `[http]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Http {
    /// Address of `/healthz`, `/readyz` and `/metrics`.
    pub listen: SocketAddr,
    /// Whether the configuration names the address; `oncebox dev` takes a free one otherwise.
    #[serde(skip)]
    pub(crate) is_chosen: bool,
}

impl Default for Http {
    fn default() -> Self {
        Self { listen: SocketAddr::from(([127, 0, 0, 1], 9464)), is_chosen: false }
    }
}

/// `[api]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Api {
    /// Address of the API.
    pub listen: SocketAddr,
    /// Whether the configuration names the address; `oncebox dev` takes a free one otherwise.
    #[serde(skip)]
    pub(crate) is_chosen: bool,
    /// File with the certificate and those that signed it, PEM.
    pub tls_certificate_file: Option<PathBuf>,
    /// File with the certificate's private key, PEM.
    pub tls_key_file: Option<PathBuf>,
    /// Longest request other than an upload, in milliseconds.
    pub request_timeout_ms: u64,
    /// Whether requests need a token; only `oncebox dev` does without.
    #[serde(skip, default = "tokens")]
    pub(crate) mode: oncebox_admin::Mode,
}

fn tokens() -> oncebox_admin::Mode {
    oncebox_admin::Mode::Tokens
}

impl Default for Api {
    fn default() -> Self {
        let listen = SocketAddr::from(([127, 0, 0, 1], 9465));
        Self {
            listen,
            is_chosen: false,
            tls_certificate_file: None,
            tls_key_file: None,
            request_timeout_ms: 30_000,
            mode: tokens(),
        }
    }
}

impl Api {
    /// Returns the certificate and its key. One without the other is an error.
    pub(crate) fn certificate(&self) -> Result<Option<(&Path, &Path)>> {
        match (&self.tls_certificate_file, &self.tls_key_file) {
            (Some(certificate), Some(key)) => Ok(Some((certificate, key))),
            (None, None) => Ok(None),
            (Some(_), None) => bail!(
                "`api.tls_certificate_file` is set and `api.tls_key_file` is not; TLS needs both"
            ),
            (None, Some(_)) => bail!(
                "`api.tls_key_file` is set and `api.tls_certificate_file` is not; TLS needs both"
            ),
        }
    }
}

/// `[log]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Log {
    /// `auto`: text on a terminal, JSON elsewhere.
    pub format: LogFormat,
    /// A level, or directives per target.
    pub level: String,
}

impl Default for Log {
    fn default() -> Self {
        Self { format: LogFormat::Auto, level: "info".to_owned() }
    }
}

/// The form of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    /// Text on a terminal, JSON elsewhere.
    Auto,
    /// Text.
    Text,
    /// JSON, a line each.
    Json,
}

/// `[shutdown]`
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Shutdown {
    /// Longest time that running work may take after SIGTERM, in milliseconds.
    pub drain_ms: u64,
}

impl Default for Shutdown {
    fn default() -> Self {
        Self { drain_ms: 25_000 }
    }
}

/// Section and key of each setting, with the variable that overrides it.
const OVERRIDES: &[(&str, &str, &str)] = &[
    ("database", "url", "ONCEBOX_DATABASE_URL"),
    ("database", "connections_max", "ONCEBOX_DATABASE_CONNECTIONS_MAX"),
    ("database", "statement_timeout_ms", "ONCEBOX_DATABASE_STATEMENT_TIMEOUT_MS"),
    ("database", "lock_timeout_ms", "ONCEBOX_DATABASE_LOCK_TIMEOUT_MS"),
    (
        "database",
        "idle_in_transaction_timeout_ms",
        "ONCEBOX_DATABASE_IDLE_IN_TRANSACTION_TIMEOUT_MS",
    ),
    ("database", "migration_lock_timeout_ms", "ONCEBOX_DATABASE_MIGRATION_LOCK_TIMEOUT_MS"),
    ("database", "migration_attempts_max", "ONCEBOX_DATABASE_MIGRATION_ATTEMPTS_MAX"),
    (
        "database",
        "migration_statement_timeout_ms",
        "ONCEBOX_DATABASE_MIGRATION_STATEMENT_TIMEOUT_MS",
    ),
    ("database", "leave_after_ms", "ONCEBOX_DATABASE_LEAVE_AFTER_MS"),
    ("kafka", "brokers", "ONCEBOX_KAFKA_BROKERS"),
    ("kafka", "idle_after_ms", "ONCEBOX_KAFKA_IDLE_AFTER_MS"),
    ("schema_registry", "url", "ONCEBOX_SCHEMA_REGISTRY_URL"),
    ("schema_registry", "username", "ONCEBOX_SCHEMA_REGISTRY_USERNAME"),
    ("schema_registry", "password_file", "ONCEBOX_SCHEMA_REGISTRY_PASSWORD_FILE"),
    ("schema_registry", "ca_file", "ONCEBOX_SCHEMA_REGISTRY_CA_FILE"),
    ("keys", "master_key_file", "ONCEBOX_KEYS_MASTER_KEY_FILE"),
    ("keys", "previous_master_key_file", "ONCEBOX_KEYS_PREVIOUS_MASTER_KEY_FILE"),
    ("runtime", "instances_max", "ONCEBOX_RUNTIME_INSTANCES_MAX"),
    ("runtime", "transactions_max", "ONCEBOX_RUNTIME_TRANSACTIONS_MAX"),
    ("runtime", "tenant_transactions_max", "ONCEBOX_RUNTIME_TENANT_TRANSACTIONS_MAX"),
    ("runtime", "deadline_ms_max", "ONCEBOX_RUNTIME_DEADLINE_MS_MAX"),
    ("runtime", "memory_bytes_max", "ONCEBOX_RUNTIME_MEMORY_BYTES_MAX"),
    ("runtime", "cache_dir", "ONCEBOX_RUNTIME_CACHE_DIR"),
    ("runtime", "component_bytes_max", "ONCEBOX_RUNTIME_COMPONENT_BYTES_MAX"),
    ("runtime", "compile_workers", "ONCEBOX_RUNTIME_COMPILE_WORKERS"),
    ("runtime", "compile_memory_bytes_max", "ONCEBOX_RUNTIME_COMPILE_MEMORY_BYTES_MAX"),
    ("runtime", "compile_timeout_ms", "ONCEBOX_RUNTIME_COMPILE_TIMEOUT_MS"),
    ("http", "listen", "ONCEBOX_HTTP_LISTEN"),
    ("api", "listen", "ONCEBOX_API_LISTEN"),
    ("api", "tls_certificate_file", "ONCEBOX_API_TLS_CERTIFICATE_FILE"),
    ("api", "tls_key_file", "ONCEBOX_API_TLS_KEY_FILE"),
    ("api", "request_timeout_ms", "ONCEBOX_API_REQUEST_TIMEOUT_MS"),
    ("log", "format", "ONCEBOX_LOG_FORMAT"),
    ("log", "level", "ONCEBOX_LOG_LEVEL"),
    ("shutdown", "drain_ms", "ONCEBOX_SHUTDOWN_DRAIN_MS"),
];

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
        let Keys { master_key, master_key_file, previous_master_key, previous_master_key_file } =
            &self.keys;
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
    /// The database or the master key is not configured.
    pub fn admin(&self) -> Result<Admin> {
        let actor = std::env::var("USER").unwrap_or_else(|_| "cli".to_owned());
        let Database {
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
        Ok(Admin::new(self.connect_options()?, self.master_key()?, actor)
            .bounding_migrations(migrations))
    }

    /// Returns the limits that all tenants of the host share.
    pub fn host_bounds(&self) -> HostBounds {
        let connections_max = self.database.connections_max;
        let transactions_max = self
            .runtime
            .transactions_max
            .unwrap_or(connections_max)
            .clamp(1, connections_max.max(1));
        let of_tenant =
            self.runtime.tenant_transactions_max.unwrap_or(transactions_max.div_ceil(2));
        HostBounds {
            transactions_max,
            memory_bytes_max: self.runtime.memory_bytes_max,
            tenant_transactions_max: Some(of_tenant.max(1)),
            deadline_max: Some(Duration::from_millis(self.runtime.deadline_ms_max.max(1))),
        }
    }

    /// Returns the settings of tenants' sessions.
    pub fn session_settings(&self) -> SessionSettings {
        let Database {
            statement_timeout_ms, lock_timeout_ms, idle_in_transaction_timeout_ms, ..
        } = self.database;
        SessionSettings { statement_timeout_ms, lock_timeout_ms, idle_in_transaction_timeout_ms }
    }
}

/// Reads a key from its value, or else from its file.
fn read_key(key: &Option<String>, file: &Option<PathBuf>, what: &str) -> Result<Option<MasterKey>> {
    let text = match (key, file) {
        (Some(key), _) => key.clone(),
        (None, Some(path)) => std::fs::read_to_string(path)
            .with_context(|| format!("failed to read {what} from `{}`", path.display()))?,
        (None, None) => return Ok(None),
    };
    Ok(Some(MasterKey::parse(&text)?))
}

/// Returns the error for a setting that the environment overrides. The file was read without an
/// error before, so the variable is at fault.
fn from_environment(error: &toml::de::Error) -> anyhow::Error {
    let place = error.to_string();
    let blamed =
        OVERRIDES.iter().find(|(section, key, _)| place.contains(&format!("`{section}.{key}`")));
    anyhow!(
        "failed to read {}: {}",
        blamed.map_or("a setting from the environment", |(_, _, variable)| variable),
        toml_error("", error)
    )
}

/// Puts a value of the environment into the table, as an integer where it is one.
fn set(table: &mut toml::Table, section: &str, key: &str, value: &str) {
    let section = table.entry(section).or_insert_with(|| toml::Table::new().into());
    let value = value.parse::<i64>().map_or_else(|_| value.into(), toml::Value::from);
    if let Some(section) = section.as_table_mut() {
        section.insert(key.to_owned(), value);
    }
}

#[cfg(test)]
mod tests {
    use super::Config;

    // The sample lists every setting with its default; uncommented, it is the default.
    #[test]
    fn the_sample_is_complete_and_says_the_defaults() {
        let sample = include_str!("../oncebox.sample.toml");
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
        default.kafka = config.kafka.clone();
        default.schema_registry = config.schema_registry.clone();
        assert_eq!(format!("{config:?}"), format!("{default:?}"));
        for (section, key, variable) in super::OVERRIDES {
            assert!(
                sample.contains(&format!("[{section}]")) && sample.contains(&format!("{key} = ")),
                "`{section}.{key}` is missing"
            );
            assert!(sample.contains(variable), "`{variable}` is missing");
        }
    }

    #[test]
    fn unknown_keys_are_named() {
        let error = toml::from_str::<Config>("[database]\nurll = 'x'").expect_err("an unknown key");
        assert!(error.to_string().contains("urll"), "{error}");
    }
}
