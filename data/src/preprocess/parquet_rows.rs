//! Reads columns of strings from a Parquet file, a few rows at a time.

use super::config::{AREA, BATCH, MAX_DOCUMENT};
use super::parquet_codec::Codec;
use super::parquet_pages::{ColumnPages, PageLimit};
use super::quiet_panics::catch_quietly;
use ferrotron_tensor::{Error, Result};
use parquet::basic::{Encoding, Type as PhysicalType};
use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::column::reader::{ColumnReaderImpl, get_column_reader, get_typed_column_reader};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::errors::{ParquetError, Result as ParquetResult};
use parquet::file::reader::{FileReader, SerializedFileReader};
use std::fs::File;
use std::path::{Path, PathBuf};

/// The rows of each column; none for a null.
pub type Columns = Vec<Vec<Option<Vec<u8>>>>;

/// The most rows that are read at once.
const ROWS: usize = 64;

/// Some columns of an open file.
pub struct ParquetRows {
    file: SerializedFileReader<File>,
    path: PathBuf,
    limit: PageLimit,
    /// The places of the columns.
    columns: Vec<usize>,
    /// The row group at hand, its columns, and its rows that are left.
    group: usize,
    readers: Vec<ColumnReaderImpl<ByteArrayType>>,
    left: usize,
    /// The row that comes next.
    at: u64,
    rows: u64,
}

impl ParquetRows {
    /// Opens the columns `keys` at row `at`. Their dictionaries and pages may have `most` bytes together.
    ///
    /// # Errors
    /// A file that is no Parquet; a column that is missing or has no plain strings.
    pub fn open(
        path: &Path,
        name: &str,
        keys: &[String],
        at: u64,
        most: usize,
    ) -> Result<ParquetRows> {
        let file = File::open(path).map_err(ParquetError::from).and_then(SerializedFileReader::new);
        let file = file.map_err(|error| unreadable(name, &error))?;
        let schema = file.metadata().file_metadata().schema_descr();
        let mut columns = Vec::new();
        for key in keys {
            let found = schema.columns().iter().position(|column| column.path().string() == *key);
            let Some(column) = found else {
                let names: Vec<String> =
                    schema.columns().iter().map(|column| column.path().string()).collect();
                let message = format!(
                    "--json-keys: '{name}' has no column '{key}'; it has {}",
                    names.join(", ")
                );
                return Err(Error::config(AREA, message));
            };
            let described = schema.column(column);
            if described.physical_type() != PhysicalType::BYTE_ARRAY
                || described.max_rep_level() > 0
            {
                let message = format!(
                    "--json-keys: column '{key}' of '{name}' has no strings, but {}{:?}",
                    if described.max_rep_level() > 0 { "lists of " } else { "" },
                    described.physical_type()
                );
                return Err(Error::config(AREA, message));
            }
            columns.push(column);
        }
        check_compression(&file, &columns, name)?;
        let rows = file.metadata().file_metadata().num_rows().max(0) as u64;
        let mut opened = ParquetRows {
            file,
            path: path.to_path_buf(),
            limit: PageLimit::new(most),
            columns,
            group: 0,
            readers: Vec::new(),
            left: 0,
            at: 0,
            rows,
        };
        let skipped = catch_quietly(|| opened.skip(at));
        let damaged =
            || Err(ParquetError::General(format!("a page in front of row {at} is damaged")));
        skipped.unwrap_or_else(damaged).map_err(|error| unreadable(name, &error))?;
        Ok(opened)
    }

    /// The row that comes next.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// The part of the file's bytes that is read, by rows.
    pub fn bytes(&self, bytes: u64) -> u64 {
        (bytes as f64 * self.at as f64 / self.rows.max(1) as f64) as u64
    }

    /// Some rows of each column.
    ///
    /// # Errors
    /// A file that is damaged or truncated; a row that is too large.
    pub fn read(&mut self, name: &str) -> Result<Option<Columns>> {
        // The crate panics at some pages that are damaged.
        let read = catch_quietly(|| self.read_rows(name));
        read.unwrap_or_else(|| {
            let message =
                format!("cannot read '{name}': a page near row {} is damaged", self.at + 1);
            Err(Error::io(AREA, message))
        })
    }

    fn read_rows(&mut self, name: &str) -> Result<Option<Columns>> {
        let mut columns = vec![Vec::new(); self.columns.len()];
        let (mut bytes, mut rows) = (0, 1);
        while bytes < BATCH {
            while self.left == 0 && self.group < self.file.num_row_groups() {
                self.open_group().map_err(|error| unreadable(name, &error))?;
            }
            if self.left == 0 {
                break;
            }
            let count = rows.min(self.left);
            for (reader, column) in self.readers.iter_mut().zip(&mut columns) {
                let before = column.len();
                read_column(reader, count, column).map_err(|error| unreadable(name, &error))?;
                let read = column[before..].iter().flatten().map(Vec::len);
                bytes += read.clone().sum::<usize>();
                if let Some(largest) = read.max().filter(|&largest| largest > MAX_DOCUMENT) {
                    let message = format!(
                        "'{name}', row {}: {largest} bytes, more than {MAX_DOCUMENT}",
                        self.at + 1
                    );
                    return Err(Error::io(AREA, message));
                }
            }
            self.left -= count;
            self.at += count as u64;
            // As many as fill the batch, if they are like those before them.
            rows = (BATCH * columns[0].len() / bytes.max(1)).clamp(1, ROWS);
        }
        Ok((!columns[0].is_empty()).then_some(columns))
    }

