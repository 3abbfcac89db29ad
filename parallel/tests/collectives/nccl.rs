//! NCCL, here a stand-in with threads as ranks. Every call is compared with the host's backend, and missing ranks are
//! found.

use ferrotron_autograd::SharedFlatBuffer;
use ferrotron_cuda::library::Search;
use ferrotron_parallel::collective::{
    Group, NcclConfig, Reduction, World, WorldConfig, partition_range, run_threads,
};
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{Category, CudaGraph, DType, Error, FlatBuffer, Result, Tensor};
use std::time::{Duration, Instant};

use crate::values::{check, device, make, on_gpu, read, value};
use crate::worlds::TIMEOUT;

/// A rank's device and its group.
fn group(world: &World, timeout: Duration) -> Result<Group> {
    let search = Search::only(vec![ferrotron_cuda_sim::folder()]);
    let layout = ParallelDims::new(world.size(), 1, 1, 1)?;
    let mesh = Mesh::new(world, layout, SequenceParallel::Off)?;
    Ok(mesh.with_nccl(&device()?, &NcclConfig { search, timeout })?.world().clone())
}

fn run(size: usize, f: impl Fn(&World, &Group) -> Result<()> + Sync) {
    let ranks = run_threads(size, &WorldConfig { timeout: TIMEOUT }, |world| {
        on_gpu(world.rank(), || f(&world, &group(&world, TIMEOUT)?))
    });
    for (rank, result) in ranks.into_iter().enumerate() {
        result.unwrap_or_else(|error| panic!("rank {rank} of {size}: {error}"));
    }
}

/// The error of every rank's call, and the time of the slowest.
fn errors(f: impl Fn(&World) -> Result<()> + Sync) -> (Vec<String>, Duration) {
    ferrotron_cuda_sim::folder(); // made now, if it is not there
    let start = Instant::now();
    let ranks = run_threads(2, &WorldConfig { timeout: TIMEOUT }, |world| {
        on_gpu(world.rank(), || f(&world))
    });
    let told = ranks.into_iter().map(|rank| rank.expect_err("it must fail").to_string()).collect();
    (told, start.elapsed())
}

/// Sums of few small integers: exact in every type.
fn sum(size: usize, index: usize) -> f64 {
    (0..size).map(|rank| value(rank, index)).sum()
}

#[test]
fn every_call_is_what_it_is_on_the_host() {
    if !ferrotron_cuda_sim::available("nccl::every_call_is_what_it_is_on_the_host") {
        return;
    }
    for size in [2, 3] {
        run(size, |world, group| {
            let (rank, last) = (world.rank(), size - 1);
            for dtype in [DType::F32, DType::BF16, DType::I64, DType::U8] {
                // Parts are equal, differ, and are empty for some.
                for rows in [0, 1, 6, 7] {
                    let whole = |rank: usize| make(dtype, &[rows, 2], |i| value(rank, i));
                    let own = partition_range(rows, size, rank);
                    let part = whole(rank)?.narrow(0, own.start, own.len())?.copy()?;
                    let owner = |i: usize| {
                        (0..size)
                            .find(|&r| partition_range(rows, size, r).contains(&(i / 2)))
                            .unwrap()
                    };
                    let (len, here) = (rows * 2, own.len() * 2);
                    let y = group.all_reduce(whole(rank)?, Reduction::Sum)?.wait()?;
                    check("all_reduce", &y, len, |i| sum(size, i))?;
                    let y = group.all_reduce(whole(rank)?, Reduction::Max)?.wait()?;
                    let max = |i| (0..size).map(|rank| value(rank, i)).fold(0.0, f64::max);
                    check("all_reduce (max)", &y, len, max)?;
                    let y = group.reduce_scatter(whole(rank)?, Reduction::Sum)?.wait()?;
                    check("reduce_scatter", &y, here, |i| sum(size, own.start * 2 + i))?;
                    let y = group.all_gather(part.copy()?, rows)?.wait()?;
                    check("all_gather", &y, len, |i| value(owner(i), i))?;
                    let y = group.broadcast(whole(rank)?, last)?.wait()?;
                    check("broadcast", &y, len, |i| value(last, i))?;
                    let y = group.reduce(whole(rank)?, last, Reduction::Sum)?.wait()?;
                    let kept = |i| if rank == last { sum(size, i) } else { value(rank, i) };
                    check("reduce", &y, len, kept)?;
                    if let Some(y) = group.gather(part.copy()?, rows, last)?.wait()? {
                        check("gather", &y, len, |i| value(owner(i), i))?;
                    }
                    let given = (rank == last).then(|| whole(last)).transpose()?;
                    let y = group.scatter(given, part, rows, last)?.wait()?;
                    check("scatter", &y, here, |i| value(last, own.start * 2 + i))?;
                    let y = group.all_to_all(whole(rank)?)?.wait()?;
                    check("all_to_all", &y, here * size, |i| {
                        value(i / here, own.start * 2 + i % here)
                    })?;
                    let (to, from) = ((rank + 1) % size, (rank + last) % size);
                    let y = group.send_recv(whole(rank)?, to, from)?.wait()?;
                    check("send_recv", &y, len, |i| value(from, i))?;
                    if rank == 0 {
                        group.send(whole(0)?, last)?.wait()?;
                    } else if rank == last {
                        let y = group.recv(whole(rank)?, 0)?.wait()?;
                        check("recv", &y, len, |i| value(0, i))?;
                    }
                }
            }
            group.barrier().wait()?;
            // What is on the host stays there.
            assert_eq!(group.sum(&ferrotron_tensor::Device::cpu(1)?, 1.0)?, size as f64);
            Ok(())
        });
    }
}

