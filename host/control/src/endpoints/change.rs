//! Changes of endpoints: set, rotate and remove; and their list.

use base64::{Engine, engine::general_purpose::STANDARD};
use chrono::Utc;
use oncebox_model::error::InboxError;
use serde_json::json;
use sqlx::{AssertSqlSafe, PgConnection};

use super::{
    request::SealedRequest,
    settings::{DuplicateDecision, NewEndpoint, SHOWN, TenantEndpoint},
};
use crate::{
    audit::Subject,
    handles::Endpoints,
    tenants::{Tenant, keys::MasterKey},
};

/// Most endpoints of a tenant.
const ENDPOINTS_MAX: i64 = 200;

/// The result of setting an endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointChange {
    /// The endpoint as it is now, or would be.
    pub endpoint: TenantEndpoint,
    /// Whether it was not there before.
    pub is_new: bool,
    /// Settings that differ from what was there before. Secrets are named and never shown.
    pub changed: Vec<&'static str>,
}

/// A step of the rotation of an endpoint's signing secret.
#[derive(Clone, PartialEq, Eq)]
pub enum SecretRotation {
    /// Another secret signs first, and the one before it signs too.
    Begin(String),
    /// The secret before the present one signs no more.
    Finish,
}

/// An endpoint as its row holds it.
#[derive(Clone, sqlx::FromRow)]
pub(super) struct StoredEndpoint {
    #[sqlx(flatten)]
    pub(super) shown: TenantEndpoint,
    pub(super) request: Vec<u8>,
}

