//! Component files that change. They are polled a few times a second. A file that stands still
//! counts as completely written. That works in every file system, for files that are written in
//! place and for those that are replaced.

use std::{
    collections::BTreeMap,
    fs::Metadata,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context, Result};

/// Pause between two looks at files, and the time that one stands still before it is read.
pub(super) const POLL: Duration = Duration::from_millis(250);
/// Longest wait for the rest of an incomplete component; after that it is taken as it is.
const REST_MAX: Duration = Duration::from_secs(2);

/// The files that are watched.
pub(super) struct Files {
    /// Files by absolute path, since a file of the folder may also be named on its own.
    watched: BTreeMap<PathBuf, Watched>,
    /// A folder whose components are watched, too.
    dir: Option<PathBuf>,
}

struct Watched {
    path: PathBuf,
    event_type: String,
    /// Stamp of the file when it was read last.
    read: Option<Stamp>,
    /// Stamp at the last look, and the time since it has had that stamp.
    seen: Option<(Stamp, Instant)>,
}

/// A file's metadata, which differ for a file that was replaced or written again.
#[derive(Clone, PartialEq)]
struct Stamp {
    modified: Option<SystemTime>,
    bytes: u64,
    inode: u64,
}

/// A component that changed.
#[derive(Debug)]
pub(super) struct Changed {
    pub(super) path: PathBuf,
    pub(super) event_type: String,
    pub(super) bytes: Vec<u8>,
}

impl Files {
    /// Creates the watched files from components by event type, and a folder.
    pub(super) fn new(
        components: impl IntoIterator<Item = (String, PathBuf)>,
        dir: Option<PathBuf>,
    ) -> Self {
        let watched = components
            .into_iter()
            .map(|(event_type, path)| (absolute(&path), Watched::new(event_type, path)))
            .collect();
        Self { watched, dir }
    }

    /// Reads all components as they are. Later differences count as changes.
    pub(super) fn read_all(&mut self) -> Result<Vec<Changed>> {
        self.look_into_dir()?;
        let mut all = Vec::new();
        for watched in self.watched.values_mut() {
            let path = &watched.path;
            let failed = || format!("failed to read the component `{}`", path.display());
            watched.read = Some(Stamp::of(&std::fs::metadata(path).with_context(failed)?));
            let bytes = std::fs::read(path).with_context(failed)?;
            all.push(Changed { path: path.clone(), event_type: watched.event_type.clone(), bytes });
        }
        Ok(all)
    }

    /// Returns the components that changed since they were read, and stand still.
    pub(super) fn changed(&mut self, now: Instant) -> Vec<Changed> {
        // A folder that is missing for a moment, as in a clean build, has no files for that moment.
        let _ = self.look_into_dir();
        self.watched.values_mut().filter_map(|watched| watched.changed(now)).collect()
    }

    fn look_into_dir(&mut self) -> Result<()> {
        let Some(dir) = &self.dir else { return Ok(()) };
        let failed = || format!("failed to look into the folder `{}`", dir.display());
        for entry in std::fs::read_dir(dir).with_context(failed)? {
            let path = entry.with_context(failed)?.path();
            let Some(event_type) = event_type(&path) else { continue };
            self.watched.entry(absolute(&path)).or_insert_with(|| Watched::new(event_type, path));
        }
        Ok(())
    }
}

/// Returns the event type of a component in the folder: its stem. Hidden files are still being
/// made.
fn event_type(path: &Path) -> Option<String> {
    let stem = path.file_stem()?.to_str()?;
    let is_component = path.extension()? == "wasm" && !stem.starts_with('.');
    is_component.then(|| stem.to_owned())
}

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

impl Watched {
    fn new(event_type: String, path: PathBuf) -> Self {
        Self { path, event_type, read: None, seen: None }
    }

    fn changed(&mut self, now: Instant) -> Option<Changed> {
        let path = &self.path;
        // A file that is gone comes back, or its last version stays live.
        let stamp = Stamp::of(&std::fs::metadata(path).ok()?);
        if self.read.as_ref() == Some(&stamp) {
            return None;
        }
        let since = match &self.seen {
            Some((seen, since)) if *seen == stamp => *since,
            _ => {
                self.seen = Some((stamp, now));
                return None;
            }
        };
        let bytes = std::fs::read(path).ok()?;
        if Stamp::of(&std::fs::metadata(path).ok()?) != stamp
            || breaks_off(&bytes) && now.duration_since(since) < REST_MAX
        {
            return None;
        }
        self.read = Some(stamp);
        Some(Changed { path: path.to_owned(), event_type: self.event_type.clone(), bytes })
    }
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        Self { modified: metadata.modified().ok(), bytes: metadata.len(), inode: metadata.ino() }
    }
}

