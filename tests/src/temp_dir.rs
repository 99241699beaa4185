//! Temporary directories of tests, and where servers keep their data.

use std::{
    ffi::CString,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use crate::services::target_dir;

/// The file system in memory that Linux has, and how much of it has to be free.
const MEMORY: &str = "/dev/shm";
const MEMORY_BYTES: u64 = 6 << 30;

/// Path of a temporary directory, which is removed with this value. The test makes the directory.
#[derive(Debug)]
pub struct TempDir(PathBuf);

impl TempDir {
    /// Chooses a path that nothing else uses.
    pub fn new(name: &str) -> Self {
        Self(own_path(name))
    }

    /// Returns the path.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Chooses a path for data of this process. What processes left that have ended is removed: one that
/// was killed removes nothing, and one whose server is in a `static` neither.
pub fn own_path(name: &str) -> PathBuf {
    own_path_in(&DATA, name)
}

/// The same on the disk, where a benchmark measures a server as people run it.
pub fn own_path_on_disk(name: &str) -> PathBuf {
    own_path_in(&target_dir().join("test-data"), name)
}

fn own_path_in(all: &Path, name: &str) -> PathBuf {
    for entry in fs::read_dir(all).into_iter().flatten().flatten() {
        let left = entry.file_name();
        let process = left.to_str().and_then(|left| left.split('-').next()).unwrap_or_default();
        if !Path::new("/proc").join(process).exists() {
            let _ = fs::remove_dir_all(entry.path()); // another process may be removing it
        }
    }
    all.join(format!("{}-{name}-{:08x}", std::process::id(), rand::random::<u32>()))
}

/// In memory where it has room, else in `target`: a database is a thousand files, and a disk takes
/// half as long to make these as PostgreSQL takes for all the rest.
static DATA: LazyLock<PathBuf> = LazyLock::new(|| {
    let in_memory = fs::metadata("/proc/self")
        .ok()
        .filter(|_| free_bytes(MEMORY) >= MEMORY_BYTES)
        .map(|own| Path::new(MEMORY).join(format!("oncebox-tests-{}", own.uid())))
        .filter(|dir| fs::create_dir_all(dir).is_ok());
    in_memory.unwrap_or_else(|| target_dir().join("test-data"))
});

/// 0 where there is no such file system.
fn free_bytes(path: &str) -> u64 {
    let Ok(path) = CString::new(path) else { return 0 };
    // SAFETY: zeroes are a value of `statvfs`, which the call fills in.
    let mut found: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are to values that outlive the call.
    match unsafe { libc::statvfs(path.as_ptr(), &raw mut found) } {
        0 => found.f_bavail * found.f_frsize,
        _ => 0,
    }
}
