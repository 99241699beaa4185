//! Whether messages are archived before their removal, and where. The row of the table
//! `oncebox.archive_setting` in the host's database says it for the whole installation. So a
//! process without the setting removes nothing that must be archived.
//!
//! The location has a mark, a file with the id of the installation and a random token that the row
//! has, too. A location without it is not the one that was meant, such as a folder that is not
//! mounted, or a copy of it from the time before `oncebox archive off`.

use bytes::Bytes;
use chrono::{DateTime, Utc};
use oncebox_archive::{ArchiveError, ArchiveStore};
use oncebox_model::error::InboxError;
use serde_json::json;
use sqlx::{AssertSqlSafe, Executor, PgConnection};

use super::failed;
use crate::{audit::Subject, handles::Archive};

/// Name of the mark, below the folder of the installation.
const MARK: &str = "oncebox-archive";

/// The decision to archive messages before their removal.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct ArchiveMark {
    /// Location of the archive.
    pub location: String,
    /// Time of the decision.
    pub set_at: DateTime<Utc>,
    /// Host or operator that was set so first.
    pub set_by: String,
    /// Time at which the location was marked; none before that.
    pub(crate) marked_at: Option<DateTime<Utc>>,
    /// Token in the mark; none before the location was marked.
    token: Option<String>,
}

/// The decision, where there is one.
const SETTING: &str =
    "SELECT location, set_at, set_by, marked_at, token FROM oncebox.archive_setting";

