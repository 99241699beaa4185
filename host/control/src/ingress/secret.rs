//! Changes of the secrets by which a consumer knows its senders.

use oncebox_model::{error::InboxError, policy::Verification};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sqlx::PgConnection;

use crate::{
    audit::Subject,
    consumers::Consumer,
    endpoints::change::generate_signing_secret,
    handles::Ingress,
    tenants::{Tenant, keys::MasterKey},
};

/// Purpose under which secrets are sealed, for the login and the consumer.
const PURPOSE: &str = "ingress secret";

/// The secrets of a consumer, as they are shown.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct IngressSecret {
    /// Number of the latest change, from 1.
    pub revision: i64,
    /// Number of secrets: 2 during a rotation.
    pub secrets: i32,
    /// Time of the latest change.
    pub set_at: chrono::DateTime<chrono::Utc>,
    /// Who made it.
    pub set_by: String,
}

/// What is sealed: secrets count for the scheme alone under which they were given.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IngressSecrets {
    /// The scheme.
    pub scheme: Verification,
    /// The secrets, the present one first.
    pub secrets: Vec<String>,
}

/// A change of the secrets of a consumer.
#[derive(Clone, PartialEq, Eq)]
pub enum IngressSecretChange {
    /// One secret in place of all others.
    Replace(String),
    /// Another secret, and the present one is known too until the rotation is finished.
    Rotate(String),
    /// The secret before the present one is known no more.
    Finish,
}

impl Ingress<'_> {
    /// Changes the secrets of a consumer. Hosts know them within two seconds.
    ///
    /// # Errors
    /// `NotFound` where there is no such consumer, `Invalid` where the secret is none of the
    /// policy's scheme, `Conflict` where the policy takes nothing over HTTP, or where the rotation
    /// does not fit what is there.
    pub async fn change_secret(
        &self,
        tenant: &str,
        name: &str,
        change: &IngressSecretChange,
    ) -> Result<IngressSecret, InboxError> {
        const KEEP: &str = "INSERT INTO oncebox.ingress_secret AS s (consumer_id, secrets, sealed, \
                set_by) VALUES ($1, $2, $3, $4) \
            ON CONFLICT (consumer_id) DO UPDATE SET revision = s.revision + 1, \
                secrets = excluded.secrets, sealed = excluded.sealed, set_at = now(), \
                set_by = excluded.set_by \
            RETURNING s.revision, s.secrets, s.set_at, s.set_by";
        let consumer = self.0.consumers().get(tenant, name).await?;
        let scheme = scheme(&consumer)?;
        let mut tx = self.0.pool.begin().await?;
        let row = self.0.tenants().lock(&mut tx, tenant).await?;
        let known = self.stored(&mut tx, &row, &consumer, scheme).await?;
        let secrets = changed(known, change, &consumer)?;
        if let Some(secret) = secrets.first() {
            let fault =
                |fault: oncebox_model::policy::SecretFault| InboxError::Invalid(fault.to_string());
            scheme.check_secret(secret).map_err(fault)?;
        }
        let count = secrets.len() as i32;
        let sealed = IngressSecrets { scheme, secrets }.sealed(&self.0.key, &row, name);
        let query = sqlx::query_as(KEEP)
            .bind(consumer.consumer_id)
            .bind(count)
            .bind(sealed)
            .bind(&self.0.actor);
        let kept: IngressSecret = query.fetch_one(&mut *tx).await?;
        let details = json!({ "revision": kept.revision, "secrets": kept.secrets });
        let subject = Subject::of(tenant, name);
        self.0.audit().record(&mut tx, "ingress_secret.set", subject, details).await?;
        tx.commit().await?;
        Ok(kept)
    }

    /// Generates a secret for the scheme of a consumer's policy.
    ///
    /// # Errors
    /// `NotFound` where there is no such consumer, `Conflict` where its policy takes nothing over
    /// HTTP.
    pub async fn generate_secret(&self, tenant: &str, name: &str) -> Result<String, InboxError> {
        Ok(match scheme(&self.0.consumers().get(tenant, name).await?)? {
            Verification::StandardWebhooks => generate_signing_secret(),
            _ => hex::encode(rand::random::<[u8; 32]>()),
        })
    }

    /// Returns what is shown of the secrets of a consumer.
    ///
    /// # Errors
    /// `NotFound` where there is no such consumer, or it has none.
    pub async fn secret(&self, tenant: &str, name: &str) -> Result<IngressSecret, InboxError> {
        const READ: &str = "SELECT revision, secrets, set_at, set_by FROM oncebox.ingress_secret \
            WHERE consumer_id = $1";
        let consumer = self.0.consumers().get(tenant, name).await?;
        let query = sqlx::query_as(READ).bind(consumer.consumer_id);
        let found: Option<IngressSecret> = query.fetch_optional(&self.0.pool).await?;
        found.ok_or_else(|| none(tenant, name))
    }

    /// Removes the secrets of a consumer: requests to it are refused. Returns what they were.
    ///
    /// # Errors
    /// `NotFound` where there is no such consumer, or it has none.
    pub async fn remove_secret(
        &self,
        tenant: &str,
        name: &str,
    ) -> Result<IngressSecret, InboxError> {
        const REMOVE: &str = "DELETE FROM oncebox.ingress_secret WHERE consumer_id = $1 \
            RETURNING revision, secrets, set_at, set_by";
        let consumer = self.0.consumers().get(tenant, name).await?;
        let mut tx = self.0.pool.begin().await?;
        self.0.tenants().lock(&mut tx, tenant).await?;
        let query = sqlx::query_as(REMOVE).bind(consumer.consumer_id);
        let removed: Option<IngressSecret> = query.fetch_optional(&mut *tx).await?;
        let removed = removed.ok_or_else(|| none(tenant, name))?;
        let details = json!({ "revision": removed.revision });
        let subject = Subject::of(tenant, name);
        self.0.audit().record(&mut tx, "ingress_secret.remove", subject, details).await?;
        tx.commit().await?;
        Ok(removed)
    }

    /// Seals the secrets of a tenant's consumers under another master key. Returns whether one was
    /// sealed under another key before.
    pub(crate) async fn seal_anew(
        &self,
        connection: &mut PgConnection,
        keys: &MasterKey,
        new: &MasterKey,
        tenant: &Tenant,
    ) -> Result<bool, InboxError> {
        const ALL: &str = "SELECT c.consumer_id, c.name, s.sealed FROM oncebox.ingress_secret s \
            JOIN oncebox.consumer c USING (consumer_id) WHERE c.tenant_id = $1 \
            ORDER BY c.consumer_id FOR UPDATE OF s";
        const KEEP: &str = "UPDATE oncebox.ingress_secret SET sealed = $2 WHERE consumer_id = $1";
        let query = sqlx::query_as(ALL).bind(tenant.tenant_id);
        let all: Vec<(i32, String, Vec<u8>)> = query.fetch_all(&mut *connection).await?;
        let mut is_changed = false;
        for (consumer_id, name, known) in all {
            let subject = subject(&tenant.login, &name);
            // It is opened in any case: a name of a key does not prove that the text is whole.
            let text = keys.unseal(PURPOSE, &subject, &known)?;
            if new.has_sealed(&known) {
                continue;
            }
            is_changed = true;
            let query =
                sqlx::query(KEEP).bind(consumer_id).bind(new.seal(PURPOSE, &subject, &text));
            query.execute(&mut *connection).await?;
        }
        Ok(is_changed)
    }

    /// Reads, locks and opens the secrets of a consumer for a scheme. None where no key opens them
    /// any more, or where they are of another scheme: they are given anew.
    async fn stored(
        &self,
        connection: &mut PgConnection,
        tenant: &Tenant,
        consumer: &Consumer,
        scheme: Verification,
    ) -> Result<Vec<String>, InboxError> {
        const READ: &str = "SELECT sealed FROM oncebox.ingress_secret WHERE consumer_id = $1 FOR \
            UPDATE";
        let query = sqlx::query_scalar(READ).bind(consumer.consumer_id);
        let known: Option<Vec<u8>> = query.fetch_optional(connection).await?;
        let Some(known) = known else { return Ok(Vec::new()) };
        let opened =
            IngressSecrets::unsealed(&self.0.key, &tenant.login, &consumer.name, &known).ok();
        Ok(opened.filter(|it| it.scheme == scheme).map(|it| it.secrets).unwrap_or_default())
    }
}

