//! Hands out the work of a product: a list that the threads take from until nothing is left.
//!
//! The list alternates between packing a cache block's panels and computing its tiles. Threads draw
//! numbers from one counter; before its first work of a new phase a thread waits until all work of
//! the phases before is done. Only work that some thread is in the midst of is ever waited for, so
//! nothing can hang, and one thread alone finishes everything if the others are busy elsewhere. After a panic the
//! other threads do not begin another piece.
//!
//! A number that is drawn entitles its thread to one piece. Each thread begins with the pieces of its own part, the same in
//! every product of the same size. A line of the cache that another core has read or written is three times as slow to
//! write. Pieces that follow one another also share lanes, which the thread's caches keep.

use super::stream::FEW;
use crate::ThreadTeam;
use crate::thread_team::{Parts, look_again};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Operations below which another thread is not worth waking.
const OPERATIONS_PER_THREAD: usize = 2 << 20;

/// Elements of an operand that are used a few times each below which another thread is not worth waking: memory gives them
/// to one thread in some 100 microseconds.
const READ_PER_THREAD: usize = 256 << 10;

/// The threads that a product of (rows, k) by (k, columns) is worth, at most `threads`.
pub(super) fn useful_threads(threads: usize, [rows, k, columns]: [usize; 3]) -> usize {
    let operations = rows.saturating_mul(columns).saturating_mul(2 * k);
    let read = if rows.min(columns) <= FEW { rows.max(columns).saturating_mul(k) } else { 0 };
    threads.clamp(1, 1 + (operations / OPERATIONS_PER_THREAD).max(read / READ_PER_THREAD))
}

/// A product that is cut into cache blocks, each packed and then computed piece by piece.
pub(super) trait Work: Sync {
    /// Number of cache blocks along rows, columns and k.
    fn cache_blocks(&self) -> [usize; 3];
    /// Number of pieces into which a block's packing is cut.
    fn packing_pieces(&self, block: CacheBlock) -> usize;
    /// Number of pieces into which a block's computation is cut.
    fn computing_pieces(&self, block: CacheBlock) -> usize;
    /// Packs piece `number` of a block.
    ///
    /// # Safety
    /// The blocks before are done, and no other thread does this piece.
    unsafe fn pack(&self, block: CacheBlock, number: usize);
    /// Computes piece `number` of a block as thread `thread`.
    ///
    /// # Safety
    /// The block is packed, the blocks before are done, and no other thread does this piece. `thread` is below the number of
    /// threads, and no other thread has this number.
    unsafe fn compute(&self, block: CacheBlock, number: usize, thread: usize);
    /// Prepares a thread before its first piece.
    fn enter(&self) {}
    /// Undoes [`Work::enter`] after the thread's last piece.
    fn leave(&self) {}
}

/// A cache block: its numbers along rows, columns and k.
#[derive(Clone, Copy)]
pub(super) struct CacheBlock {
    pub index: [usize; 3],
    /// Whether rows and columns differ from those of the block before.
    pub fresh: [bool; 2],
}

/// Packing or computing one cache block.
#[derive(Clone, Copy)]
struct Phase {
    block: CacheBlock,
    packing: bool,
    /// Number of its first piece in the list, and how many there are.
    start: usize,
    len: usize,
}

/// The state of a list that threads work on.
struct List<'a, W> {
    work: &'a W,
    /// Pieces handed out.
    drawn: AtomicUsize,
    /// Pieces finished.
    done: AtomicUsize,
    /// Whether a piece panicked, so that its phase never ends.
    abandoned: AtomicBool,
    /// The parts of the threads, if they are several.
    parts: Option<Parts>,
}

/// Does all work with up to `threads` threads of a team.
///
/// # Safety
/// Pieces of one phase may be done at the same time.
pub(super) unsafe fn run<W: Work>(team: &ThreadTeam, threads: usize, work: &W) {
    let [drawn, done] = [const { AtomicUsize::new(0) }; 2];
    let parts = (threads > 1).then(|| Parts::new(threads));
    let list = List { work, drawn, done, abandoned: AtomicBool::new(false), parts };
    team.share(threads, &|thread| list.draw(thread));
}

/// A thread's work on a list. It is undone and told to the others also if it ends by a panic.
struct Visit<'a, W: Work> {
    list: &'a List<'a, W>,
    /// Whether [`Work::enter`] was called.
    entered: bool,
    /// Whether it ended as it should.
    ended: bool,
}

impl<W: Work> Drop for Visit<'_, W> {
    fn drop(&mut self) {
        if self.entered {
            self.list.work.leave();
        }
        if !self.ended {
            self.list.abandoned.store(true, Ordering::Release);
        }
    }
}

