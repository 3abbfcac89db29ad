//! Many calls at once, in more than one group.

use ferrotron_parallel::collective::Reduction;
use ferrotron_tensor::DType;

use crate::values::{check, make, value};
use crate::worlds::{Backend, all};

pub fn groups_do_not_wait_for_one_another(backend: Backend) {
    backend.run(2, |world| {
        let (a, b) = (world.group("a", &[0, 1])?, world.group("b", &[0, 1])?);
        let mine = || make(DType::F32, &[1000], |i| value(world.rank(), i));
        // The first call of either rank can only end after the second of the other.
        let (first, second) = if world.rank() == 0 { (&a, &b) } else { (&b, &a) };
        let early = one_all_reduce(first, mine()?)?;
        let late = one_all_reduce(second, mine()?)?;
        check("late", &late.wait()?, 1000, |i| value(0, i) + value(1, i))?;
        check("early", &early.wait()?, 1000, |i| value(0, i) + value(1, i))?;
        Ok(())
    });
}

pub fn many_calls_are_in_flight_on_two_groups(backend: Backend) {
    let n = 4;
    let len = |call| [1, 1000, 0, 300_001][call % 4] + call;
    backend.run(n, |world| {
        let (a, b) = (world.group("a", &all(&world))?, world.group("b", &all(&world))?);
        let mut works = Vec::new();
        for call in 0..60 {
            // Each group's calls are in the same order everywhere, their interleaving is not.
            let order = if (world.rank() + call / 7) % 2 == 0 { [&a, &b] } else { [&b, &a] };
            for group in order {
                let x = make(DType::F32, &[len(call)], |i| value(world.rank() + call, i))?;
                works.push((call, one_all_reduce(group, x)?));
            }
        }
        // Waiting in another order than calling.
        works.reverse();
        for (call, work) in works {
            let sum = |i| (0..n).map(|rank| value(rank + call, i)).sum();
            check(&format!("call {call}"), &work.wait()?, len(call), sum)?;
        }
        Ok(())
    });
}

/// One place in the program for calls in either group.
fn one_all_reduce(
    group: &ferrotron_parallel::collective::Group,
    x: ferrotron_tensor::Tensor,
) -> ferrotron_tensor::Result<ferrotron_parallel::collective::Work<ferrotron_tensor::Tensor>> {
    group.all_reduce(x, Reduction::Sum)
}

pub fn subgroups_work_side_by_side(backend: Backend) {
    backend.run(6, |world| {
        // Rows and columns of a 2 x 3 mesh, and ranks in an order of their own.
        let (row, column) = (world.rank() / 3, world.rank() % 3);
        let across = world.group("row", &[row * 3, row * 3 + 1, row * 3 + 2])?;
        let down = world.group("column", &[column, column + 3])?;
        assert_eq!((across.rank(), across.size()), (column, 3));
        let mine = || make(DType::F64, &[10_007], |i| value(world.rank(), i));
        for _ in 0..3 {
            let (x, y) = (one_all_reduce(&across, mine()?)?, one_all_reduce(&down, mine()?)?);
            check("row", &x.wait()?, 10_007, |i| (0..3).map(|c| value(row * 3 + c, i)).sum())?;
            check("column", &y.wait()?, 10_007, |i| value(column, i) + value(column + 3, i))?;
        }
        let backwards = world.group("backwards", &[5, 4, 3, 2, 1, 0])?;
        assert_eq!(backwards.rank(), 5 - world.rank());
        let y = backwards.broadcast(mine()?, 1)?.wait()?;
        check("rank 4 is number 1", &y, 10_007, |i| value(4, i))
    });
}

pub fn work_that_nobody_waits_for_is_done(backend: Backend) {
    backend.run(3, |world| {
        let group = world.group("all", &all(&world))?;
        for _ in 0..5 {
            let x = make(DType::F32, &[500_000], |i| value(world.rank(), i))?;
            drop(group.all_reduce(x, Reduction::Sum)?);
        }
        group.barrier().wait()?; // calls of a group are carried out in order
        assert_eq!(group.traffic().calls_and_bytes("all_reduce").0, 5);
        Ok(())
    });
}

pub fn groups_of_one_name_are_told_apart(backend: Backend) {
    backend.run(4, |world| {
        let pair = if world.rank() < 2 { [0, 1] } else { [2, 3] };
        let first = world.group("pair", &pair)?;
        let second = world.group("pair", &pair)?;
        let mine = || make(DType::I64, &[5], |i| value(world.rank(), i));
        for group in [second, first] {
            let y = group.all_reduce(mine()?, Reduction::Sum)?.wait()?;
            check("pair", &y, 5, |i| value(pair[0], i) + value(pair[1], i))?;
        }
        Ok(())
    });
}
