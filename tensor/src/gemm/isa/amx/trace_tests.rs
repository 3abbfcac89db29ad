//! The order and the addresses of a product's tile instructions, read while they are emulated: what its speed rests
//! on, checked on any machine.

use super::blocking::Blocking;
use super::emulator::{Event, trace};
use super::product;
use super::tests::{numbers, problem, trace_in_child};
use crate::gemm::Accum;
use crate::gemm::problem::{Bias, Operand, Problem, Target};
use crate::{DType, ThreadTeam, bf16};
use std::collections::{HashMap, HashSet};

/// (m, k, n): one sum block and two chunks, several sum blocks, several cache blocks along k.
const SIZES: [[usize; 3]; 3] = [[96, 768, 1536], [64, 1600, 384], [64, 4096, 128]];

fn is_operand(register: usize) -> bool {
    register >= 4
}

/// Registers 4 and 5 hold rows, which stay in L1, 6 and 7 columns, which are read from L2.
fn is_rows(register: usize) -> bool {
    matches!(register, 4 | 5)
}

/// The products of a linear layer, y = x W^T + b, dx = dy W and dW += dy^T x, by where operands and results lie.
#[derive(Debug, Clone, Copy)]
enum Kind {
    /// Rows of steps into f32.
    Plain,
    /// y: a bias is added, and the sum is rounded to bf16.
    Rounded,
    /// dx: the columns of the weight lie together.
    Turned,
    /// dW: lanes of both operands lie together, and the sum is added.
    OverRows,
}

/// The cuts of a product for one thread.
fn cuts([m, k, n]: [usize; 3]) -> Blocking {
    Blocking::new([m, n, k], 1)
}

/// The instructions of this thread in a product of so many.
fn traced(kind: Kind, size: [usize; 3], blocking: Blocking, threads: usize) -> Vec<Event> {
    let [m, k, n] = size;
    let (lhs, rhs) = (numbers(m * k, 1), numbers(n * k, 2));
    let (mut sums, mut rounded) = (vec![0.0_f32; m * n], vec![bf16::ZERO; m * n]);
    let bias: Vec<bf16> = numbers(n, 3);
    let plain = problem(&lhs, &rhs, &mut sums, size);
    let turned = |operand: Operand| Operand {
        lane_stride: 1,
        step_stride: operand.lanes as isize,
        ..operand
    };
    let problem = match kind {
        Kind::Plain => plain,
        Kind::Rounded => Problem {
            target: Target {
                data: rounded.as_mut_ptr().cast(),
                dtype: DType::BF16,
                ..plain.target
            },
            bias: Bias::Columns(bias.as_ptr().cast()),
            ..plain
        },
        Kind::Turned => Problem { rhs: turned(plain.rhs), ..plain },
        Kind::OverRows => {
            Problem { lhs: turned(plain.lhs), rhs: turned(plain.rhs), accum: Accum::Add, ..plain }
        }
    };
    let team = ThreadTeam::new(threads).unwrap();
    // SAFETY: the vectors hold the matrices; the instructions are emulated.
    trace(|| unsafe { product::run_with(blocking, &team, threads, problem, 1.0) }.unwrap())
}

