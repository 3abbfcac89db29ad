//! Every operation against what it is defined to do: sizes, dtypes, numbers of ranks.

use ferrotron_autograd::SharedFlatBuffer;
use ferrotron_parallel::collective::{Reduction, partition_range};
use ferrotron_tensor::{Category, DType, Error, FlatBuffer, Tensor};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::values::{check, device, make, value};
use crate::worlds::{Backend, all};

const SIZES: [usize; 6] = [0, 1, 2, 7, 64, 1001];

/// Rows and elements of a row: small buffers, and some with parts of over 64 KiB, fewer than ranks, which go round a ring.
fn shapes(dtype: DType) -> impl Iterator<Item = [usize; 2]> {
    let large = [[1, 70_001], [2, 70_001]].into_iter().filter(move |_| dtype == DType::F32);
    SIZES.into_iter().map(|rows| [rows, 3]).chain(large)
}

/// The reduction of element `index` over `n` ranks.
fn reduced(n: usize, index: usize, reduction: Reduction) -> f64 {
    let values = (0..n).map(|rank| value(rank, index));
    match reduction {
        Reduction::Sum => values.sum(),
        Reduction::Max => values.fold(0.0, f64::max),
    }
}

const REDUCTIONS: [Reduction; 2] = [Reduction::Sum, Reduction::Max];

pub fn all_reduce_gives_every_rank_the_reduction(backend: Backend) {
    for n in backend.sizes() {
        backend.run(n, |world| {
            let group = world.group("all", &all(&world))?;
            for dtype in DType::ALL {
                for len in SIZES {
                    for reduction in REDUCTIONS {
                        let x = make(dtype, &[len], |i| value(world.rank(), i))?;
                        let y = group.all_reduce(x, reduction)?.wait()?;
                        let what = format!("all_reduce {reduction:?} of {n} ranks");
                        check(&what, &y, len, |i| reduced(n, i, reduction))?;
                    }
                }
            }
            Ok(())
        });
    }
}

pub fn reduce_scatter_gives_every_rank_its_part(backend: Backend) {
    for n in backend.sizes() {
        backend.run(n, |world| {
            let group = world.group("all", &all(&world))?;
            for dtype in DType::ALL {
                for [rows, row] in shapes(dtype) {
                    for reduction in REDUCTIONS {
                        let x = make(dtype, &[rows, row], |i| value(world.rank(), i))?;
                        let y = group.reduce_scatter(x, reduction)?.wait()?;
                        let own = partition_range(rows, n, world.rank());
                        assert_eq!(y.dims(), [own.len(), row]);
                        let what = format!("reduce_scatter {reduction:?} of {n} ranks");
                        check(&what, &y, own.len() * row, |i| {
                            reduced(n, own.start * row + i, reduction)
                        })?;
                    }
                }
            }
            Ok(())
        });
    }
}

pub fn all_gather_gives_every_rank_all_parts(backend: Backend) {
    for n in backend.sizes() {
        backend.run(n, |world| {
            let group = world.group("all", &all(&world))?;
            for dtype in DType::ALL {
                for [rows, row] in shapes(dtype) {
                    let own = partition_range(rows, n, world.rank());
                    let part = make(dtype, &[own.len(), row], |i| value(0, own.start * row + i))?;
                    let y = group.all_gather(part, rows)?.wait()?;
                    assert_eq!(y.dims(), [rows, row]);
                    check(&format!("all_gather of {n} ranks"), &y, rows * row, |i| value(0, i))?;
                }
            }
            Ok(())
        });
    }
}

