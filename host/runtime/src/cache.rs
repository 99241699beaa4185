//! Cache of compiled code on disk, so that a restart compiles nothing again.
//!
//! Deserialising a file runs its content. A file therefore counts only when its own hash is
//! right, and only the host may write to the folder. The cache holds what this engine compiled,
//! never bytes of a tenant.

use std::{
    fs,
    hash::{Hash, Hasher},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};
use wasmtime::{Engine, component::Component};

use crate::error::LoadError;

/// First bytes of a file. A new layout gets a new number.
const MAGIC: &[u8; 8] = b"oncebox1";

/// A folder of compiled components.
pub(crate) struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// Opens the folder and creates it where it is missing. Refuses a folder that other users can
    /// write to.
    pub(crate) fn open(folder: &Path) -> Result<Self, LoadError> {
        let fail = |reason: String| LoadError::Cache { path: folder.to_owned(), reason };
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)
            .map_err(|error| fail(error.to_string()))?;
        let metadata = fs::metadata(folder).map_err(|error| fail(error.to_string()))?;
        if metadata.mode() & 0o022 != 0 {
            return Err(fail(
                "others may write to it, and its content is executed; run `chmod 700` on it"
                    .to_owned(),
            ));
        }
        Ok(Self { folder: folder.to_owned() })
    }

    /// Reads a compiled component. Returns none for one that is absent, damaged or of another
    /// engine.
    pub(crate) fn read(&self, engine: &Engine, digest: &[u8; 32]) -> Option<Component> {
        let file = fs::read(self.path(engine, digest)).ok()?;
        let code = verified(&file)?;
        // SAFETY: the hash shows that `write` wrote these bytes, and only the host can write to the
        // folder.
        unsafe { Component::deserialize(engine, code) }.ok()
    }

    /// Writes a compiled component. The file appears whole or not at all, since another host may
    /// write it at the same time.
    pub(crate) fn write(&self, engine: &Engine, digest: &[u8; 32], code: &[u8]) -> io::Result<()> {
        let path = self.path(engine, digest);
        let temporary = path.with_extension(format!("{}.new", std::process::id()));
        let mut file = fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&temporary)?;
        file.write_all(MAGIC)?;
        file.write_all(&Sha256::digest(code))?;
        file.write_all(code)?;
        file.sync_all()?;
        fs::rename(&temporary, &path)
    }

    fn path(&self, engine: &Engine, digest: &[u8; 32]) -> PathBuf {
        self.folder.join(format!("{}-{}.compiled", hex::encode(digest), fingerprint(engine)))
    }
}

/// Returns the code in a file whose hash is right.
fn verified(file: &[u8]) -> Option<&[u8]> {
    let rest = file.strip_prefix(MAGIC)?;
    let (hash, code) = rest.split_at_checked(32)?;
    (Sha256::digest(code).as_slice() == hash).then_some(code)
}

/// Returns a hash of the engine's build and settings. Only code with this fingerprint runs in it.
pub(crate) fn fingerprint(engine: &Engine) -> String {
    let mut hasher = ShaHasher(Sha256::new());
    engine.precompile_compatibility_hash().hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// A hasher whose result does not depend on the build of the host.
struct ShaHasher(Sha256);

impl Hasher for ShaHasher {
    fn write(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    fn finish(&self) -> u64 {
        let digest = self.0.clone().finalize();
        let mut first = [0; 8];
        first.copy_from_slice(&digest[..8]);
        u64::from_be_bytes(first)
    }
}
