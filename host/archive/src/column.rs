//! The columns of a file, and the cells of a row. A column has a name and a type, and may have
//! cells without a value.

use std::{ops::Range, sync::Arc};

use chrono::{DateTime, Utc};
use parquet::{
    basic::{LogicalType, Repetition, TimeUnit, Type as PhysicalType},
    column::{
        reader::{ColumnReader, ColumnReaderImpl},
        writer::ColumnWriter,
    },
    data_type::{ByteArray, DataType},
    errors::{ParquetError, Result},
    schema::types::{Type, TypePtr},
};

/// A value of a row.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Cell {
    Flag(bool),
    Int(i32),
    Long(i64),
    Bytes(ByteArray),
}

/// The type of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CellKind {
    Flag,
    Int,
    Long,
    /// Microseconds since 1970, UTC.
    Time,
    /// UTF-8.
    Text,
    Bytes,
}

/// A column of every file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Column {
    pub(crate) name: &'static str,
    kind: CellKind,
    is_required: bool,
}

/// A field of a message: its column's type, and its value as a cell.
pub(crate) trait CellValue: Sized {
    /// Type of the column.
    const KIND: CellKind;
    /// Whether each row has a value.
    const IS_REQUIRED: bool = true;

    /// Returns the value as a cell.
    fn cell(&self) -> Option<Cell>;

    /// Returns the value of a cell; none where the cell cannot be one.
    fn of(cell: Option<Cell>) -> Option<Self>;
}

impl Column {
    /// Returns the column of a field.
    pub(crate) const fn of<T: CellValue>(name: &'static str) -> Self {
        Self { name, kind: T::KIND, is_required: T::IS_REQUIRED }
    }

    /// Returns the column in the schema of a file.
    pub(crate) fn field(&self) -> Result<TypePtr> {
        let (physical, logical) = match self.kind {
            CellKind::Flag => (PhysicalType::BOOLEAN, None),
            CellKind::Int => (PhysicalType::INT32, None),
            CellKind::Long => (PhysicalType::INT64, None),
            CellKind::Time => {
                (PhysicalType::INT64, Some(LogicalType::timestamp(true, TimeUnit::MICROS)))
            }
            CellKind::Text => (PhysicalType::BYTE_ARRAY, Some(LogicalType::String)),
            CellKind::Bytes => (PhysicalType::BYTE_ARRAY, None),
        };
        let repetition = if self.is_required { Repetition::REQUIRED } else { Repetition::OPTIONAL };
        let field = Type::primitive_type_builder(self.name, physical)
            .with_repetition(repetition)
            .with_logical_type(logical)
            .build()?;
        Ok(Arc::new(field))
    }

    /// Writes the cells of a row group.
    pub(crate) fn write(
        &self,
        writer: &mut ColumnWriter<'_>,
        cells: Vec<Option<Cell>>,
    ) -> Result<()> {
        let levels: Vec<i16> = cells.iter().map(|cell| i16::from(cell.is_some())).collect();
        let levels = (!self.is_required).then_some(levels.as_slice());
        match writer {
            ColumnWriter::BoolColumnWriter(writer) => {
                writer.write_batch(&self.values(cells, Cell::flag)?, levels, None)?
            }
            ColumnWriter::Int32ColumnWriter(writer) => {
                writer.write_batch(&self.values(cells, Cell::int)?, levels, None)?
            }
            ColumnWriter::Int64ColumnWriter(writer) => {
                writer.write_batch(&self.values(cells, Cell::long)?, levels, None)?
            }
            ColumnWriter::ByteArrayColumnWriter(writer) => {
                writer.write_batch(&self.values(cells, Cell::bytes)?, levels, None)?
            }
            _ => return Err(self.mistyped()),
        };
        Ok(())
    }

    /// Returns the values of the cells that have one.
    fn values<T>(
        &self,
        cells: Vec<Option<Cell>>,
        value: impl Fn(Cell) -> Option<T>,
    ) -> Result<Vec<T>> {
        let given = cells.into_iter().flatten();
        given.map(|cell| value(cell).ok_or_else(|| self.mistyped())).collect()
    }

    /// Reads the cells of some rows of a row group.
    pub(crate) fn read(
        &self,
        reader: ColumnReader,
        rows: Range<usize>,
    ) -> Result<Vec<Option<Cell>>> {
        match reader {
            ColumnReader::BoolColumnReader(reader) => self.cells(reader, rows, Cell::Flag),
            ColumnReader::Int32ColumnReader(reader) => self.cells(reader, rows, Cell::Int),
            ColumnReader::Int64ColumnReader(reader) => self.cells(reader, rows, Cell::Long),
            ColumnReader::ByteArrayColumnReader(reader) => self.cells(reader, rows, Cell::Bytes),
            _ => Err(self.mistyped()),
        }
    }

