//! Errors of files and of the storage. Each names the file.

/// An error of the archive.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// Settings that cannot work.
    #[error("{0}")]
    Settings(String),
    /// A file that is not there.
    #[error("the archive has no file `{path}`")]
    Missing {
        /// Path of the file in the archive.
        path: String,
    },
    /// A file that does not hold what was written.
    #[error("the file `{path}` of the archive is damaged: {cause}")]
    Damaged {
        /// Path of the file in the archive.
        path: String,
        /// Cause, as text.
        cause: String,
    },
    /// A file with a column that this release does not know, and would lose.
    #[error(
        "the file `{path}` of the archive has the column `{column}`, which this release does not \
            know; use the release that wrote it, or a later one"
    )]
    Newer {
        /// Path of the file in the archive.
        path: String,
        /// Name of the column.
        column: String,
    },
    /// Storage that does not answer, or refuses.
    #[error("the archive does not serve the file `{path}`: {cause}")]
    Unavailable {
        /// Path of the file in the archive.
        path: String,
        /// Cause, as text.
        cause: String,
    },
}

impl ArchiveError {
    /// Returns the error of a file that does not hold what was written.
    pub fn damaged(path: &str, cause: &dyn std::fmt::Display) -> Self {
        Self::Damaged { path: path.to_owned(), cause: cause.to_string() }
    }

    /// Returns the error of the storage for a file.
    pub(crate) fn of_storage(path: &str, error: &object_store::Error) -> Self {
        match error {
            object_store::Error::NotFound { .. } => Self::Missing { path: path.to_owned() },
            error => Self::unavailable(path, error),
        }
    }

    /// Returns the error of storage that does not answer.
    pub(crate) fn unavailable(path: &str, cause: &dyn std::fmt::Display) -> Self {
        let cause = cause.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        Self::Unavailable { path: path.to_owned(), cause }
    }

    /// Returns the error without its cause, for readers who do not run the host.
    pub fn headline(&self) -> String {
        match self {
            Self::Unavailable { path, .. } => {
                format!("the archive does not serve the file `{path}`")
            }
            Self::Damaged { path, .. } => format!("the file `{path}` of the archive is damaged"),
            other => other.to_string(),
        }
    }
}
