//! The compute threads of a device: helpers that share the loops of a calling thread.
//!
//! A step of a small model has some 150 loops of 20 to 500 microseconds, and waking a thread takes 20 to 40. So a helper
//! watches for the next loop for [`LINGER`] before it sleeps, as OpenMP's threads do for `GOMP_SPINCOUNT`. It yields its
//! processor meanwhile, since other ranks may need it.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, LazyLock, Mutex, OnceLock, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use crate::{Error, Result};

/// An upper bound on threads, above any machine's core count: systems fail unrecoverably at much larger numbers.
const MOST_THREADS: usize = 4096;

/// The time for which a helper watches for the next loop before it sleeps.
const LINGER: Duration = Duration::from_micros(200);

/// Looks for a change between two yields of the processor: about a microsecond.
const LOOKS: u32 = 32;

/// Threads that share the loops of any thread that calls: it takes part, and the others are the team's own.
///
/// While the team shares one thread's loop, those of other threads run on their callers alone, and so do loops within
/// loops.
///
/// ```
/// use ferrotron_tensor::ThreadTeam;
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// let team = ThreadTeam::new(2)?;
/// let sum = AtomicUsize::new(0);
/// team.for_each(100, &|i| {
///     sum.fetch_add(i, Ordering::Relaxed);
/// });
/// assert_eq!((team.threads(), sum.into_inner()), (2, 4950));
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub struct ThreadTeam {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
}

/// The state that all threads of a team see.
#[derive(Default)]
struct Shared {
    /// The [`Ticket`] of the latest loop; [`STOP`] ends the helpers.
    latest: AtomicU64,
    /// The loop that helpers may join, while there is one.
    open: AtomicPtr<Loop<'static>>,
    /// Helpers that may be reading the open loop.
    inside: AtomicUsize,
    /// Whether the team shares a loop.
    busy: AtomicBool,
    /// The helpers, to wake them.
    helpers: OnceLock<Vec<Thread>>,
}

/// The number of a loop, which is larger than those before, and in the last bits the threads that it wants.
type Ticket = u64;

const STOP: Ticket = Ticket::MAX;
const THREADS_BITS: u32 = MOST_THREADS.ilog2() + 1;

/// A loop that threads share, on the stack of its caller.
struct Loop<'a> {
    ticket: Ticket,
    body: &'a (dyn Fn(usize) + Sync),
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl ThreadTeam {
    /// Starts a team of so many threads, one of which is whichever calls.
    ///
    /// Errors if the number is not from 1 to 4096, or if the system starts no more threads.
    pub fn new(threads: usize) -> Result<ThreadTeam> {
        checked(threads)?;
        let mut team = ThreadTeam { shared: Arc::default(), helpers: Vec::new() };
        for index in 1..threads {
            let shared = team.shared.clone();
            let builder = thread::Builder::new().name(format!("ferrotron-{index}"));
            let helper = builder.spawn(move || shared.help(index)).map_err(|error| {
                Error::memory("device", format!("cannot start {threads} threads: {error}"))
            })?;
            team.helpers.push(helper);
        }
        let helpers = team.helpers.iter().map(|helper| helper.thread().clone());
        team.shared.helpers.get_or_init(|| helpers.collect());
        Ok(team)
    }

    /// The calling thread alone.
    pub fn alone() -> &'static ThreadTeam {
        static ALONE: LazyLock<ThreadTeam> =
            LazyLock::new(|| ThreadTeam { shared: Arc::default(), helpers: Vec::new() });
        &ALONE
    }

    /// Number of threads, the caller included.
    pub fn threads(&self) -> usize {
        1 + self.helpers.len()
    }

    /// Calls `f(task)` for every task below `tasks`. Each thread begins with a run of tasks of its own.
    pub fn for_each(&self, tasks: usize, f: &(dyn Fn(usize) + Sync)) {
        let threads = self.threads().min(tasks);
        if threads <= 1 {
            return (0..tasks).for_each(f);
        }
        let parts = Parts::new(threads);
        self.share(threads, &|thread| {
            // Few turns, and no long last one.
            let eighth = |left: usize| left.div_ceil(8);
            while let Some(tasks) = parts.take(&(0..tasks), thread, eighth) {
                tasks.for_each(f);
            }
        });
    }

    /// Calls `f` once on each thread, with the thread's number, all at the same time. Not within a loop.
    pub(crate) fn on_each_thread(&self, f: &(dyn Fn(usize) + Sync)) {
        while self.shared.busy.swap(true, Ordering::Acquire) {
            thread::yield_now();
        }
        let all = Barrier::new(self.threads());
        self.open(self.threads(), &|thread| {
            all.wait();
            f(thread);
        });
    }

    /// Calls `body(thread)` on the calling thread, as number 0, and on others that come before it is done. Each of them has
    /// another number below `threads`. One call has to do all that is left to do.
    pub(crate) fn share(&self, threads: usize, body: &(dyn Fn(usize) + Sync)) {
        let threads = threads.min(self.threads());
        if threads <= 1 || self.shared.busy.swap(true, Ordering::Acquire) {
            body(0);
        } else {
            self.open(threads, body);
        }
    }

    /// Shares a loop, the caller having set `busy`.
    fn open(&self, threads: usize, body: &(dyn Fn(usize) + Sync)) {
        let before = self.shared.latest.load(Ordering::Relaxed) >> THREADS_BITS;
        let ticket = (before + 1) << THREADS_BITS | threads as Ticket;
        let shared = Loop { ticket, body, panic: Mutex::default() };
        // Dropped before the loop, also by a panic.
        let closing = Closing(&self.shared);
        self.shared.open.store((&raw const shared).cast_mut().cast(), Ordering::SeqCst);
        self.shared.latest.store(ticket, Ordering::SeqCst);
        self.shared.wake(1..2.min(threads));
        body(0);
        drop(closing);
        let panic = shared.panic.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

/// Closes the open loop when dropped, and waits for the helpers that have joined it.
struct Closing<'a>(&'a Shared);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        let Closing(shared) = self;
        shared.open.store(null_mut(), Ordering::SeqCst);
        let mut looks = 0_u32;
        while shared.inside.load(Ordering::SeqCst) != 0 {
            look_again(&mut looks);
        }
        shared.busy.store(false, Ordering::Release);
    }
}