/// Returns whether bytes are an incomplete WebAssembly file, judged by the lengths of its sections.
fn breaks_off(bytes: &[u8]) -> bool {
    let magic = b"\0asm";
    if bytes.len() < 8 {
        return magic.starts_with(&bytes[..bytes.len().min(4)]);
    }
    if !bytes.starts_with(magic) {
        return false;
    }
    let mut rest = &bytes[8..];
    while let Some((_id, after)) = rest.split_first() {
        let Some((length, after)) = length(after) else { return true };
        let Some(after) = after.get(length..) else { return true };
        rest = after;
    }
    false
}

/// Reads an unsigned LEB128 number of 32 bits. Returns it with the bytes that follow.
fn length(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let end = bytes.iter().take(5).position(|byte| byte & 0x80 == 0)? + 1;
    let value = bytes[..end]
        .iter()
        .rev()
        .fold(0_usize, |value, byte| value << 7 | usize::from(byte & 0x7f));
    Some((value, &bytes[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A watcher whose looks are one poll apart.
    struct Looker {
        files: Files,
        now: Instant,
    }

    impl Looker {
        fn look(&mut self) -> Vec<String> {
            self.now += POLL;
            let changed = self.files.changed(self.now);
            changed.iter().map(|c| format!("{} {}", c.event_type, c.bytes.len())).collect()
        }
    }

    // Could fail so: half a file is deployed, a change is missed, or a file is deployed again and
    // again.
    #[test]
    fn a_change_is_told_once_and_whole() {
        let dir = std::env::temp_dir().join(format!("oncebox-files-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a folder");
        let component = b"\0asm\x0d\0\x01\0\0\x02ab";
        let (path, other) = (dir.join("order.placed.wasm"), dir.join("x.wasm"));
        std::fs::write(&path, component).expect("a file");
        let mut files = Files::new([("t".to_owned(), other.clone())], Some(dir.clone()));
        assert!(files.read_all().is_err(), "a file that is missing at the start is an error");
        std::fs::write(&other, "text").expect("a file");
        let all: Vec<_> =
            files.read_all().expect("both").into_iter().map(|changed| changed.event_type).collect();
        assert_eq!(all, ["order.placed", "t"]);
        let mut looker = Looker { files, now: Instant::now() };
        assert!(looker.look().is_empty() && looker.look().is_empty(), "nothing changed");

        // Written in place, with a pause in the middle.
        std::fs::write(&path, &component[..10]).expect("a file");
        assert!(
            looker.look().is_empty() && looker.look().is_empty() && looker.look().is_empty(),
            "half of it"
        );
        std::fs::write(&path, [component.as_slice(), b"\0\0"].concat()).expect("a file");
        assert!(looker.look().is_empty(), "it may still be written");
        assert_eq!(looker.look(), ["order.placed 14"]);
        assert!(looker.look().is_empty());
        // Replaced.
        std::fs::write(dir.join(".new.wasm"), component).expect("a file");
        std::fs::rename(dir.join(".new.wasm"), &path).expect("a file");
        assert!(looker.look().is_empty());
        assert_eq!(looker.look(), ["order.placed 12"]);
        // Gone, and back.
        std::fs::remove_file(&path).expect("a file");
        assert!(looker.look().is_empty() && looker.look().is_empty());
        std::fs::write(&path, component).expect("a file");
        assert!(looker.look().is_empty());
        assert_eq!(looker.look(), ["order.placed 12"]);
        // A new one, which is half a component for good.
        std::fs::write(dir.join("half.wasm"), &component[..10]).expect("a file");
        let looks: Vec<_> = (0..12).map(|_| looker.look()).collect();
        assert_eq!(
            (looks.concat(), looks[0].len() + looks[4].len()),
            (vec!["half 10".to_owned()], 0)
        );
        std::fs::remove_dir_all(&dir).expect("the folder");
    }

    #[test]
    fn what_breaks_off_is_told_from_what_is_no_component() {
        let whole = b"\0asm\x0d\0\x01\0\0\x02ab\x01\x80\x01"
            .iter()
            .copied()
            .chain([0; 128])
            .collect::<Vec<_>>();
        assert!(!breaks_off(&whole));
        let ends = [8, 12, whole.len()];
        for end in 0..=whole.len() {
            assert_eq!(breaks_off(&whole[..end]), !ends.contains(&end), "{end} bytes");
        }
        assert!(!breaks_off(b"hello world") && !breaks_off(b"oops"));
    }
}
