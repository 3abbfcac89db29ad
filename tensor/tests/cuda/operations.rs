//! Operations that have no gradient, or sizes that the op table of autograd does not have: many blocks of a grid.

use ferrotron_tensor::ops::cast::cast;
use ferrotron_tensor::ops::concat::{concat, pad_narrow};
use ferrotron_tensor::ops::dropout::dropout;
use ferrotron_tensor::ops::pointwise::{Comparison, add_assign, compare, where_cond};
use ferrotron_tensor::ops::random::{normal, uniform};
use ferrotron_tensor::ops::reduce::{KeepDims, amax, argmax, log_sum_exp, mean, sum};
use ferrotron_tensor::ops::zero_bitmap::{compress, expand};
use ferrotron_tensor::{DType, Device, RandomKey, Result, ShardSpec, Tensor};

use crate::support::{FLOATS, assert_like_cpu, gpu, random};

#[test]
fn reductions_of_many_blocks_give_what_the_cpu_gives() -> Result<()> {
    let Some(gpu) = gpu("reductions_of_many_blocks_give_what_the_cpu_gives")? else {
        return Ok(());
    };
    for (dims, over) in [
        (&[3, 9000][..], &[1][..]),
        (&[9001], &[0]),
        (&[300, 130], &[0]),
        (&[2, 70, 3], &[1]),
        (&[4, 5, 6], &[0, 2]),
        (&[0, 4], &[0]),
        (&[4, 0], &[0]),
    ] {
        let reduced: usize = over.iter().map(|&d| dims[d as usize]).product();
        for dtype in [DType::F32, DType::BF16] {
            // Sums of n numbers up to 2 in another order, against the largest, and one rounding.
            let sums = DType::F32.epsilon() * (reduced as f64 / 32.0 + 40.0);
            let tolerance = dtype.epsilon() + sums;
            let x = |device: &Device| random(device, dtype, dims, 1);
            type Reduction = fn(&Tensor, &[isize], KeepDims) -> Result<Tensor>;
            let all: [(&str, Reduction, f64); 4] = [
                ("sum", sum, tolerance),
                ("mean", mean, tolerance),
                ("log_sum_exp", log_sum_exp, tolerance),
                ("amax", amax, 0.0),
            ];
            for (name, f, tolerance) in all {
                if reduced == 0 && name == "amax" {
                    assert_eq!(
                        f(&x(&gpu)?, over, KeepDims::Keep).unwrap_err().to_string(),
                        f(&x(&Device::cpu(1)?)?, over, KeepDims::Keep).unwrap_err().to_string()
                    );
                    continue;
                }
                for keep in [KeepDims::Keep, KeepDims::Drop] {
                    assert_like_cpu(name, &gpu, tolerance, |device| f(&x(device)?, over, keep))?;
                }
            }
            if let [dim] = over
                && reduced > 0
            {
                assert_like_cpu("argmax", &gpu, 0.0, |device| {
                    argmax(&x(device)?, *dim, KeepDims::Drop)
                })?;
            }
        }
    }
    Ok(())
}

#[test]
fn copies_of_any_views_have_their_elements() -> Result<()> {
    let Some(gpu) = gpu("copies_of_any_views_have_their_elements")? else { return Ok(()) };
    // Rows that are, or are not, of whole words of 2, 4 and 8 bytes, and begin at them.
    for (dims, start, len) in [
        ([3, 5, 16], 0, 16),
        ([3, 5, 16], 8, 8),
        ([3, 5, 16], 2, 6),
        ([3, 5, 16], 1, 12),
        ([3, 5, 17], 0, 16),
        ([3, 1, 16], 4, 8),
        ([3, 5, 16], 4, 1),
        ([3, 5, 16], 4, 0),
    ] {
        for dtype in [DType::U8, DType::BF16, DType::F32, DType::I64] {
            let view = |device: &Device| {
                cast(&random(device, DType::F64, &dims, 1)?.abs()?.mul_scalar(64.0)?, dtype)?
                    .permute(&[1, 0, 2])?
                    .narrow(2, start, len)
            };
            assert_like_cpu("contiguous", &gpu, 0.0, |device| view(device)?.contiguous())?;
            assert_like_cpu("write", &gpu, 0.0, |device| {
                let x = view(device)?;
                let mut wide = x.dims().to_vec();
                wide[2] = 24;
                let mut y = Tensor::zeros(device, dtype, &wide)?;
                y.narrow_mut(2, 3 * (start % 2) + 4, len, |part| part.copy_from(&x))?;
                Ok(y)
            })?;
        }
    }
    Ok(())
}

