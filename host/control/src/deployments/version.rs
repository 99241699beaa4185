//! Versions: uploads of a handler, each identified by the digest of its component.

use oncebox_model::error::InboxError;
use serde_json::Value;
use sha2::{Digest, Sha256};
use sqlx::PgConnection;

use crate::{
    audit::Subject,
    control::check_name,
    deployments::{Deployment, NewDeployment},
    handles::Versions,
};

/// A component that passed every check that is possible without compiling it.
#[derive(Debug, Clone, Copy)]
pub struct NewVersion<'a> {
    /// The component's bytes.
    pub component: &'a [u8],
    /// SHA-256 of the uploaded core module; none where the upload was a component.
    pub source_digest: Option<[u8; 32]>,
    /// Description of the component: imports, languages, sizes. Null where nothing inspected it.
    pub report: &'a Value,
    /// Whether the component is compiled; otherwise a host has to compile it first.
    pub is_compiled: bool,
}

/// A version with the state of its component.
#[derive(Debug, Clone, serde::Serialize, sqlx::FromRow)]
pub struct Version {
    /// Key.
    pub version_id: i32,
    /// Name of the handler.
    pub handler: String,
    /// SHA-256 of the component.
    #[serde(serialize_with = "hex::serde::serialize")]
    pub digest: Vec<u8>,
    /// SHA-256 of the upload, in hexadecimal digits, where it was a core module.
    pub source_digest: Option<String>,
    /// Size of the component, bytes.
    pub size: i32,
    /// State of the component: `queued`, `compiling`, `ready` or `failed`.
    pub state: String,
    /// Reasons of a failed compilation: a list of `code` and `text`.
    pub problems: Value,
    /// Description of the component: imports, languages, sizes.
    pub report: Option<Value>,
    /// Duration of the compilation, milliseconds.
    pub compile_ms: Option<i64>,
    /// Time of the upload.
    pub created_at: chrono::DateTime<chrono::Utc>,
    /// Actor that uploaded it.
    pub created_by: String,
}

/// A handler with the number of its versions.
#[derive(Debug, Clone, serde::Serialize, sqlx::FromRow)]
pub struct HandlerRow {
    /// Name of the handler.
    pub name: String,
    /// Number of uploaded versions.
    pub versions: i64,
    /// Time of the newest upload.
    pub latest_at: Option<chrono::DateTime<chrono::Utc>>,
}

const VERSION: &str = "SELECT v.version_id, h.name AS handler, v.digest, encode(v.source_digest, \
    'hex') AS source_digest, \
    octet_length(c.bytes) AS size, c.state, c.problems, c.report, c.compile_ms, v.created_at, \
    v.created_by \
    FROM oncebox.version v JOIN oncebox.handler h USING (handler_id) JOIN oncebox.component c \
    USING (digest) ";

fn select<'q>(
    condition: &str,
) -> sqlx::query::QueryAs<'q, sqlx::Postgres, Version, <sqlx::Postgres as sqlx::Database>::Arguments>
{
    sqlx::query_as(sqlx::AssertSqlSafe([VERSION, condition].concat()))
}

impl Version {
    /// Returns whether the component imports an interface, in any version of it.
    pub(crate) fn imports(&self, interface: &str) -> bool {
        let is_it = |import: &str| import.split_once('@').map_or(import, |(it, _)| it) == interface;
        self.all_imports().any(is_it)
    }

    /// Returns whether the component imports something whose name begins like this.
    pub(crate) fn imports_of(&self, beginning: &str) -> bool {
        self.all_imports().any(|import| import.starts_with(beginning))
    }

    fn all_imports(&self) -> impl Iterator<Item = &str> {
        let imports = self.report.as_ref().and_then(|report| report["imports"].as_array());
        imports.into_iter().flatten().filter_map(Value::as_str)
    }

    /// Returns whether the component takes the messages of a transaction in one call.
    pub(crate) fn takes_batches(&self) -> bool {
        self.report.as_ref().is_some_and(|report| report["world"] == "batch")
    }