fn none(tenant: &str, name: &str) -> InboxError {
    InboxError::NotFound(format!(
        "consumer `{tenant}/{name}` has no secret for messages over HTTP; `oncebox consumer secret \
            set {name} --tenant {tenant}` gives it one"
    ))
}

/// Returns the scheme of a consumer's policy.
fn scheme(consumer: &Consumer) -> Result<Verification, InboxError> {
    let policy = consumer.policy()?;
    policy.ingress.map(|ingress| ingress.verify).ok_or_else(|| {
        InboxError::conflict(format!(
            "the policy of consumer `{}/{}` takes no messages over HTTP; `[ingress]` of its policy \
                does, with `oncebox consumer policy set`",
            consumer.tenant, consumer.name
        ))
    })
}

/// Returns the secrets after a change.
fn changed(
    known: Vec<String>,
    change: &IngressSecretChange,
    consumer: &Consumer,
) -> Result<Vec<String>, InboxError> {
    let Consumer { tenant, name, .. } = consumer;
    match (change, known.as_slice()) {
        (IngressSecretChange::Replace(secret), _) => Ok(vec![secret.clone()]),
        (IngressSecretChange::Rotate(secret), [current]) => {
            Ok(vec![secret.clone(), current.clone()])
        }
        (IngressSecretChange::Rotate(_), []) => Err(InboxError::conflict(format!(
            "consumer `{tenant}/{name}` has no secret that another one could replace; \
                `oncebox consumer secret set {name} --tenant {tenant}` gives it one"
        ))),
        (IngressSecretChange::Rotate(_), _) => Err(InboxError::conflict(format!(
            "consumer `{tenant}/{name}` has two secrets; `oncebox consumer secret rotate {name} \
                --tenant {tenant} --finish` ends the rotation that is under way"
        ))),
        (IngressSecretChange::Finish, [current, _]) => Ok(vec![current.clone()]),
        (IngressSecretChange::Finish, _) => Err(InboxError::conflict(format!(
            "no rotation of the secret of consumer `{tenant}/{name}` is under way"
        ))),
    }
}

impl IngressSecrets {
    fn sealed(&self, key: &MasterKey, tenant: &Tenant, consumer: &str) -> Vec<u8> {
        let text = serde_json::to_vec(self).expect("texts are JSON");
        key.seal(PURPOSE, &subject(&tenant.login, consumer), &text)
    }

    /// Opens the secrets of a consumer.
    ///
    /// # Errors
    /// `Sealed` where no key of this process opens them.
    pub(super) fn unsealed(
        key: &MasterKey,
        login: &str,
        consumer: &str,
        sealed: &[u8],
    ) -> Result<Self, InboxError> {
        let text = key.unseal(PURPOSE, &subject(login, consumer), sealed)?;
        serde_json::from_slice(&text).map_err(|_| {
            InboxError::Sealed(format!(
                "the secret of consumer `{consumer}` is of a form that this version does not know"
            ))
        })
    }
}

fn subject(login: &str, consumer: &str) -> String {
    format!("{login}/{consumer}")
}
