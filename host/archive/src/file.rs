//! Files in memory: written from messages, and read.

use std::{ops::Range, sync::Arc};

use bytes::Bytes;
use parquet::{
    basic::{Compression, ZstdLevel},
    data_type::ByteArray,
    errors::{ParquetError, Result as ParquetResult},
    file::{
        properties::{EnabledStatistics, WriterProperties, WriterPropertiesBuilder},
        reader::{FileReader as _, RowGroupReader, SerializedFileReader},
        writer::SerializedFileWriter,
    },
    schema::types::{ColumnPath, SchemaDescriptor, Type},
};

use crate::{
    ArchiveError,
    column::{Cell, Column},
    digests::{Footer, GroupDigests, extent},
    message::ArchivedMessage,
};

/// Most messages of a row group: the search for one message reads a group.
pub const GROUP_ROWS_MAX: usize = 5_000;
/// Messages after which a file takes no further group.
pub const FILE_ROWS_MAX: usize = 100_000;
/// Bytes after which a file takes no further group. A file is held in memory.
pub const FILE_BYTES_MAX: usize = 32 << 20;

/// The column by which messages are found.
pub(crate) const ID: &str = "message_id";
/// Columns whose values hardly ever repeat, so that a dictionary of them saves nothing.
const UNIQUE: [&str; 5] = [ID, "payload", "headers", "payload_hash", "trace_parent"];
/// Share of absent ids for which a bloom filter says that they may be there.
const FALSE_POSITIVES: f64 = 0.01;

/// A file that is being written, in memory.
pub struct FileWriter {
    path: String,
    rows: usize,
    writer: SerializedFileWriter<Vec<u8>>,
    digests: GroupDigests,
}

/// A file that was written, in memory.
#[derive(Debug, Clone)]
pub struct WrittenFile {
    /// Bytes of the file.
    pub bytes: Bytes,
    /// Its footer, by which it is known again.
    pub footer: Footer,
}

impl FileWriter {
    /// Begins a file. The path is for errors.
    ///
    /// # Errors
    /// `Damaged` where the library refuses the schema.
    pub fn new(path: &str) -> Result<Self, ArchiveError> {
        let begun = schema().and_then(|schema| {
            SerializedFileWriter::new(Vec::new(), Arc::new(schema), Arc::new(properties()))
        });
        let writer = begun.map_err(|error| ArchiveError::damaged(path, &error))?;
        Ok(Self { path: path.to_owned(), rows: 0, writer, digests: GroupDigests::default() })
    }

    /// Writes messages as a row group. They are sorted by id, follow those of the group before, and
    /// are at most [`GROUP_ROWS_MAX`].
    ///
    /// # Errors
    /// `Damaged` where the library cannot encode them.
    pub fn write(&mut self, messages: &[ArchivedMessage]) -> Result<(), ArchiveError> {
        if messages.is_empty() {
            return Ok(());
        }
        self.rows += messages.len();
        self.write_group(messages).map_err(|error| ArchiveError::damaged(&self.path, &error))
    }

    fn write_group(&mut self, messages: &[ArchivedMessage]) -> ParquetResult<()> {
        let mut group = self.writer.next_row_group()?;
        for (column, cells) in ArchivedMessage::COLUMNS.iter().zip(by_column(messages)) {
            let mut writer = group
                .next_column()?
                .ok_or_else(|| ParquetError::General("a column is missing".to_owned()))?;
            column.write(writer.untyped(), cells)?;
            writer.close()?;
        }
        group.close()?;
        self.writer.flush()?;
        match self.writer.flushed_row_groups().last() {
            Some(group) => self.digests.add(group, self.writer.inner()),
            None => Err(ParquetError::General("a group is missing".to_owned())),
        }
    }

    /// Returns the number of messages so far.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns whether the file is large enough to be ended.
    pub fn is_full(&self) -> bool {
        self.rows >= FILE_ROWS_MAX || self.writer.bytes_written() >= FILE_BYTES_MAX
    }