#[test]
fn instructions_come_in_the_order_that_keeps_the_units_busy() {
    if !trace_in_child(
        "gemm::isa::amx::trace_tests::instructions_come_in_the_order_that_keeps_the_units_busy",
    ) {
        return;
    }
    // Each product of a layer, whole and ragged.
    let ragged = [Kind::Plain, Kind::Rounded, Kind::Turned, Kind::OverRows]
        .into_iter()
        .flat_map(|kind| [(kind, SIZES[0]), (kind, [70, 100, 90])]);
    for (kind, size) in SIZES.map(|size| (Kind::Plain, size)).into_iter().chain(ragged) {
        let ([m, _, n], blocking) = (size, cuts(size));
        let events = traced(kind, size, blocking, 1);
        let count =
            |wanted: fn(&Event) -> bool| events.iter().filter(|&event| wanted(event)).count();
        assert_eq!(
            count(|event| *event == Event::Configure),
            1,
            "{kind:?} {size:?}: configurations"
        );
        let multiplications = count(|event| matches!(event, Event::Multiply { .. }));
        let loads =
            count(|event| matches!(event, Event::Load { register, .. } if is_operand(*register)));
        assert_eq!(loads, multiplications, "{kind:?} {size:?}: operand loads");
        let (mut done, mut last_into, mut waiting) = (0, [None; 8], 0);
        for event in &events {
            match *event {
                Event::Load { stride, register, far, .. } => {
                    assert_eq!(stride, 64, "{kind:?} {size:?}: rows of a tile lie together");
                    assert_eq!(
                        far,
                        matches!(register, 6 | 7),
                        "{kind:?} {size:?}: register {register}"
                    );
                }
                Event::Store { register, stride, .. } => {
                    assert_eq!(stride, 64, "{kind:?} {size:?}: rows of a tile lie together");
                    waiting += usize::from(last_into[register].is_some_and(|last| done - last < 3));
                    last_into[register] = None;
                }
                Event::Multiply { sums } => {
                    done += 1;
                    last_into[sums] = Some(done);
                }
                _ => {}
            }
        }
        // The three of the last microtile of each piece, behind which there is nothing to do meanwhile.
        let chunks = n.div_ceil(blocking.chunk) * blocking.cache_blocks[2];
        assert_eq!(waiting, 3 * m.div_ceil(32) * chunks, "{kind:?} {size:?}: stores that wait");
    }
}

#[test]
fn each_thread_of_a_product_is_configured_once() {
    if !trace_in_child("gemm::isa::amx::trace_tests::each_thread_of_a_product_is_configured_once") {
        return;
    }
    for kind in [Kind::Rounded, Kind::Turned, Kind::OverRows] {
        let size = [256, 768, 768];
        let [m, k, n] = size;
        let events = traced(kind, size, Blocking::new([m, n, k], 2), 2);
        let configurations = events.iter().filter(|&event| *event == Event::Configure).count();
        // The other thread may have done all of it.
        assert!(configurations == 1 || events.is_empty(), "{kind:?}: {configurations}");
    }
}

#[test]
fn few_rows_load_each_tile_of_the_columns_once_and_where_it_lies() {
    if !trace_in_child(
        "gemm::isa::amx::trace_tests::few_rows_load_each_tile_of_the_columns_once_and_where_it_lies",
    ) {
        return;
    }
    // Two sum blocks; the last panel has 4 columns, which are copied.
    let [m, k, n] = [5, 1088, 100];
    let (lhs, rhs) = (numbers(m * k, 1), numbers(n * k, 2));
    let mut dst = vec![0.0_f32; m * n];
    let problem = problem(&lhs, &rhs, &mut dst, [m, k, n]);
    // SAFETY: the vectors hold the matrices; the instructions are emulated.
    let events = trace(|| unsafe { product::run(ThreadTeam::alone(), 1, problem, 1.0) }.unwrap());
    let configurations = events.iter().filter(|&event| *event == Event::Configure).count();
    assert_eq!(configurations, 1);
    let weight = rhs.as_ptr_range();
    let [start, end] = [weight.start, weight.end].map(|at| at.addr());
    let mut read = Vec::new();
    for event in &events {
        match *event {
            Event::Load { address, stride, .. } if (start..end).contains(&address) => {
                assert_eq!(stride, 2 * k as isize, "a row of the tile for each column");
                read.push((address - start) / 2);
            }
            _ => {}
        }
    }
    read.sort_unstable();
    let tiles =
        (0..96).step_by(16).flat_map(|column| (0..k).step_by(32).map(move |e| column * k + e));
    assert_eq!(read, tiles.collect::<Vec<_>>(), "first elements of the tiles that were read");
}

/// A cache of lines of 64 bytes, each set from the least to the most recently used.
struct Cache {
    sets: Vec<Vec<usize>>,
    ways: usize,
}

impl Cache {
    fn new(bytes: usize, ways: usize) -> Cache {
        Cache { sets: vec![Vec::new(); bytes / 64 / ways], ways }
    }