impl<'a> Archive<'a> {
    /// Returns the place of this process for files, if it has one.
    pub(crate) fn store(&self) -> Option<&'a ArchiveStore> {
        self.0.archive_store.as_ref()
    }

    /// Returns the decision to archive, if there is one.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn mark(&self) -> Result<Option<ArchiveMark>, InboxError> {
        Ok(sqlx::query_as(SETTING).fetch_optional(&self.0.pool).await?)
    }

    /// Notes the decision in the host's database, where this process is set to archive and no note
    /// is there. From then on no process without the setting removes messages.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn announce(&self) -> Result<(), InboxError> {
        const NOTE: &str = "INSERT INTO oncebox.archive_setting (location, set_by) VALUES ($1, $2) \
            ON CONFLICT DO NOTHING";
        let Some(store) = self.store() else { return Ok(()) };
        let query = sqlx::query(NOTE).bind(store.location()).bind(&self.0.actor);
        query.execute(&self.0.pool).await?;
        Ok(())
    }

    /// Takes the decision back, and returns it; none where there was none. Files and their rows
    /// stay. A host that is still set to archive notes it again at its next run.
    ///
    /// # Errors
    /// An error of the host's database.
    pub async fn end(&self) -> Result<Option<ArchiveMark>, InboxError> {
        const END: &str = "DELETE FROM oncebox.archive_setting \
            RETURNING location, set_at, set_by, marked_at, token";
        let mut tx = self.0.pool.begin().await?;
        let mark: Option<ArchiveMark> = sqlx::query_as(END).fetch_optional(&mut *tx).await?;
        if let Some(mark) = &mark {
            let details = json!({ "location": mark.location, "set_at": mark.set_at });
            let subject = Subject::platform("archive");
            self.0.audit().record(&mut tx, "archive.off", subject, details).await?;
        }
        tx.commit().await?;
        Ok(mark)
    }

    /// Returns the place to which messages must go before they are removed; none where they need
    /// not.
    ///
    /// # Errors
    /// `Conflict` where messages must go to a place that this process does not have, or that is not
    /// the one that was marked. `Archive` where the place does not answer.
    pub(crate) async fn required(&self) -> Result<Option<&'a ArchiveStore>, InboxError> {
        let mut mark = self.mark().await?;
        if mark.is_none() && self.store().is_some() {
            self.announce().await?;
            mark = self.mark().await?;
        }
        match (self.store(), mark) {
            (None, None) => Ok(None),
            (Some(store), Some(mark)) if mark.location == store.location() => {
                self.check_mark(store, &mark).await?;
                Ok(Some(store))
            }
            (Some(store), Some(mark)) => Err(InboxError::conflict(format!(
                "messages are archived at `{}` before their removal, and this process is set to \
                    `{}`; give all of them one `archive.location`. To move the archive, stop the \
                    hosts, copy its files, and run `oncebox archive off` first",
                mark.location,
                store.location()
            ))),
            (None, Some(mark)) => Err(InboxError::conflict(format!(
                "messages are archived at `{}` before their removal, and this process has no \
                    `archive.location`; give it the settings of the hosts, or end the archive with \
                    `oncebox archive off`",
                mark.location
            ))),
            (Some(_), None) => Err(InboxError::conflict(
                "the archive was ended just now; the next run looks again",
            )),
        }
    }

    /// Checks, in the transaction of a drop without an archive, that nobody has decided to archive
    /// since. In the host's database, where no tenant is named, a decision waits until the
    /// transaction ends. It does not wait for a drop in a tenant's own database.
    ///
    /// # Errors
    /// `Conflict` where messages must be archived. An error of a database.
    pub(crate) async fn check_is_off(
        &self,
        connection: &mut PgConnection,
        database: Option<&str>,
    ) -> Result<(), InboxError> {
        const LOCK: &str = "LOCK TABLE oncebox.archive_setting IN SHARE MODE";
        let mark = if database.is_some() {
            self.mark().await?
        } else {
            connection.execute(LOCK).await?;
            sqlx::query_as(SETTING).fetch_optional(connection).await?
        };
        match mark {
            None => Ok(()),
            Some(ArchiveMark { location, .. }) => Err(InboxError::conflict(format!(
                "messages are archived at `{location}` since this removal began without it; the \
                    next run archives them first"
            ))),
        }
    }

    /// Checks that the location is the one that was marked. The first process marks it.
    pub(crate) async fn check_mark(
        &self,
        store: &ArchiveStore,
        mark: &ArchiveMark,
    ) -> Result<(), InboxError> {
        let token = match &mark.token {
            Some(token) => token.clone(),
            None => self.mark_place(store).await?,
        };
        let (path, content) = (self.path(MARK).await?, self.mark_content(&token).await?);
        let found = match store.get(&path).await {
            Err(ArchiveError::Missing { .. }) => None,
            found => Some(found.map_err(failed)?),
        };
        if found.is_some_and(|found| found == content.as_bytes()) {
            return Ok(());
        }
        Err(InboxError::conflict(format!(
            "the archive at `{}` has no file `{path}` as it was written when the archive began; \
                check that the folder is mounted, or that it is the right bucket",
            store.location()
        )))
    }

    /// Writes the mark to the location, unless another process did so just now. Returns the token
    /// in the mark. Two processes never mark two places: the row is locked meanwhile.
    async fn mark_place(&self, store: &ArchiveStore) -> Result<String, InboxError> {
        const MARKED: &str = "UPDATE oncebox.archive_setting SET marked_at = now(), token = $1";
        let mut tx = self.0.pool.begin().await?;
        let locked = sqlx::query_as(AssertSqlSafe(format!("{SETTING} FOR UPDATE")));
        let mark: Option<ArchiveMark> = locked.fetch_optional(&mut *tx).await?;
        let mark = mark.filter(|mark| mark.location == store.location()).ok_or_else(|| {
            InboxError::conflict("the archive was ended just now; the next run looks again")
        })?;
        if let Some(token) = mark.token {
            return Ok(token);
        }
        let token = hex::encode(rand::random::<[u8; 16]>());
        store.create().await.map_err(failed)?;
        let (path, content) = (self.path(MARK).await?, self.mark_content(&token).await?);
        store.put(&path, Bytes::from(content)).await.map_err(failed)?;
        sqlx::query(MARKED).bind(&token).execute(&mut *tx).await?;
        tx.commit().await?;
        Ok(token)
    }

    /// Returns the content of the mark: the id of the installation and the token.
    async fn mark_content(&self, token: &str) -> Result<String, InboxError> {
        Ok(format!("{} {token}\n", self.0.tenant_databases().installation().await?))
    }

    /// Returns the path of a file of this installation.
    pub(crate) async fn path(&self, file: &str) -> Result<String, InboxError> {
        Ok(format!("{}/{file}", self.0.tenant_databases().installation().await?))
    }
}
