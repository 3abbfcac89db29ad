//! Ranks that do not name the same root find out at once, also those that would only send.

use ferrotron_parallel::collective::{Group, Reduction};
use ferrotron_tensor::{DType, Result};

use crate::values::make;
use crate::worlds::{Backend, TIMEOUT, all};

/// Nothing to send, one piece, and more than the pipes hold.
const ROWS: [usize; 3] = [0, 1000, 5_000_000];

/// The last of `n` ranks names itself as root and the others rank 0. Every rank gets an error that holds
/// both calls, as `op` describes them.
fn roots_differ(
    backend: Backend,
    op: &str,
    dtypes: &[DType],
    call: impl Fn(&Group, DType, usize, usize) -> Result<()> + Sync,
) {
    for n in [2, 3, 4] {
        for (rows, &dtype) in
            ROWS.into_iter().flat_map(|rows| dtypes.iter().map(move |d| (rows, d)))
        {
            let last = n - 1;
            let errors = backend.errors(n, TIMEOUT, |world| {
                let group = world.group("dp", &all(&world))?;
                let root = if world.rank() == last { last } else { 0 };
                call(&group, dtype, rows, root)?;
                // A rank that has heard from none of the others hears of it in the next call.
                group.barrier().wait()
            });
            for (rank, error) in errors.iter().enumerate() {
                for word in [
                    format!("rank {last} calls {op} (root {last}) of {rows} x {dtype}"),
                    format!("calls {op} (root 0) of {rows} x {dtype}"),
                    "call 1 of group dp".to_string(),
                ] {
                    assert!(error.contains(&word), "rank {rank} of {n}, no '{word}': {error}");
                }
            }
        }
    }
}

pub fn another_root_of_a_broadcast_is_named(backend: Backend) {
    roots_differ(backend, "broadcast", &[DType::F32], |group, dtype, rows, root| {
        group.broadcast(make(dtype, &[rows], |_| 1.0)?, root)?.wait().map(drop)
    });
}

pub fn another_root_of_a_reduce_is_named(backend: Backend) {
    roots_differ(backend, "reduce", &[DType::F32, DType::BF16], |group, dtype, rows, root| {
        group.reduce(make(dtype, &[rows], |_| 1.0)?, root, Reduction::Sum)?.wait().map(drop)
    });
}

pub fn another_root_of_a_gather_is_named(backend: Backend) {
    roots_differ(backend, "gather", &[DType::U8], |group, dtype, rows, root| {
        let part = make(dtype, &[group.local_range(rows).len()], |_| 1.0)?;
        group.gather(part, rows, root)?.wait().map(drop)
    });
}

pub fn another_root_of_a_scatter_is_named(backend: Backend) {
    roots_differ(backend, "scatter", &[DType::U8], |group, dtype, rows, root| {
        let whole = (group.rank() == root).then(|| make(dtype, &[rows], |_| 1.0)).transpose()?;
        let part = make(dtype, &[group.local_range(rows).len()], |_| 1.0)?;
        group.scatter(whole, part, rows, root)?.wait().map(drop)
    });
}

pub fn a_broadcast_against_a_send_is_named(backend: Backend) {
    for len in ROWS {
        let errors = backend.errors(2, TIMEOUT, |world| {
            let group = world.group("pp", &all(&world))?;
            let x = make(DType::U8, &[len], |_| 1.0)?;
            if world.rank() == 0 {
                group.broadcast(x, 0)?.wait()?;
            } else {
                group.send(x, 0)?.wait()?;
            }
            group.barrier().wait()
        });
        for (rank, error) in errors.iter().enumerate() {
            // A small send has ended before it is heard, and rank 1 may be at its next call.
            for word in ["rank 1 calls ", &format!("rank 0 calls broadcast (root 0) of {len} x u8")]
            {
                assert!(error.contains(word), "rank {rank}, no '{word}': {error}");
            }
        }
    }
}