    /// Touches a line and says whether it was there; with `far` a new line is the first to go.
    fn touch(&mut self, line: usize, far: bool) -> bool {
        let index = line % self.sets.len();
        let set = &mut self.sets[index];
        let found = set.iter().position(|&held| held == line);
        match found {
            Some(place) => {
                set.remove(place);
            }
            None if set.len() == self.ways => {
                set.remove(0);
            }
            None => {}
        }
        if far {
            set.insert(0, line)
        } else {
            set.push(line)
        }
        found.is_some()
    }
}

#[test]
fn operands_stay_in_the_caches_that_they_are_cut_for() {
    if !trace_in_child(
        "gemm::isa::amx::trace_tests::operands_stay_in_the_caches_that_they_are_cut_for",
    ) {
        return;
    }
    // A long left operand takes the longest chunk, of 1.6 MB.
    let long = [64, 1024, 800];
    let only = Blocking { columns: 800, chunk: 800, ..cuts(long) };
    let sizes = SIZES.map(|size| (size, cuts(size)));
    for (size, blocking) in sizes.into_iter().chain([(long, only)]) {
        let events = traced(Kind::Plain, size, blocking, 1);
        let (mut l1, mut l2) = (Cache::new(48 << 10, 12), Cache::new(2 << 20, 16));
        // Misses of rows in L1 and of columns in L2, by line.
        let (mut rows, mut columns) = (HashMap::<usize, usize>::new(), HashSet::new());
        let (mut first, mut last) = (usize::MAX, 0);
        for event in events {
            let (register, address, far) = match event {
                Event::Load { register, address, far, .. } => (register, address, far),
                Event::Store { register, address, .. } => (register, address, false),
                _ => continue,
            };
            (first, last) = (first.min(address), last.max(address));
            for line in (address / 64..).take(16) {
                if l1.touch(line, far) {
                    continue;
                }
                if is_rows(register) {
                    *rows.entry(line).or_default() += 1;
                }
                let is_new = !l2.touch(line, false);
                if is_new && is_operand(register) && !is_rows(register) {
                    assert!(columns.insert(line), "{size:?}: columns left L2");
                }
            }
        }
        // The workspace begins at a huge page, so the sets of its lines are the same in each run.
        assert!(last - first < 4 << 20, "{size:?}: a tile lies outside of the workspace");
        // Each chunk reads the rows anew; panels of later cache blocks lie where the first did.
        let passes = size[2].div_ceil(blocking.chunk) * blocking.cache_blocks[2];
        let most = rows.values().max().copied().unwrap_or(0);
        assert!(
            most <= passes,
            "{size:?}: a line of rows was read {most} times in {passes} passes"
        );
    }
}

#[test]
fn cuts_fit_the_caches() {
    for m in [1, 64, 1024, 50_304] {
        for n in [1, 65, 768, 3072, 50_304] {
            for k in [1, 64, 768, 1024, 3072, 50_304] {
                for threads in [1, 2, 16] {
                    let blocking = Blocking::new([m, n, k], threads);
                    let what = format!("({m}, {k}, {n}), {threads} threads: {blocking:?}");
                    assert!(blocking.k_block * 2048 <= 32 << 10, "{what}");
                    let bytes = 2 * blocking.chunk * blocking.depth.next_multiple_of(32);
                    let most = if m == 50_304 { 1600 << 10 } else { 1200 << 10 };
                    assert!(bytes <= most || blocking.chunk == 32, "{what}");
                    assert_eq!(blocking.chunk % 32, 0, "{what}");
                    for (whole, part, cache_blocks) in [
                        (m, blocking.rows, blocking.cache_blocks[0]),
                        (n, blocking.columns, blocking.cache_blocks[1]),
                        (k, blocking.depth, blocking.cache_blocks[2]),
                    ] {
                        assert!(
                            part * cache_blocks >= whole && part * (cache_blocks - 1) < whole,
                            "{what}"
                        );
                    }
                    let deep = blocking.cache_blocks[2] > 1;
                    assert!(!deep || blocking.depth.is_multiple_of(blocking.sum_block), "{what}");
                }
            }
        }
    }
}
