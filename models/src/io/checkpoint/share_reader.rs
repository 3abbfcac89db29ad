//! Reading a rank's share of the files of a checkpoint, with the checksums of what was read.

use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use super::read_plan::ReadPlan;
use crate::io::checked_file::{Fault, FileRecord, cannot};

/// Bytes that are read at a time: they stay in the cache for the checksum.
const CHUNK: usize = 256 << 10;

/// The checksum of consecutive bytes of a file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Stretch {
    /// Number of the file in the plan.
    file: usize,
    start: u64,
    pub bytes: u64,
    crc32: u32,
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
    start: u64,
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
                Current { number, file, start, hasher: crc32fast::Hasher::new(), bytes: 0 }
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

    /// The checksums of all that was read.
    pub fn stretches(mut self) -> Vec<Stretch> {
        self.stretches.extend(self.current.take().map(Current::stretch));
        self.stretches
    }
}

impl Current {
    fn stretch(self) -> Stretch {
        let Current { number, start, hasher, bytes, .. } = self;
        Stretch { file: number, start, bytes, crc32: hasher.finalize() }
    }
}

/// Compares the checksums of all files with those that they should have, from what all ranks have read.
pub(super) fn compare(
    plan: &ReadPlan,
    folder: &Path,
    mut stretches: Vec<Stretch>,
) -> Result<(), Fault> {
    stretches.sort_unstable();
    for (number, (name, record, _)) in plan.files.iter().enumerate() {
        let first = stretches.partition_point(|stretch| stretch.file < number);
        let mut whole = crc32fast::Hasher::new();
        let mut bytes = 0;
        for stretch in stretches[first..].iter().take_while(|stretch| stretch.file == number) {
            let next = crc32fast::Hasher::new_with_initial_len(stretch.crc32, stretch.bytes);
            whole.combine(&next);
            bytes += stretch.bytes;
        }
        let found = FileRecord { bytes, crc32: whole.finalize() };
        record.compare(&found, &folder.join(name))?;
    }
    Ok(())
}
