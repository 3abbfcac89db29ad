//! Decompresses pages of Parquet from the file into the page, without a copy of what is compressed.

use super::parquet_header::{byte, damaged, varint};
use flate2::bufread::MultiGzDecoder;
use parquet::basic::Compression;
use parquet::errors::Result;
use std::fmt::Display;
use std::io::{BufRead, Read, Take};
use zstd::stream::read::Decoder;

/// The codecs that are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codec {
    Plain,
    Snappy,
    Gzip,
    Zstd,
}

impl Codec {
    /// None for a codec that is not read.
    pub fn new(compression: Compression) -> Option<Codec> {
        match compression {
            Compression::UNCOMPRESSED => Some(Codec::Plain),
            Compression::SNAPPY => Some(Codec::Snappy),
            Compression::GZIP(_) => Some(Codec::Gzip),
            Compression::ZSTD(_) => Some(Codec::Zstd),
            _ => None,
        }
    }
}

/// Decompresses the bytes that are left of `body`, which fill `out`.
///
/// # Errors
/// Bytes that are damaged, or of another number than `out` has.
pub fn decompress(codec: Codec, body: &mut Take<impl BufRead>, out: &mut [u8]) -> Result<()> {
    match codec {
        Codec::Plain => body.read_exact(out).map_err(|_| fewer())?,
        Codec::Snappy => snappy(body, out)?,
        Codec::Gzip => fill(out, MultiGzDecoder::new(body))?,
        Codec::Zstd => {
            let mut decoder = Decoder::with_buffer(body)?;
            // Its window is no larger than the page, and goes with it.
            decoder.window_log_max(31)?;
            fill(out, decoder)?;
        }
    }
    Ok(())
}

/// Reads all that a decoder gives.
fn fill(out: &mut [u8], mut decoder: impl Read) -> Result<()> {
    decoder.read_exact(out).map_err(|error| wrong(&error))?;
    match decoder.read(&mut [0]).map_err(|error| wrong(&error))? {
        0 => Ok(()),
        _ => Err(more()),
    }
}

fn wrong(error: &dyn Display) -> parquet::errors::ParquetError {
    damaged(&error.to_string())
}

fn more() -> parquet::errors::ParquetError {
    damaged("a page has more bytes than its header says")
}

fn fewer() -> parquet::errors::ParquetError {
    damaged("a page has fewer bytes than its header says")
}

/// Decodes a block of Snappy's format: its length, then literals and copies of bytes that are decoded already. The crate
/// that does it needs the whole block in memory.
fn snappy(body: &mut Take<impl BufRead>, out: &mut [u8]) -> Result<()> {
    if varint(body)? != out.len() as u64 {
        return Err(damaged("a page has another number of bytes than its header says"));
    }
    let number = |body: &mut Take<_>, bytes: usize| -> Result<usize> {
        let mut number = [0; 4];
        Read::read_exact(body, &mut number[..bytes])?;
        Ok(u32::from_le_bytes(number) as usize)
    };
    let mut at = 0;
    while body.limit() > 0 {
        let tag = usize::from(byte(body)?);
        let (len, offset) = match tag & 3 {
            0 => {
                let len = match tag >> 2 {
                    len @ ..60 => len,
                    long => number(body, long - 59)?,
                };
                (len + 1, None)
            }
            1 => (4 + (tag >> 2 & 7), Some((tag >> 5 << 8) + number(body, 1)?)),
            2 => (1 + (tag >> 2), Some(number(body, 2)?)),
            _ => (1 + (tag >> 2), Some(number(body, 4)?)),
        };
        if len > out.len() - at {
            return Err(more());
        }
        match offset {
            None => body.read_exact(&mut out[at..at + len])?,
            Some(offset) if offset == 0 || offset > at => {
                return Err(damaged("a page has a copy of bytes in front of its first"));
            }
            Some(offset) if offset >= len => out.copy_within(at - offset..at - offset + len, at),
            // The copy repeats what it writes.
            Some(offset) => (at..at + len).for_each(|to| out[to] = out[to - offset]),
        }
        at += len;
    }
    if at == out.len() { Ok(()) } else { Err(fewer()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoded(block: &[u8], bytes: usize) -> Result<Vec<u8>> {
        let mut out = vec![0; bytes];
        decompress(Codec::Snappy, &mut block.take(block.len() as u64), &mut out)?;
        Ok(out)
    }

    /// Literals of both forms, copies of all three, and one that repeats itself.
    #[test]
    fn each_element_of_snappy_is_decoded() {
        let long = [b'x'; 70];
        let block =
            [&[86, 2 << 2][..], b"abc", &[1, 3], &[3 << 2 | 2, 6, 0], &[60 << 2, 69], &long];
        let block = [&block.concat()[..], &[4 << 2 | 3, 70, 0, 0, 0]].concat();
        let want = [&b"abcabcabcab"[..], &long, b"xxxxx"].concat();
        assert_eq!(decoded(&block, want.len()).unwrap(), want);
    }

    #[test]
    fn damaged_blocks_of_snappy_are_refused() {
        for (block, words) in [
            (&[3, 2 << 2, b'a', b'b', b'c'][..], "another number of bytes"),
            (&[4, 2 << 2, b'a', b'b', b'c'], "fewer bytes"),
            (&[4, 4 << 2, b'a', b'b', b'c'], "more bytes"),
            (&[4, 2 << 2, b'a', b'b'], "failed to fill"),
            (&[4, 0, b'a', 2 << 2 | 2, 2, 0], "in front of its first"),
            (&[4, 0, b'a', 2 << 2 | 2, 0, 0], "in front of its first"),
            (&[4, 0, b'a', 3 << 2 | 2, 1, 0], "more bytes"),
            (&[4, 0, b'a', 2 << 2 | 2, 1], "failed to fill"),
        ] {
            let error = decoded(block, 4).unwrap_err().to_string();
            assert!(error.contains(words), "{block:?}: {error}");
        }
    }
}
