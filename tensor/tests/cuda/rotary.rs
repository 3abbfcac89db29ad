//! Rotary position embedding, forward and backward.

use ferrotron_tensor::ops::rotary::{Direction, RotaryTable, rotary};
use ferrotron_tensor::{Category, DType, Device, Result};

use crate::both::{assert_close, cpu, rounding, there, views};
use crate::support::{FLOATS, gpu, numbers, random};

#[test]
fn heads_turn_as_on_the_cpu() -> Result<()> {
    let Some(gpu) = gpu("heads_turn_as_on_the_cpu")? else { return Ok(()) };
    for dtype in FLOATS {
        // (B, T, H, D), rotated heads, rotated elements of each
        for (dims, heads, turned) in [
            ([1, 1, 1, 2], 1, 2),
            ([2, 5, 6, 8], 4, 8),
            ([2, 3, 2, 10], 2, 6),
            ([1, 7, 3, 64], 0, 64),
            ([2, 0, 3, 4], 3, 4),
        ] {
            let x = random(&cpu()?, dtype, &dims, 1)?;
            let all = if x.numel() > 0 { views(&x)? } else { vec![x] };
            for x in all {
                for direction in [Direction::Forward, Direction::Backward] {
                    let table = |device: &Device| {
                        RotaryTable::new(device, dtype, 0..dims[1] + 3, turned, 10_000.0)?
                            .narrow(3, dims[1])
                    };
                    let want = rotary(&x, &table(x.device())?, heads, direction)?;
                    let got = rotary(&there(&gpu, &x)?, &table(&gpu)?, heads, direction)?;
                    // Two products of numbers up to 2 and their sum, fused or not.
                    let eps = dtype.accumulator().epsilon();
                    assert_close("rotary", &got, &want, rounding(dtype) + eps, 4.0 * eps)?;
                }
            }
        }
    }
    let x = random(&gpu, DType::BF16, &[1, 2, 1, 4], 1)?;
    let table = RotaryTable::new(&gpu, DType::F64, 0..2, 4, 10_000.0)?;
    let error = rotary(&x, &table, 1, Direction::Forward).unwrap_err().to_string();
    assert_eq!(error, "rotary: the table is f64, x is bf16: it needs a table of f32");
    Ok(())
}

/// Tables from position 0 and up to a million, whose fastest pair turns by as many radians, and with scaled frequencies.
#[test]
fn tables_are_computed_on_the_gpu_as_exactly_as_on_the_cpu() -> Result<()> {
    let test = "tables_are_computed_on_the_gpu_as_exactly_as_on_the_cpu";
    let Some(gpu) = gpu(test)? else { return Ok(()) };
    let positions: Vec<usize> = (0..40).chain(8190..8200).chain(999_990..1_000_000).collect();
    let plain = RotaryTable::frequencies(32, 500_000.0)?;
    let scaled = plain.iter().enumerate().map(|(pair, f)| if pair < 8 { *f } else { f / 8.0 });
    for frequencies in [plain.clone(), scaled.collect()] {
        for dtype in FLOATS {
            let table = |device: &Device| {
                let positions = positions.iter().copied();
                RotaryTable::with_frequencies(device, dtype, positions, &frequencies)
            };
            let launches = || gpu.gpu().map_or(0, |gpu| gpu.launches());
            let before = launches();
            let got = table(&gpu)?;
            // Angles, and the cosines and sines of these with a cast each if the table is not in f64.
            let casts = if dtype == DType::F64 { 0 } else { 2 };
            assert_eq!(launches() - before, 3 + casts, "{dtype}");
            let bytes = 2 * positions.len() * frequencies.len() * dtype.accumulator().size();
            assert_eq!(gpu.memory().bytes(Category::Tables), bytes);
            let want =
                positions.iter().flat_map(|&t| frequencies.iter().map(move |f| t as f64 * f));
            let want: Vec<f64> = want.collect();
            // One unit of 1 in the last place if it is rounded to f32, else the errors of libraries.
            let tolerance = match dtype.accumulator() {
                DType::F64 => 3.0 * f64::EPSILON,
                _ => f64::from(f32::EPSILON),
            };
            for (got, function) in got.tensors().into_iter().zip([f64::cos, f64::sin]) {
                assert_eq!(got.device(), &gpu);
                for (i, (got, angle)) in numbers(got)?.iter().zip(&want).enumerate() {
                    let off = (got - function(*angle)).abs();
                    assert!(off <= tolerance, "{dtype} at {i}: {off:e} off of {angle}");
                }
            }
        }
    }
    Ok(())
}
