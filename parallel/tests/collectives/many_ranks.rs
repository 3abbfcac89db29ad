//! Groups of so many ranks that small buffers go along a tree, and 16-bit sums are made in f32.

use ferrotron_parallel::collective::{Reduction, partition_range};
use ferrotron_tensor::DType;
use std::time::{Duration, Instant};

use crate::faults::{LONG, check as check_errors, reduce, until_error};
use crate::values::{check, make};
use crate::worlds::{Backend, all};

/// Elements of f32: less than a rank's worth, one piece, several pieces along the tree of 70 ranks, round their ring.
const LENGTHS: [usize; 5] = [0, 1, 1001, 70_001, 100_001];

/// Numbers whose sums over 70 ranks are exact in 16 bits and in a byte.
fn value(rank: usize, index: usize) -> f64 {
    ((rank + index / 3) % 3) as f64
}

fn sizes(backend: Backend) -> &'static [usize] {
    // Of threads alone are there enough for sums in f32.
    if backend == Backend::Threads { &[17, 22, 70] } else { &[17, 22] }
}

pub fn every_operation_of_many_ranks(backend: Backend) {
    for &n in sizes(backend) {
        backend.run(n, |world| {
            let (group, rank) = (world.group("all", &all(&world))?, world.rank());
            let mine = |i| value(rank, i);
            let sum = |i| (0..n).map(|rank| value(rank, i)).sum::<f64>();
            for dtype in [DType::F32, DType::BF16, DType::U8, DType::F64] {
                for len in LENGTHS {
                    if len > 70_000 && dtype != DType::F32 && !(dtype == DType::BF16 && n == 70) {
                        continue;
                    }
                    let own = partition_range(len, n, rank);
                    let x = || make(dtype, &[len], mine);
                    let y = group.all_reduce(x()?, Reduction::Sum)?.wait()?;
                    check("all_reduce", &y, len, sum)?;
                    let y = group.all_reduce(x()?, Reduction::Max)?.wait()?;
                    check("all_reduce", &y, len, |_| 2.0)?;
                    let y = group.reduce_scatter(x()?, Reduction::Sum)?.wait()?;
                    check("reduce_scatter", &y, own.len(), |i| sum(own.start + i))?;
                    let part = make(dtype, &[own.len()], |i| value(1, own.start + i))?;
                    let y = group.all_gather(part.copy()?, len)?.wait()?;
                    check("all_gather", &y, len, |i| value(1, i))?;
                    for root in [0, 3] {
                        let y = group.broadcast(x()?, root)?.wait()?;
                        check("broadcast", &y, len, |i| value(root, i))?;
                        let y = group.reduce(x()?, root, Reduction::Sum)?.wait()?;
                        check("reduce", &y, len, |i| if rank == root { sum(i) } else { mine(i) })?;
                        let y = group.gather(part.copy()?, len, root)?.wait()?;
                        y.map_or(Ok(()), |y| check("gather", &y, len, |i| value(1, i)))?;
                        let whole = (rank == root).then(x).transpose()?;
                        let y = group.scatter(whole, part.copy()?, len, root)?.wait()?;
                        check("scatter", &y, own.len(), |i| value(root, own.start + i))?;
                    }
                }
            }
            group.barrier().wait()
        });
    }
}

pub fn sums_of_many_ranks_have_the_same_bits(backend: Backend) {
    let rough = |rank: usize, i: usize| 1.0 / (1 + rank * 7919 + i * 31) as f64;
    for dtype in [DType::F32, DType::BF16] {
        let results = backend.run(22, |world| {
            let group = world.group("all", &all(&world))?;
            let x = || make(dtype, &[3001], |i| rough(world.rank(), i));
            let first = group.all_reduce(x()?, Reduction::Sum)?.wait()?.to_f64()?;
            let again = group.all_reduce(x()?, Reduction::Sum)?.wait()?.to_f64()?;
            assert_eq!(first, again);
            Ok(first)
        });
        assert!(results.iter().all(|result| *result == results[0]), "{dtype}");
    }
}

pub fn a_barrier_of_many_ranks_waits_for_the_last(backend: Backend) {
    const PAUSE: Duration = Duration::from_millis(100);
    backend.run(20, |world| {
        let group = world.group("all", &all(&world))?;
        group.barrier().wait()?;
        let begun = Instant::now();
        if world.rank() == 13 {
            std::thread::sleep(PAUSE);
        }
        group.barrier().wait()?;
        assert!(begun.elapsed() >= PAUSE / 2, "{:?}", begun.elapsed());
        Ok(())
    });
}

/// The odd one goes along the tree or round the ring, where the others go along the tree.
pub fn a_different_call_among_many_is_named(backend: Backend) {
    for len in [1001, 1_000_000] {
        let begun = Instant::now();
        let errors = backend.errors(20, LONG, |world| {
            let group = world.group("dp", &all(&world))?;
            let len = if world.rank() == 7 { len } else { 1000 };
            until_error(|| reduce(&group, DType::F32, len))
        });
        assert!(begun.elapsed() < LONG / 2, "{:?}", begun.elapsed());
        let odd = format!("rank 7 calls all_reduce of {len} x f32");
        check_errors(&errors, &[&odd, "calls all_reduce of 1000 x f32", "call 1"]);
    }
}
