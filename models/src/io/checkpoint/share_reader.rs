//! Reading a rank's share of the files of a checkpoint, with the checksums of what was read.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use super::read_plan::ReadPlan;
use crate::io::checked_file::{Fault, FileRecord, cannot};

/// Bytes that are read at a time: they stay in the cache for the checksum.
const CHUNK: usize = 256 << 10;

/// The checksum of consecutive bytes of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stretch {
    /// Number of the file in the plan.
    pub file: usize,
    pub bytes: u64,
    pub crc32: u32,
}

/// Reads the windows of a share one after another; one file is open at a time.
pub(super) struct ShareReader<'a> {
    plan: &'a ReadPlan<'a>,
    folder: &'a Path,
    current: Option<Current>,
    stretches: Vec<Stretch>,
}

/// The file that is being read.
struct Current {
    number: usize,
    file: File,
    hasher: crc32fast::Hasher,
    bytes: u64,
}

impl<'a> ShareReader<'a> {
    pub fn new(plan: &'a ReadPlan<'a>, folder: &'a Path) -> ShareReader<'a> {
        ShareReader { plan, folder, current: None, stretches: Vec::new() }
    }

    pub fn rounds(&self) -> u64 {
        self.plan.rounds()
    }

    /// Reads the window of `rank` in a round, to be called for one round after another. Takes a buffer to be used again.
    pub fn read(&mut self, rank: usize, round: u64, mut window: Vec<u8>) -> Result<Vec<u8>, Fault> {
        let plan = self.plan;
        let positions = plan.window(rank, round);
        window.resize((positions.end - positions.start) as usize, 0);
        for (number, range, at) in plan.stretches(&positions) {
            let (name, record, _) = plan.files[number];
            let path = self.folder.join(name);
            let bytes = &mut window[at..at + (range.end - range.start) as usize];
            let read = self.read_file(number, &path, record, range.start, bytes);
            read.map_err(|error| cannot("read", &path, &error))?;
        }
        Ok(window)
    }

    fn read_file(
        &mut self,
        number: usize,
        path: &Path,
        record: &FileRecord,
        start: u64,
        bytes: &mut [u8],
    ) -> io::Result<()> {
        let current = match self.current.take() {
            Some(current) if current.number == number => current,
            other => {
                self.stretches.extend(other.map(Current::stretch));
                let mut file = File::open(path)?;
                let found = file.metadata()?.len();
                if found != record.bytes {
                    let message = format!("it has {found} bytes, not {}", record.bytes);
                    return Err(io::Error::other(message));
                }
                file.seek(SeekFrom::Start(start))?;
                Current { number, file, hasher: crc32fast::Hasher::new(), bytes: 0 }
            }
        };
        let current = self.current.insert(current);
        for chunk in bytes.chunks_mut(CHUNK) {
            current.file.read_exact(chunk)?;
            current.hasher.update(chunk);
        }
        current.bytes += bytes.len() as u64;
        Ok(())
    }

    /// The checksums of all that was read, in the order of the plan.
    pub fn stretches(mut self) -> Vec<Stretch> {
        self.stretches.extend(self.current.take().map(Current::stretch));
        self.stretches
    }
}

impl Current {
    fn stretch(self) -> Stretch {
        let Current { number, hasher, bytes, .. } = self;
        Stretch { file: number, bytes, crc32: hasher.finalize() }
    }
}

/// The state of the files of a plan on one rank, from the bytes that it and those before it have read.
pub(super) struct Checked {
    /// Files that are as they should be.
    pub files: usize,
    /// The beginning of a file whose rest the next rank has read.
    pub open: Option<Stretch>,
}

/// Compares the checksums of the files that end in a rank's share with those that they should have. `before` is the
/// beginning of its first file, which ranks before it have read.
pub(super) fn compare(
    plan: &ReadPlan,
    folder: &Path,
    before: Option<Stretch>,
    own: &[Stretch],
) -> Result<Checked, Fault> {
    let mut checked = Checked { files: 0, open: None };
    let is_whole = |found: &Stretch| found.bytes == plan.files[found.file].1.bytes;
    let compare = |found: &Stretch| {
        let (name, record, _) = plan.files[found.file];
        let found = FileRecord { bytes: found.bytes, crc32: found.crc32 };
        record.compare(&found, &folder.join(name))
    };
    for &stretch in before.iter().chain(own) {
        let joined = match checked.open.take() {
            Some(begun) if begun.file == stretch.file => begun.followed_by(&stretch),
            Some(begun) => return compare(&begun).map(|()| checked), // a part is missing
            None => stretch,
        };
        match is_whole(&joined) {
            true => compare(&joined)?,
            false => checked.open = Some(joined),
        }
        checked.files += usize::from(checked.open.is_none());
    }
    Ok(checked)
}

impl Stretch {
    /// The checksum of these bytes and those behind them.
    fn followed_by(self, next: &Stretch) -> Stretch {
        let hasher = |of: &Stretch| crc32fast::Hasher::new_with_initial_len(of.crc32, of.bytes);
        let mut both = hasher(&self);
        both.combine(&hasher(next));
        Stretch { bytes: self.bytes + next.bytes, crc32: both.finalize(), ..self }
    }
}
