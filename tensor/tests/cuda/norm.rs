//! LayerNorm and RMSNorm and their gradients.

use ferrotron_tensor::ops::layer_norm::{layer_norm, layer_norm_backward};
use ferrotron_tensor::ops::rms_norm::{rms_norm, rms_norm_backward, rms_norm_backward_input};
use ferrotron_tensor::{DType, Device, Result, Tensor};

use crate::both::{assert_close, cpu, rounding, there, views};
use crate::support::{FLOATS, gpu, random};

const EPS: f64 = 1e-5;

/// Operands of a norm on the CPU.
struct Operands {
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    dy: Tensor,
}

impl Operands {
    fn new(dtype: DType, dims: &[usize]) -> Result<Operands> {
        let (cpu, width) = (cpu()?, &dims[dims.len() - 1..]);
        let of = |dims: &[usize], seed| random(&cpu, dtype, dims, seed);
        Ok(Operands {
            x: of(dims, 1)?,
            weight: of(width, 2)?,
            bias: of(width, 3)?,
            dy: of(dims, 4)?,
        })
    }

    fn on(&self, device: &Device) -> Result<Operands> {
        let there = |x| there(device, x);
        let (x, weight) = (there(&self.x)?, there(&self.weight)?);
        Ok(Operands { x, weight, bias: there(&self.bias)?, dy: there(&self.dy)? })
    }
}

#[test]
fn norms_give_what_the_cpu_gives() -> Result<()> {
    let Some(gpu) = gpu("norms_give_what_the_cpu_gives")? else { return Ok(()) };
    for dtype in FLOATS {
        for dims in [&[1, 1][..], &[5, 7], &[2, 3, 33], &[70, 64], &[2, 1031], &[33], &[0, 5]] {
            let own = Operands::new(dtype, dims)?;
            let x_views = if own.x.numel() > 0 { views(&own.x)? } else { vec![own.x.clone()] };
            for (i, x) in x_views.into_iter().enumerate() {
                let dy = if i > 0 { views(&own.dy)?[i].clone() } else { own.dy.clone() };
                let own = Operands { x, dy, ..Operands::new(dtype, dims)? };
                check(&own, &own.on(&gpu)?)?;
            }
        }
    }
    Ok(())
}

/// Compares the operations on the operands here and there.
fn check(here: &Operands, gpu: &Operands) -> Result<()> {
    let (dims, dtype) = (here.x.dims(), here.x.dtype());
    let width = dims[dims.len() - 1];
    let rows = here.x.numel() / width;
    // Sums of n terms in different orders differ by n / 32 + 32 roundings of a term; what is computed from them is
    // rounded once. A row of one element has deviation 0, and rstd = eps^(-1/2) multiplies all errors.
    let sums = dtype.accumulator().epsilon() * (width as f64 / 32.0 + 40.0);
    let (rounded, blown) = (rounding(dtype), if width == 1 { EPS.powf(-0.5) } else { 1.0 });
    let columns = dtype.accumulator().epsilon() * (rows as f64 + 8.0);

    for bias in [false, true] {
        let run = |o: &Operands| layer_norm(&o.x, &o.weight, bias.then_some(&o.bias), EPS);
        let ((got, got_mean, got_rstd), (want, mean, rstd)) = (run(gpu)?, run(here)?);
        assert_close("layer_norm", &got, &want, rounded + sums, 8.0 * sums * blown)?;
        assert_close("mean", &got_mean, &mean, sums, 2.0 * sums)?;
        assert_close("rstd", &got_rstd, &rstd, sums * blown, 0.0)?;
        // The gradients, from the CPU's statistics.
        let largest = rstd.to_f64()?.into_iter().fold(1.0, f64::max);
        let (near, far) = (16.0 * sums * largest * blown, columns * rows as f64);
        let (gpu_mean, gpu_rstd) = (there(gpu.x.device(), &mean)?, there(gpu.x.device(), &rstd)?);
        let got = layer_norm_backward(&gpu.dy, &gpu.x, &gpu_mean, &gpu_rstd, &gpu.weight, None)?;
        let want = layer_norm_backward(&here.dy, &here.x, &mean, &rstd, &here.weight, None)?;
        assert_close("layer_norm, dx", &got.0, &want.0, rounded + sums, near)?;
        assert_close("layer_norm, dweight", &got.1, &want.1, columns, 4.0 * far * largest)?;
        assert_close("layer_norm, dbias", &got.2, &want.2, columns, far)?;
        let before = Some(&gpu.x);
        let sum = layer_norm_backward(&gpu.dy, &gpu.x, &gpu_mean, &gpu_rstd, &gpu.weight, before)?;
        let want = got.0.add(&gpu.x)?;
        assert_close("layer_norm, dx and another gradient", &sum.0, &want, rounded + sums, sums)?;
    }

    let run = |o: &Operands| rms_norm(&o.x, &o.weight, EPS);
    let ((got, got_rstd), (want, rstd)) = (run(gpu)?, run(here)?);
    assert_close("rms_norm", &got, &want, rounded + sums, 8.0 * sums * blown)?;
    assert_close("rstd", &got_rstd, &rstd, sums * blown, 0.0)?;
    let gpu_rstd = there(gpu.x.device(), &rstd)?;
    let largest = rstd.to_f64()?.into_iter().fold(1.0, f64::max);
    let got = rms_norm_backward(&gpu.dy, &gpu.x, &gpu_rstd, &gpu.weight, None)?;
    let want = rms_norm_backward(&here.dy, &here.x, &rstd, &here.weight, None)?;
    let near = 16.0 * sums * largest * blown;
    assert_close("rms_norm, dx", &got.0, &want.0, rounded + sums, near)?;
    let far = 4.0 * columns * rows as f64 * largest;
    assert_close("rms_norm, dweight", &got.1, &want.1, columns, far)?;
    let part = rms_norm_backward_input(&gpu.dy, &gpu.x, &gpu_rstd, &gpu.weight, None)?;
    assert_close("rms_norm, dx alone", &part, &got.0, 0.0, 0.0)?;
    let before = Some(&gpu.x);
    let sum = rms_norm_backward_input(&gpu.dy, &gpu.x, &gpu_rstd, &gpu.weight, before)?;
    let want = got.0.add(&gpu.x)?;
    assert_close("rms_norm, dx and another gradient", &sum, &want, rounded + sums, sums)
}
