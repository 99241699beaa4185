//! The storage, whichever it is. Paths are those below the archive's location.

use std::{ffi::OsStr, io, ops::Range, path::PathBuf, sync::Arc, time::Duration};

use bytes::Bytes;
use object_store::{
    GetOptions, GetRange, ObjectStore, ObjectStoreExt, PutOptions, RetryConfig, aws::AmazonS3,
    local::LocalFileSystem, path::Path,
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use crate::{
    ArchiveError,
    bucket::BucketAccess,
    client::{Connector, longest},
    computed,
    digests::Footer,
    lookup::{FileParts, SearchStep},
    message::ArchivedMessage,
    options::{ArchiveLocation, ArchiveOptions},
};

/// Longest time for the reading of a file, whose length is not known before. A row group has some
/// MiB, and a file some dozens.
const READ_MAX: Duration = Duration::from_secs(900);
/// Most repetitions of a request that failed.
const RETRIES_MAX: usize = 3;
/// Time from the begin of a request after which it is not repeated.
const RETRY_MAX: Duration = Duration::from_secs(600);

/// Memory of the row groups that all searches of a process decode at a time, MiB. A group that
/// takes more is decoded alone.
const SEARCH_MIB_MAX: u32 = 128;
/// Memory of the files that all erasures of a process hold at a time, MiB. A file that takes more
/// is held alone.
const REWRITE_MIB_MAX: u32 = 256;
/// Memory that the rewriting of a file takes, as a multiple of its length: the file, the new one,
/// and what is read back of that.
const REWRITE_FACTOR: u64 = 3;

/// A place for files.
#[derive(Clone)]
pub struct ArchiveStore {
    location: String,
    place: ArchivePlace,
    /// MiB that searches may yet take.
    memory: Arc<Semaphore>,
    /// MiB that files which are written again may yet take.
    rewrites: Arc<Semaphore>,
}

/// Memory for a file that is written again. Others may take it when this value is dropped.
pub struct RewriteMemory {
    _held: Option<OwnedSemaphorePermit>,
}

#[derive(Clone)]
enum ArchivePlace {
    Folder(PathBuf),
    Bucket { bucket: Arc<AmazonS3>, prefix: String },
}

impl std::fmt::Debug for ArchiveStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ArchiveStore").field("location", &self.location).finish_non_exhaustive()
    }
}

impl ArchiveStore {
    /// Checks the options, and returns the place that they name. Opens nothing.
    ///
    /// # Errors
    /// `Settings` with the option that cannot be used.
    pub fn new(options: &ArchiveOptions) -> Result<Self, ArchiveError> {
        let place = match options.parse()? {
            ArchiveLocation::Folder(path) => ArchivePlace::Folder(path),
            ArchiveLocation::Bucket { bucket, prefix } => {
                ArchivePlace::Bucket { bucket: Arc::new(s3(options, &bucket)?), prefix }
            }
        };
        let memory = Arc::new(Semaphore::new(SEARCH_MIB_MAX as usize));
        let rewrites = Arc::new(Semaphore::new(REWRITE_MIB_MAX as usize));
        let location = options.location.trim_end_matches('/').to_owned();
        Ok(Self { location, place, memory, rewrites })
    }

    /// Returns the location, as the settings name it.
    pub fn location(&self) -> &str {
        &self.location
    }

    /// Makes the folder of the archive, where it is one and missing.
    ///
    /// # Errors
    /// `Unavailable` where it cannot be made.
    pub async fn create(&self) -> Result<(), ArchiveError> {
        if let ArchivePlace::Folder(path) = &self.place {
            let created = tokio::fs::create_dir_all(path).await;
            created.map_err(|error| ArchiveError::unavailable(&self.location, &error))?;
        }
        Ok(())
    }

    /// Writes a file, or replaces it. It is durable afterwards.
    ///
    /// # Errors
    /// `Unavailable` where the storage does not take it.
    pub async fn put(&self, path: &str, bytes: Bytes) -> Result<(), ArchiveError> {
        let (store, place) = self.open(path)?;
        let longest = longest(bytes.len() as u64) * (1 + RETRIES_MAX as u32);
        within(path, longest, store.put_opts(&place, bytes.into(), PutOptions::default())).await?;
        Ok(())
    }