    fn cells<T: DataType>(
        &self,
        mut reader: ColumnReaderImpl<T>,
        rows: Range<usize>,
        cell: impl Fn(T::T) -> Cell,
    ) -> Result<Vec<Option<Cell>>> {
        let (mut values, mut levels) = (Vec::new(), Vec::new());
        let skipped = reader.skip_records(rows.start)?;
        let (read, _, _) = reader.read_records(rows.len(), Some(&mut levels), None, &mut values)?;
        if skipped != rows.start || read != rows.len() {
            return Err(self.broken("it has fewer rows than its group"));
        }
        let mut values = values.into_iter().map(cell);
        // A column without levels has a value in each row.
        if levels.is_empty() {
            return Ok(values.map(Some).collect());
        }
        let cell_of = |level: i16| if level > 0 { values.next() } else { None };
        Ok(levels.into_iter().map(cell_of).collect())
    }

    /// Returns the cells of a file that was written before the column was added.
    pub(crate) fn absent(&self, rows: usize) -> Result<Vec<Option<Cell>>> {
        if self.is_required {
            return Err(self.broken("it is missing"));
        }
        Ok(vec![None; rows])
    }

    fn mistyped(&self) -> ParquetError {
        self.broken("it is of another type")
    }

    fn broken(&self, why: &str) -> ParquetError {
        ParquetError::General(format!("column `{}`: {why}", self.name))
    }
}

impl Cell {
    fn flag(self) -> Option<bool> {
        if let Self::Flag(flag) = self { Some(flag) } else { None }
    }

    fn int(self) -> Option<i32> {
        if let Self::Int(number) = self { Some(number) } else { None }
    }

    fn long(self) -> Option<i64> {
        if let Self::Long(number) = self { Some(number) } else { None }
    }

    pub(crate) fn bytes(self) -> Option<ByteArray> {
        if let Self::Bytes(bytes) = self { Some(bytes) } else { None }
    }
}

impl CellValue for bool {
    const KIND: CellKind = CellKind::Flag;

    fn cell(&self) -> Option<Cell> {
        Some(Cell::Flag(*self))
    }

    fn of(cell: Option<Cell>) -> Option<Self> {
        cell?.flag()
    }
}

impl CellValue for i16 {
    const KIND: CellKind = CellKind::Int;

    fn cell(&self) -> Option<Cell> {
        Some(Cell::Int((*self).into()))
    }

    fn of(cell: Option<Cell>) -> Option<Self> {
        cell?.int()?.try_into().ok()
    }
}

impl CellValue for i32 {
    const KIND: CellKind = CellKind::Int;

    fn cell(&self) -> Option<Cell> {
        Some(Cell::Int(*self))
    }

    fn of(cell: Option<Cell>) -> Option<Self> {
        cell?.int()
    }
}

impl CellValue for i64 {
    const KIND: CellKind = CellKind::Long;

    fn cell(&self) -> Option<Cell> {
        Some(Cell::Long(*self))
    }

    fn of(cell: Option<Cell>) -> Option<Self> {
        cell?.long()
    }
}

impl CellValue for DateTime<Utc> {
    const KIND: CellKind = CellKind::Time;

    fn cell(&self) -> Option<Cell> {
        Some(Cell::Long(self.timestamp_micros()))
    }

    fn of(cell: Option<Cell>) -> Option<Self> {
        Self::from_timestamp_micros(cell?.long()?)
    }
}

impl CellValue for String {
    const KIND: CellKind = CellKind::Text;

    fn cell(&self) -> Option<Cell> {
        Some(Cell::Bytes(self.as_str().into()))
    }

    fn of(cell: Option<Cell>) -> Option<Self> {
        Self::from_utf8(cell?.bytes()?.data().to_vec()).ok()
    }
}

impl CellValue for Vec<u8> {
    const KIND: CellKind = CellKind::Bytes;

    fn cell(&self) -> Option<Cell> {
        Some(Cell::Bytes(self.as_slice().into()))
    }

    fn of(cell: Option<Cell>) -> Option<Self> {
        Some(cell?.bytes()?.data().to_vec())
    }
}

impl<T: CellValue> CellValue for Option<T> {
    const KIND: CellKind = T::KIND;
    const IS_REQUIRED: bool = false;

    fn cell(&self) -> Option<Cell> {
        self.as_ref().and_then(T::cell)
    }

    fn of(cell: Option<Cell>) -> Option<Self> {
        match cell {
            None => Some(None),
            cell => T::of(cell).map(Some),
        }
    }
}