    fn open_group(&mut self) -> ParquetResult<()> {
        let group = self.file.get_row_group(self.group)?;
        self.readers.clear();
        for &column in &self.columns {
            let chunk = group.metadata().column(column);
            let codec = Codec::new(chunk.compression())
                .ok_or_else(|| ParquetError::General("an unknown compression".to_string()))?;
            let pages = ColumnPages::open(&self.path, chunk.byte_range(), codec, &self.limit)?;
            let pages = Box::new(OneLargePage { pages, is_held: false });
            let reader = get_column_reader(chunk.column_descr_ptr(), pages);
            self.readers.push(get_typed_column_reader(reader));
        }
        self.left = group.metadata().num_rows().max(0) as usize;
        self.group += 1;
        Ok(())
    }

    /// Goes on to row `at`, in which only its own row group is read.
    fn skip(&mut self, at: u64) -> ParquetResult<()> {
        while self.at < at && self.group < self.file.num_row_groups() {
            let rows = self.file.metadata().row_group(self.group).num_rows().max(0) as u64;
            if self.at + rows <= at {
                self.group += 1;
                self.at += rows;
                continue;
            }
            self.open_group()?;
            let count = (at - self.at) as usize;
            for reader in &mut self.readers {
                let skipped = reader.skip_records(count)?;
                if skipped != count {
                    return Err(ParquetError::General(format!("{skipped} rows of {count}")));
                }
            }
            self.left -= count;
            self.at = at;
        }
        Ok(())
    }
}

/// Appends `count` rows of a column, each copied before the next is read: a value of the column's reader keeps its page in
/// memory.
fn read_column(
    reader: &mut ColumnReaderImpl<ByteArrayType>,
    count: usize,
    column: &mut Vec<Option<Vec<u8>>>,
) -> ParquetResult<()> {
    let (mut levels, mut values) = (Vec::new(), Vec::<ByteArray>::new());
    for _ in 0..count {
        levels.clear();
        let mut read = || reader.read_records(1, Some(&mut levels), None, &mut values);
        // The first call may end at the empty page behind a large one.
        if read()?.0 == 0 && read()?.0 == 0 {
            return Err(ParquetError::General("fewer rows than the row group states".to_string()));
        }
        // A row without a value is null.
        column.push(values.pop().map(|value| value.data().to_vec()));
    }
    Ok(())
}

/// Pages of a column. Behind a large one comes an empty one: the column's reader lets go of a page when it gets the next,
/// which would else be in memory as well.
struct OneLargePage {
    pages: ColumnPages,
    /// Whether the reader has a large page.
    is_held: bool,
}

/// Bytes of a large page.
const LARGE_PAGE: usize = 8 << 20;

/// The empty list of levels in front of the values, which columns that cannot be null do not read.
const NO_LEVELS: [u8; 4] = [0; 4];

impl PageReader for OneLargePage {
    fn get_next_page(&mut self) -> ParquetResult<Option<Page>> {
        if std::mem::take(&mut self.is_held) {
            return Ok(Some(Page::DataPage {
                buf: NO_LEVELS.to_vec().into(),
                num_values: 0,
                encoding: Encoding::PLAIN,
                def_level_encoding: Encoding::RLE,
                rep_level_encoding: Encoding::RLE,
                statistics: None,
            }));
        }
        let page = self.pages.get_next_page()?;
        self.is_held = page.as_ref().is_some_and(|page| {
            page.is_data_page()
                && page.encoding() == Encoding::PLAIN
                && page.buffer().len() > LARGE_PAGE
        });
        Ok(page)
    }

    fn peek_next_page(&mut self) -> ParquetResult<Option<PageMetadata>> {
        self.pages.peek_next_page()
    }

    fn skip_next_page(&mut self) -> ParquetResult<()> {
        self.pages.skip_next_page()
    }
}

impl Iterator for OneLargePage {
    type Item = ParquetResult<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

fn unreadable(name: &str, error: &ParquetError) -> Error {
    let why = error.to_string();
    let why = why.trim_start_matches("Parquet error: ").trim_start_matches("EOF: ");
    Error::io(AREA, format!("cannot read '{name}': {why}"))
}

/// Errors for columns that are compressed in a way that is not read, whose name is given.
fn check_compression(
    file: &SerializedFileReader<File>,
    columns: &[usize],
    name: &str,
) -> Result<()> {
    let chunks = file.metadata().row_groups().iter();
    let chunks = chunks.flat_map(|group| columns.iter().map(|&column| group.column(column)));
    for chunk in chunks {
        let kind = chunk.compression();
        if Codec::new(kind).is_none() {
            let message = format!(
                "cannot read '{name}': column '{}' is compressed by {kind}: write it with snappy, gzip, zstd or none",
                chunk.column_path().string()
            );
            return Err(Error::io(AREA, message));
        }
    }
    Ok(())
}
