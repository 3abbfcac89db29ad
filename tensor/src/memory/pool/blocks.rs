//! Block allocation of a pool: best fit with split and coalesce, in a reserved address space much larger than memory.
//!
//! Addresses come in arenas, far larger than needed. Each arena consists of blocks in use, free ranges, and bare
//! ranges, which have no memory because it was never touched or was returned. Reserved memory is everything but the
//! bare ranges. It may exceed the peak in use by at most [`slack`]. If the free ranges are too fragmented for a
//! request, as much memory of the largest one is returned to the system as is committed elsewhere. Tensors whose
//! sizes vary between steps therefore do not make a process grow.
//!
//! Freed blocks up to 1 MiB wait in bins by size without coalescing: the next training step requests the same sizes.

use std::collections::{BTreeMap, BTreeSet};

use super::arena::{Arena, Backing, HUGE_PAGE, PAGE};
use crate::{Error, Result};

/// Alignment of every block: a cache line and an AVX-512 register.
const ALIGNMENT: usize = 64;
/// Freed blocks up to this size wait in bins; larger ones are rounded up to pages.
const LARGEST_BIN: usize = 1 << 20;
/// Addresses per arena, unless a request needs more.
const ARENA: usize = 64 << 30;

/// Bound on reserved memory beyond the peak in use: 3 % of much, nearly 5 % of little, and at least one MiB. Less would cause
/// repeated returns and requests, of few large blocks in a small pool.
fn slack(most: usize) -> usize {
    (most / 21).clamp(1 << 20, 4 << 20).max(most / 32)
}

/// Expected time in use of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lifetime {
    /// At most until backward has passed, as activations.
    Short,
    /// Longer.
    Long,
}

/// A range of addresses.
#[derive(Debug, Clone, Copy)]
pub(super) struct MemoryBlock {
    arena: usize,
    offset: usize,
    size: usize,
}

/// Disjoint ranges that are not adjacent, indexed by address and by size.
#[derive(Default)]
struct Ranges {
    by_size: BTreeSet<(usize, usize, usize)>,
    by_place: BTreeMap<(usize, usize), usize>,
}

impl Ranges {
    /// Adds a range and coalesces it with its neighbours.
    fn insert(&mut self, block: MemoryBlock) {
        let MemoryBlock { arena, mut offset, mut size } = block;
        if size == 0 {
            return;
        }
        if let Some(&after) = self.by_place.get(&(arena, offset + size)) {
            self.remove(MemoryBlock { arena, offset: offset + size, size: after });
            size += after;
        }
        let before = self.by_place.range((arena, 0)..(arena, offset)).next_back();
        if let Some((&(_, start), &length)) = before
            && start + length == offset
        {
            self.remove(MemoryBlock { arena, offset: start, size: length });
            (offset, size) = (start, size + length);
        }
        self.by_size.insert((size, arena, offset));
        self.by_place.insert((arena, offset), size);
    }

    fn remove(&mut self, block: MemoryBlock) {
        self.by_size.remove(&(block.size, block.arena, block.offset));
        self.by_place.remove(&(block.arena, block.offset));
    }

    /// Splits `size` bytes off the beginning of the smallest sufficient range.
    fn take(&mut self, size: usize) -> Option<MemoryBlock> {
        let &(whole, arena, offset) = self.by_size.range((size, 0, 0)..).next()?;
        self.remove(MemoryBlock { arena, offset, size: whole });
        self.insert(MemoryBlock { arena, offset: offset + size, size: whole - size });
        Some(MemoryBlock { arena, offset, size })
    }

    /// Splits `size` bytes off the end of the last sufficient range.
    fn take_last(&mut self, size: usize) -> Option<MemoryBlock> {
        let sufficient = |&(_, &whole): &(&(usize, usize), &usize)| whole >= size;
        let (&(arena, offset), &whole) = self.by_place.iter().rev().find(sufficient)?;
        self.remove(MemoryBlock { arena, offset, size: whole });
        self.insert(MemoryBlock { arena, offset, size: whole - size });
        Some(MemoryBlock { arena, offset: offset + whole - size, size })
    }

