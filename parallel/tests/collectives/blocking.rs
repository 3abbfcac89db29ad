//! Calls that have ended when they return, carried out by their caller where ranks share memory.

use ferrotron_parallel::collective::{Group, Reduction};
use ferrotron_tensor::{DType, Error, Result, Tensor};
use std::time::{Duration, Instant};

use crate::values::{check, make, read, value};
use crate::worlds::{Backend, TIMEOUT, all};

/// The results of operations that take other ways through pipes: small and large, with headers first and without.
fn results(group: &Group, numel: usize) -> Result<Vec<Vec<f64>>> {
    let (rank, n) = (group.rank(), group.size());
    let mine = || make(DType::F32, &[numel], |i| value(rank, i));
    let part = || make(DType::F32, &[group.local_range(numel).len()], |i| value(rank, i));
    let mut results: Vec<Tensor> = vec![
        group.all_reduce(mine()?, Reduction::Sum)?.wait()?,
        group.reduce_scatter(mine()?, Reduction::Max)?.wait()?,
        group.all_gather(part()?, numel)?.wait()?,
        group.broadcast(mine()?, n - 1)?.wait()?,
        group.reduce(mine()?, 0, Reduction::Sum)?.wait()?,
        group.all_to_all(mine()?)?.wait()?,
    ];
    if n > 1 {
        results.push(group.send_recv(mine()?, (rank + 1) % n, (rank + n - 1) % n)?.wait()?);
    }
    results.extend(group.gather(part()?, numel, n - 1)?.wait()?);
    group.barrier().wait()?;
    results.iter().map(read).collect()
}

pub fn blocking_calls_give_the_results_of_queued_ones(backend: Backend) {
    for n in backend.sizes().chain([17]) {
        backend.run(n, |world| {
            let group = world.group("all", &all(&world))?;
            for numel in [0, 7, 1001, 300_007] {
                let (queued, blocking) =
                    (results(&group, numel)?, results(&group.blocking(), numel)?);
                assert!(queued == blocking, "{numel} elements, {n} ranks");
            }
            Ok(())
        });
    }
}

pub fn blocking_calls_come_after_those_in_the_queue(backend: Backend) {
    backend.run(3, |world| {
        let (a, b) = (world.group("a", &all(&world))?, world.group("b", &all(&world))?);
        for call in 0..30 {
            let x = |numel| make(DType::F64, &[numel], |i| value(world.rank() + call, i));
            let sum = |i| (0..3).map(|rank| value(rank + call, i)).sum();
            let (first, other) =
                (a.all_reduce(x(200_003)?, Reduction::Sum)?, b.all_reduce(x(5)?, Reduction::Sum)?);
            let second = a.blocking().all_reduce(x(3)?, Reduction::Sum)?.wait()?;
            let third = b.blocking().all_reduce(x(4)?, Reduction::Sum)?.wait()?;
            check("second", &second, 3, sum)?;
            check("third", &third, 4, sum)?;
            check("first", &first.wait()?, 200_003, sum)?;
            check("other", &other.wait()?, 5, sum)?;
        }
        Ok(())
    });
}

pub fn names_of_a_group_share_a_queue_and_count_apart(backend: Backend) {
    backend.run(3, |world| {
        let dp = world.group("dp", &all(&world))?;
        let dp_cp = dp.named("dp-cp");
        let x = |numel| make(DType::F64, &[numel], |_| 1.0);
        for _ in 0..10 {
            let queued = dp.all_reduce(x(200_003)?, Reduction::Sum)?;
            let sum = dp_cp.blocking().all_reduce(x(3)?, Reduction::Sum)?;
            assert!(sum.is_done());
            check("blocking", &sum.wait()?, 3, |_| 3.0)?;
            check("queued", &queued.wait()?, 200_003, |_| 3.0)?;
            // By another name again, now that nothing is queued.
            let sum = dp.blocking().named("world").all_reduce(x(6)?, Reduction::Sum)?.wait()?;
            check("blocking", &sum, 6, |_| 3.0)?;
            dp.blocking().all_reduce(x(9)?, Reduction::Sum)?.wait()?;
        }
        // Each rank owns one of three elements: it sends two to their owners, and its own to two ranks.
        assert_eq!(dp_cp.traffic().calls_and_bytes("all_reduce"), (10, 10 * 4 * 8));
        assert_eq!(dp_cp.blocking().traffic(), dp_cp.traffic());
        let (calls, bytes) = dp.traffic().calls_and_bytes("all_reduce");
        assert_eq!(calls, 20);
        assert!(bytes > 10 * 200_003 * 8 && bytes < 30 * 200_003 * 8, "{bytes}");
        Ok(())
    });
}

/// Ranks make blocking calls until one does what `odd` says instead of the third. Returns the errors.
fn one_fails(
    backend: Backend,
    timeout: Duration,
    odd: impl Fn(&Group) -> Result<()> + Sync,
) -> Vec<String> {
    let ended = backend.try_run(3, timeout, |world| {
        let group = world.group("dp", &all(&world))?.blocking();
        for call in 0.. {
            if call == 2 && world.rank() == 1 {
                odd(&group)?;
            }
            group.all_reduce(make(DType::F32, &[100], |_| 1.0)?, Reduction::Sum)?.wait()?;
        }
        Ok(())
    });
    let errors = ended.into_iter().map(|ended| ended.expect_err("a rank fails").to_string());
    errors.collect()
}

pub fn faults_end_blocking_calls(backend: Backend) {
    let check = |errors: Vec<String>, word: &str| {
        for (rank, error) in errors.into_iter().enumerate() {
            assert!(error.contains(word), "rank {rank} does not say '{word}': {error}");
        }
    };
    let broken = |_: &Group| Err(Error::io("data", "no such file"));
    check(one_fails(backend, TIMEOUT, broken), "no such file");
    let panics = |_: &Group| panic!("the weather is bad");
    check(one_fails(backend, TIMEOUT, panics), "the weather is bad");
    let another = |group: &Group| group.barrier().wait();
    check(one_fails(backend, TIMEOUT, another), "rank 1 calls barrier");
    let late = |_: &Group| {
        std::thread::sleep(Duration::from_secs(2));
        Ok(())
    };
    let errors = one_fails(backend, Duration::from_millis(800), late);
    check(errors, "rank 1 did not enter call 3 of group dp");
}

/// A rank that leaves is named long before the timeout by those whose own threads wait for it.
pub fn a_rank_that_leaves_blocking_calls_is_named(backend: Backend) {
    let begun = Instant::now();
    let ended = backend.try_run(3, TIMEOUT, |world| {
        let group = world.group("dp", &all(&world))?.blocking();
        for call in 0.. {
            if call == 100 && world.rank() == 1 {
                return Ok(());
            }
            for len in [10, 100_000] {
                group.all_reduce(make(DType::F32, &[len], |_| 1.0)?, Reduction::Sum)?.wait()?;
            }
        }
        Ok(())
    });
    assert!(begun.elapsed() < TIMEOUT / 2, "{:?}", begun.elapsed());
    for (rank, ended) in ended.into_iter().enumerate() {
        match rank {
            1 => assert!(ended.is_ok()),
            _ => {
                let error = ended.expect_err("rank 1 has left").to_string();
                for word in ["rank 1 has left", "call 201 of group dp"] {
                    assert!(error.contains(word), "rank {rank} does not say '{word}': {error}");
                }
            }
        }
    }
}
