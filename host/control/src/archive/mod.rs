//! The archive: messages of a time partition go to files before retention removes them. A file
//! counts when it has a row in `oncebox.archive_file`, and it gets the row after it was read back.

// Whether messages are archived, and where.
pub(crate) mod setting;
// The consumers with messages in a partition.
mod consumers;
// The files of a partition.
pub(crate) mod write;
// Attempts to write a file.
pub(crate) mod attempt;
// The messages of a row group.
mod group;
// The proof that files hold what the database has.
pub(crate) mod verify;
// Lists of files.
pub(crate) mod list;
// Files that are taken out of the list.
pub(crate) mod forget;
// The search for a message.
pub(crate) mod find;

use oncebox_archive::ArchiveError;
use oncebox_model::error::InboxError;

pub use setting::ArchiveMark;

/// Returns an error of the archive as one of the inbox.
pub(crate) fn failed(error: ArchiveError) -> InboxError {
    InboxError::Archive { text: error.headline(), error: error.to_string() }
}

/// Checks that the row of a file names one of its tenant. A row in a tenant's own database may name
/// any file, and a host reads none of another tenant for it.
///
/// # Errors
/// `Damaged` where it does not.
pub(crate) fn check_row(path: &str, installation: &str, tenant: &str) -> Result<(), ArchiveError> {
    if is_file_of(path, installation, tenant) {
        return Ok(());
    }
    Err(changed_row(path))
}

/// Returns the error of a row that is not as it was written. The path is shown on one line,
/// whatever it is.
pub(crate) fn changed_row(path: &str) -> ArchiveError {
    let cause = "its row was changed in the database, and names no file of the tenant";
    ArchiveError::damaged(&path.escape_debug().to_string(), &cause)
}

/// Returns whether a path is that of a file of a tenant.
pub(crate) fn is_file_of(path: &str, installation: &str, tenant: &str) -> bool {
    tenant_of(path, installation) == Some(tenant)
}

/// Returns whether a path is that of a file of an installation, whichever tenant it belongs to.
fn is_file_of_installation(path: &str, installation: &str) -> bool {
    tenant_of(path, installation).is_some()
}

/// Returns the name of the tenant of a file; none where no file of the installation has that path.
fn tenant_of<'p>(path: &'p str, installation: &str) -> Option<&'p str> {
    let parts: Vec<_> = path.split('/').collect();
    let [of, partition, tenant, consumer, file] = parts[..] else { return None };
    let is_plain = |part: &str| {
        !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c))
    };
    let is_there = [partition, tenant, consumer].into_iter().all(is_plain);
    (of == installation && is_there && is_file_name(file)).then_some(tenant)
}

/// Returns whether a name is that of a file: of the numbers of the consumer and the file, and of
/// random digits.
fn is_file_name(name: &str) -> bool {
    let parts = name.strip_suffix(".parquet").map(|name| name.split('-').collect::<Vec<_>>());
    let is_of_digits = |part: &str| !part.is_empty() && part.chars().all(|c| c.is_ascii_hexdigit());
    parts.is_some_and(|parts| parts.len() == 3 && parts.into_iter().all(is_of_digits))
}

#[cfg(test)]
mod tests {
    use super::*;

    // What could go wrong: a tenant has the host delete a file of another tenant, or the mark.
    #[test]
    fn a_path_names_its_tenant() {
        let is_of_acme = |path: &str| is_file_of(path, "id", "acme");
        assert!(is_of_acme("id/inbox_7d_1/acme/orders/3-000001-00.parquet"));
        for other in [
            "id/inbox_7d_1/other/orders/3-000001-00.parquet",
            "other/inbox_7d_1/acme/orders/3-000001-00.parquet",
            "id/inbox_7d_1/acme/../other/3-000001-00.parquet/x",
            "id/oncebox-archive",
            "id/inbox_7d_1/acme/orders/3-000001-00.parquet\nid/oncebox-archive",
            "id/inbox_7d_1/acme/../3-000001-00.parquet",
            "id/inbox_7d_1/acme/orders/oncebox-archive",
            "id/inbox_7d_1/acme/orders/3-000001.parquet",
            "id/inbox_7d_1/acme//3-000001-00.parquet",
            "",
        ] {
            assert!(!is_of_acme(other), "{other}");
        }
    }
}
