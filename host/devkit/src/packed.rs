//! Files that the program holds compressed. `build.rs` makes their lists.

use std::io::{self, Read};

use flate2::read::GzDecoder;

/// The name of a file, and its compressed content.
pub(crate) type PackedFile = (&'static str, &'static [u8]);

/// Returns the content of a file.
pub(crate) fn unpack((_, packed): &PackedFile) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    GzDecoder::new(*packed).read_to_end(&mut content)?;
    Ok(content)
}
