//! A ring of pieces in memory that two processes map: the layout, and the few operations on it.
//!
//! ```text
//!  0     token      says that this is the ring that was offered
//!  64    written    pieces put in so far            (the writer's)
//!  128   read       pieces taken out so far         (the reader's)
//!  192   waiting    whether the reader sleeps
//!  256   full       whether the writer sleeps
//!  320   revoked    whether memory that was lent may be read no more
//!  384   ...        for each slot a line: length, address in the writer or 0
//!  4096  ...        for each slot the bytes of a piece
//! ```
//!
//! Slot i holds the pieces i, i + SLOTS, ... A slot belongs to the writer until `written` passes it and to
//! the reader until `read` does.

use memmap2::{MmapOptions, MmapRaw};
use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::collective::host::transport::piece::{PIECE, SLOTS};

const LINE: usize = 64;
const DESCRIPTORS: usize = 6 * LINE;
const DATA: usize = 4096;
const BYTES: usize = DATA + SLOTS * PIECE;
const _: () = assert!(DESCRIPTORS + SLOTS * LINE <= DATA);

/// The word of a side that does not sleep.
pub const AWAKE: u32 = 0;
/// The word of a side whose thread waits for the connection.
pub const SLEEPS_AT_SOCKET: u32 = 1;
/// The word of a side whose thread waits for the word itself to change.
pub const SLEEPS_AT_WORD: u32 = 2;

/// Sleeps for at most `limit` while the word is [`SLEEPS_AT_WORD`]. May return early.
pub fn sleep_at(word: &AtomicU32, limit: Duration) {
    let limit = libc::timespec { tv_sec: 0, tv_nsec: limit.subsec_nanos().into() };
    // SAFETY: FUTEX_WAIT reads the word, which outlives the call, and the time. A word that has changed, a signal and the
    // end of the time are told as errors, and all mean to look again.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT,
            SLEEPS_AT_WORD,
            &raw const limit,
        );
    }
}

/// Wakes the thread that sleeps at the word, in whatever process.
pub fn wake_at(word: &AtomicU32) {
    // SAFETY: FUTEX_WAKE does not access memory.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, 1);
    }
}

/// One direction's memory.
pub struct Ring(MmapRaw);

/// A piece as its slot describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptor {
    /// Bytes.
    pub len: u64,
    /// Address of the bytes in the writer's memory, or 0 if they are in the slot.
    pub address: u64,
}

impl Ring {
    /// A new ring and the nameless file behind it, which is gone when no process has it open or mapped.
    pub fn create(token: u64) -> Result<(Ring, File)> {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = File::from(rustix::fs::memfd_create("ferrotron-ring", flags)?);
        file.set_len(BYTES as u64)?;
        let ring = Ring(MmapOptions::new().len(BYTES).map_raw(&file)?);
        ring.word(0).store(token, Ordering::Release);
        Ok((ring, file))
    }

    /// The ring in a file that another process offers.
    pub fn open(file: &File, token: u64) -> Result<Ring> {
        if file.metadata()?.len() != BYTES as u64 {
            return Err(Error::new(ErrorKind::InvalidData, "the file is no ring"));
        }
        let ring = Ring(MmapOptions::new().len(BYTES).map_raw(file)?);
        if ring.word(0).load(Ordering::Acquire) != token {
            return Err(Error::new(ErrorKind::InvalidData, "the ring is another one"));
        }
        Ok(ring)
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset.is_multiple_of(8) && offset < DATA);
        // SAFETY: inside the mapping, which is page-aligned and lives as long as `self`; all accesses of
        // either process to these words are atomic.
        unsafe { AtomicU64::from_ptr(self.0.as_mut_ptr().add(offset).cast()) }
    }

    fn flag(&self, line: usize) -> &AtomicU32 {
        // SAFETY: as in `word`.
        unsafe { AtomicU32::from_ptr(self.0.as_mut_ptr().add(line * LINE).cast()) }
    }

    /// Pieces put in so far.
    pub fn written(&self) -> &AtomicU64 {
        self.word(LINE)
    }

    /// Pieces taken out so far.
    pub fn read(&self) -> &AtomicU64 {
        self.word(2 * LINE)
    }

    /// Set while the reader sleeps.
    pub fn reader_sleeps(&self) -> &AtomicU32 {
        self.flag(3)
    }

    /// Set while the writer sleeps.
    pub fn writer_sleeps(&self) -> &AtomicU32 {
        self.flag(4)
    }

    /// Set when memory that was lent may be read no more.
    pub fn revoked(&self) -> &AtomicU32 {
        self.flag(5)
    }

    /// Describes piece `number`. Only its owner may.
    pub fn describe(&self, number: u64, descriptor: Descriptor) {
        let line = DESCRIPTORS + (number as usize % SLOTS) * LINE;
        self.word(line).store(descriptor.len, Ordering::Relaxed);
        self.word(line + 8).store(descriptor.address, Ordering::Relaxed);
    }

    /// The description of piece `number`.
    pub fn descriptor(&self, number: u64) -> Descriptor {
        let line = DESCRIPTORS + (number as usize % SLOTS) * LINE;
        let load = |offset| self.word(line + offset).load(Ordering::Relaxed);
        Descriptor { len: load(0), address: load(8) }
    }

    /// The bytes of piece `number`'s slot.
    ///
    /// # Safety
    ///
    /// The caller must own the slot, as its writer or as its reader, until it passes it on; and must not
    /// write it as its reader.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slot(&self, number: u64) -> &mut [u8] {
        let offset = DATA + (number as usize % SLOTS) * PIECE;
        // SAFETY: inside the mapping; no other thread or process touches the slot while the caller owns it.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().add(offset), PIECE) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_is_recognised_by_its_token_and_length() {
        let (ring, file) = Ring::create(77).unwrap();
        assert!(Ring::open(&file, 78).is_err());
        let other = Ring::open(&file, 77).unwrap();
        ring.describe(9, Descriptor { len: 5, address: 6 });
        assert_eq!(other.descriptor(9), Descriptor { len: 5, address: 6 });
        // SAFETY: no other thread or process touches it.
        unsafe {
            ring.slot(9)[3] = 44;
            assert_eq!(other.slot(9)[3], 44);
        }
        file.set_len(100).unwrap();
        assert!(Ring::open(&file, 77).is_err());
    }
}