impl Shared {
    /// Joins loops as thread number `index` until the team ends.
    fn help(&self, index: usize) {
        let (mut seen, mut idle_since) = (0, Instant::now());
        loop {
            seen = self.later_than(seen, idle_since);
            if seen == STOP {
                return;
            }
            if index >= wanted(seen) {
                continue;
            }
            self.inside.fetch_add(1, Ordering::SeqCst);
            // SAFETY: a caller closes its loop and then waits until no helper is inside. In the one order of these
            // operations, a helper that comes inside after that finds it closed, or a later loop, whose caller waits
            // for this helper.
            if let Some(shared) = unsafe { self.open.load(Ordering::SeqCst).as_ref() } {
                seen = shared.ticket; // perhaps later than before
                let threads = wanted(seen);
                if index < threads {
                    self.wake(2 * index..(2 * index + 2).min(threads));
                    let body = AssertUnwindSafe(|| (shared.body)(index));
                    if let Err(panic) = catch_unwind(body) {
                        *shared.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
                    }
                }
            }
            self.inside.fetch_sub(1, Ordering::SeqCst);
            idle_since = Instant::now();
        }
    }

    /// Waits for a loop after `seen`, asleep once [`LINGER`] is over.
    fn later_than(&self, seen: Ticket, idle_since: Instant) -> Ticket {
        let mut looks = 0_u32;
        loop {
            let latest = self.latest.load(Ordering::Acquire);
            if latest > seen {
                return latest;
            }
            if look_again(&mut looks) && idle_since.elapsed() > LINGER {
                thread::park();
            }
        }
    }

    /// Wakes helpers by their numbers, if they sleep. Each wakes two more.
    fn wake(&self, threads: Range<usize>) {
        let helpers = self.helpers.get().map(Vec::as_slice).unwrap_or_default();
        for thread in threads {
            helpers[thread - 1].unpark();
        }
    }
}

/// The threads that a loop wants.
fn wanted(ticket: Ticket) -> usize {
    (ticket & ((1 << THREADS_BITS) - 1)) as usize
}

/// Lets some time pass before the next look at what another thread changes. Yields the processor once in a while, for
/// that thread may need it, and says so.
pub(crate) fn look_again(looks: &mut u32) -> bool {
    *looks = looks.wrapping_add(1);
    let yields = looks.is_multiple_of(LOOKS);
    if yields {
        thread::yield_now();
    } else {
        std::hint::spin_loop();
    }
    yields
}

