//! Counts of the bytes sent.

use ferrotron_parallel::collective::{Reduction, partition_range};
use ferrotron_tensor::DType;

use crate::values::{make, value};
use crate::worlds::{Backend, all};

pub fn bytes_are_those_of_the_algorithm(backend: Backend) {
    for n in (1..=8).chain([17]) {
        for (dtype, len) in
            [(DType::F32, 0), (DType::F64, 5), (DType::BF16, 1003), (DType::F32, 200_001)]
        {
            let sent = backend.run(n, |world| {
                let group = world.group("all", &all(&world))?;
                let x = make(dtype, &[len], |i| value(world.rank(), i))?;
                group.all_reduce(x, Reduction::Sum)?.wait()?;
                Ok(group.traffic().calls_and_bytes("all_reduce"))
            });
            let size = dtype.size();
            let part = |rank: usize| (partition_range(len, n, rank % n).len() * size) as u64;
            for (rank, &(calls, bytes)) in sent.iter().enumerate() {
                if n == 1 {
                    assert_eq!((calls, bytes), (0, 0));
                    continue;
                }
                // Small buffers of many ranks go to the parent and the children, those of 16 bits round the ring.
                let tree = (4 * rank + 1..4 * rank + 5).filter(|&child| child < n).count();
                if n > 16 && len * size <= 256 << 10 && size != 2 {
                    let want = (len * size * (tree + usize::from(rank > 0))) as u64;
                    assert_eq!((calls, bytes), (1, want), "rank {rank} of {n}, {len} x {dtype}");
                    continue;
                }
                // Every part but its own to reduce; to gather every part but the next rank's round a ring, or of a
                // buffer with small parts its own to every other rank.
                let all: u64 = (0..n).map(part).sum();
                let gathered = match (3..=16).contains(&n) && len.div_ceil(n) * size <= 64 << 10 {
                    true => (n as u64 - 1) * part(rank),
                    false => all - part(rank + 1),
                };
                let want = all - part(rank) + gathered;
                assert_eq!((calls, bytes), (1, want), "rank {rank} of {n}, {len} x {dtype}");
            }
            let total: u64 = sent.iter().map(|(_, bytes)| bytes).sum();
            assert_eq!(total, (2 * (n - 1) * len * size) as u64, "{n} ranks, {len} x {dtype}");
        }
    }
}

pub fn bytes_are_counted_by_operation(backend: Backend) {
    let (n, len) = (4, 1000);
    let traffic = backend.run(n, |world| {
        let (group, rank) = (world.group("all", &all(&world))?, world.rank());
        let mine = || make(DType::F32, &[len], |i| value(rank, i));
        let part = || make(DType::F32, &[len / n], |i| value(rank, i));
        group.reduce_scatter(mine()?, Reduction::Sum)?.wait()?;
        group.all_gather(part()?, len)?.wait()?;
        group.broadcast(mine()?, 2)?.wait()?;
        group.reduce(mine()?, 2, Reduction::Sum)?.wait()?;
        group.gather(part()?, len, 2)?.wait()?;
        group.scatter((rank == 2).then(mine).transpose()?, part()?, len, 2)?.wait()?;
        group.all_to_all(mine()?)?.wait()?;
        group.send_recv(mine()?, (rank + 1) % n, (rank + n - 1) % n)?.wait()?;
        group.barrier().wait()?;
        Ok(group.traffic())
    });
    let sum = |op| traffic.iter().map(|rank| rank.calls_and_bytes(op).1).sum::<u64>();
    let (whole, n) = (4 * len as u64, n as u64);
    for (op, want) in [
        ("reduce_scatter", (n - 1) * whole),
        ("all_gather", (n - 1) * whole),
        ("broadcast", (n - 1) * whole),
        ("reduce", (n - 1) * whole),
        ("gather", whole / n * (n - 1)),
        ("scatter", whole / n * (n - 1)),
        ("all_to_all", whole * (n - 1)),
        ("send_recv", whole * n),
        ("barrier", 0),
    ] {
        assert_eq!(sum(op), want, "{op}");
        assert!(traffic.iter().all(|rank| rank.calls_and_bytes(op).0 == 1), "{op} was called once");
    }
    let all: u64 = traffic.iter().map(|rank| rank.bytes()).sum();
    assert_eq!(all, 5 * (n - 1) * whole + 2 * (whole / n * (n - 1)) + n * whole);
}
