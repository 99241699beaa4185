//! The archive: the place is there, and so are files that it was given.

use oncebox_archive::{ArchiveError, ArchiveStore};
use oncebox_model::error::InboxError;

use super::{Finding, Severity};
use crate::{
    archive::{check_row, list::ArchivedFile},
    handles::Doctor,
};

const CHECK: &str = "archive";
/// Files of each database that are looked for, chosen by chance.
const LOOKED_FOR: i64 = 5;

impl Doctor<'_> {
    /// Checks that the archive can be read, and that some of its files are there. Returns nothing
    /// where messages are not archived.
    pub(super) async fn archive_is_there(&self) -> Vec<Finding> {
        let mark = match self.0.archive().mark().await {
            Ok(None) => return Vec::new(),
            Ok(Some(mark)) => mark,
            Err(error) => return vec![self.unknown_archive(&error)],
        };
        let location = &mark.location;
        let store = match self.0.archive().store() {
            Some(store) if store.location() == location => store,
            Some(store) => {
                let found = format!(
                    "messages are archived at `{location}`, and this process is set to `{}`, so \
                        that it removes none",
                    store.location()
                );
                let advice = "give all processes one `archive.location`";
                return vec![self.of_archive(Severity::Error, found).advise(advice)];
            }
            None => {
                let found = format!(
                    "messages are archived at `{location}`, where this process does not look"
                );
                let advice = "run it with the settings of a host, or through its API";
                return vec![self.of_archive(Severity::Unknown, found).advise(advice)];
            }
        };
        if mark.marked_at.is_none() {
            let found = format!("no run of retention has used the archive at `{location}` yet");
            return vec![self.of_archive(Severity::Unknown, found)];
        }
        if let Err(error) = self.0.archive().check_mark(store, &mark).await {
            return vec![self.of_archive(Severity::Error, error.to_string())];
        }
        match self.missing_files(store).await {
            Err(error) => vec![self.unknown_archive(&error)],
            Ok((missing, _)) if !missing.is_empty() => missing,
            Ok((_, count)) => {
                let found = format!(
                    "the archive at `{location}` can be read, and has {count} of {count} files \
                        that were looked for"
                );
                vec![self.of_archive(Severity::Ok, found)]
            }
        }
    }

    /// Looks for some files of each database. Returns a finding for each that is not as it was
    /// written, and the number of files.
    async fn missing_files(
        &self,
        store: &ArchiveStore,
    ) -> Result<(Vec<Finding>, usize), InboxError> {
        let (mut findings, mut count) = (Vec::new(), 0);
        let installation = self.0.tenant_databases().installation().await?.to_string();
        for database in self.0.tenant_databases().all().await? {
            let files = match self.0.archive().sample(&database, LOOKED_FOR).await {
                Ok(files) => files,
                // Another check names a tenant's database that does not answer.
                Err(_) if database.name().is_some() => continue,
                Err(error) => return Err(error),
            };
            for file in files {
                count += 1;
                let Err(error) = look_at(store, &installation, &file).await else { continue };
                let found = error.to_string();
                findings.push(self.of_archive(Severity::Error, found).advise(
                    "restore the file from the storage's own backup or versions, or, where \
                                it was deleted on purpose, run `oncebox archive forget`",
                ));
            }
        }
        Ok((findings, count))
    }

    fn unknown_archive(&self, error: &InboxError) -> Finding {
        self.of_archive(Severity::Unknown, format!("the database does not tell: {error}"))
    }

    fn of_archive(&self, severity: Severity, found: String) -> Finding {
        self.of_host_database(CHECK, severity, found)
    }
}

/// Checks that a file is there with its length.
async fn look_at(
    store: &ArchiveStore,
    installation: &str,
    file: &ArchivedFile,
) -> Result<(), ArchiveError> {
    check_row(&file.path, installation, &file.tenant)?;
    let length = store.length(&file.path).await?;
    if length == file.bytes as u64 {
        return Ok(());
    }
    let cause = format!("it has {length} bytes, and not {}", file.bytes);
    Err(ArchiveError::damaged(&file.path, &cause))
}
