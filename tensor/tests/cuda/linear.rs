//! Linear layers that do more in the pass of their product: GELU, its derivative, and the addition of a residual.

use ferrotron_tensor::ops::linear::{
    linear_gelu, linear_gelu_gradients, linear_gelu_input_gradient, linear_input_gradient,
    linear_onto,
};
use ferrotron_tensor::ops::matmul::Accum;
use ferrotron_tensor::ops::pointwise::unary;
use ferrotron_tensor::ops::table::Unary;
use ferrotron_tensor::{Device, Result};

use crate::matmul::{all_are_taken, integers, same};
use crate::support::{FLOATS, gpu};

#[test]
fn gelu_comes_with_its_linear_layer() -> Result<()> {
    let Some(device) = gpu("gelu_comes_with_its_linear_layer")? else { return Ok(()) };
    for dtype in FLOATS {
        for (rows, k, n) in [(&[2_usize, 3][..], 5, 16), (&[7], 8, 8), (&[3], 4, 12), (&[0], 4, 8)]
        {
            let on = |device: &Device, seed, dims: &[usize]| integers(device, dtype, dims, seed);
            let x = |device: &Device| on(device, 1, &[rows, &[k]].concat());
            let w = |device: &Device| on(device, 2, &[n + 1, k])?.narrow(0, 1, n);
            for bias in [false, true] {
                let b = |device: &Device| on(device, 3, &[n]);
                let what = format!("{dtype} {rows:?} {k} {n} {bias}");
                let b = |device: &Device| bias.then(|| b(device)).transpose();
                let layer =
                    |device: &Device| linear_gelu(&x(device)?, &w(device)?, b(device)?.as_ref());
                same(&what, &device, |device| Ok(layer(device)?.0))?;
                let (hidden, value) = layer(&device)?;
                let together = dtype.size() == 2 && n % 8 == 0 && rows != [0];
                let expected = value.is_some() == together || !all_are_taken() && value.is_none();
                assert!(expected, "{what}");
                let Some(value) = value else { continue };
                let (x, values) = (hidden.to_f64()?, value.to_f64()?);
                for (i, (x, got)) in x.iter().zip(values).enumerate() {
                    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
                    let want = 0.5 * x * (1.0 + inner.tanh());
                    // A GPU's own hyperbolic tangent is off by 2^-11 (PTX ISA, "tanh"), and the result is rounded.
                    let bound = 2_f64.powi(-12) * x.abs() + dtype.epsilon() * want.abs();
                    assert!((got - want).abs() <= bound, "{what} [{i}]: {got}, not {want}");
                }
            }
        }
    }
    Ok(())
}

/// Sums of integers are exact in any order; a GPU adds the residual in the pass of the product in 16 bits.
#[test]
fn a_residual_is_added_by_its_linear_layer() -> Result<()> {
    let Some(device) = gpu("a_residual_is_added_by_its_linear_layer")? else { return Ok(()) };
    for dtype in FLOATS {
        for (rows, k, n) in [(&[2_usize, 3][..], 5, 16), (&[7], 8, 3), (&[0], 4, 8), (&[4], 0, 8)] {
            let on = |device: &Device, seed, dims: &[usize]| integers(device, dtype, dims, seed);
            for bias in [false, true] {
                let what = format!("{dtype} {rows:?} {k} {n} {bias}");
                same(&what, &device, |device| {
                    let x = on(device, 1, &[rows, &[k]].concat())?;
                    let w = on(device, 2, &[n + 1, k])?.narrow(0, 1, n)?;
                    let b = bias.then(|| on(device, 3, &[n])).transpose()?;
                    let residual = on(device, 4, &[rows, &[n]].concat())?;
                    let launches = || device.gpu().map_or(0, |gpu| gpu.launches());
                    let before = launches();
                    let sum = linear_onto(&residual, &x, &w, b.as_ref())?;
                    let fuses = dtype.size() == 2 && k > 0 && rows != [0] && all_are_taken();
                    assert!(!fuses || launches() == before, "{what}: a pass of its own");
                    Ok(sum)
                })?;
            }
        }
    }
    Ok(())
}

/// dx gelu'(h) beside the two passes of a CPU, for shapes that a GPU fuses in 16 bits, and others.
#[test]
fn the_derivative_of_gelu_comes_with_the_gradient_of_inputs() -> Result<()> {
    let test = "the_derivative_of_gelu_comes_with_the_gradient_of_inputs";
    let Some(device) = gpu(test)? else { return Ok(()) };
    let launches = || device.gpu().unwrap().launches();
    for dtype in FLOATS {
        for (rows, n, k) in [(&[2_usize, 3][..], 5, 16), (&[7], 8, 8), (&[3], 4, 12), (&[0], 4, 8)]
        {
            let on = |device: &Device, seed, dims: &[usize]| integers(device, dtype, dims, seed);
            let gradient = |device: &Device| {
                let dy = on(device, 1, &[rows, &[n]].concat())?;
                let w = on(device, 2, &[n, k + 1])?.narrow(1, 0, k)?;
                let hidden = on(device, 3, &[rows, &[k]].concat())?.mul_scalar(0.25)?;
                let before = launches();
                let found = linear_gelu_input_gradient(&dy, &w, &hidden)?;
                let passes = launches() - before;
                let [value, again] = linear_gelu_gradients(&dy, &w, &hidden)?;
                assert_eq!(again.to_f64()?, found.to_f64()?, "{dtype} {rows:?} {n} {k}");
                let gelu = unary(Unary::GeluTanh, 0.0, &hidden)?;
                assert_eq!(value.to_f64()?, gelu.to_f64()?, "{dtype} {rows:?} {n} {k}");
                let mut dx = hidden.zeros_like()?;
                linear_input_gradient(&mut dx, Accum::Replace, &dy, &w)?;
                Ok((found, dx, passes))
            };
            let (want, dx, _) = gradient(&Device::cpu(1)?)?;
            let (got, _, passes) = gradient(&device)?;
            let what = format!("{dtype} {rows:?} {n} {k}");
            let together = dtype.size() == 2 && k % 8 == 0;
            if all_are_taken() && rows != [0] {
                assert_eq!(passes == 0, together, "{what}: {passes} kernels");
            }
            assert_eq!(got.dims(), want.dims(), "{what}");
            let (got, want) = (got.to_f64()?, want.to_f64()?);
            for (i, dx) in dx.to_f64()?.iter().enumerate() {
                // The derivative, at most 1.13, and the result are rounded; dx is an integer. A GPU's own hyperbolic tangent
                // is off by 2^-11 (PTX ISA, "tanh"), and for these h the derivative by at most 1.2 times as much.
                let tanh = if together { 1.2 * 2_f64.powi(-11) } else { 0.0 };
                let bound = (tanh + 4.0 * dtype.epsilon()) * dx.abs();
                let off = (got[i] - want[i]).abs();
                assert!(off <= bound, "{what} [{i}]: {}, not {}", got[i], want[i]);
            }
        }
    }
    Ok(())
}
