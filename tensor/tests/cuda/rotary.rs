//! Rotary position embedding, forward and backward.

use ferrotron_tensor::ops::rotary::{Direction, RotaryTable, rotary};
use ferrotron_tensor::{DType, Device, Result};

use crate::both::{assert_close, cpu, rounding, there, views};
use crate::support::{FLOATS, gpu, random};

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