    /// Ends the file, and returns it.
    ///
    /// # Errors
    /// `Damaged` where the library cannot encode its end.
    pub fn finish(self) -> Result<WrittenFile, ArchiveError> {
        let Self { path, mut writer, digests, .. } = self;
        writer.append_key_value_metadata(digests.metadata());
        let bytes = writer.into_inner().map_err(|error| ArchiveError::damaged(&path, &error))?;
        let footer =
            Footer::of(&bytes).ok_or_else(|| ArchiveError::damaged(&path, &"it has no footer"))?;
        Ok(WrittenFile { bytes: bytes.into(), footer })
    }
}

/// Returns the columns as a schema of Parquet.
fn schema() -> ParquetResult<Type> {
    let fields =
        ArchivedMessage::COLUMNS.iter().map(Column::field).collect::<ParquetResult<Vec<_>>>()?;
    Type::group_type_builder("message").with_fields(fields).build()
}

/// Returns the encoding of a file. Only ids have statistics and a filter, so that the footer stays
/// small.
fn properties() -> WriterProperties {
    let id = || ColumnPath::from(ID);
    let properties = WriterProperties::builder()
        .set_created_by(concat!("oncebox ", env!("CARGO_PKG_VERSION")).to_owned())
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .set_statistics_enabled(EnabledStatistics::None)
        .set_offset_index_disabled(true)
        .set_column_statistics_enabled(id(), EnabledStatistics::Chunk)
        .set_column_bloom_filter_max_ndv(id(), GROUP_ROWS_MAX as u64)
        .set_column_bloom_filter_fpp(id(), FALSE_POSITIVES);
    let without_dictionary = |properties: WriterPropertiesBuilder, name: &str| {
        properties.set_column_dictionary_enabled(ColumnPath::from(name), false)
    };
    UNIQUE.into_iter().fold(properties, without_dictionary).build()
}

/// Returns the cells of messages, column by column.
fn by_column(messages: &[ArchivedMessage]) -> Vec<Vec<Option<Cell>>> {
    let mut columns: Vec<_> =
        ArchivedMessage::COLUMNS.iter().map(|_| Vec::with_capacity(messages.len())).collect();
    for message in messages {
        for (column, cell) in columns.iter_mut().zip(message.cells()) {
            column.push(cell);
        }
    }
    columns
}

/// A file that is read, in memory.
pub struct FileReader {
    path: String,
    bytes: Bytes,
    reader: SerializedFileReader<Bytes>,
    digests: GroupDigests,
}

impl FileReader {
    /// Reads the footer of a file, which says where everything is. The path is for errors.
    ///
    /// # Errors
    /// `Damaged` where the footer is not the one that was written.
    pub fn open(path: &str, bytes: Bytes, footer: &Footer) -> Result<Self, ArchiveError> {
        let open = || -> ParquetResult<_> {
            let begin = bytes.len().checked_sub(footer.bytes as usize);
            let begin = begin.ok_or_else(|| ParquetError::General("it is cut".to_owned()))?;
            // The library trusts sizes that it reads there, and a wrong one may end the process.
            footer.check(&bytes[begin..])?;
            let reader = SerializedFileReader::new(bytes.clone())?;
            let digests = GroupDigests::of(reader.metadata())?;
            Ok((reader, digests))
        };
        let (reader, digests) = open().map_err(|error| ArchiveError::damaged(path, &error))?;
        Ok(Self { path: path.to_owned(), bytes, reader, digests })
    }

    /// Returns the number of row groups.
    pub fn groups(&self) -> usize {
        self.reader.num_row_groups()
    }

    /// Reads the messages of a row group, in their order.
    ///
    /// # Errors
    /// `Damaged` where the group is not the one that was written.
    pub fn read(&self, group: usize) -> Result<Vec<ArchivedMessage>, ArchiveError> {
        let read = || -> ParquetResult<_> {
            let group = self.group(group)?;
            messages(&*group, 0..rows(&*group))
        };
        read().map_err(|error| ArchiveError::damaged(&self.path, &error))
    }

    /// Returns a file with the same row groups, in which each message was changed.
    ///
    /// # Errors
    /// `Damaged` where the file is not the one that was written; `Newer` where it has a column that
    /// the new file would lack; the error of a change.
    pub fn rewrite(
        &self,
        path: &str,
        mut change: impl FnMut(&mut ArchivedMessage) -> Result<(), ArchiveError>,
    ) -> Result<WrittenFile, ArchiveError> {
        self.check_columns()?;
        let mut writer = FileWriter::new(path)?;
        for group in 0..self.groups() {
            let mut messages = self.read(group)?;
            messages.iter_mut().try_for_each(&mut change)?;
            writer.write(&messages)?;
        }
        writer.finish()
    }

