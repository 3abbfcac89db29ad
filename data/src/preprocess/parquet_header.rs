//! Reads the header in front of a Parquet page: `PageHeader` of `parquet.thrift`, in Thrift's compact protocol.

use parquet::errors::{ParquetError, Result};
use std::collections::BTreeMap;
use std::io::Read;

/// Structs within a struct of a header, at most: those of a format that is still unknown.
const DEPTH: usize = 8;

/// The header of a page.
pub struct PageHeader {
    pub kind: PageKind,
    /// Bytes of the body as it is in the file.
    pub compressed: usize,
    pub uncompressed: usize,
    /// The fields of its kind.
    pub fields: Fields,
}

/// The kinds of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageKind {
    Data,
    Index,
    Dictionary,
    DataV2,
}

impl PageHeader {
    /// Reads a header.
    ///
    /// # Errors
    /// A header that is damaged, or of an unknown kind.
    pub fn read(input: &mut impl Read) -> Result<PageHeader> {
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
pub struct Fields(BTreeMap<i16, Field>);

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
    pub fn count(&self, field: i16) -> Result<u32> {
        let number = match self.0.get(&field) {
            Some(&Field::Number(number)) => u32::try_from(number).ok(),
            _ => None,
        };
        number.ok_or_else(|| damaged(&format!("a page header has no number in field {field}")))
    }

    pub fn flag(&self, field: i16) -> Option<bool> {
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

/// A byte.
pub fn byte(input: &mut impl Read) -> Result<u8> {
    let mut byte = [0];
    input.read_exact(&mut byte)?;
    Ok(byte[0])
}

/// A number in groups of seven bits, the lowest first.
pub fn varint(input: &mut impl Read) -> Result<u64> {
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

/// The error of a file that is damaged.
pub fn damaged(why: &str) -> ParquetError {
    ParquetError::General(why.to_string())
}