impl<W: Work> List<'_, W> {
    /// Draws and does pieces until none is left.
    fn draw(&self, thread: usize) {
        let mut phase = self.phase(CacheBlock { index: [0; 3], fresh: [true; 2] }, true, 0);
        let mut visit = Visit { list: self, entered: false, ended: false };
        'pieces: loop {
            let number = self.drawn.fetch_add(1, Ordering::Relaxed);
            while number >= phase.start + phase.len {
                match self.next(phase) {
                    Some(next) => phase = next,
                    None => break 'pieces,
                }
            }
            if !self.reaches(phase) {
                break;
            }
            if !std::mem::replace(&mut visit.entered, true) {
                self.work.enter();
            }
            let piece = match &self.parts {
                Some(parts) => {
                    let pieces = phase.start..phase.start + phase.len;
                    let own = parts.take(&pieces, thread, |_| 1);
                    own.expect("as many numbers are drawn as there are pieces").start
                }
                None => number,
            } - phase.start;
            // SAFETY: each number is drawn once, the parts give each piece once, the phases before are done, and the threads
            // of a team have numbers of their own.
            unsafe {
                match phase.packing {
                    true => self.work.pack(phase.block, piece),
                    false => self.work.compute(phase.block, piece, thread),
                }
            }
            self.done.fetch_add(1, Ordering::Release);
        }
        visit.ended = true;
    }

    /// Waits until the phases before are done; false if the list is abandoned.
    fn reaches(&self, phase: Phase) -> bool {
        let mut looks = 0_u32;
        loop {
            if self.abandoned.load(Ordering::Acquire) {
                return false;
            }
            if self.done.load(Ordering::Acquire) >= phase.start {
                return true;
            }
            look_again(&mut looks);
        }
    }

    fn phase(&self, block: CacheBlock, packing: bool, start: usize) -> Phase {
        let len = match packing {
            true => self.work.packing_pieces(block),
            false => self.work.computing_pieces(block),
        };
        Phase { block, packing, start, len }
    }

    fn next(&self, phase: Phase) -> Option<Phase> {
        let start = phase.start + phase.len;
        if phase.packing {
            return Some(self.phase(phase.block, false, start));
        }
        // Along k first, so that a tile is finished soon; along columns last.
        let old = phase.block.index;
        let mut index = old;
        for axis in [2, 0, 1] {
            index[axis] += 1;
            if index[axis] < self.work.cache_blocks()[axis] {
                let along_k = index[2] != old[2];
                let fresh = [along_k || index[0] != old[0], along_k || index[1] != old[1]];
                return Some(self.phase(CacheBlock { index, fresh }, true, start));
            }
            index[axis] = 0;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Barrier;

    /// Counts how often each piece of each cache block is done.
    struct Counts {
        pieces: [usize; 2],
        done: [Vec<AtomicUsize>; 2],
    }

    impl Counts {
        fn count(&self, computing: usize, block: CacheBlock, number: usize) {
            let [.., k] = block.index;
            let at = k * self.pieces[computing] + number;
            assert!(number < self.pieces[computing], "piece {number} of {:?}", self.pieces);
            self.done[computing][at].fetch_add(1, Ordering::Relaxed);
        }
    }

    impl Work for Counts {
        fn cache_blocks(&self) -> [usize; 3] {
            [1, 1, 5]
        }
        fn packing_pieces(&self, _: CacheBlock) -> usize {
            self.pieces[0]
        }
        fn computing_pieces(&self, _: CacheBlock) -> usize {
            self.pieces[1]
        }
        unsafe fn pack(&self, block: CacheBlock, number: usize) {
            self.count(0, block, number);
        }
        unsafe fn compute(&self, block: CacheBlock, number: usize, _: usize) {
            self.count(1, block, number);
        }
    }

    /// Two pieces in each of five blocks. Two threads do one of the first block's each, and one of them panics.
    struct Panics {
        helper: bool,
        first: Barrier,
        /// Threads that have entered and not left.
        inside: AtomicUsize,
    }

    impl Work for Panics {
        fn cache_blocks(&self) -> [usize; 3] {
            [1, 1, 5]
        }
        fn packing_pieces(&self, _: CacheBlock) -> usize {
            0
        }
        fn computing_pieces(&self, _: CacheBlock) -> usize {
            2
        }
        unsafe fn pack(&self, _: CacheBlock, _: usize) {}
        unsafe fn compute(&self, block: CacheBlock, _: usize, thread: usize) {
            if block.index == [0; 3] {
                self.first.wait();
            }
            assert_ne!(thread != 0, self.helper, "on purpose");
        }
        fn enter(&self) {
            self.inside.fetch_add(1, Ordering::Relaxed);
        }
        fn leave(&self) {
            self.inside.fetch_sub(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_panic_on_one_thread_ends_the_work_of_all() {
        let team = ThreadTeam::new(2).unwrap();
        for helper in [false, true].repeat(20) {
            let work = Panics { helper, first: Barrier::new(2), inside: 0.into() };
            // SAFETY: pieces touch nothing.
            let product = AssertUnwindSafe(|| unsafe { run(&team, 2, &work) });
            assert!(catch_unwind(product).is_err(), "the helper's: {helper}");
            assert_eq!(work.inside.into_inner(), 0, "the helper's: {helper}");
        }
    }

    #[test]
    fn threads_do_each_piece_once() {
        for threads in [1, 2, 3, 7] {
            let team = ThreadTeam::new(threads).unwrap();
            for pieces in [[0, 1], [1, 1], [2, 1], [5, 3], [40, 8]] {
                for _ in 0..20 {
                    let done = pieces.map(|pieces| (0..5 * pieces).map(|_| 0.into()).collect());
                    let counts = Counts { pieces, done };
                    // SAFETY: pieces only count.
                    unsafe { run(&team, threads, &counts) };
                    let once = |count: &AtomicUsize| count.load(Ordering::Relaxed) == 1;
                    assert!(counts.done.iter().flatten().all(once), "{threads} {pieces:?}");
                }
            }
        }
    }
}
