//! Which bits a reduction gives.

use ferrotron_parallel::collective::Reduction;
use ferrotron_tensor::{DType, bf16};

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

pub fn narrow_floats_are_rounded_once(backend: Backend) {
    let n = 6;
    let ranks = backend.run(n, |world| {
        let group = world.group("all", &all(&world))?;
        let mine = || make(DType::BF16, &[5003], |i| rough(world.rank(), i));
        let sum = group.all_reduce(mine()?, Reduction::Sum)?.wait()?.to_f64()?;
        let part = group.reduce_scatter(mine()?, Reduction::Sum)?.wait()?.to_f64()?;
        let root = group.reduce(mine()?, 4, Reduction::Sum)?.wait()?.to_f64()?;
        assert_eq!(part, sum[group.part(5003)]);
        if world.rank() == 4 {
            assert_eq!(root, sum);
        } else {
            assert_eq!(root, mine()?.to_f64()?);
        }
        Ok(sum)
    });
    for (i, got) in ranks[0].iter().enumerate() {
        // In f32, in the order of ranks.
        let sum =
            (0..n).map(|rank| bf16::from_f64(rough(rank, i)).to_f32()).fold(0.0, |a, b| a + b);
        assert_eq!(*got, bf16::from_f32(sum).to_f64(), "at {i}");
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
