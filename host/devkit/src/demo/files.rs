//! The files that the demo needs.

use std::io;

use crate::packed::{PackedFile, unpack};

/// The files, by their names below `guest-examples`.
pub(super) const FILES: [PackedFile; 8] = include!(concat!(env!("OUT_DIR"), "/demo_files.rs"));

/// Returns the content of a file.
///
/// # Errors
///
/// `NotFound` where the demo has no file of this name.
pub(super) fn read(name: &str) -> io::Result<Vec<u8>> {
    match FILES.iter().find(|(file, _)| *file == name) {
        Some(file) => unpack(file),
        None => {
            Err(io::Error::new(io::ErrorKind::NotFound, format!("the demo has no file `{name}`")))
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test, a panic is the report")]
mod tests {
    use std::path::Path;

    use super::*;

    // What could go wrong: a file is cut, or another one's.
    #[test]
    fn each_file_is_the_one_of_the_examples() {
        let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest-examples");
        for (name, packed) in FILES {
            let content = read(name).unwrap();
            assert_eq!(content, std::fs::read(examples.join(name)).unwrap(), "{name}");
            assert!(packed.len() < content.len() / 2, "{name}");
        }
        assert_eq!(read("components/other.wasm").unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