impl Endpoints<'_> {
    /// Gives a tenant an endpoint, or changes one; without a change it stays as it is. Requests
    /// that begin some seconds later use it. With `is_dry` nothing is written. Opens no connection
    /// to it.
    ///
    /// # Errors
    /// `NotFound` where there is no such tenant, `Conflict` where it is being deleted or has as
    /// many endpoints as it may have, `Invalid` where a setting cannot be used, or where the
    /// operator's settings or the tenant's limits do not allow the host.
    pub async fn set(
        &self,
        tenant: &str,
        new: &NewEndpoint,
        is_dry: bool,
    ) -> Result<EndpointChange, InboxError> {
        new.check()?;
        let mut tx = self.0.pool.begin().await?;
        let row = self.0.tenants().lock(&mut tx, tenant).await?;
        let before = match stored(&mut tx, row.tenant_id, &new.name).await? {
            Some(before) => {
                let request = match self.unsealed(&row, &before) {
                    // Nobody can open it any more. It is given anew, as a whole.
                    Err(InboxError::Sealed(_)) if new.signing_secret.is_some() => {
                        SealedRequest::empty()
                    }
                    request => request?,
                };
                Some((before.shown, request))
            }
            None => {
                check_number(&mut tx, &row).await?;
                None
            }
        };
        let request = SealedRequest {
            url: new.url.clone(),
            headers: new.headers.clone(),
            signing_secrets: match (&new.signing_secret, &before) {
                (Some(secret), _) if secret.is_empty() => Vec::new(),
                // A secret that signs already stays with the one of its rotation.
                (Some(secret), Some((_, known))) if known.signing_secrets.contains(secret) => {
                    known.signing_secrets.clone()
                }
                (Some(secret), _) => vec![secret.clone()],
                (None, Some((_, known))) => known.signing_secrets.clone(),
                (None, None) => Vec::new(),
            },
        };
        let mut endpoint = self.shown(new, &request, before.as_ref().map(|(shown, _)| shown));
        let opened = request.endpoint(&endpoint, &row)?;
        self.check_hosts(&opened)?;
        endpoint.origin = request.origin(&opened);
        let changed = changes(&endpoint, &request, before.as_ref());
        let is_new = before.is_none();
        if is_dry || (!is_new && changed.is_empty()) {
            tx.rollback().await?;
            if let Some((shown, _)) = before.filter(|_| changed.is_empty()) {
                endpoint = shown;
            }
            return Ok(EndpointChange { endpoint, is_new, changed });
        }
        let sealed = request.sealed(&self.0.key, &row, &new.name);
        let endpoint = write(&mut tx, &row, &endpoint, sealed).await?;
        let details = json!({
            "revision": endpoint.revision, "changed": changed, "origin": endpoint.origin,
            "answer": endpoint.answer, "receiver_deduplicates": endpoint.receiver_deduplicates,
            "duplicates_accepted_by": endpoint.duplicates_accepted_by,
            "duplicates_because": endpoint.duplicates_because,
        });
        self.record(&mut tx, "endpoint.set", tenant, &new.name, details).await?;
        tx.commit().await?;
        Ok(EndpointChange { endpoint, is_new, changed })
    }

    /// Takes a step of the rotation of an endpoint's signing secret. Between the two steps both
    /// secrets sign each request, and receivers may know either.
    ///
    /// # Errors
    /// `NotFound` where there is no such endpoint, `Conflict` where a rotation is under way or,
    /// to finish, none is, and `Invalid` where the secret cannot be used.
    pub async fn rotate(
        &self,
        tenant: &str,
        name: &str,
        step: &SecretRotation,
    ) -> Result<TenantEndpoint, InboxError> {
        let mut tx = self.0.pool.begin().await?;
        let row = self.0.tenants().lock(&mut tx, tenant).await?;
        let before = stored(&mut tx, row.tenant_id, name).await?;
        let before = before.ok_or_else(|| missing(tenant, name))?;
        let mut request = self.unsealed(&row, &before)?;
        let secrets = &mut request.signing_secrets;
        match (step, secrets.len()) {
            (SecretRotation::Begin(secret), 0 | 1) => secrets.insert(0, secret.clone()),
            (SecretRotation::Begin(_), _) => {
                return Err(InboxError::conflict(format!(
                    "the endpoint `{name}` has two signing secrets; `oncebox endpoint rotate \
                        {name} --tenant {tenant} --finish` ends the rotation that is under way"
                )));
            }
            (SecretRotation::Finish, 2) => secrets.truncate(1),
            (SecretRotation::Finish, _) => {
                return Err(InboxError::conflict(format!(
                    "no rotation of the signing secret of the endpoint `{name}` is under way"
                )));
            }
        }
        let mut shown = before.shown;
        shown.signing_secrets = request.signing_secrets.len() as i32;
        shown.set_by = self.0.actor.clone();
        request.endpoint(&shown, &row)?;
        let sealed = request.sealed(&self.0.key, &row, name);
        let endpoint = write(&mut tx, &row, &shown, sealed).await?;
        let details = json!({
            "revision": endpoint.revision, "signing_secrets": endpoint.signing_secrets,
        });
        self.record(&mut tx, "endpoint.rotate", tenant, name, details).await?;
        tx.commit().await?;
        Ok(endpoint)
    }

    /// Returns the endpoints of a tenant, by name.
    ///
    /// # Errors
    /// `NotFound` where there is no such tenant, or an error of the host's database.
    pub async fn list(&self, tenant: &str) -> Result<Vec<TenantEndpoint>, InboxError> {
        let tenant = self.0.tenants().get(tenant).await?;
        let list = format!(
            "SELECT {SHOWN} FROM oncebox.endpoint e WHERE e.tenant_id = $1 ORDER BY e.name"
        );
        let query = sqlx::query_as(AssertSqlSafe(list)).bind(tenant.tenant_id);
        Ok(query.fetch_all(&self.0.pool).await?)
    }

    /// Returns an endpoint of a tenant.
    ///
    /// # Errors
    /// `NotFound` where there is no such tenant or endpoint.
    pub async fn get(&self, tenant: &str, name: &str) -> Result<TenantEndpoint, InboxError> {
        let endpoints = self.list(tenant).await?;
        let found = endpoints.into_iter().find(|endpoint| endpoint.name == name);
        found.ok_or_else(|| missing(tenant, name))
    }

    /// Removes an endpoint with its secrets. Returns what it was. Messages that are still to be
    /// sent to it are parked.
    ///
    /// # Errors
    /// `NotFound` where there is no such tenant or endpoint, `Conflict` where the tenant is being
    /// deleted.
    pub async fn remove(&self, tenant: &str, name: &str) -> Result<TenantEndpoint, InboxError> {
        let mut tx = self.0.pool.begin().await?;
        let row = self.0.tenants().lock(&mut tx, tenant).await?;
        let delete = format!(
            "DELETE FROM oncebox.endpoint e WHERE e.tenant_id = $1 AND e.name = $2 RETURNING \
                {SHOWN}"
        );
        let query = sqlx::query_as(AssertSqlSafe(delete)).bind(row.tenant_id).bind(name);
        let removed: Option<TenantEndpoint> = query.fetch_optional(&mut *tx).await?;
        let removed = removed.ok_or_else(|| missing(tenant, name))?;
        let details = json!({ "origin": removed.origin });
        self.record(&mut tx, "endpoint.remove", tenant, name, details).await?;
        tx.commit().await?;
        Ok(removed)
    }

    /// Seals a tenant's endpoints under another master key. Returns whether one was sealed under
    /// another key before.
    pub(crate) async fn seal_anew(
        &self,
        connection: &mut PgConnection,
        keys: &MasterKey,
        new: &MasterKey,
        tenant: &Tenant,
    ) -> Result<bool, InboxError> {
        const ALL: &str = "SELECT name, request FROM oncebox.endpoint WHERE tenant_id = $1 \
            ORDER BY name FOR UPDATE";
        const KEEP: &str =
            "UPDATE oncebox.endpoint SET request = $3 WHERE tenant_id = $1 AND name = $2";
        let all: Vec<(String, Vec<u8>)> =
            sqlx::query_as(ALL).bind(tenant.tenant_id).fetch_all(&mut *connection).await?;
        let mut is_changed = false;
        for (name, sealed) in all {
            let Some(sealed) = SealedRequest::anew(keys, new, tenant, &name, &sealed)? else {
                continue;
            };
            is_changed = true;
            let query = sqlx::query(KEEP).bind(tenant.tenant_id).bind(&name).bind(sealed);
            query.execute(&mut *connection).await?;
        }
        Ok(is_changed)
    }

    pub(super) fn unsealed(
        &self,
        tenant: &Tenant,
        stored: &StoredEndpoint,
    ) -> Result<SealedRequest, InboxError> {
        SealedRequest::unsealed(&self.0.key, tenant, &stored.shown.name, &stored.request)
    }

    /// Returns an endpoint as it would be shown. Its origin is that of the one before it.
    fn shown(
        &self,
        new: &NewEndpoint,
        request: &SealedRequest,
        before: Option<&TenantEndpoint>,
    ) -> TenantEndpoint {
        let number = |value: u32| i32::try_from(value).unwrap_or(i32::MAX);
        let (by, because) = match &new.duplicates {
            DuplicateDecision::ReceiverDeduplicates => (None, None),
            DuplicateDecision::Accepted { by, because } => {
                (Some(by.clone()), Some(because.clone()))
            }
        };
        TenantEndpoint {
            name: new.name.clone(),
            revision: before.map_or(1, |before| before.revision + 1),
            origin: before.map(|before| before.origin.clone()).unwrap_or_default(),
            method: new.method.clone(),
            header_names: request.headers.iter().map(|(name, _)| name.to_lowercase()).collect(),
            signing_secrets: request.signing_secrets.len() as i32,
            connect_timeout_ms: number(new.connect_timeout_ms),
            timeout_ms: number(new.timeout_ms),
            requests_per_second: new.requests_per_second.map(number),
            requests_max: number(new.requests_max),
            failures_max: number(new.failures_max),
            pause_ms: number(new.pause_ms),
            answer: new.answer.as_str().to_owned(),
            answer_to: new.answer_to.clone(),
            answer_event_type: new.answer_event_type.clone(),
            receiver_deduplicates: by.is_none(),
            duplicates_accepted_by: by,
            duplicates_because: because,
            set_at: Utc::now(),
            set_by: self.0.actor.clone(),
        }
    }

    pub(super) async fn record(
        &self,
        connection: &mut PgConnection,
        action: &str,
        tenant: &str,
        name: &str,
        details: serde_json::Value,
    ) -> Result<(), InboxError> {
        self.0.audit().record(connection, action, Subject::of(tenant, name), details).await
    }
}

