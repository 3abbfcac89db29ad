//! Opens files as streams of bytes, decompressed, and counts what was read of the files themselves.

use super::input::Compression;
use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::FrameDecoder;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Opens a file. `count` grows by the bytes that are read of it.
///
/// # Errors
/// A file that cannot be opened.
pub fn open(
    path: &Path,
    compression: Compression,
    count: Arc<AtomicU64>,
) -> io::Result<Box<dyn Read + Send>> {
    let file = BufReader::with_capacity(1 << 16, Counted { file: File::open(path)?, count });
    Ok(match compression {
        Compression::None => Box::new(file),
        Compression::Gzip => Box::new(MultiGzDecoder::new(file)),
        Compression::Zstd => {
            Box::new(ZstdReader { file, decoder: FrameDecoder::new(), in_frame: false })
        }
    })
}

struct Counted {
    file: File,
    count: Arc<AtomicU64>,
}

impl Read for Counted {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(out)?;
        self.count.fetch_add(read as u64, Relaxed);
        Ok(read)
    }
}

/// Decodes the frames of a Zstandard file (RFC 8878), one after another, and compares their checksums.
struct ZstdReader<R> {
    file: BufReader<R>,
    decoder: FrameDecoder,
    in_frame: bool,
}

/// The magic numbers of frames that are to be skipped, but for the last four bits.
const SKIPPABLE: u32 = 0x184D_2A50;

/// The largest window, as of `zstd` itself unless it is told otherwise: the decoder keeps so many bytes.
const MAX_WINDOW: u64 = 1 << 27;

impl<R: Read> ZstdReader<R> {
    /// Reads the header of a frame behind its magic number, with which it is returned (RFC 8878, section 3.1.1.1).
    ///
    /// # Errors
    /// A window that is too large.
    fn header(&mut self, magic: [u8; 4]) -> io::Result<Vec<u8>> {
        let mut header = magic.to_vec();
        header.push(0);
        self.file.read_exact(&mut header[4..])?;
        let descriptor = usize::from(header[4]);
        let is_single = descriptor & 0x20 != 0;
        let dictionary = [0, 1, 2, 4][descriptor & 3];
        let content = [usize::from(is_single), 2, 4, 8][descriptor >> 6];
        header.resize(5 + usize::from(!is_single) + dictionary + content, 0);
        self.file.read_exact(&mut header[5..])?;
        let window = match is_single {
            true => {
                let size = &header[header.len() - content..];
                size.iter().rev().fold(0, |size, &byte| size << 8 | u64::from(byte))
            }
            false => {
                let base = 1 << (10 + (header[5] >> 3));
                base + base / 8 * u64::from(header[5] & 7)
            }
        };
        if window > MAX_WINDOW {
            return Err(io::Error::other(format!(
                "it has a window of {window} bytes, more than {MAX_WINDOW}: compress it anew, with --long=27 at most"
            )));
        }
        Ok(header)
    }

    /// Begins the next frame; false at the end of the file.
    fn next_frame(&mut self) -> io::Result<bool> {
        while !self.file.fill_buf()?.is_empty() {
            let mut head = [0; 4];
            self.file.read_exact(&mut head)?;
            if u32::from_le_bytes(head) & !0xF == SKIPPABLE {
                self.file.read_exact(&mut head)?;
                let length = u64::from(u32::from_le_bytes(head));
                if io::copy(&mut (&mut self.file).take(length), &mut io::sink())? < length {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                continue;
            }
            let header = self.header(head)?;
            self.decoder.reset((&header[..]).chain(&mut self.file)).map_err(io::Error::other)?;
            self.in_frame = true;
            return Ok(true);
        }
        Ok(false)
    }
}

impl<R: Read> Read for ZstdReader<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        use ruzstd::decoding::BlockDecodingStrategy::UptoBytes;
        loop {
            if !self.in_frame && !self.next_frame()? {
                return Ok(0);
            }
            if self.decoder.can_collect() == 0 && !self.decoder.is_finished() {
                let decoded = self.decoder.decode_blocks(&mut self.file, UptoBytes(out.len()));
                decoded.map_err(io::Error::other)?;
            }
            let read = self.decoder.read(out)?;
            if read > 0 || out.is_empty() {
                return Ok(read);
            }
            if self.decoder.is_finished() {
                let stated = self.decoder.get_checksum_from_data();
                if stated.is_some() && stated != self.decoder.get_calculated_checksum() {
                    return Err(io::Error::other("the checksum of a frame is wrong"));
                }
                self.in_frame = false;
            }
        }
    }
}
