//! Temporary directories of tests.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Path of a temporary directory, which is removed with this value. The test makes the directory.
#[derive(Debug)]
pub struct TempDir(PathBuf);

impl TempDir {
    /// Chooses a path that nothing else uses.
    pub fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("oncebox-{name}-{:08x}", rand::random::<u32>())))
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
