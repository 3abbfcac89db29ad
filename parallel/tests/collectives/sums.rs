//! The exact bits of reductions.

use ferrotron_parallel::collective::{Reduction, partition_range};
use ferrotron_tensor::{DType, bf16, f16};

use crate::values::make;
use crate::worlds::{Backend, all};

/// Numbers whose sum depends on the order of its terms.
fn rough(rank: usize, index: usize) -> f64 {
    let bits = (rank as u64 * 7919 + index as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    ((bits >> 11) as f64 / (1_u64 << 53) as f64 - 0.5) * 10_f64.powi((bits % 9) as i32 - 4)
}

pub fn floats_sum_to_the_same_bits_everywhere_and_again(backend: Backend) {
    for n in [2, 3, 4, 7] {
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            let run = || {
                backend.run(n, |world| {
                    let group = world.group("all", &all(&world))?;
                    let x = make(dtype, &[300_007], |i| rough(world.rank(), i))?;
                    group.all_reduce(x, Reduction::Sum)?.wait()?.to_f64()
                })
            };
            let (first, second) = (run(), run());
            for (rank, got) in first.iter().chain(&second).enumerate() {
                let same = got.iter().zip(&first[0]).position(|(a, b)| a.to_bits() != b.to_bits());
                assert_eq!(same, None, "{n} ranks, {dtype}, rank {}", rank % n);
            }
        }
    }
}

pub fn wide_floats_are_added_round_the_ring(backend: Backend) {
    // Parts go straight to their owners, and round the ring if they have more than 64 KiB.
    for (n, len) in [(2, 5003), (3, 5003), (5, 5003), (3, 90_001), (5, 90_001)] {
        for dtype in [DType::F64, DType::F32] {
            let ranks = backend.run(n, |world| {
                let group = world.group("all", &all(&world))?;
                let x = make(dtype, &[len], |i| rough(world.rank(), i))?;
                group.all_reduce(x, Reduction::Sum)?.wait()?.to_f64()
            });
            assert_eq!(ranks[0].len(), len);
            for (i, got) in ranks[0].iter().enumerate() {
                // ((x[c+1] + x[c+2]) + ...) + x[c] in part c: the same bits whatever carries them.
                let c = (0..n).find(|&c| partition_range(len, n, c).contains(&i)).unwrap();
                let x = (1..=n).map(|steps| rough((c + steps) % n, i));
                let want = match dtype {
                    DType::F64 => x.reduce(|a, b| a + b).unwrap(),
                    _ => f64::from(x.map(|x| x as f32).reduce(|a, b| a + b).unwrap()),
                };
                assert_eq!(
                    got.to_bits(),
                    want.to_bits(),
                    "{n} ranks, {dtype} at {i}: {got} {want}"
                );
            }
        }
    }
}

pub fn narrow_floats_are_rounded_once(backend: Backend) {
    let (n, len) = (6, 5003);
    for dtype in [DType::BF16, DType::F16] {
        let ranks = backend.run(n, |world| {
            let group = world.group("all", &all(&world))?;
            let mine = || make(dtype, &[len], |i| rough(world.rank(), i));
            let sum = group.all_reduce(mine()?, Reduction::Sum)?.wait()?.to_f64()?;
            let part = group.reduce_scatter(mine()?, Reduction::Sum)?.wait()?.to_f64()?;
            let root = group.reduce(mine()?, 4, Reduction::Sum)?.wait()?.to_f64()?;
            assert_eq!(part, sum[group.local_range(len)]);
            if world.rank() == 4 {
                assert_eq!(root, sum);
            } else {
                assert_eq!(root, mine()?.to_f64()?);
            }
            Ok(sum)
        });
        for (i, got) in ranks[0].iter().enumerate() {
            // In f32, in the order of ranks.
            let x = (0..n).map(|rank| rough(rank, i));
            let want = match dtype {
                DType::BF16 => {
                    let sum = x.map(|x| bf16::from_f64(x).to_f32()).fold(0.0, |a, b| a + b);
                    bf16::from_f32(sum).to_f64()
                }
                _ => {
                    let sum = x.map(|x| f16::from_f64(x).to_f32()).fold(0.0, |a, b| a + b);
                    f16::from_f32(sum).to_f64()
                }
            };
            assert_eq!(*got, want, "{dtype} at {i}");
        }
    }
}

pub fn max_keeps_nan(backend: Backend) {
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        backend.run(3, |world| {
            let group = world.group("all", &all(&world))?;
            let x = make(dtype, &[7], |i| {
                if i == 3 && world.rank() == 1 { f64::NAN } else { -(i as f64) }
            })?;
            let y = group.all_reduce(x, Reduction::Max)?.wait()?.to_f64()?;
            for (i, y) in y.into_iter().enumerate() {
                assert!(if i == 3 { y.is_nan() } else { y == -(i as f64) }, "{dtype} at {i}: {y}");
            }
            Ok(())
        });
    }
}