#[test]
fn flats_and_work_that_nobody_waits_for() {
    if !ferrotron_cuda_sim::available("nccl::flats_and_work_that_nobody_waits_for") {
        return;
    }
    run(2, |world, group| {
        let ranges = [("a".to_string(), vec![4]), ("b".to_string(), vec![2, 2])];
        let flat = FlatBuffer::uninit(&device()?, DType::F32, Category::Gradients, &ranges)?;
        let flat = SharedFlatBuffer::new(flat);
        for range in 0..2 {
            flat.lock().unwrap().with_mut(range, |part| {
                let ones = Tensor::full(part.device(), DType::F32, part.dims(), 1.0)?;
                part.copy_from(&ones)
            })?;
        }
        // One after another, though no thread waits in between.
        let first = group.reduce_scatter_flat(&flat, Reduction::Sum);
        let second = group.all_gather_flat(&flat);
        second.wait()?;
        first.wait()?;
        for range in 0..2 {
            let part = flat.lock().unwrap().tensor(range)?;
            assert_eq!(read(&part)?, [2.0; 4]);
        }
        // The memory of a call that is dropped is not given to others before its end.
        for round in 0..20 {
            let x = make(DType::F32, &[1000], |i| value(world.rank() + round, i))?;
            drop(group.all_reduce(x, Reduction::Sum)?);
            let y = make(DType::F32, &[1000], |i| i as f64)?;
            check("another's memory", &y, 1000, |i| i as f64)?;
        }
        group.all_reduce(make(DType::F32, &[1], |_| 1.0)?, Reduction::Sum)?.wait()?;
        assert_eq!(group.traffic().calls_and_bytes("all_reduce").0, 21);
        Ok(())
    });
}

#[test]
fn calls_in_a_capture_are_replayed_among_others() {
    if !ferrotron_cuda_sim::available("nccl::calls_in_a_capture_are_replayed_among_others") {
        return;
    }
    run(2, |world, group| {
        let mut x = make(DType::F32, &[4], |_| 1.0)?;
        let work = |x: &Tensor| {
            // Calls begin before the first has ended.
            let (square, same) = (x.square()?, x.copy()?);
            let square = group.all_reduce(square, Reduction::Sum)?;
            let same = group.all_gather(same, 8)?;
            let most = group.all_reduce(x.copy()?, Reduction::Max)?;
            most.wait()?;
            square.wait()?.add_scalar(1.0)?.mul(&same.wait()?.narrow(0, 0, 4)?)
        };
        check("as it is", &work(&x)?, 4, |_| 3.0)?;
        let (mut graph, found) = CudaGraph::capture(&device()?, || work(&x))?;
        assert!(group.is_capturable());
        for step in 1..4 {
            let own = (step + world.rank() as u64) as f32;
            x.write_slice(&[own; 4])?;
            graph.replay(step)?;
            group.watch_replay()?;
            let (first, second) = (step as f64, step as f64 + 1.0);
            let want = (first * first + second * second + 1.0) * first;
            check("a replay", &found, 4, |_| want)?;
            let between = group.all_reduce(make(DType::F32, &[2], |_| 1.0)?, Reduction::Sum)?;
            check("between replays", &between.wait()?, 2, |_| 2.0)?;
        }
        drop(graph);
        Ok(())
    });
}

#[test]
fn a_rank_that_does_not_come_is_an_error() {
    if !ferrotron_cuda_sim::available("nccl::a_rank_that_does_not_come_is_an_error") {
        return;
    }
    let limit = Duration::from_millis(300);
    // It has come for the group, but makes no call: the other's stream waits for it, until that gives up.
    let (told, took) = errors(|world| {
        let group = group(world, limit)?;
        if world.rank() == 1 {
            while group.sum(&ferrotron_tensor::Device::cpu(1)?, 0.0).is_ok() {}
            return Err(Error::communication("", "heard of it"));
        }
        let x = make(DType::F32, &[3], |_| 1.0)?;
        let y = group.all_reduce(x, Reduction::Sum)?.wait()?;
        read(&y)?; // returns, as the call was given up
        group.all_reduce(y, Reduction::Sum)?.wait().map(drop)
    });
    assert!(told[0].contains("call 1 of rank 0 of group world (all_reduce of 3 x f32"), "{told:?}");
    assert!(told[0].contains("did not end within 300ms"), "{told:?}");
    assert_eq!(told[1], "heard of it");
    assert!(took < Duration::from_secs(20), "{took:?}");
}

#[test]
fn a_rank_that_fails_ends_the_calls_of_others() {
    if !ferrotron_cuda_sim::available("nccl::a_rank_that_fails_ends_the_calls_of_others") {
        return;
    }
    let (told, took) = errors(|world| {
        let group = group(world, TIMEOUT)?;
        if world.rank() == 1 {
            return Err(Error::value("", "on purpose"));
        }
        let x = make(DType::F32, &[3], |_| 1.0)?;
        let y = group.all_reduce(x, Reduction::Sum)?.wait()?;
        read(&y)?;
        group.all_reduce(y, Reduction::Sum)?.wait().map(drop)
    });
    assert!(told[0].contains("rank 1 ended with an error: on purpose"), "{told:?}");
    assert!(took < Duration::from_secs(20), "{took:?}");
}