    /// Checks that hosts can run the version: its component must be `ready`.
    pub(crate) fn check_deployable(&self) -> Result<(), InboxError> {
        let short = &hex::encode(&self.digest)[..12];
        let (code, text) = match self.state.as_str() {
            "ready" => return Ok(()),
            "failed" => {
                let problems = self
                    .problems
                    .as_array()
                    .into_iter()
                    .flatten()
                    .filter_map(|problem| problem["text"].as_str());
                let problems = problems.collect::<Vec<_>>().join("; ");
                (
                    "component_refused",
                    format!(
                        "version `{short}` of handler `{}` cannot be deployed: {problems}",
                        self.handler
                    ),
                )
            }
            state => (
                "version_not_ready",
                format!(
                    "version `{short}` of handler `{}` is {state}; deploy it when it is ready",
                    self.handler
                ),
            ),
        };
        Err(InboxError::Conflict { code, text })
    }
}

/// Fewest digits of a digest that name a version.
const PREFIX_MIN: usize = 6;

/// Checks that `text` is a digest or the beginning of one, and returns it in lower case.
pub(crate) fn check_prefix(text: &str) -> Result<String, InboxError> {
    let is_digest =
        (PREFIX_MIN..=64).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit());
    if is_digest {
        return Ok(text.to_ascii_lowercase());
    }
    Err(InboxError::Invalid(format!(
        "`{text}` is no version; a version is {PREFIX_MIN} to 64 hexadecimal digits of its digest"
    )))
}

/// Finds the version of a handler by its digest or the digest of its core module. `digest` may be
/// the first digits of either; more than one match is an error.
pub(crate) async fn find(
    connection: &mut PgConnection,
    tenant_id: i32,
    handler: &str,
    digest: &str,
) -> Result<Version, InboxError> {
    const FIND: &str = "WHERE h.tenant_id = $1 AND h.name = $2 \
        AND (encode(v.digest, 'hex') LIKE $3 || '%' OR encode(v.source_digest, 'hex') LIKE $3 || \
        '%') ORDER BY v.version_id DESC LIMIT 2";
    let prefix = check_prefix(digest)?;
    let mut found =
        select(FIND).bind(tenant_id).bind(handler).bind(&prefix).fetch_all(connection).await?;
    match (found.pop(), found.is_empty()) {
        (Some(version), true) => Ok(version),
        (None, _) => Err(InboxError::NotFound(format!(
            "handler `{handler}` has no version `{digest}`; `oncebox version list` shows those \
                there are"
        ))),
        (Some(_), false) => Err(InboxError::Invalid(format!(
            "more than one version of handler `{handler}` begins with `{digest}`; use more digits"
        ))),
    }
}

/// Reads a version by its key.
pub(crate) async fn by_id(
    connection: &mut PgConnection,
    version_id: i32,
) -> Result<Version, InboxError> {
    Ok(select("WHERE v.version_id = $1").bind(version_id).fetch_one(connection).await?)
}