pub fn rooted_operations_move_what_they_name(backend: Backend) {
    for n in backend.sizes() {
        backend.run(n, |world| {
            let (group, rank) = (world.group("all", &all(&world))?, world.rank());
            for (case, dtype) in DType::ALL.into_iter().enumerate() {
                for (shift, rows) in SIZES.into_iter().enumerate() {
                    let root = (case + shift) % n;
                    let what = |op| format!("{op} of {n} ranks, root {root}, on rank {rank}");
                    let mine = |i| value(rank, i);

                    let y = group.broadcast(make(dtype, &[rows, 2], mine)?, root)?.wait()?;
                    check(&what("broadcast"), &y, rows * 2, |i| value(root, i))?;

                    for reduction in REDUCTIONS {
                        let x = make(dtype, &[rows, 2], mine)?;
                        let y = group.reduce(x, root, reduction)?.wait()?;
                        let want =
                            |i| if rank == root { reduced(n, i, reduction) } else { mine(i) };
                        check(&what("reduce"), &y, rows * 2, want)?;
                    }

                    let own = partition_range(rows, n, rank);
                    let part = make(dtype, &[own.len(), 2], |i| value(0, own.start * 2 + i))?;
                    let y = group.gather(part.copy()?, rows, root)?.wait()?;
                    assert_eq!(y.is_some(), rank == root, "{}", what("gather"));
                    if let Some(y) = y {
                        assert_eq!(y.dims(), [rows, 2]);
                        check(&what("gather"), &y, rows * 2, |i| value(0, i))?;
                    }

                    let whole = (rank == root).then(|| make(dtype, &[rows, 2], |i| value(5, i)));
                    let y = group.scatter(whole.transpose()?, part, rows, root)?.wait()?;
                    assert_eq!(y.dims(), [own.len(), 2]);
                    check(&what("scatter"), &y, own.len() * 2, |i| value(5, own.start * 2 + i))?;
                }
            }
            Ok(())
        });
    }
}

pub fn all_to_all_sends_part_i_to_rank_i(backend: Backend) {
    for n in backend.sizes() {
        backend.run(n, |world| {
            let group = world.group("all", &all(&world))?;
            for dtype in DType::ALL {
                for rows in SIZES {
                    let x = make(dtype, &[rows, 2], |i| value(world.rank(), i))?;
                    let y = group.all_to_all(x)?.wait()?;
                    let own = partition_range(rows, n, world.rank());
                    assert_eq!(y.dims(), [own.len() * n, 2]);
                    check(&format!("all_to_all of {n} ranks"), &y, own.len() * n * 2, |i| {
                        let (from, offset) = (i / (own.len() * 2), i % (own.len() * 2));
                        value(from, own.start * 2 + offset)
                    })?;
                }
            }
            Ok(())
        });
    }
}

pub fn messages_pass_between_two_ranks_and_round_a_ring(backend: Backend) {
    for n in backend.sizes().filter(|&n| n > 1) {
        backend.run(n, |world| {
            let (group, rank) = (world.group("all", &all(&world))?, world.rank());
            for dtype in DType::ALL {
                for len in SIZES.into_iter().chain([400_000]) {
                    let mine = make(dtype, &[len], |i| value(rank, i))?;
                    let (to, from) = ((rank + 1) % n, (rank + n - 1) % n);
                    let y = group.send_recv(mine.copy()?, to, from)?.wait()?;
                    check(&format!("exchange of {n} ranks"), &y, len, |i| value(from, i))?;

                    let y = if rank == 0 {
                        group.send(mine, 1)?.wait()?;
                        group.recv(make(dtype, &[len], |_| 0.0)?, n - 1)?.wait()?
                    } else {
                        let y = group.recv(mine, rank - 1)?.wait()?;
                        group.send(y.copy()?, to)?.wait()?;
                        y
                    };
                    check(&format!("send and recv of {n} ranks"), &y, len, |i| value(0, i))?;
                }
            }
            Ok(())
        });
    }
}

pub fn a_barrier_waits_for_the_last(backend: Backend) {
    for n in backend.sizes() {
        let come = AtomicUsize::new(0);
        backend.run(n, |world| {
            let group = world.group("all", &all(&world))?;
            for round in 1..=3 {
                if world.rank() == round % n {
                    std::thread::sleep(Duration::from_millis(20));
                }
                come.fetch_add(1, Ordering::SeqCst);
                group.barrier().wait()?;
                let come = come.load(Ordering::SeqCst);
                assert!(come >= n * round, "{come} of {n} ranks in round {round}");
            }
            Ok(())
        });
    }
}

