//! The search for a message in a file of which only parts are read: its footer, then the bloom
//! filters of the row groups that may hold the id, then such a group.

use std::{ops::Range, sync::Arc};

use bytes::{Buf, Bytes, buf::Reader};
use parquet::{
    bloom_filter::Sbbf,
    errors::{ParquetError, Result},
    file::{
        metadata::{ParquetMetaData, ParquetMetaDataReader, RowGroupMetaData},
        properties::ReaderProperties,
        reader::{ChunkReader, Length},
        serialized_reader::SerializedRowGroupReader,
    },
};

use crate::{
    digests::{Footer, GroupDigests, extent, filter},
    file::{ID, ids, messages, position},
    message::ArchivedMessage,
};

/// The parts of a file that were read.
#[derive(Clone)]
pub(crate) struct FileParts {
    length: u64,
    footer: Footer,
    /// Offset and bytes of each part.
    parts: Vec<(u64, Bytes)>,
    /// Row groups that were looked through.
    searched: Vec<usize>,
}

/// The next step of a search.
pub(crate) enum SearchStep {
    /// Parts of the file that the search needs, and the bytes of memory that they take once they
    /// are decoded.
    Read(Vec<Range<u64>>, u64),
    /// The message, or none: the file does not hold it.
    Ended(Option<Box<ArchivedMessage>>),
}

impl FileParts {
    /// Returns a file of a length, of which nothing was read.
    pub(crate) fn new(length: u64, footer: Footer) -> Self {
        Self { length, footer, parts: Vec::new(), searched: Vec::new() }
    }

    /// Adds a part.
    pub(crate) fn add(&mut self, offset: u64, bytes: Bytes) {
        self.parts.push((offset, bytes));
    }

    /// Takes the search for an id as far as the parts allow. A part that was asked for is not asked
    /// for again, so that a search ends. A row group without the id is let go of before the next.
    pub(crate) fn search(&mut self, message_id: &str) -> Result<SearchStep> {
        let begin = self.length.checked_sub(self.footer.bytes);
        let begin = begin.ok_or_else(|| ParquetError::General("it is cut".to_owned()))?;
        if !self.holds(&(begin..self.length)) {
            return self.read(Vec::from_iter(Some(begin..self.length)), 0);
        }
        // The library trusts sizes that it reads there, and a wrong one may end the process.
        self.footer.check(&self.bytes(begin, self.length)?)?;
        let metadata = ParquetMetaDataReader::new().parse_and_finish(&*self)?;
        let digests = GroupDigests::of(&metadata)?;
        let (groups, filters) = self.candidates(&metadata, &digests, message_id)?;
        if !filters.is_empty() {
            return self.read(filters, 0);
        }
        for group in groups {
            if self.searched.contains(&group) {
                continue;
            }
            let extent = extent(metadata.row_group(group));
            if !self.holds(&extent) {
                let decoded = metadata.row_group(group).total_byte_size().max(0) as u64;
                return self.read(vec![extent], decoded);
            }
            digests.check_group(group, &self.bytes(extent.start, extent.end)?)?;
            if let Some(message) = self.find(metadata.row_group(group), message_id)? {
                return Ok(SearchStep::Ended(Some(Box::new(message))));
            }
            self.searched.push(group);
            self.parts.retain(|(offset, _)| *offset != extent.start);
        }
        Ok(SearchStep::Ended(None))
    }

    /// Returns the row groups that may hold an id, and the filters that must be read to tell.
    fn candidates(
        &self,
        metadata: &ParquetMetaData,
        digests: &GroupDigests,
        message_id: &str,
    ) -> Result<(Vec<usize>, Vec<Range<u64>>)> {
        let (mut groups, mut filters) = (Vec::new(), Vec::new());
        for (number, group) in metadata.row_groups().iter().enumerate() {
            let at = position(group.schema_descr(), ID);
            let at = at.ok_or_else(|| ParquetError::General("it has no ids".to_owned()))?;
            if !is_within(group, at, message_id.as_bytes()) {
                continue;
            }
            match filter(group) {
                Some(range) if !self.holds(&range) => filters.push(range),
                Some(range) => {
                    digests.check_filter(number, &self.bytes(range.start, range.end)?)?;
                    let filter = Sbbf::read_from_column_chunk(group.column(at), self)?;
                    if filter.is_none_or(|filter| filter.check(message_id)) {
                        groups.push(number);
                    }
                }
                None => groups.push(number),
            }
        }
        Ok((groups, filters))
    }

    /// Looks for an id in a row group that was read.
    fn find(&self, group: &RowGroupMetaData, message_id: &str) -> Result<Option<ArchivedMessage>> {
        let properties = Arc::new(ReaderProperties::builder().build());
        let group = SerializedRowGroupReader::new(Arc::new(self.clone()), group, None, properties)?;
        let wanted = message_id.as_bytes();
        let Some(row) = ids(&group)?.iter().position(|id| id.data() == wanted) else {
            return Ok(None);
        };
        Ok(messages(&group, row..row + 1)?.pop())
    }

    fn read(&self, ranges: Vec<Range<u64>>, decoded: u64) -> Result<SearchStep> {
        let is_there = |range: &Range<u64>| range.start < range.end && range.end <= self.length;
        if !ranges.iter().all(is_there) {
            return Err(ParquetError::General("it points outside of itself".to_owned()));
        }
        let bytes: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        Ok(SearchStep::Read(ranges, bytes.saturating_add(decoded)))
    }