    fn check_columns(&self) -> Result<(), ArchiveError> {
        let columns = self.reader.metadata().file_metadata().schema_descr().columns();
        match columns.iter().find(|column| !ArchivedMessage::NAMES.contains(&column.name())) {
            None => Ok(()),
            Some(column) => Err(ArchiveError::Newer {
                path: self.path.clone(),
                column: column.name().to_owned(),
            }),
        }
    }

    /// Reads the ids of all messages, in their order.
    ///
    /// # Errors
    /// `Damaged` where a group is not the one that was written.
    pub fn ids(&self) -> Result<Vec<Vec<u8>>, ArchiveError> {
        let mut all = Vec::new();
        for group in 0..self.groups() {
            let read = self.group(group).and_then(|group| ids(&*group));
            let read = read.map_err(|error| ArchiveError::damaged(&self.path, &error))?;
            all.extend(read.iter().map(|id| id.data().to_vec()));
        }
        Ok(all)
    }

    fn group(&self, group: usize) -> ParquetResult<Box<dyn RowGroupReader + '_>> {
        let Range { start, end } = extent(self.reader.metadata().row_group(group));
        let part = self.bytes.get(start as usize..end as usize).unwrap_or_default();
        self.digests.check_group(group, part)?;
        self.reader.get_row_group(group)
    }
}

/// Returns the number of messages of a row group.
fn rows(group: &dyn RowGroupReader) -> usize {
    usize::try_from(group.metadata().num_rows()).unwrap_or(0)
}

/// Reads some messages of a row group.
pub(crate) fn messages(
    group: &dyn RowGroupReader,
    rows: Range<usize>,
) -> ParquetResult<Vec<ArchivedMessage>> {
    let mut columns = Vec::with_capacity(ArchivedMessage::COLUMNS.len());
    for column in ArchivedMessage::COLUMNS {
        columns.push(cells(group, column, rows.clone())?.into_iter());
    }
    let mut read = Vec::with_capacity(rows.len());
    for _ in rows {
        let mut columns = columns.iter_mut();
        let message = ArchivedMessage::of_cells(|| columns.next()?.next()?);
        read.push(
            message.ok_or_else(|| {
                ParquetError::General("a value does not fit its column".to_owned())
            })?,
        );
    }
    Ok(read)
}

/// Reads the ids of a row group.
pub(crate) fn ids(group: &dyn RowGroupReader) -> ParquetResult<Vec<ByteArray>> {
    let column = ArchivedMessage::COLUMNS.iter().find(|column| column.name == ID);
    let column = column.ok_or_else(|| ParquetError::General("files have no ids".to_owned()))?;
    let cells = cells(group, column, 0..rows(group))?;
    Ok(cells.into_iter().flatten().filter_map(Cell::bytes).collect())
}

fn cells(
    group: &dyn RowGroupReader,
    column: &Column,
    rows: Range<usize>,
) -> ParquetResult<Vec<Option<Cell>>> {
    match position(group.metadata().schema_descr(), column.name) {
        Some(at) => column.read(group.get_column_reader(at)?, rows),
        None => column.absent(rows.len()),
    }
}