    /// Reads a file.
    ///
    /// # Errors
    /// `Missing` where it is not there, `Unavailable` where the storage does not answer.
    pub async fn get(&self, path: &str) -> Result<Bytes, ArchiveError> {
        self.read(path, None).await
    }

    /// Reads a part of a file.
    ///
    /// # Errors
    /// As for a file; `Damaged` where the file is shorter.
    pub async fn get_range(&self, path: &str, range: Range<u64>) -> Result<Bytes, ArchiveError> {
        let wanted = range.end - range.start;
        let bytes = self.read(path, Some(GetRange::Bounded(range))).await?;
        if bytes.len() as u64 != wanted {
            return Err(ArchiveError::damaged(path, &"it is shorter than it was written"));
        }
        Ok(bytes)
    }

    /// Returns the length of a file, bytes.
    ///
    /// # Errors
    /// `Missing` where it is not there, `Unavailable` where the storage does not answer.
    pub async fn length(&self, path: &str) -> Result<u64, ArchiveError> {
        let (store, place) = self.open(path)?;
        let options = GetOptions { head: true, ..GetOptions::default() };
        Ok(within(path, READ_MAX, store.get_opts(&place, options)).await?.meta.size)
    }

    /// Deletes a file, and in a folder also what interrupted puts of it left. One that is not there
    /// may be an error or none.
    ///
    /// # Errors
    /// `Missing` where it is not there, `Unavailable` where the storage does not delete it.
    pub async fn delete(&self, path: &str) -> Result<(), ArchiveError> {
        let (store, place) = self.open(path)?;
        if let ArchivePlace::Folder(folder) = &self.place {
            let file: &str = place.as_ref();
            let deleting = delete_parts(path, folder.join(file));
            timeout(READ_MAX, deleting).await.unwrap_or_else(|_| Err(late(path, READ_MAX)))?;
        }
        within(path, READ_MAX, store.delete(&place)).await
    }

    /// Waits for the memory that it takes to write a file of a length again.
    pub async fn memory_for_rewrite(&self, length: u64) -> RewriteMemory {
        let wanted = mebibytes(length.saturating_mul(REWRITE_FACTOR), REWRITE_MIB_MAX);
        // Nobody closes the semaphore.
        RewriteMemory { _held: self.rewrites.clone().acquire_many_owned(wanted).await.ok() }
    }

    /// Looks for a message in a file that was written with this length and footer. Reads the
    /// footer, filters, and the row groups that may hold the id. Waits while other searches take
    /// the memory for that.
    ///
    /// # Errors
    /// `Damaged` where the file is not the one that was written; otherwise as for a file.
    pub async fn find(
        &self,
        path: &str,
        length: u64,
        footer: Footer,
        message_id: &str,
    ) -> Result<Option<ArchivedMessage>, ArchiveError> {
        let mut file = FileParts::new(length, footer);
        let mut memory = None;
        loop {
            let (id, of) = (message_id.to_owned(), path.to_owned());
            let (searched, step) = computed(path, move || {
                let step = file.search(&id).map_err(|error| ArchiveError::damaged(&of, &error))?;
                Ok((file, step))
            })
            .await?;
            file = searched;
            match step {
                SearchStep::Ended(found) => return Ok(found.map(|message| *message)),
                SearchStep::Read(ranges, bytes) => {
                    // Of one group at a time, so that no search holds memory and waits for more.
                    drop(memory.take());
                    memory = self.remember(bytes).await;
                    for range in ranges {
                        let start = range.start;
                        file.add(start, self.get_range(path, range).await?);
                    }
                }
            }
        }
    }

    /// Waits for memory, and holds it until the value is dropped.
    async fn remember(&self, bytes: u64) -> Option<OwnedSemaphorePermit> {
        // Nobody closes the semaphore.
        self.memory.clone().acquire_many_owned(mebibytes(bytes, SEARCH_MIB_MAX)).await.ok()
    }