/// Generates a signing secret.
pub fn generate_signing_secret() -> String {
    format!("whsec_{}", STANDARD.encode(rand::random::<[u8; 32]>()))
}

/// Names what differs from the endpoint before; nothing where there was none.
fn changes(
    endpoint: &TenantEndpoint,
    request: &SealedRequest,
    before: Option<&(TenantEndpoint, SealedRequest)>,
) -> Vec<&'static str> {
    let Some((shown, known)) = before else { return Vec::new() };
    let mut changed = endpoint.differences(shown);
    for (name, is_same) in [
        ("url", request.url == known.url),
        ("headers", request.headers == known.headers),
        ("signing_secret", request.signing_secrets == known.signing_secrets),
    ] {
        if !is_same {
            changed.push(name);
        }
    }
    changed
}

/// Refuses a further endpoint of a tenant that has as many as it may have. The caller has locked
/// the tenant.
async fn check_number(connection: &mut PgConnection, tenant: &Tenant) -> Result<(), InboxError> {
    const COUNT: &str = "SELECT count(*) FROM oncebox.endpoint WHERE tenant_id = $1";
    let query = sqlx::query_scalar(COUNT).bind(tenant.tenant_id);
    let count: i64 = query.fetch_one(connection).await?;
    if count < ENDPOINTS_MAX {
        return Ok(());
    }
    Err(InboxError::conflict(format!(
        "tenant `{}` has {ENDPOINTS_MAX} endpoints, and may not have more; `oncebox endpoint \
            remove` removes one",
        tenant.name
    )))
}