#[test]
fn comparisons_and_choices_take_every_dtype() -> Result<()> {
    let Some(gpu) = gpu("comparisons_and_choices_take_every_dtype")? else { return Ok(()) };
    let all = [
        Comparison::Eq,
        Comparison::Ne,
        Comparison::Lt,
        Comparison::Le,
        Comparison::Gt,
        Comparison::Ge,
    ];
    for (i, dtype) in DType::ALL.into_iter().enumerate() {
        let few = |device: &Device, dims: &[usize], seed| {
            let x = random(device, DType::F64, dims, seed)?;
            cast(&cast(&x.add_scalar(2.0)?, DType::U8)?, dtype)
        };
        for comparison in [all[i % 6], all[(i + 1) % 6]] {
            assert_like_cpu(&format!("{comparison:?}"), &gpu, 0.0, |device| {
                let (a, b) = (few(device, &[5, 1], 1)?, few(device, &[7, 3, 5], 2)?);
                compare(comparison, &a, &b.transpose(1, 2)?)
            })?;
        }
        assert_like_cpu("select", &gpu, 0.0, |device| {
            let (a, b) = (few(device, &[5, 1], 1)?, few(device, &[7, 5, 3], 2)?);
            where_cond(&compare(Comparison::Gt, &a, &b)?, &a, &b)
        })?;
        assert_like_cpu("concat", &gpu, 0.0, |device| {
            let (a, b) = (few(device, &[4, 2], 1)?, few(device, &[4, 3], 2)?);
            concat(&[&a, &b, &a.narrow(1, 1, 0)?, &a.narrow(1, 0, 1)?], -1)
        })?;
        assert_like_cpu("pad_narrow", &gpu, 0.0, |device| {
            pad_narrow(&few(device, &[4, 2], 1)?.transpose(0, 1)?, 0, 3, 7)
        })?;
    }
    Ok(())
}

#[test]
fn casts_between_any_two_dtypes_give_what_the_cpu_gives() -> Result<()> {
    let Some(gpu) = gpu("casts_between_any_two_dtypes_give_what_the_cpu_gives")? else {
        return Ok(());
    };
    for from in DType::ALL {
        for to in DType::ALL {
            assert_like_cpu(&format!("cast from {from}"), &gpu, 0.0, |device| {
                let x = random(device, DType::F64, &[7, 3], 1)?.mul_scalar(100.0)?;
                cast(&cast(&x, from)?.transpose(0, 1)?, to)
            })?;
        }
    }
    Ok(())
}

#[test]
fn random_numbers_are_those_of_the_cpu() -> Result<()> {
    let Some(gpu) = gpu("random_numbers_are_those_of_the_cpu")? else { return Ok(()) };
    let places = [
        ShardSpec::unsharded(&[]),
        ShardSpec::unsharded(&[5, 33]),
        ShardSpec::new(&[6, 5, 33], &[&[(0, 6)], &[(2, 1), (4, 1)], &[(3, 9), (20, 13)]])?,
    ];
    for place in &places {
        for dtype in FLOATS {
            // Steps that change back and forth: each kernel sees its own.
            for step in [3, 4, 3] {
                let key = RandomKey::new(7, step, "weight");
                assert_like_cpu("uniform", &gpu, 0.0, |device| {
                    uniform(device, dtype, place, &key, -3.0, 1.0)
                })?;
                assert_like_cpu("normal", &gpu, 0.0, |device| {
                    normal(device, dtype, place, &key, 0.5, 2.0)
                })?;
                assert_like_cpu("dropout", &gpu, 0.0, |device| {
                    dropout(&random(device, dtype, place.dims(), 1)?, 0.4, &key, place)
                })?;
            }
        }
    }
    Ok(())
}

#[test]
fn what_is_written_through_a_view_stays_within_it() -> Result<()> {
    let Some(gpu) = gpu("what_is_written_through_a_view_stays_within_it")? else { return Ok(()) };
    for dtype in FLOATS {
        assert_like_cpu("add_assign", &gpu, 0.0, |device| {
            let mut x = random(device, dtype, &[5, 6], 1)?;
            let y = random(device, dtype, &[3, 5], 2)?.transpose(0, 1)?;
            x.narrow_mut(1, 2, 3, |part| add_assign(part, &y))?;
            Ok(x)
        })?;
    }
    let ones = Tensor::full(&gpu, DType::F32, &[4, 4], 1.0)?;
    let mut stretched = Tensor::zeros(&gpu, DType::F32, &[1, 4])?.broadcast_to(&[4, 4])?;
    let error = add_assign(&mut stretched, &ones).unwrap_err().to_string();
    assert_eq!(error, "add_assign: the elements of the broadcast view [4, 4] overlap");
    let mut shared = ones.clone();
    let error = add_assign(&mut shared, &stretched).unwrap_err().to_string();
    assert!(error.contains("has other holders"), "{error}");
    Ok(())
}

#[test]
fn vectors_of_zeros_are_stored_as_on_the_cpu() -> Result<()> {
    let Some(gpu) = gpu("vectors_of_zeros_are_stored_as_on_the_cpu")? else { return Ok(()) };
    for dtype in FLOATS {
        for numel in [0, 1, 65, 5000, 12_288] {
            // Half of them; some are -0.
            let x = |device: &Device| random(device, dtype, &[numel], 1)?.relu()?.neg();
            let there = compress(&x(&gpu)?)?;
            assert_eq!(there.is_some(), compress(&x(&Device::cpu(1)?)?)?.is_some());
            if let Some(packed) = there {
                assert_like_cpu("expand", &gpu, 0.0, |device| {
                    expand(&compress(&x(device)?.abs()?)?.unwrap(), dtype, numel)
                })?;
                let message = expand(&packed, dtype, 64 * numel).unwrap_err().to_string();
                assert!(message.starts_with("zero_bitmap: "), "{message}");
            }
        }
    }
    Ok(())
}