    async fn read(&self, path: &str, range: Option<GetRange>) -> Result<Bytes, ArchiveError> {
        let (store, place) = self.open(path)?;
        let reading = async {
            let options = GetOptions { range, ..GetOptions::default() };
            store.get_opts(&place, options).await?.bytes().await
        };
        within(path, READ_MAX, reading).await
    }

    /// Returns the storage, and the place of a file in it.
    fn open(&self, path: &str) -> Result<(Arc<dyn ObjectStore>, Path), ArchiveError> {
        match &self.place {
            ArchivePlace::Folder(folder) => {
                let store = LocalFileSystem::new_with_prefix(folder)
                    .map_err(|error| ArchiveError::of_storage(path, &error))?;
                // What was archived is dropped from the database next.
                Ok((Arc::new(store.with_fsync(true)), Path::from(path)))
            }
            ArchivePlace::Bucket { bucket, prefix } => {
                Ok((bucket.clone(), Path::from(format!("{prefix}/{path}"))))
            }
        }
    }
}

fn s3(options: &ArchiveOptions, bucket: &str) -> Result<AmazonS3, ArchiveError> {
    let access = BucketAccess {
        bucket,
        endpoint: &options.endpoint,
        region: &options.region,
        access_key_id: &options.access_key_id,
        secret_access_key: &options.secret_access_key,
    };
    let retries = RetryConfig {
        max_retries: RETRIES_MAX,
        retry_timeout: RETRY_MAX,
        ..RetryConfig::default()
    };
    access.open(Connector::new(options.ca_file.as_deref())?, retries)
}

/// Returns bytes as MiB of memory: at least one, and no more than there is.
fn mebibytes(bytes: u64, most: u32) -> u32 {
    u32::try_from(bytes.div_ceil(1 << 20)).unwrap_or(u32::MAX).clamp(1, most)
}

/// Deletes what interrupted puts of a file left in its folder: files with its name, `#` and a
/// number.
async fn delete_parts(path: &str, file: PathBuf) -> Result<(), ArchiveError> {
    let failed = |error: io::Error| ArchiveError::unavailable(path, &error);
    let name = file.file_name().and_then(OsStr::to_str);
    let (Some(folder), Some(name)) = (file.parent(), name) else { return Ok(()) };
    let mut entries = match tokio::fs::read_dir(folder).await {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(failed)?,
    };
    while let Some(entry) = entries.next_entry().await.map_err(failed)? {
        let is_part = entry.file_name().to_str().is_some_and(|entry| is_part_of(entry, name));
        if is_part {
            match tokio::fs::remove_file(entry.path()).await {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {} // it was put meanwhile
                removed => removed.map_err(failed)?,
            }
        }
    }
    Ok(())
}

/// Returns whether an entry of a folder is what an interrupted put of a file left.
fn is_part_of(entry: &str, name: &str) -> bool {
    let number = entry.strip_prefix(name).and_then(|rest| rest.strip_prefix('#'));
    number.is_some_and(|number| number.chars().all(|c| c.is_ascii_digit()))
}

/// Waits for the storage, with a bound.
async fn within<T>(
    path: &str,
    longest: Duration,
    work: impl Future<Output = object_store::Result<T>>,
) -> Result<T, ArchiveError> {
    match timeout(longest, work).await {
        Ok(done) => done.map_err(|error| ArchiveError::of_storage(path, &error)),
        Err(_) => Err(late(path, longest)),
    }
}

