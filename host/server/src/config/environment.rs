//! Overrides of settings by the environment.

use anyhow::anyhow;
use oncebox_model::policy::toml_error;

/// Section and key of each setting, with the variable that overrides it.
pub(super) const OVERRIDES: &[(&str, &str, &str)] = &[
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
    ("kafka", "horizon_check_ms", "ONCEBOX_KAFKA_HORIZON_CHECK_MS"),
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
    ("api", "console", "ONCEBOX_API_CONSOLE"),
    ("ingress", "listen", "ONCEBOX_INGRESS_LISTEN"),
    ("ingress", "tls_certificate_file", "ONCEBOX_INGRESS_TLS_CERTIFICATE_FILE"),
    ("ingress", "tls_key_file", "ONCEBOX_INGRESS_TLS_KEY_FILE"),
    ("oidc", "issuer", "ONCEBOX_OIDC_ISSUER"),
    ("oidc", "client_id", "ONCEBOX_OIDC_CLIENT_ID"),
    ("oidc", "client_secret_file", "ONCEBOX_OIDC_CLIENT_SECRET_FILE"),
    ("oidc", "redirect_url", "ONCEBOX_OIDC_REDIRECT_URL"),
    ("oidc", "name_claim", "ONCEBOX_OIDC_NAME_CLAIM"),
    ("oidc", "groups_claim", "ONCEBOX_OIDC_GROUPS_CLAIM"),
    ("oidc", "ca_file", "ONCEBOX_OIDC_CA_FILE"),
    ("log", "format", "ONCEBOX_LOG_FORMAT"),
    ("log", "level", "ONCEBOX_LOG_LEVEL"),
    ("telemetry", "endpoint", "ONCEBOX_TELEMETRY_ENDPOINT"),
    ("telemetry", "traces", "ONCEBOX_TELEMETRY_TRACES"),
    ("telemetry", "logs", "ONCEBOX_TELEMETRY_LOGS"),
    ("telemetry", "metrics", "ONCEBOX_TELEMETRY_METRICS"),
    ("telemetry", "metrics_interval_ms", "ONCEBOX_TELEMETRY_METRICS_INTERVAL_MS"),
    ("telemetry", "sample", "ONCEBOX_TELEMETRY_SAMPLE"),
    ("telemetry", "follow", "ONCEBOX_TELEMETRY_FOLLOW"),
    ("telemetry", "statements", "ONCEBOX_TELEMETRY_STATEMENTS"),
    ("telemetry", "handler_spans", "ONCEBOX_TELEMETRY_HANDLER_SPANS"),
    ("retention", "enabled", "ONCEBOX_RETENTION_ENABLED"),
    ("retention", "interval_ms", "ONCEBOX_RETENTION_INTERVAL_MS"),
    ("retention", "window", "ONCEBOX_RETENTION_WINDOW"),
    ("retention", "outgoing_days", "ONCEBOX_RETENTION_OUTGOING_DAYS"),
    ("archive", "location", "ONCEBOX_ARCHIVE_LOCATION"),
    ("archive", "endpoint", "ONCEBOX_ARCHIVE_ENDPOINT"),
    ("archive", "region", "ONCEBOX_ARCHIVE_REGION"),
    ("archive", "access_key_id", "ONCEBOX_ARCHIVE_ACCESS_KEY_ID"),
    ("archive", "secret_access_key_file", "ONCEBOX_ARCHIVE_SECRET_ACCESS_KEY_FILE"),
    ("archive", "ca_file", "ONCEBOX_ARCHIVE_CA_FILE"),
    ("archive", "allow_http", "ONCEBOX_ARCHIVE_ALLOW_HTTP"),
    ("references", "stall_ms", "ONCEBOX_REFERENCES_STALL_MS"),
    ("references", "fetches_max", "ONCEBOX_REFERENCES_FETCHES_MAX"),
    ("references", "consumer_fetches_max", "ONCEBOX_REFERENCES_CONSUMER_FETCHES_MAX"),
    ("references", "memory_bytes", "ONCEBOX_REFERENCES_MEMORY_BYTES"),
    ("references", "tenant_memory_bytes", "ONCEBOX_REFERENCES_TENANT_MEMORY_BYTES"),
    ("http_destinations", "ca_file", "ONCEBOX_HTTP_DESTINATIONS_CA_FILE"),
    ("storage", "measure_ms", "ONCEBOX_STORAGE_MEASURE_MS"),
    ("shutdown", "drain_ms", "ONCEBOX_SHUTDOWN_DRAIN_MS"),
];

/// Returns the error for a setting that the environment overrides. The file was read without an
/// error before, so the variable is at fault.
pub(super) fn from_environment(error: &toml::de::Error) -> anyhow::Error {
    let place = error.to_string();
    let blamed =
        OVERRIDES.iter().find(|(section, key, _)| place.contains(&format!("`{section}.{key}`")));
    anyhow!(
        "failed to read {}: {}",
        blamed.map_or("a setting from the environment", |(_, _, variable)| variable),
        toml_error("", error)
    )
}

/// Puts a value of the environment into the table, as an integer or a boolean where it is one.
pub(super) fn set(table: &mut toml::Table, section: &str, key: &str, value: &str) {
    let section = table.entry(section).or_insert_with(|| toml::Table::new().into());
    let value: toml::Value = match (value.parse::<i64>(), value.parse::<bool>()) {
        (Ok(number), _) => number.into(),
        (_, Ok(flag)) => flag.into(),
        _ => value.into(),
    };
    if let Some(section) = section.as_table_mut() {
        section.insert(key.to_owned(), value);
    }
}
