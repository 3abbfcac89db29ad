//! Opens files as streams of bytes, decompressed, and counts what was read of the files themselves.

use super::input::Compression;
use flate2::bufread::MultiGzDecoder;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use zstd::stream::read::Decoder;

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
        Compression::Zstd => Box::new(ZstdReader::new(file)?),
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

/// The power of two of the largest window, as of `zstd` itself unless it is told otherwise: the decoder keeps so many bytes.
const WINDOW_LOG: u32 = 27;

/// Decodes the frames of a Zstandard file (RFC 8878), one after another, and compares their checksums.
struct ZstdReader<R>(Decoder<'static, R>);

impl<R: BufRead> ZstdReader<R> {
    fn new(file: R) -> io::Result<ZstdReader<R>> {
        let mut decoder = Decoder::with_buffer(file)?;
        decoder.window_log_max(WINDOW_LOG)?;
        Ok(ZstdReader(decoder))
    }
}

impl<R: BufRead> Read for ZstdReader<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.0.read(out).map_err(|error| match error.to_string().contains("too much memory") {
            true => io::Error::other(format!(
                "it has a window of more than {} bytes: compress it anew, with --long={WINDOW_LOG} at most",
                1 << WINDOW_LOG
            )),
            false => error,
        })
    }
}
