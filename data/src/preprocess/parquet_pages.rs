//! Reads the pages of Parquet columns, without a C library and without the memory of a page as it is compressed.
//!
//! A column chunk is a run of pages: a header, and a body of as many bytes as the header says. Of data pages of version 2,
//! the levels in front of the values are not compressed. A page can only be read as a whole, and a dictionary stays as
//! long as its column chunk, so both are refused where they take too much memory.

use super::parquet_codec::{Codec, decompress};
use super::parquet_header::{PageHeader, PageKind, damaged};
use parquet::basic::Encoding;
use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::errors::{ParquetError, Result};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Take};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The bytes that the dictionaries and pages of all columns may have together.
#[derive(Clone)]
pub struct PageLimit {
    bytes: usize,
    held: Arc<AtomicUsize>,
}

impl PageLimit {
    pub fn new(bytes: usize) -> PageLimit {
        PageLimit { bytes, held: Arc::default() }
    }
}

/// The bytes of the dictionary and the page of a column chunk.
struct PageRoom {
    limit: PageLimit,
    dictionary: usize,
    page: usize,
}

impl PageRoom {
    /// Counts a page that comes in place of the one before, or a dictionary.
    ///
    /// # Errors
    /// More than the limit.
    fn take(&mut self, header: &PageHeader) -> Result<()> {
        let (place, encoding) = match header.kind {
            PageKind::Index => return Ok(()),
            PageKind::Dictionary => (&mut self.dictionary, None),
            PageKind::Data => (&mut self.page, Some(header.fields.count(2)?)),
            PageKind::DataV2 => (&mut self.page, Some(header.fields.count(4)?)),
        };
        let PageLimit { bytes: most, held } = &self.limit;
        let bytes = header.uncompressed.max(header.compressed);
        let before = std::mem::take(place);
        let others = held.fetch_sub(before, Relaxed) - before;
        // Decoders of other encodings than the plain one keep a page until they have the next.
        let others = others + if encoding == Some(0) { 0 } else { before };
        if bytes > most.saturating_sub(others) {
            let (what, are) = match header.kind {
                PageKind::Dictionary => ("a dictionary", "pages"),
                _ => ("a page", "dictionaries and pages of other columns"),
            };
            let message = format!(
                "{what} of {bytes} bytes beside {others} bytes of {are}, together more than {most}: write fewer rows to a \
                 page (pyarrow: write_batch_size), without a dictionary (use_dictionary=False)"
            );
            return Err(ParquetError::General(message));
        }
        *place = bytes;
        held.fetch_add(bytes, Relaxed);
        Ok(())
    }
}

impl Drop for PageRoom {
    fn drop(&mut self) {
        self.limit.held.fetch_sub(self.dictionary + self.page, Relaxed);
    }
}

/// The pages of one column chunk.
pub struct ColumnPages {
    file: Take<BufReader<File>>,
    codec: Codec,
    room: PageRoom,
    /// The header that was read ahead of its body.
    header: Option<PageHeader>,
}

impl ColumnPages {
    /// The pages of the `length` bytes from `start` on.
    ///
    /// # Errors
    /// A file that cannot be opened.
    pub fn open(
        path: &Path,
        (start, length): (u64, u64),
        codec: Codec,
        limit: &PageLimit,
    ) -> Result<ColumnPages> {
        let mut file = BufReader::with_capacity(1 << 16, File::open(path)?);
        file.seek(SeekFrom::Start(start))?;
        let room = PageRoom { limit: limit.clone(), dictionary: 0, page: 0 };
        Ok(ColumnPages { file: file.take(length), codec, room, header: None })
    }

    /// Reads the next header, if there is one and it was not read before.
    fn read_header(&mut self) -> Result<Option<&PageHeader>> {
        if self.header.is_none() {
            if self.file.fill_buf()?.is_empty() {
                return Ok(None);
            }
            self.header = Some(PageHeader::read(&mut self.file)?);
        }
        Ok(self.header.as_ref())
    }