pub fn large_buffers_go_through_small_pipes(backend: Backend) {
    for (n, len) in [(2, 3_000_001), (3, 2_500_003), (8, 1_300_001)] {
        backend.run(n, |world| {
            let (group, rank) = (world.group("all", &all(&world))?, world.rank());
            let own = partition_range(len, n, rank);
            for dtype in [DType::F32, DType::BF16, DType::U8] {
                let mine = || make(dtype, &[len], |i| value(rank, i));
                let sum = |i| reduced(n, i, Reduction::Sum);
                let what = |op| format!("{op} of {n} ranks");

                let y = group.all_reduce(mine()?, Reduction::Sum)?.wait()?;
                check(&what("all_reduce"), &y, len, sum)?;
                let y = group.reduce_scatter(mine()?, Reduction::Sum)?.wait()?;
                check(&what("reduce_scatter"), &y, own.len(), |i| sum(own.start + i))?;
                let part = mine()?.narrow(0, own.start, own.len())?;
                let y = group.all_gather(part.copy()?, len)?.wait()?;
                let owner = |i| (0..n).find(|&r| partition_range(len, n, r).contains(&i)).unwrap();
                check(&what("all_gather"), &y, len, |i| value(owner(i), i))?;
                let y = group.broadcast(mine()?, n - 1)?.wait()?;
                check(&what("broadcast"), &y, len, |i| value(n - 1, i))?;
                let y = group.reduce(mine()?, 1, Reduction::Sum)?.wait()?;
                check(
                    &what("reduce"),
                    &y,
                    len,
                    |i| if rank == 1 { sum(i) } else { value(rank, i) },
                )?;
                if let Some(y) = group.gather(part.copy()?, len, 0)?.wait()? {
                    check(&what("gather"), &y, len, |i| value(owner(i), i))?;
                }
                let whole = (rank == 1).then(mine).transpose()?;
                let y = group.scatter(whole, part, len, 1)?.wait()?;
                check(&what("scatter"), &y, own.len(), |i| value(1, own.start + i))?;
                let y = group.all_to_all(mine()?)?.wait()?;
                check(&what("all_to_all"), &y, own.len() * n, |i| {
                    value(i / own.len(), own.start + i % own.len())
                })?;
                let y = group.send_recv(mine()?, (rank + 1) % n, (rank + n - 1) % n)?.wait()?;
                check(&what("send_recv"), &y, len, |i| value((rank + n - 1) % n, i))?;
            }
            Ok(())
        });
    }
}

pub fn flats_are_reduced_where_they_lie(backend: Backend) {
    for n in backend.sizes() {
        backend.run(n, |world| {
            let (group, rank) = (world.group("all", &all(&world))?, world.rank());
            let ranges = [("a".to_string(), vec![5, 3]), ("b".to_string(), vec![8])];
            let flat = FlatBuffer::uninit(&device()?, DType::F32, Category::Gradients, &ranges)?;
            let flat = SharedFlatBuffer::new(flat);
            let len = flat.lock().unwrap().numel();
            let fill = || {
                let mut flat = flat.lock().unwrap();
                for range in 0..flat.len() {
                    let (start, len) = flat.range(range)?;
                    let values: Vec<f32> =
                        (start..start + len).map(|i| value(rank, i) as f32).collect();
                    flat.with_mut(range, |part| {
                        part.copy_from(&Tensor::from_slice(part.device(), &values, part.dims())?)
                    })?;
                }
                Ok::<_, Error>(())
            };
            let read = || {
                let flat = flat.lock().unwrap();
                let parts = (0..flat.len()).map(|range| flat.tensor(range)?.to_vec::<f32>());
                Ok::<_, Error>(parts.collect::<Result<Vec<_>, Error>>()?.concat())
            };
            let sum = |i| reduced(n, i, Reduction::Sum) as f32;

            fill()?;
            group.all_reduce_flat(&flat, Reduction::Sum).wait()?;
            assert_eq!(read()?, (0..len).map(sum).collect::<Vec<_>>());

            // Only this rank's part changes.
            fill()?;
            group.reduce_scatter_flat(&flat, Reduction::Sum).wait()?;
            let own = group.local_range(len);
            let want = |i| if own.contains(&i) { sum(i) } else { value(rank, i) as f32 };
            assert_eq!(read()?, (0..len).map(want).collect::<Vec<_>>());

            group.all_gather_flat(&flat).wait()?;
            assert_eq!(read()?, (0..len).map(sum).collect::<Vec<_>>());
            Ok(())
        });
    }
}