impl Versions<'_> {
    /// Stores an upload as a version of a handler. Identical bytes give the existing version. A
    /// component that failed to compile is queued again. Returns the version.
    ///
    /// # Errors
    /// `NotFound` where there is no such tenant. `Invalid` for a bad name.
    pub async fn add(
        &self,
        tenant: &str,
        handler: &str,
        new: NewVersion<'_>,
    ) -> Result<Version, InboxError> {
        check_name("handler", handler)?;
        let tenant = self.0.tenants().get(tenant).await?;
        let digest: [u8; 32] = Sha256::digest(new.component).into();
        let mut tx = self.0.pool.begin().await?;
        const COMPONENT: &str = "INSERT INTO oncebox.component AS c (digest, bytes, state, report) \
            VALUES ($1, $2, $3, $4) \
            ON CONFLICT (digest) DO UPDATE SET state = excluded.state, problems = '[]', \
            compile_starts = 0, state_at = now(), host_id = NULL, \
                session_pid = NULL, session_began_at = NULL WHERE c.state = 'failed' OR (c.state \
                <> 'ready' AND excluded.state = 'ready')";
        let state = if new.is_compiled { "ready" } else { "queued" };
        let report = Some(new.report).filter(|report| !report.is_null());
        sqlx::query(COMPONENT)
            .bind(&digest[..])
            .bind(new.component)
            .bind(state)
            .bind(report)
            .execute(&mut *tx)
            .await?;
        const HANDLER: &str = "INSERT INTO oncebox.handler (tenant_id, name) VALUES ($1, $2) \
            ON CONFLICT ON CONSTRAINT handler_name_unique DO UPDATE SET name = excluded.name \
            RETURNING handler_id";
        let handler_id: i32 = sqlx::query_scalar(HANDLER)
            .bind(tenant.tenant_id)
            .bind(handler)
            .fetch_one(&mut *tx)
            .await?;
        const INSERT: &str = "INSERT INTO oncebox.version (handler_id, digest, source_digest, \
            created_by) VALUES ($1, $2, $3, $4) \
            ON CONFLICT ON CONSTRAINT version_digest_unique DO NOTHING RETURNING version_id";
        let source = new.source_digest.map(|digest| digest.to_vec());
        let inserted: Option<i32> = sqlx::query_scalar(INSERT)
            .bind(handler_id)
            .bind(&digest[..])
            .bind(source)
            .bind(&self.0.actor)
            .fetch_optional(&mut *tx)
            .await?;
        if inserted.is_some() {
            let details =
                serde_json::json!({ "digest": hex::encode(digest), "bytes": new.component.len() });
            self.0
                .audit()
                .record(&mut tx, "version.upload", Subject::of(&tenant.name, handler), details)
                .await?;
        }
        let version = find(&mut tx, tenant.tenant_id, handler, &hex::encode(digest)).await?;
        tx.commit().await?;
        Ok(version)
    }

    /// Returns a version by its digest, or by enough of the digest's first digits.
    ///
    /// # Errors
    /// `NotFound` where there is no such version. `Invalid` for digits that fit several.
    pub async fn get(
        &self,
        tenant: &str,
        handler: &str,
        digest: &str,
    ) -> Result<Version, InboxError> {
        let tenant = self.0.tenants().get(tenant).await?;
        let mut connection = self.0.pool.acquire().await?;
        find(&mut connection, tenant.tenant_id, handler, digest).await
    }

    /// Lists the versions of a handler, newest first.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn list(&self, tenant: &str, handler: &str) -> Result<Vec<Version>, InboxError> {
        const LIST: &str = "WHERE h.tenant_id = $1 AND h.name = $2 ORDER BY v.version_id DESC";
        let tenant = self.0.tenants().get(tenant).await?;
        Ok(select(LIST).bind(tenant.tenant_id).bind(handler).fetch_all(&self.0.pool).await?)
    }

    /// Lists the handlers of a tenant, by name.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn handlers(&self, tenant: &str) -> Result<Vec<HandlerRow>, InboxError> {
        const LIST: &str = "SELECT h.name, count(v.version_id) AS versions, max(v.created_at) AS \
            latest_at \
            FROM oncebox.handler h LEFT JOIN oncebox.version v USING (handler_id) WHERE \
            h.tenant_id = $1 GROUP BY h.name ORDER BY h.name";
        let tenant = self.0.tenants().get(tenant).await?;
        Ok(sqlx::query_as(LIST).bind(tenant.tenant_id).fetch_all(&self.0.pool).await?)
    }

    /// Uploads a component that the caller has just compiled, and deploys that version.
    /// Returns the deployment.
    ///
    /// # Errors
    /// The errors of [`Versions::add`] and [`Deployments::deploy`](crate::Deployments::deploy).
    pub async fn deploy_compiled(
        &self,
        tenant: &str,
        consumer: &str,
        new: NewDeployment,
        component: &[u8],
    ) -> Result<Deployment, InboxError> {
        let version =
            NewVersion { component, source_digest: None, report: &Value::Null, is_compiled: true };
        let version = self.add(tenant, &new.handler, version).await?;
        self.0
            .deployments()
            .deploy(
                tenant,
                consumer,
                &NewDeployment { version: hex::encode(version.digest), ..new },
            )
            .await
    }

    /// Returns the bytes of a component.
    ///
    /// # Errors
    /// `NotFound` where it is not stored, or an error of the host's database.
    pub async fn component(&self, digest: &[u8]) -> Result<Vec<u8>, InboxError> {
        let bytes = sqlx::query_scalar("SELECT bytes FROM oncebox.component WHERE digest = $1")
            .bind(digest)
            .fetch_optional(&self.0.pool)
            .await?;
        bytes.ok_or_else(|| {
            InboxError::NotFound(format!("there is no component `{}`", hex::encode(digest)))
        })
    }
}