impl Drop for ThreadTeam {
    fn drop(&mut self) {
        self.shared.latest.store(STOP, Ordering::Release);
        for helper in self.helpers.drain(..) {
            helper.thread().unpark();
            // Loops catch panics.
            let _ = helper.join();
        }
    }
}

/// Tasks that threads hand out to themselves: each those of its own part, then what others have left.
pub(crate) struct Parts {
    /// The next task of each part.
    next: Vec<OwnLine>,
}

/// A counter on a cache line of its own.
#[repr(align(64))]
struct OwnLine(AtomicUsize);

impl Parts {
    pub(crate) fn new(parts: usize) -> Parts {
        Parts { next: (0..parts).map(|_| OwnLine(AtomicUsize::new(0))).collect() }
    }

    /// Takes some of `tasks` as thread `own`: `run(left)` of those that a part has left. Later calls may name later tasks.
    pub(crate) fn take(
        &self,
        tasks: &Range<usize>,
        own: usize,
        run: impl Fn(usize) -> usize,
    ) -> Option<Range<usize>> {
        let parts = self.next.len();
        (own..own + parts).find_map(|part| {
            let part = part % parts;
            let [first, end] =
                [part, part + 1].map(|part| tasks.start + part * tasks.len() / parts);
            // A counter that stands before the part still counts earlier tasks.
            let taken = |next: usize| {
                let start = next.max(first);
                (start < end).then(|| start..start + run(end - start))
            };
            let next = |next| taken(next).map(|taken| taken.end);
            let before = self.next[part].0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
            before.ok().and_then(taken)
        })
    }
}

/// Errors for numbers of threads that no machine has.
pub(crate) fn checked(threads: usize) -> Result<usize> {
    match threads {
        1..=MOST_THREADS => Ok(threads),
        _ => {
            let message = format!("needs 1 to {MOST_THREADS} threads, got {threads}");
            Err(Error::config("device", message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn each_task_is_done_once_by_teams_that_watch_and_that_sleep() {
        for threads in [1, 2, 3, 8] {
            let team = ThreadTeam::new(threads).unwrap();
            for (round, tasks) in [0, 1, 2, 7, 100, 1000].into_iter().cycle().take(60).enumerate() {
                let done: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                team.for_each(tasks, &|task| {
                    done[task].fetch_add(1, Ordering::Relaxed);
                });
                let once = |done: &AtomicUsize| done.load(Ordering::Relaxed) == 1;
                assert!(done.iter().all(once), "{threads} threads, {tasks} tasks");
                if round % 6 == 0 {
                    thread::sleep(2 * LINGER);
                }
            }
        }
    }

    #[test]
    fn all_threads_take_part_at_the_same_time() {
        let team = ThreadTeam::new(5).unwrap();
        for round in 0..100 {
            let all = Barrier::new(5);
            let who = Mutex::new(HashSet::new());
            team.on_each_thread(&|thread| {
                all.wait();
                assert!(who.lock().unwrap().insert((thread, thread::current().id())));
            });
            assert_eq!(who.into_inner().unwrap().len(), 5);
            if round % 10 == 0 {
                thread::sleep(2 * LINGER);
            }
        }
    }

    #[test]
    fn loops_within_loops_and_of_other_callers_are_done() {
        let team = ThreadTeam::new(3).unwrap();
        let sum = AtomicUsize::new(0);
        let nested = || {
            for _ in 0..200 {
                team.for_each(5, &|i| {
                    team.for_each(7, &|j| {
                        sum.fetch_add(i * j, Ordering::Relaxed);
                    });
                });
            }
        };
        thread::scope(|scope| (0..3).for_each(|_| drop(scope.spawn(nested))));
        assert_eq!(sum.into_inner(), 3 * 200 * 10 * 21);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_leaves_the_team_working() {
        let team = ThreadTeam::new(3).unwrap();
        for bad in 0..30 {
            let run = || team.for_each(30, &|task| assert_ne!(task, bad, "on purpose"));
            assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
        }
        let count = AtomicUsize::new(0);
        team.for_each(30, &|_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.into_inner(), 30);
    }
}