    fn largest(&self) -> Option<MemoryBlock> {
        self.by_size.last().map(|&(size, arena, offset)| MemoryBlock { arena, offset, size })
    }
}

/// The blocks of a pool.
pub(super) struct BlockAllocator {
    backing: Backing,
    arenas: Vec<Arena>,
    /// Freed small blocks, by size.
    bins: BTreeMap<usize, Vec<MemoryBlock>>,
    /// Ranges with memory.
    free: Ranges,
    /// Ranges without memory.
    bare: Ranges,
    /// Bytes of blocks in use, and their peak.
    live: usize,
    peak: usize,
    reserved: usize,
    /// Bytes returned to the system since the last reset.
    pub(super) returned: usize,
}

impl BlockAllocator {
    pub(super) fn new(backing: Backing) -> BlockAllocator {
        BlockAllocator {
            backing,
            arenas: Vec::new(),
            bins: BTreeMap::new(),
            free: Ranges::default(),
            bare: Ranges::default(),
            live: 0,
            peak: 0,
            reserved: 0,
            returned: 0,
        }
    }

    pub(super) fn backing(&self) -> &Backing {
        &self.backing
    }

    /// Bytes held from the system: in use or free.
    pub(super) fn reserved(&self) -> usize {
        self.reserved
    }

    pub(super) fn pointer(&self, block: MemoryBlock) -> *mut u8 {
        self.arenas[block.arena].base().wrapping_add(block.offset)
    }

    /// Allocates at least `bytes` bytes; memory from the system is zero. Blocks that are to be in use for longer are taken
    /// from the last free range, so that they do not divide those of the others.
    pub(super) fn take(&mut self, bytes: usize, lifetime: Lifetime) -> Result<MemoryBlock> {
        // The maximum size of a slice; below it, rounding up cannot overflow.
        if bytes > isize::MAX as usize {
            return Err(Error::memory("pool", format!("{bytes} bytes exceed any memory")));
        }
        let size = rounded(bytes);
        let take = |free: &mut Ranges| match lifetime {
            Lifetime::Long if size > LARGEST_BIN => free.take_last(size),
            _ => free.take(size),
        };
        let binned = self.bins.get_mut(&size).and_then(Vec::pop);
        let block = match binned.or_else(|| take(&mut self.free)) {
            Some(block) => block,
            None => {
                self.empty_bins();
                match take(&mut self.free) {
                    Some(block) => block,
                    None => self.grow(size)?,
                }
            }
        };
        self.live += size;
        self.peak = self.peak.max(self.live);
        Ok(block)
    }

    fn empty_bins(&mut self) {
        for block in std::mem::take(&mut self.bins).into_values().flatten() {
            self.free.insert(block);
        }
    }

    pub(super) fn give_back(&mut self, block: MemoryBlock) {
        self.live -= block.size;
        match block.size <= LARGEST_BIN {
            true => self.bins.entry(block.size).or_default().push(block),
            false => self.free.insert(block),
        }
    }

    /// Starts reading `len` bytes of a block from `offset` on, if they are in a file.
    pub(super) fn prefetch(&self, block: MemoryBlock, offset: usize, len: usize) {
        let MemoryBlock { arena, offset: start, size } = block;
        if matches!(self.backing, Backing::Files(_)) && offset < size {
            self.arenas[arena].prefetch(start + offset, len.min(size - offset));
        }
    }