fn late(path: &str, longest: Duration) -> ArchiveError {
    ArchiveError::unavailable(path, &format!("no answer within {} s", longest.as_secs()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::{FileWriter, WrittenFile};

    // What could go wrong: a group that is larger than the memory for searches is never read.
    #[test]
    fn a_search_takes_no_more_memory_than_there_is() {
        let mib = |bytes| mebibytes(bytes, SEARCH_MIB_MAX);
        assert_eq!((mib(0), mib(1), mib(1 << 20), mib((1 << 20) + 1)), (1, 1, 1, 2));
        assert_eq!((mib(1 << 40), mib(u64::MAX)), (SEARCH_MIB_MAX, SEARCH_MIB_MAX));
    }

    // What could go wrong: many erasures at a time hold a file each, and take all memory; a file
    // that is larger than the memory is never written again.
    #[tokio::test]
    async fn erasures_share_their_memory() {
        let location = "file:///nowhere".to_owned();
        let options = ArchiveOptions { location, ..ArchiveOptions::default() };
        let store = ArchiveStore::new(&options).expect("a place");
        let left = |store: &ArchiveStore| store.rewrites.available_permits();
        let small = store.memory_for_rewrite(10 << 20).await;
        let other = store.clone().memory_for_rewrite(1).await;
        assert_eq!(left(&store), REWRITE_MIB_MAX as usize - 31);
        drop((small, other));
        let huge = store.memory_for_rewrite(u64::MAX).await;
        assert_eq!(left(&store), 0, "it is alone");
        drop(huge);
        assert_eq!(left(&store), REWRITE_MIB_MAX as usize);
    }

    // What could go wrong: a folder loses a file, gives another one, or hides that one is missing
    // or shorter.
    #[tokio::test]
    async fn a_folder_keeps_files() {
        let folder = std::env::temp_dir().join(format!("oncebox-archive-{}", std::process::id()));
        let location = format!("file://{}/deep", folder.display());
        let options = ArchiveOptions { location, ..ArchiveOptions::default() };
        let store = ArchiveStore::new(&options).expect("a place");
        let error = store.put("a/b", Bytes::from("x")).await.expect_err("no folder").to_string();
        assert!(error.contains("does not serve the file `a/b`"), "{error}");
        store.create().await.expect("a folder");
        store.put("a/b.parquet", Bytes::from("one")).await.expect("a file");
        store.put("a/b.parquet", Bytes::from("other")).await.expect("another file");
        assert_eq!(store.get("a/b.parquet").await.expect("the file"), "other");
        assert_eq!(store.length("a/b.parquet").await.expect("its length"), 5);
        assert_eq!(store.get_range("a/b.parquet", 1..3).await.expect("a part"), "th");
        let short = store.get_range("a/b.parquet", 1..9).await.expect_err("it is shorter");
        assert!(short.to_string().contains("`a/b.parquet` of the archive is damaged"), "{short}");
        store.put("a/c.parquet", Bytes::from("gone")).await.expect("a third file");
        let part = |name: &str| folder.join("deep/a").join(name);
        for name in ["c.parquet#1", "c.parquet#27", "d.parquet#1", "c.parquet#x", "b.parquet#1"] {
            std::fs::write(part(name), "half of it").expect("a part");
        }
        store.delete("a/c.parquet").await.expect("it is deleted");
        store.delete("a/d.parquet").await.expect_err("it was never whole");
        let left = ["c.parquet#1", "c.parquet#27", "d.parquet#1", "c.parquet#x", "b.parquet#1"];
        let left = left.map(|name| part(name).exists());
        assert_eq!(left, [false, false, false, true, true], "parts of interrupted puts");
        let missing = store.get("a/c.parquet").await.expect_err("it is not there");
        assert_eq!(missing.to_string(), "the archive has no file `a/c.parquet`");

        let mut file = FileWriter::new("m").expect("a file");
        file.write(&[ArchivedMessage::sample("a")]).expect("a group");
        let WrittenFile { bytes, footer } = file.finish().expect("its bytes");
        let length = bytes.len() as u64;
        store.put("m", bytes).await.expect("a file");
        let found = store.find("m", length, footer, "a").await.expect("a search");
        assert_eq!(found, Some(ArchivedMessage::sample("a")));
        assert_eq!(store.find("m", length, footer, "b").await.expect("a search"), None);
        std::fs::remove_dir_all(&folder).expect("the folder");
    }
}
