//! Reads the pages of Parquet columns that are compressed by Zstandard, without a C library.
//!
//! The crate `parquet` reads files of all other kinds that are accepted. A column chunk is a run of pages: a header in
//! Thrift's compact protocol (`PageHeader` of `parquet.thrift`), and a body of as many bytes as the header says. Of data
//! pages of version 2, the levels in front of the values are not compressed.

use parquet::basic::Encoding;
use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::errors::{ParquetError, Result};
use ruzstd::decoding::{BlockDecodingStrategy::UptoBytes, FrameDecoder};
use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Take};
use std::path::Path;

/// Structs within a struct of a header, at most: those of a format that is still unknown.
const DEPTH: usize = 8;

/// The pages of one column chunk.
pub struct ZstdPages {
    file: Take<BufReader<File>>,
    /// The header that was read ahead of its body.
    header: Option<PageHeader>,
}

struct PageHeader {
    kind: PageKind,
    compressed: usize,
    uncompressed: usize,
    fields: Fields,
}

enum PageKind {
    Data,
    Index,
    Dictionary,
    DataV2,
}

impl ZstdPages {
    /// The pages of the `length` bytes from `start` on.
    ///
    /// # Errors
    /// A file that cannot be opened.
    pub fn open(path: &Path, (start, length): (u64, u64)) -> Result<ZstdPages> {
        let mut file = BufReader::with_capacity(1 << 16, File::open(path)?);
        file.seek(SeekFrom::Start(start))?;
        Ok(ZstdPages { file: file.take(length), header: None })
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
        if !is_compressed || header.compressed == plain {
            let mut whole = Vec::new();
            body.read_to_end(&mut whole)?;
            return if whole.len() < header.compressed { Err(early()) } else { Ok(whole) };
        }
        let mut whole = vec![0; header.uncompressed];
        body.read_exact(&mut whole[..plain]).map_err(|_| early())?;
        let (mut out, wrong) =
            (&mut whole[plain..], |error: &dyn Display| damaged(&error.to_string()));
        // Its window is as large as the page, and goes with it.
        let mut decoder = FrameDecoder::new();
        while body.limit() > 0 {
            decoder.reset(&mut body).map_err(|error| wrong(&error))?;
            while !decoder.is_finished() {
                let decoded = decoder.decode_blocks(&mut body, UptoBytes(1 << 20));
                decoded.map_err(|error| wrong(&error))?;
                let read = decoder.read(out)?;
                out = &mut out[read..];
                if decoder.can_collect() > 0 {
                    return Err(damaged("a page has more bytes than its header says"));
                }
            }
        }
        match out.is_empty() {
            true => Ok(whole),
            false => Err(damaged("a page has fewer bytes than its header says")),
        }
    }
}

impl Iterator for ZstdPages {
    type Item = Result<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

impl PageReader for ZstdPages {
    fn get_next_page(&mut self) -> Result<Option<Page>> {
        while self.read_header()?.is_some() {
            let Some(header) = self.header.take() else { break };
            let number = |field| header.fields.count(field);
            let page = match header.kind {
                PageKind::Index => {
                    self.read_body(&header, 0, false)?;
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
            Some(header) => self.read_body(&header, 0, false).map(drop),
            None => Ok(()),
        }
    }
}

impl PageHeader {
    fn read(input: &mut impl Read) -> Result<PageHeader> {
        let fields = Fields::read(input, DEPTH)?;
        let (kind, place) = match fields.count(1)? {
            0 => (PageKind::Data, 5),
            1 => (PageKind::Index, 6),
            2 => (PageKind::Dictionary, 7),
            3 => (PageKind::DataV2, 8),
            other => return Err(damaged(&format!("a page has the unknown type {other}"))),
        };
        let (uncompressed, compressed) = (fields.count(2)? as usize, fields.count(3)? as usize);
        let mut fields = fields;
        let Some(Field::Struct(fields)) = fields.0.remove(&place) else {
            return Err(damaged("a page header lacks the part of its type"));
        };
        Ok(PageHeader { kind, compressed, uncompressed, fields })
    }
}

/// The fields of a struct in Thrift's compact protocol, by number.
struct Fields(BTreeMap<i16, Field>);

enum Field {
    Number(i64),
    Flag(bool),
    Struct(Fields),
    /// A value of a type that page headers do not need.
    Other,
}

impl Fields {
    fn read(input: &mut impl Read, depth: usize) -> Result<Fields> {
        if depth == 0 {
            return Err(damaged("a page header is nested too deeply"));
        }
        let (mut fields, mut number) = (BTreeMap::new(), 0_i16);
        loop {
            let head = byte(input)?;
            if head == 0 {
                return Ok(Fields(fields));
            }
            number = match head >> 4 {
                0 => zigzag(varint(input)?) as i16,
                step => number.saturating_add(step.into()),
            };
            fields.insert(number, Field::read(input, head & 0xF, depth)?);
        }
    }

    /// A number that is not below 0.
    fn count(&self, field: i16) -> Result<u32> {
        let number = match self.0.get(&field) {
            Some(&Field::Number(number)) => u32::try_from(number).ok(),
            _ => None,
        };
        number.ok_or_else(|| damaged(&format!("a page header has no number in field {field}")))
    }

    fn flag(&self, field: i16) -> Option<bool> {
        match self.0.get(&field) {
            Some(&Field::Flag(flag)) => Some(flag),
            _ => None,
        }
    }
}

impl Field {
    fn read(input: &mut impl Read, kind: u8, depth: usize) -> Result<Field> {
        Ok(match kind {
            1 | 2 => Field::Flag(kind == 1),
            3 => Field::Number(i64::from(byte(input)?)),
            4..=6 => Field::Number(zigzag(varint(input)?)),
            7 => skip(input, 8)?,
            8 => {
                let bytes = varint(input)?;
                skip(input, bytes)?
            }
            12 => Field::Struct(Fields::read(input, depth - 1)?),
            other => return Err(damaged(&format!("a page header has a field of type {other}"))),
        })
    }
}

fn skip(input: &mut impl Read, bytes: u64) -> Result<Field> {
    match std::io::copy(&mut input.take(bytes), &mut std::io::sink())? == bytes {
        true => Ok(Field::Other),
        false => Err(damaged("a page header ends too early")),
    }
}

fn byte(input: &mut impl Read) -> Result<u8> {
    let mut byte = [0];
    input.read_exact(&mut byte)?;
    Ok(byte[0])
}

fn varint(input: &mut impl Read) -> Result<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let byte = byte(input)?;
        number |= u64::from(byte & 0x7F) << shift;
        if byte < 0x80 {
            return Ok(number);
        }
    }
    Err(damaged("a page header has a number of more than 64 bits"))
}

fn zigzag(number: u64) -> i64 {
    (number >> 1) as i64 ^ -((number & 1) as i64)
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

fn damaged(why: &str) -> ParquetError {
    ParquetError::General(why.to_string())
}