    /// Returns whether a part has these bytes.
    fn holds(&self, range: &Range<u64>) -> bool {
        self.part(range.start, range.end).is_some()
    }

    fn part(&self, start: u64, end: u64) -> Option<&(u64, Bytes)> {
        self.parts
            .iter()
            .find(|(offset, bytes)| *offset <= start && end <= offset + bytes.len() as u64)
    }

    fn bytes(&self, start: u64, end: u64) -> Result<Bytes> {
        let (offset, bytes) = self.part(start, end).ok_or_else(|| {
            ParquetError::General(format!("its bytes {start} to {end} were not read"))
        })?;
        Ok(bytes.slice((start - offset) as usize..(end - offset) as usize))
    }
}

impl Length for FileParts {
    fn len(&self) -> u64 {
        self.length
    }
}

impl ChunkReader for FileParts {
    type T = Reader<Bytes>;

    fn get_read(&self, start: u64) -> Result<Self::T> {
        // Of two parts that meet there, the one that goes on.
        let (offset, bytes) = self.part(start, start + 1).ok_or_else(|| {
            ParquetError::General(format!("its bytes from {start} on were not read"))
        })?;
        Ok(bytes.slice((start - offset) as usize..).reader())
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes> {
        self.bytes(start, start + length as u64)
    }
}

/// Returns whether an id is within the lowest and the highest of a row group, as far as it says.
fn is_within(group: &RowGroupMetaData, column: usize, id: &[u8]) -> bool {
    group.column(column).statistics().is_none_or(|statistics| {
        statistics.min_bytes_opt().is_none_or(|lowest| lowest <= id)
            && statistics.max_bytes_opt().is_none_or(|highest| id <= highest)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::{FileWriter, GROUP_ROWS_MAX, WrittenFile};

    /// Searches a file that can be read as a whole. Returns the message, and how many bytes were
    /// read.
    fn search(file: &Bytes, footer: Footer, id: &str) -> Result<(Option<ArchivedMessage>, usize)> {
        let (mut parts, mut read) = (FileParts::new(file.len() as u64, footer), 0);
        for _ in 0..10 {
            match parts.search(id)? {
                SearchStep::Ended(found) => return Ok((found.map(|message| *message), read)),
                SearchStep::Read(ranges, memory) => {
                    assert!(memory > 0, "the memory of a part is known");
                    for range in ranges {
                        let part = file.slice(range.start as usize..range.end as usize);
                        read += part.len();
                        parts.add(range.start, part);
                    }
                }
            }
        }
        panic!("the search for `{id}` does not end");
    }

    /// A file with messages `m00000000`, `m00000001` and so on.
    fn file(count: usize) -> WrittenFile {
        let mut file = FileWriter::new("a file").expect("a file");
        for first in (0..count).step_by(GROUP_ROWS_MAX) {
            let message = |number: usize| {
                let mut message = ArchivedMessage::sample(&format!("m{number:08}"));
                // What compresses badly, so that the file has a size.
                let word =
                    |n: usize| ((number * 40 + n) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                message.payload = Some((0..40).flat_map(|n| word(n).to_le_bytes()).collect());
                message
            };
            let group: Vec<_> = (first..count.min(first + GROUP_ROWS_MAX)).map(message).collect();
            file.write(&group).expect("a group");
        }
        file.finish().expect("its bytes")
    }

    // What could go wrong: an id is not found where it is the first or the last of a group, one is
    // found that is not there, or the whole file is read.
    #[test]
    fn an_id_is_found_by_a_part_of_its_file() {
        let WrittenFile { bytes, footer } = file(3 * GROUP_ROWS_MAX + 1);
        assert!(bytes.len() > 2 << 20, "{}", bytes.len());
        for number in [0, 1, 4_999, 5_000, 9_999, 14_999, 15_000] {
            let id = format!("m{number:08}");
            let (found, read) = search(&bytes, footer, &id).expect("a search");
            assert_eq!(found.map(|message| message.message_id), Some(id));
            assert!(read < bytes.len() / 2, "{read} of {} bytes", bytes.len());
        }
        for absent in ["", "m", "m00000000x", "m99999999", "z", "m0000500"] {
            let (found, read) = search(&bytes, footer, absent).expect("a search");
            assert!(found.is_none() && read < bytes.len() / 2, "{absent}: {read}");
        }
    }

    // What could go wrong: a damaged file gives another message, or hides one that is there.
    #[test]
    fn a_search_in_a_damaged_file_finds_the_message_or_fails() {
        let WrittenFile { bytes, footer } = file(100);
        let (whole, _) = search(&bytes, footer, "m00000050").expect("a search");
        let mut failures = 0;
        for at in (0..bytes.len()).step_by(101).chain(bytes.len() - 8..bytes.len()) {
            let mut damaged = bytes.to_vec();
            damaged[at] ^= 0x55;
            match search(&damaged.into(), footer, "m00000050") {
                Ok((found, _)) => assert_eq!(found, whole, "byte {at}"),
                Err(_) => failures += 1,
            }
        }
        assert!(failures > 100, "{failures}");
    }
}
