//! Which version of a handler takes an event type.

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::{
    admin::{Admin, check_name},
    error::InboxError,
};

/// A live deployment, as a host loads it.
#[derive(Debug, Clone, serde::Serialize, sqlx::FromRow)]
pub struct Deployment {
    /// Key.
    pub deployment_id: i64,
    /// The event type, or `*`.
    pub event_type: String,
    /// Name of the handler.
    pub handler: String,
    /// Key of the version.
    pub version_id: i32,
    /// SHA-256 of the component.
    #[serde(serialize_with = "hex::serde::serialize")]
    pub digest: Vec<u8>,
    /// Settings that the handler reads through `config`.
    pub settings: Value,
}

/// The live deployments of a consumer, and their generation.
#[derive(Debug, Clone)]
pub struct Deployments {
    /// Grows with every change.
    pub generation: i64,
    /// The newest of each event type.
    pub live: Vec<Deployment>,
}

impl Admin {
    /// Make a component the live handler of an event type. One transaction; a host switches between
    /// two transactions of its own.
    pub async fn deploy(
        &self,
        tenant: &str,
        consumer: &str,
        event_type: &str,
        handler: &str,
        component: &[u8],
        settings: &Value,
    ) -> Result<Deployment, InboxError> {
        check_name("handler", handler)?;
        if event_type.is_empty() {
            return Err(InboxError::Invalid("the event type is empty; use `*` for those that no other deployment takes".to_owned()));
        }
        let consumer = self.consumer(tenant, consumer).await?;
        let tenant = self.tenant(tenant).await?;
        let digest: [u8; 32] = Sha256::digest(component).into();
        let mut tx = self.pool.begin().await?;
        sqlx::query("INSERT INTO oncebox.component (digest, bytes) VALUES ($1, $2) ON CONFLICT DO NOTHING")
            .bind(&digest[..])
            .bind(component)
            .execute(&mut *tx)
            .await?;
        const HANDLER: &str = "INSERT INTO oncebox.handler (tenant_id, name) VALUES ($1, $2) \
            ON CONFLICT ON CONSTRAINT handler_name_unique DO UPDATE SET name = excluded.name RETURNING handler_id";
        let handler_id: i32 = sqlx::query_scalar(HANDLER).bind(tenant.tenant_id).bind(handler).fetch_one(&mut *tx).await?;
        const VERSION: &str = "INSERT INTO oncebox.version (handler_id, digest) VALUES ($1, $2) \
            ON CONFLICT ON CONSTRAINT version_digest_unique DO UPDATE SET digest = excluded.digest RETURNING version_id";
        let version_id: i32 = sqlx::query_scalar(VERSION).bind(handler_id).bind(&digest[..]).fetch_one(&mut *tx).await?;
        const DEPLOYMENT: &str = "INSERT INTO oncebox.deployment (consumer_id, event_type, version_id, settings) VALUES ($1, $2, $3, $4) RETURNING deployment_id";
        let deployment_id: i64 = sqlx::query_scalar(DEPLOYMENT)
            .bind(consumer.consumer_id)
            .bind(event_type)
            .bind(version_id)
            .bind(settings)
            .fetch_one(&mut *tx)
            .await?;
        sqlx::query("UPDATE oncebox.consumer SET generation = generation + 1 WHERE consumer_id = $1")
            .bind(consumer.consumer_id)
            .execute(&mut *tx)
            .await?;
        let details = json!({ "event_type": event_type, "handler": handler, "digest": hex::encode(digest) });
        self.audit(&mut tx, "deploy", &format!("{}/{}", tenant.name, consumer.name), details).await?;
        tx.commit().await?;
        let (event_type, handler, settings) = (event_type.to_owned(), handler.to_owned(), settings.clone());
        Ok(Deployment { deployment_id, event_type, handler, version_id, digest: digest.to_vec(), settings })
    }

    /// What is live for a consumer.
    pub async fn deployments(&self, consumer_id: i32) -> Result<Deployments, InboxError> {
        const LIVE: &str = "SELECT DISTINCT ON (d.event_type) d.deployment_id, d.event_type, h.name AS handler, v.version_id, v.digest, d.settings \
            FROM oncebox.deployment d JOIN oncebox.version v USING (version_id) JOIN oncebox.handler h USING (handler_id) \
            WHERE d.consumer_id = $1 ORDER BY d.event_type, d.deployment_id DESC";
        // The generation is read first: deployments that come between the two make it look older, and
        // it is loaded again.
        let generation = sqlx::query_scalar("SELECT generation FROM oncebox.consumer WHERE consumer_id = $1")
            .bind(consumer_id)
            .fetch_one(&self.pool)
            .await?;
        let live = sqlx::query_as(LIVE).bind(consumer_id).fetch_all(&self.pool).await?;
        Ok(Deployments { generation, live })
    }

    /// The bytes of a component.
    pub async fn component(&self, digest: &[u8]) -> Result<Vec<u8>, InboxError> {
        let bytes =
            sqlx::query_scalar("SELECT bytes FROM oncebox.component WHERE digest = $1").bind(digest).fetch_optional(&self.pool).await?;
        bytes.ok_or_else(|| InboxError::NotFound(format!("there is no component `{}`", hex::encode(digest))))
    }
}
