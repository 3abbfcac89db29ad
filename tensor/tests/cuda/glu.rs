//! Gated linear units and their gradients.

use ferrotron_tensor::ops::glu::{GluKind, geglu, glu_backward, swiglu};
use ferrotron_tensor::{Result, Tensor};

use crate::both::{assert_close, cpu, rounding, there, views};
use crate::support::{FLOATS, gpu, random};

#[test]
fn halves_of_any_view_give_what_the_cpu_gives() -> Result<()> {
    let Some(gpu) = gpu("halves_of_any_view_give_what_the_cpu_gives")? else { return Ok(()) };
    type Forward = fn(&Tensor) -> Result<Tensor>;
    let both: [(GluKind, Forward); 2] = [(GluKind::SwiGlu, swiglu), (GluKind::GeGlu, geglu)];
    for dtype in FLOATS {
        for dims in [&[6][..], &[2, 3, 10], &[5, 2], &[6, 128], &[0, 4], &[3, 0]] {
            let own = random(&cpu()?, dtype, dims, 1)?.mul_scalar(3.0)?;
            // Two roundings, of which the first may go the other way.
            let eps = 3.0 * rounding(dtype) + 64.0 * dtype.accumulator().epsilon();
            let all = if own.numel() > 0 { views(&own)? } else { vec![own] };
            for x in all {
                for (kind, forward) in both {
                    let (what, want) = (format!("{kind:?} of {x:?}"), forward(&x)?);
                    assert_close(&what, &forward(&there(&gpu, &x)?)?, &want, eps, 9.0 * eps)?;
                    let dy = random(&cpu()?, dtype, want.dims(), 2)?;
                    let want = glu_backward(kind, x.clone(), &dy)?;
                    let got = glu_backward(kind, there(&gpu, &x)?, &there(&gpu, &dy)?)?;
                    assert_close(&format!("gradient of {what}"), &got, &want, eps, 9.0 * eps)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn the_gradient_overwrites_a_unique_x_and_only_that() -> Result<()> {
    let Some(gpu) = gpu("the_gradient_overwrites_a_unique_x_and_only_that")? else {
        return Ok(());
    };
    let x = random(&gpu, FLOATS[1], &[2, 6], 1)?;
    let dy = random(&gpu, FLOATS[1], &[2, 3], 2)?;
    let (id, before) = (x.buffer_id(), x.to_f64()?);
    let dx = glu_backward(GluKind::SwiGlu, x.clone(), &dy)?;
    assert_eq!(x.to_f64()?, before);
    let over = glu_backward(GluKind::SwiGlu, x, &dy)?;
    assert_eq!((over.buffer_id(), over.to_f64()?), (id, dx.to_f64()?));
    Ok(())
}