    /// Reads a body, of which the first `plain` bytes are not compressed.
    fn read_body(
        &mut self,
        header: &PageHeader,
        plain: usize,
        is_compressed: bool,
    ) -> Result<Vec<u8>> {
        let early = || damaged("a page ends too early");
        if plain > header.compressed.min(header.uncompressed) {
            return Err(early());
        }
        let mut body = (&mut self.file).take(header.compressed as u64);
        if self.codec == Codec::Plain || !is_compressed || header.compressed == plain {
            let mut whole = vec![0; header.compressed];
            body.read_exact(&mut whole).map_err(|_| early())?;
            return Ok(whole);
        }
        let mut whole = vec![0; header.uncompressed];
        body.read_exact(&mut whole[..plain]).map_err(|_| early())?;
        decompress(self.codec, &mut body, &mut whole[plain..])?;
        Ok(whole)
    }

    fn skip_body(&mut self, header: &PageHeader) -> Result<()> {
        let mut body = (&mut self.file).take(header.compressed as u64);
        match std::io::copy(&mut body, &mut std::io::sink())? == header.compressed as u64 {
            true => Ok(()),
            false => Err(damaged("a page ends too early")),
        }
    }
}

impl Iterator for ColumnPages {
    type Item = Result<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

impl PageReader for ColumnPages {
    fn get_next_page(&mut self) -> Result<Option<Page>> {
        while self.read_header()?.is_some() {
            let Some(header) = self.header.take() else { break };
            self.room.take(&header)?;
            let number = |field| header.fields.count(field);
            let page = match header.kind {
                PageKind::Index => {
                    self.skip_body(&header)?;
                    continue;
                }
                PageKind::Data => Page::DataPage {
                    num_values: number(1)?,
                    encoding: encoding(number(2)?)?,
                    def_level_encoding: encoding(number(3)?)?,
                    rep_level_encoding: encoding(number(4)?)?,
                    statistics: None,
                    buf: self.read_body(&header, 0, true)?.into(),
                },
                PageKind::Dictionary => Page::DictionaryPage {
                    num_values: number(1)?,
                    encoding: encoding(number(2)?)?,
                    is_sorted: header.fields.flag(3).unwrap_or(false),
                    buf: self.read_body(&header, 0, true)?.into(),
                },
                PageKind::DataV2 => {
                    let [definitions, repetitions] = [number(5)?, number(6)?];
                    let plain = definitions as usize + repetitions as usize;
                    let is_compressed = header.fields.flag(7).unwrap_or(true);
                    Page::DataPageV2 {
                        num_values: number(1)?,
                        num_nulls: number(2)?,
                        num_rows: number(3)?,
                        encoding: encoding(number(4)?)?,
                        def_levels_byte_len: definitions,
                        rep_levels_byte_len: repetitions,
                        is_compressed: false,
                        statistics: None,
                        buf: self.read_body(&header, plain, is_compressed)?.into(),
                    }
                }
            };
            return Ok(Some(page));
        }
        Ok(None)
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>> {
        while let Some(header) = self.read_header()? {
            let rows = |field| header.fields.count(field).map(|rows| Some(rows as usize));
            return Ok(Some(match header.kind {
                PageKind::Index => {
                    self.skip_next_page()?;
                    continue;
                }
                PageKind::Dictionary => {
                    PageMetadata { num_rows: None, num_levels: None, is_dict: true }
                }
                PageKind::Data => {
                    PageMetadata { num_rows: None, num_levels: rows(1)?, is_dict: false }
                }
                PageKind::DataV2 => {
                    PageMetadata { num_rows: rows(3)?, num_levels: rows(1)?, is_dict: false }
                }
            }));
        }
        Ok(None)
    }

    fn skip_next_page(&mut self) -> Result<()> {
        self.read_header()?;
        match self.header.take() {
            Some(header) => self.skip_body(&header),
            None => Ok(()),
        }
    }
}

/// The encodings of `parquet.thrift` by number.
fn encoding(number: u32) -> Result<Encoding> {
    Ok(match number {
        0 => Encoding::PLAIN,
        2 => Encoding::PLAIN_DICTIONARY,
        3 => Encoding::RLE,
        #[expect(deprecated, reason = "old files have levels in it")]
        4 => Encoding::BIT_PACKED,
        5 => Encoding::DELTA_BINARY_PACKED,
        6 => Encoding::DELTA_LENGTH_BYTE_ARRAY,
        7 => Encoding::DELTA_BYTE_ARRAY,
        8 => Encoding::RLE_DICTIONARY,
        9 => Encoding::BYTE_STREAM_SPLIT,
        other => return Err(damaged(&format!("a page has the unknown encoding {other}"))),
    })
}