/// Returns the position of a column in a file.
pub(crate) fn position(schema: &SchemaDescriptor, name: &str) -> Option<usize> {
    schema.columns().iter().position(|column| column.name() == name)
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    // What could go wrong: a value changes on its way through a file, or comes into another row.
    #[test]
    fn messages_survive_a_file() {
        let mut first = ArchivedMessage::sample("a");
        first.payload = None;
        first.over_gap = false;
        let mut second = ArchivedMessage::sample("ä");
        (second.key, second.headers, second.source) = (None, None, Some(String::new()));
        second.history = Some("[]".to_owned());
        let written = [first, second, ArchivedMessage::sample("z")];
        let mut file = FileWriter::new("a file").expect("a file");
        file.write(&written[..2]).expect("a group");
        file.write(&[]).expect("nothing");
        file.write(&written[2..]).expect("a group");
        assert_eq!((file.rows(), file.is_full()), (3, false));
        let WrittenFile { bytes, footer } = file.finish().expect("its bytes");
        let file = FileReader::open("a file", bytes, &footer).expect("a file");
        assert_eq!(file.groups(), 2);
        let read = [file.read(0).expect("a group"), file.read(1).expect("a group")].concat();
        assert_eq!(read, written);
        assert_eq!(file.ids().expect("ids"), ["a", "ä", "z"].map(|id| id.as_bytes().to_vec()));
        let without = |message: &mut ArchivedMessage| {
            message.payload = None;
            Ok(())
        };
        let WrittenFile { bytes, footer } = file.rewrite("other", without).expect("another file");
        let other = FileReader::open("other", bytes, &footer).expect("a file");
        let mut expected = ArchivedMessage::sample("z");
        expected.payload = None;
        assert_eq!((other.groups(), other.read(1).expect("a group")), (2, vec![expected]));
    }

    /// A file with a message, and with a column that no message has.
    fn newer() -> WrittenFile {
        let extra = Column::of::<Option<String>>("later");
        let columns: Vec<_> = ArchivedMessage::COLUMNS.iter().chain([&extra]).collect();
        let fields = columns.iter().map(|column| column.field().expect("a field")).collect();
        let schema = Type::group_type_builder("message").with_fields(fields).build();
        let schema = Arc::new(schema.expect("a schema"));
        let mut file = FileWriter::new("newer").expect("a file");
        file.writer = SerializedFileWriter::new(Vec::new(), schema, Arc::new(properties()))
            .expect("another file");
        let mut group = file.writer.next_row_group().expect("a group");
        let cells = by_column(&[ArchivedMessage::sample("a")]).into_iter().chain([vec![None]]);
        for (column, cells) in columns.into_iter().zip(cells) {
            let mut writer = group.next_column().expect("a column").expect("a column");
            column.write(writer.untyped(), cells).expect("its cells");
            writer.close().expect("its end");
        }
        group.close().expect("its end");
        file.writer.flush().expect("its bytes");
        let group = file.writer.flushed_row_groups().last().expect("a group");
        file.digests.add(group, file.writer.inner()).expect("its digest");
        file.finish().expect("its bytes")
    }

    // What could go wrong: an erasure by an older release takes a column out of a file that a later
    // one wrote.
    #[test]
    fn a_file_with_a_later_column_is_read_and_not_written_again() {
        let WrittenFile { bytes, footer } = newer();
        let file = FileReader::open("newer", bytes, &footer).expect("a file");
        assert_eq!(file.read(0).expect("a group"), [ArchivedMessage::sample("a")]);
        let error = file.rewrite("other", |_| Ok(())).expect_err("it would lose the column");
        assert!(error.to_string().contains("has the column `later`"), "{error}");
    }

    // What could go wrong: a file that was cut or changed is read as if it were whole.
    #[test]
    fn a_file_that_is_not_as_it_was_written_is_damaged() {
        let mut file = FileWriter::new("a file").expect("a file");
        file.write(&[ArchivedMessage::sample("a")]).expect("a group");
        let WrittenFile { bytes, footer } = file.finish().expect("its bytes");
        let changed = |at: usize| {
            let mut bytes = bytes.to_vec();
            bytes[at] ^= 1;
            Bytes::from(bytes)
        };
        let (end, cut) = (bytes.len() - 1, bytes.len() - footer.bytes as usize);
        for broken in [
            bytes.slice(..end),
            bytes.slice(1..),
            Bytes::new(),
            changed(10), // the group
            changed(cut),
            changed(end),
        ] {
            let read = FileReader::open("x.parquet", broken, &footer).and_then(|file| file.read(0));
            let error = read.expect_err("it is broken").to_string();
            assert!(error.starts_with("the file `x.parquet` of the archive is damaged"), "{error}");
        }
        // A row that was changed by hand may name any part of a file as its footer.
        for length in [0, 1, 8, footer.bytes as usize - 1, bytes.len()] {
            let digest = Sha256::digest(&bytes[bytes.len() - length..]).into();
            let part = Footer { bytes: length as u64, digest };
            let opened = FileReader::open("x.parquet", bytes.clone(), &part);
            assert!(opened.is_err(), "the last {length} bytes");
        }
    }
}