    /// Allocates `size` bytes from the system.
    fn grow(&mut self, size: usize) -> Result<MemoryBlock> {
        if self.backing.is_whole() {
            // Few arenas for large totals, and not much more than requested.
            let bytes = size.max(self.reserved / 8).next_multiple_of(HUGE_PAGE);
            self.arenas.push(self.backing.arena(bytes).map_err(|why| self.refused(bytes, &why))?);
            self.reserved += bytes;
            self.free.insert(MemoryBlock { arena: self.arenas.len() - 1, offset: 0, size: bytes });
            return Ok(self.free.take(size).expect("the new arena has room for the request"));
        }
        let most = self.peak.max(self.live + size);
        let grown = size.next_multiple_of(self.backing.grain(most));
        let allowed = most + slack(most);
        while let Some(excess) = (self.reserved + grown).checked_sub(allowed).filter(|&n| n > 0) {
            if !self.shrink(excess) {
                break;
            }
        }
        let block = match self.bare.take(grown) {
            Some(block) => block,
            None => {
                self.add_arena(grown)?;
                self.bare.take(grown).expect("the new arena has room for the request")
            }
        };
        if !matches!(self.backing, Backing::Addresses)
            && let Err(why) = self.arenas[block.arena].commit(block.offset, grown)
        {
            self.bare.insert(block);
            return Err(self.refused(grown, &why));
        }
        self.reserved += grown;
        self.free.insert(block);
        Ok(self.free.take(size).expect("what has grown has room for the request"))
    }

    /// Returns up to `excess` bytes of the largest free range to the system; false if there is nothing to return.
    fn shrink(&mut self, excess: usize) -> bool {
        self.free.largest().is_some_and(|block| self.release(block, excess))
    }

    /// Returns all free memory that the system accepts.
    pub(super) fn trim(&mut self) {
        self.empty_bins();
        let free = self.free.by_place.iter();
        let free: Vec<MemoryBlock> =
            free.map(|(&(arena, offset), &size)| MemoryBlock { arena, offset, size }).collect();
        for block in free {
            self.release(block, block.size);
        }
    }

    /// Returns up to `excess` bytes of a free range to the system; false if nothing was returned.
    fn release(&mut self, block: MemoryBlock, excess: usize) -> bool {
        let MemoryBlock { arena, offset, size } = block;
        let page = self.backing.page();
        let end = (offset + size) / page * page;
        let start =
            end.saturating_sub(excess.next_multiple_of(page)).max(offset.next_multiple_of(page));
        if start >= end {
            return false;
        }
        if self.backing.keeps() || !self.arenas[arena].release(start, end - start) {
            return false;
        }
        let range =
            |start: usize, end: usize| MemoryBlock { arena, offset: start, size: end - start };
        self.free.remove(block);
        self.free.insert(range(offset, start));
        self.free.insert(range(end, offset + size));
        self.bare.insert(range(start, end));
        self.reserved -= end - start;
        self.returned += end - start;
        true
    }

    /// Reserves an arena for at least `bytes`.
    fn add_arena(&mut self, bytes: usize) -> Result<()> {
        let needed = bytes.next_multiple_of(HUGE_PAGE) + HUGE_PAGE;
        let mut len = needed.max(ARENA);
        let arena = loop {
            match self.backing.arena(len) {
                Ok(arena) => break arena,
                Err(_) if len > needed => len = needed.max(len / 2),
                Err(why) => return Err(self.refused(bytes, &why)),
            }
        };
        let offset = arena.base().align_offset(HUGE_PAGE);
        let size = (len - offset) / HUGE_PAGE * HUGE_PAGE;
        self.bare.insert(MemoryBlock { arena: self.arenas.len(), offset, size });
        self.arenas.push(arena);
        Ok(())
    }

    fn refused(&self, bytes: usize, why: &str) -> Error {
        if let Backing::Files(_) = self.backing {
            return Error::io("offload", why);
        }
        let reserved = self.reserved;
        let message = format!("the system refuses {bytes} bytes beside {reserved} in use: {why}");
        Error::memory("pool", message)
    }
}

/// Rounds small sizes up to cache lines, large ones to pages.
fn rounded(bytes: usize) -> usize {
    bytes.max(1).next_multiple_of(if bytes > LARGEST_BIN { PAGE } else { ALIGNMENT })
}

#[cfg(test)]
mod tests;