/// Reads and locks the row of an endpoint.
async fn stored(
    connection: &mut PgConnection,
    tenant_id: i32,
    name: &str,
) -> Result<Option<StoredEndpoint>, InboxError> {
    let read = format!(
        "SELECT {SHOWN}, e.request FROM oncebox.endpoint e WHERE e.tenant_id = $1 AND e.name = $2 \
            FOR UPDATE"
    );
    let query = sqlx::query_as(AssertSqlSafe(read)).bind(tenant_id).bind(name);
    Ok(query.fetch_optional(connection).await?)
}

/// Writes the row of an endpoint.
async fn write(
    connection: &mut PgConnection,
    tenant: &Tenant,
    endpoint: &TenantEndpoint,
    sealed: Vec<u8>,
) -> Result<TenantEndpoint, InboxError> {
    let write = format!(
        "INSERT INTO oncebox.endpoint AS e (tenant_id, name, origin, method, header_names, \
            signing_secrets, request, connect_timeout_ms, timeout_ms, requests_per_second, \
            requests_max, failures_max, pause_ms, answer, answer_to, answer_event_type, \
            receiver_deduplicates, duplicates_accepted_by, duplicates_because, set_by) \
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, \
            $19, $20) \
         ON CONFLICT (tenant_id, name) DO UPDATE SET revision = e.revision + 1, \
            origin = excluded.origin, method = excluded.method, \
            header_names = excluded.header_names, signing_secrets = excluded.signing_secrets, \
            request = excluded.request, connect_timeout_ms = excluded.connect_timeout_ms, \
            timeout_ms = excluded.timeout_ms, \
            requests_per_second = excluded.requests_per_second, \
            requests_max = excluded.requests_max, failures_max = excluded.failures_max, \
            pause_ms = excluded.pause_ms, answer = excluded.answer, \
            answer_to = excluded.answer_to, answer_event_type = excluded.answer_event_type, \
            receiver_deduplicates = excluded.receiver_deduplicates, \
            duplicates_accepted_by = excluded.duplicates_accepted_by, \
            duplicates_because = excluded.duplicates_because, set_at = now(), \
            set_by = excluded.set_by \
         RETURNING {SHOWN}"
    );
    let query = sqlx::query_as(AssertSqlSafe(write))
        .bind(tenant.tenant_id)
        .bind(&endpoint.name)
        .bind(&endpoint.origin)
        .bind(&endpoint.method)
        .bind(&endpoint.header_names)
        .bind(endpoint.signing_secrets)
        .bind(sealed)
        .bind(endpoint.connect_timeout_ms)
        .bind(endpoint.timeout_ms)
        .bind(endpoint.requests_per_second)
        .bind(endpoint.requests_max)
        .bind(endpoint.failures_max)
        .bind(endpoint.pause_ms)
        .bind(&endpoint.answer)
        .bind(&endpoint.answer_to)
        .bind(&endpoint.answer_event_type)
        .bind(endpoint.receiver_deduplicates)
        .bind(&endpoint.duplicates_accepted_by)
        .bind(&endpoint.duplicates_because)
        .bind(&endpoint.set_by);
    Ok(query.fetch_one(connection).await?)
}

fn missing(tenant: &str, name: &str) -> InboxError {
    InboxError::NotFound(format!(
        "tenant `{tenant}` has no endpoint `{name}`; `oncebox endpoint list --tenant {tenant}` \
            shows those that it has"
    ))
}
