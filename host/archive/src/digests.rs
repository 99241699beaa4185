//! The digests by which a file is known to be as it was written. That of the footer stands outside
//! of the file. The footer has those of the row groups and of their filters, so that a part of a
//! file can be checked alone.

use std::ops::Range;

use parquet::{
    errors::{ParquetError, Result},
    file::{
        FOOTER_SIZE,
        metadata::{ColumnChunkMetaData, KeyValue, ParquetMetaData, RowGroupMetaData},
    },
};
use sha2::{Digest, Sha256};

use crate::file::{ID, position};

/// Key of the digests among the metadata of a file.
const KEY: &str = "oncebox.digests";

/// The footer of a file: everything that says where the rest is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footer {
    /// Bytes from its begin to the end of the file.
    pub bytes: u64,
    /// SHA-256 of these bytes.
    pub digest: [u8; 32],
}

impl Footer {
    /// Returns the footer of a file; none where the bytes are no file.
    pub(crate) fn of(file: &[u8]) -> Option<Self> {
        let tail = file.len().checked_sub(FOOTER_SIZE)?;
        let length = u32::from_le_bytes(file.get(tail..tail + 4)?.try_into().ok()?) as usize;
        let bytes = length + FOOTER_SIZE;
        let digest = sha256(file.get(file.len().checked_sub(bytes)?..)?);
        Some(Self { bytes: bytes as u64, digest })
    }

    /// Checks that bytes are the footer that was written, as a whole: a row of the list that names
    /// a part of it, or nothing, says nothing of what stands before.
    ///
    /// # Errors
    /// An error where they are not.
    pub(crate) fn check(&self, bytes: &[u8]) -> Result<()> {
        check(Self::of(bytes) == Some(*self), "its footer")
    }
}

/// The digests of the row groups of a file, and of their filters.
#[derive(Debug, Clone, Default)]
pub(crate) struct GroupDigests(Vec<[[u8; 32]; 2]>);

impl GroupDigests {
    /// Adds a row group that was written. `file` has all bytes so far.
    pub(crate) fn add(&mut self, group: &RowGroupMetaData, file: &[u8]) -> Result<()> {
        let of = |range: Range<u64>| {
            let part = file.get(range.start as usize..range.end as usize);
            part.map(sha256).ok_or_else(|| ParquetError::General("a part is missing".to_owned()))
        };
        self.0.push([of(extent(group))?, of(filter(group).unwrap_or(0..0))?]);
        Ok(())
    }

    /// Returns the digests as metadata of a file.
    pub(crate) fn metadata(&self) -> KeyValue {
        let digits: Vec<_> = self.0.iter().flatten().map(hex::encode).collect();
        KeyValue::new(KEY.to_owned(), digits.join(" "))
    }

    /// Reads the digests from the footer of a file.
    pub(crate) fn of(metadata: &ParquetMetaData) -> Result<Self> {
        let missing = || ParquetError::General("it has no digests".to_owned());
        let all = metadata.file_metadata().key_value_metadata().ok_or_else(missing)?;
        let text = all.iter().find(|pair| pair.key == KEY).and_then(|pair| pair.value.as_deref());
        let digests: Option<Vec<_>> = text.ok_or_else(missing)?.split(' ').map(unhex).collect();
        let digests = digests.ok_or_else(missing)?;
        let pairs = digests.chunks_exact(2).map(|pair| [pair[0], pair[1]]);
        Ok(Self(pairs.collect()))
    }

    /// Checks that bytes are the row group that was written.
    pub(crate) fn check_group(&self, group: usize, bytes: &[u8]) -> Result<()> {
        self.check(group, 0, bytes)
    }

    /// Checks that bytes are the filter of a row group that was written.
    pub(crate) fn check_filter(&self, group: usize, bytes: &[u8]) -> Result<()> {
        self.check(group, 1, bytes)
    }

    fn check(&self, group: usize, which: usize, bytes: &[u8]) -> Result<()> {
        let known = self.0.get(group).map(|digests| digests[which]);
        check(known == Some(sha256(bytes)), "a part of it")
    }
}

/// Returns where a row group stands.
pub(crate) fn extent(group: &RowGroupMetaData) -> Range<u64> {
    let ranges = || group.columns().iter().map(ColumnChunkMetaData::byte_range);
    let start = ranges().map(|(start, _)| start).min().unwrap_or(0);
    let end = ranges().map(|(start, length)| start + length).max().unwrap_or(0);
    start..end
}

/// Returns where the bloom filter of a row group's ids stands, if it has one.
pub(crate) fn filter(group: &RowGroupMetaData) -> Option<Range<u64>> {
    let column = group.column(position(group.schema_descr(), ID)?);
    let start = u64::try_from(column.bloom_filter_offset()?).ok()?;
    let length = u64::try_from(column.bloom_filter_length()?).ok()?;
    Some(start..start + length)
}

fn check(is_so: bool, what: &str) -> Result<()> {
    if is_so {
        return Ok(());
    }
    Err(ParquetError::General(format!("{what} is not as it was written")))
}

fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

fn unhex(digits: &str) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    hex::decode_to_slice(digits, &mut bytes).ok()?;
    Some(bytes)
}
