//! The archive: messages of the inbox as Parquet files, in a folder or on storage that speaks S3.
//! The same client reads the objects that messages refer to. The crate knows neither the tables of
//! the inbox nor any other crate of the host.
//!
//! A file holds messages of one consumer in row groups of at most [`GROUP_ROWS_MAX`] messages. Of
//! the column `message_id` each group has the lowest and the highest value, and a bloom filter. So
//! the search for an id reads the footer of the file, a filter, and one group.
//!
//! The list of files, which stands elsewhere, has the digest of each [`Footer`]. The footer has the
//! digests of groups and filters. So a damaged file is an error, and never another message.
//!
//! The modules stand in reading order.

// Errors of files and of the storage.
mod error;
// The columns of a file, and the cells of a row.
mod column;
// A message with all its columns.
mod message;
// The digests by which a file is known to be as it was written.
mod digests;
// Files in memory: written from messages, and read.
mod file;
// The search for a message in a file of which only parts are read.
mod lookup;
// The place of an archive, as the settings name it.
mod options;
// Addresses that are not those of a private network.
mod network;
// HTTP for storage that speaks S3.
mod client;
// Signatures of its requests.
mod signing;
// A bucket, by that client.
mod bucket;
// The storage, whichever it is.
mod store;
// Objects that others put into a bucket.
mod object;

pub use digests::Footer;
pub use error::ArchiveError;
pub use file::{
    FILE_BYTES_MAX, FILE_ROWS_MAX, FileReader, FileWriter, GROUP_ROWS_MAX, WrittenFile,
};
pub use message::ArchivedMessage;
pub use object::{ObjectError, ObjectOptions, ObjectReader, OpenObject};
pub use options::ArchiveOptions;
pub use store::{ArchiveStore, RewriteMemory};

/// Runs work that computes for long on a thread for such work. A panic in it is an error of the
/// file: the library that reads Parquet may panic on bytes that it did not write.
pub async fn computed<T: Send + 'static>(
    path: &str,
    work: impl FnOnce() -> Result<T, ArchiveError> + Send + 'static,
) -> Result<T, ArchiveError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(ArchiveError::damaged(path, &error)),
    }
}
