//! The passes of optimizers, for every pair of types of weights and gradients.

use ferrotron_tensor::ops::adafactor::{
    Adafactor, MatrixBatch, NormalizeBy, SecondMomentDecay, SquareSums, adafactor, matrix_factors,
    square_sums, update_mean_squares, update_means, update_sq_norm, vector_factors,
};
use ferrotron_tensor::ops::adamw::{AdamW, adamw};
use ferrotron_tensor::ops::lion::{Lion, lion};
use ferrotron_tensor::ops::round::{Stochastic, round, widen};
use ferrotron_tensor::ops::rounded::Rounded;
use ferrotron_tensor::ops::sgd::{Nesterov, Sgd, sgd};
use ferrotron_tensor::ops::sq_norm::{add_sq_norm, all_finite};
use ferrotron_tensor::ops::step::{DeviceStepParams, StepParams};
use ferrotron_tensor::{
    DType, Device, ErrorKind, MemoryKind, RandomKey, Result, ShardSpec, Tensor,
};

use crate::support::{FLOATS, assert_like_cpu, gpu, random};

use DType::{BF16, F16, F32, F64};

/// Types of weights, of their gradients, and of rounded copies of the weights.
const TYPES: [(DType, DType, Option<DType>); 12] = [
    (F64, F64, None),
    (F32, F32, None),
    (F32, BF16, None),
    (F32, F16, None),
    (BF16, BF16, None),
    (BF16, F32, None),
    (F16, F16, None),
    (F16, F32, None),
    (F32, F32, Some(BF16)),
    (F32, BF16, Some(BF16)),
    (F32, F32, Some(F16)),
    (F32, F16, Some(F16)),
];

fn step(device: &Device) -> Result<DeviceStepParams> {
    DeviceStepParams::new(device, &StepParams { update: 3, lr: 0.03, grad_scale: 0.4 })
}

/// Asserts that all tensors that `f` makes are those of the CPU, but for a few units in the last place.
fn check(what: &str, gpu: &Device, f: impl Fn(&Device) -> Result<Vec<Tensor>>) -> Result<()> {
    let dtypes: Vec<DType> = f(&Device::cpu(1)?)?.iter().map(Tensor::dtype).collect();
    for (index, dtype) in dtypes.into_iter().enumerate() {
        let rounding = if dtype == dtype.accumulator() { 0.0 } else { dtype.epsilon() };
        let tolerance = 8.0 * dtype.accumulator().epsilon() + rounding;
        let what = format!("{what}, result {index}");
        assert_like_cpu(&what, gpu, tolerance, |device| Ok(f(device)?.swap_remove(index)))?;
    }
    Ok(())
}

#[test]
fn weights_are_updated_as_on_the_cpu() -> Result<()> {
    let Some(gpu) = gpu("weights_are_updated_as_on_the_cpu")? else { return Ok(()) };
    for (weights, grads, copy) in TYPES {
        for n in [0, 1, 5000] {
            let what = format!("{weights} weights, {grads} gradients, copies {copy:?}, {n}");
            let operands = |device: &Device| -> Result<_> {
                let kept = weights.accumulator();
                let (w, g) = (random(device, weights, &[n], 1)?, random(device, grads, &[n], 2)?);
                let (m, v) = (random(device, kept, &[n], 3)?, random(device, kept, &[n], 4)?);
                let copy = copy.map(|dtype| Tensor::zeros(device, dtype, &[n])).transpose()?;
                Ok((w, g, m, v.square()?, copy))
            };
            check(&format!("adamw, {what}"), &gpu, |device| {
                let (mut w, g, mut m, mut v, mut copy) = operands(device)?;
                let config = AdamW { weight_decay: 0.1, ..AdamW::default() };
                adamw(
                    &config,
                    &step(device)?,
                    &mut w,
                    &g,
                    &mut m,
                    &mut v,
                    copy.as_mut().map(Rounded::nearest),
                )?;
                Ok([w, m, v].into_iter().chain(copy).collect())
            })?;
            if copy.is_some() {
                continue;
            }
            check(&format!("lion, {what}"), &gpu, |device| {
                let (mut w, g, mut m, ..) = operands(device)?;
                let config = Lion { weight_decay: 0.1, ..Lion::default() };
                lion(&config, &step(device)?.scale_lr(0.5)?, &mut w, &g, &mut m, None)?;
                Ok(vec![w, m])
            })?;
            for (momentum, nesterov) in
                [(0.0, Nesterov::Off), (0.9, Nesterov::Off), (0.9, Nesterov::On)]
            {
                check(&format!("sgd, {what}"), &gpu, |device| {
                    let (mut w, g, m, ..) = operands(device)?;
                    let none = Tensor::zeros(device, m.dtype(), &[0])?;
                    let mut m = if momentum == 0.0 { none } else { m };
                    let config = Sgd { momentum, weight_decay: 0.1, nesterov };
                    sgd(&config, &step(device)?, &mut w, &g, &mut m, None)?;
                    Ok(vec![w, m])
                })?;
            }
        }
    }
    Ok(())
}

#[test]
fn types_that_do_not_fit_are_refused() -> Result<()> {
    let Some(gpu) = gpu("types_that_do_not_fit_are_refused")? else { return Ok(()) };
    let zeros = |dtype| Tensor::zeros(&gpu, dtype, &[4]);
    let step = step(&gpu)?;
    for (weights, grads, moments, copy) in [
        (F32, F64, F32, None),
        (BF16, F16, F32, None),
        (BF16, BF16, BF16, None),
        (F32, BF16, F32, Some(F16)),
        (BF16, BF16, F32, Some(BF16)),
        (F32, F32, F32, Some(F32)),
    ] {
        let copy = &mut copy.map(zeros).transpose()?;
        let (mut w, mut m, mut v) = (zeros(weights)?, zeros(moments)?, zeros(moments)?);
        let config = AdamW::default();
        let result = adamw(
            &config,
            &step,
            &mut w,
            &zeros(grads)?,
            &mut m,
            &mut v,
            copy.as_mut().map(Rounded::nearest),
        );
        assert_eq!(result.unwrap_err().kind(), ErrorKind::DType, "{weights} {grads} {copy:?}");
    }
    // Numbers of the host are not where a kernel of the GPU reads them.
    let (mut w, mut m) = (zeros(F32)?, zeros(F32)?);
    let host = self::step(&Device::cpu(1)?)?;
    let config = Sgd { momentum: 0.9, weight_decay: 0.0, nesterov: Nesterov::Off };
    let error = sgd(&config, &host, &mut w, &zeros(F32)?, &mut m, None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Device);
    Ok(())
}

#[test]
fn numbers_are_rounded_and_widened() -> Result<()> {
    let Some(gpu) = gpu("numbers_are_rounded_and_widened")? else { return Ok(()) };
    let place =
        ShardSpec::new(&[6, 40, 33], &[&[(1, 3)], &[(2, 1), (4, 20)], &[(3, 9), (20, 13)]])?;
    let n = place.dims().iter().product();
    let key = RandomKey::new(7, 3, "weight");
    for dtype in FLOATS {
        let wide = |device: &Device| {
            random(device, dtype.accumulator(), &[n], 1)?.mul_scalar(1.003)?.exp()
        };
        // Of an optimizer's step, whose number is not the key's.
        let numbers = StepParams { update: 4, lr: 0.1, grad_scale: 1.0 };
        let of_steps = std::cell::RefCell::new(Vec::new());
        for from in ["the key", "a step"] {
            assert_like_cpu(&format!("round, number of {from}"), &gpu, 0.0, |device| {
                let x =
                    random(&Device::cpu(1)?, dtype.accumulator(), &[n], 1)?.mul_scalar(1.003)?;
                let x =
                    Tensor::from_slice(device, &x.to_f64()?, &[n])?.cast(dtype.accumulator())?;
                let mut target = Tensor::zeros(device, dtype, &[n])?;
                let step = DeviceStepParams::new(device, &numbers)?;
                let (key, step) = match from {
                    "a step" => (&key, Some(&step)),
                    _ => (&RandomKey::new(7, 4, "weight"), None),
                };
                round(&mut target, &x, Some(Stochastic { key, place: &place, step }))?;
                of_steps.borrow_mut().push(target.to_f64()?);
                Ok(target)
            })?;
        }
        assert!(of_steps.borrow().windows(2).all(|pair| pair[0] == pair[1]), "{dtype}");
        for stochastic in [None, Some(Stochastic { key: &key, place: &place, step: None })] {
            // What is rounded is the CPU's: a last place of the exponential would decide where the bits fall.
            let source = wide(&Device::cpu(1)?)?.to_f64()?;
            assert_like_cpu("round", &gpu, 0.0, |device| {
                let source =
                    Tensor::from_slice(device, &source, &[n])?.cast(dtype.accumulator())?;
                let mut target = Tensor::zeros(device, dtype, &[n])?;
                round(&mut target, &source, stochastic)?;
                Ok(target)
            })?;
        }
        assert_like_cpu("widen", &gpu, 0.0, |device| {
            let mut target = Tensor::zeros(device, dtype.accumulator(), &[n])?;
            widen(&mut target, &random(device, dtype, &[n], 2)?)?;
            Ok(target)
        })?;
    }
    Ok(())
}

#[test]
fn squares_are_summed_and_what_is_not_finite_is_found() -> Result<()> {
    let Some(gpu) = gpu("squares_are_summed_and_what_is_not_finite_is_found")? else {
        return Ok(());
    };
    for dtype in FLOATS {
        for n in [0, 1, 4097, 100_000] {
            // Squares are multiples of 2^-12: their sum is exact in any order.
            assert_like_cpu("sq_norm", &gpu, 0.0, |device| {
                let mut total = Tensor::full(device, F64, &[1], 0.5)?;
                add_sq_norm(&mut total, &random(device, dtype, &[n], 1)?)?;
                add_sq_norm(&mut total, &random(device, dtype, &[n], 2)?)?;
                Ok(total)
            })?;
            let mut numbers = vec![1.0_f32; n];
            let of = |numbers: &[f32]| Tensor::from_slice(&gpu, numbers, &[n])?.cast(dtype);
            assert!(all_finite(&of(&numbers)?)?);
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                if n > 0 {
                    numbers[n - 1] = bad;
                    assert!(!all_finite(&of(&numbers)?)?, "{dtype} {n} {bad}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn adafactor_is_that_of_the_cpu() -> Result<()> {
    let Some(gpu) = gpu("adafactor_is_that_of_the_cpu")? else { return Ok(()) };
    let types = TYPES.iter().filter(|(.., copy)| copy.is_none());
    for &(weights, grads, _) in types {
        for dims in [&[90, 70][..], &[2, 5, 300], &[40]] {
            for mean_of in [NormalizeBy::Rows, NormalizeBy::Columns] {
                let what = format!("adafactor, {weights} weights, {grads} gradients, {dims:?}");
                check(&what, &gpu, |device| whole_step(device, weights, grads, dims, mean_of))?;
            }
        }
    }
    Ok(())
}

/// The weights, the means of updates, and of squares, after one step.
fn whole_step(
    device: &Device,
    weights: DType,
    grads: DType,
    dims: &[usize],
    mean_of: NormalizeBy,
) -> Result<Vec<Tensor>> {
    let (shape, kept) = (MatrixBatch::from_dims(dims), weights.accumulator());
    let (n, is_vector) = (shape.numel(), dims.len() < 2);
    let (step, decay) = (step(device)?, SecondMomentDecay { rate: 0.8, eps1: 1e-3 });
    let g = random(device, grads, &[n], 2)?;
    let ones = |n| Tensor::full(device, kept, &[n], 1.0);
    let (factors, means) = if is_vector {
        let mut means = ones(n)?;
        update_mean_squares(&decay, &step, &mut means, &g)?;
        (vector_factors(&means)?, vec![means])
    } else {
        let (rows, columns) = (shape.count * shape.rows, shape.count * shape.columns);
        let sums = |n| Tensor::zeros(device, F64, &[n]);
        let (mut row_sums, mut column_sums) = (sums(rows)?, sums(columns)?);
        square_sums(&shape, &g, &mut row_sums, &mut column_sums)?;
        let (mut rows, mut columns) = (ones(rows)?, ones(columns)?);
        update_means(&decay, &step, &mut rows, &row_sums, shape.columns)?;
        update_means(&decay, &step, &mut columns, &column_sums, shape.rows)?;
        (matrix_factors(&shape, &rows, &columns, mean_of)?, vec![rows, columns])
    };
    let mut w = random(device, weights, &[n], 1)?;
    let mut of_weights = Tensor::zeros(device, F64, &[1])?;
    add_sq_norm(&mut of_weights, &w)?;
    let update = update_sq_norm(&step, &g, &factors)?;
    let sums = SquareSums { weights: Some(of_weights), update, numel: n };
    let config = Adafactor { eps2: 1e-3, clip_threshold: 0.1, beta1: 0.9, weight_decay: 0.1 };
    let mut mean = random(device, kept, &[n], 3)?;
    adafactor(&config, &step, &mut w, &g, (&factors, &sums), Some(&mut mean), None)?;
    adafactor(&config, &step, &mut w, &g, (&factors, &sums), None, None)?;
    Ok([w, mean, sums.update].into_iter().chain(means).collect())
}

#[test]
fn moments_may_be_in_memory_of_the_host() -> Result<()> {
    let Some(gpu) = gpu("moments_may_be_in_memory_of_the_host")? else { return Ok(()) };
    check("adamw with moments of the host", &gpu, |device| {
        let kept = |seed| -> Result<Tensor> {
            let mut kept = Tensor::empty_in(MemoryKind::Host, device, F32, &[3000])?;
            kept.copy_from(&random(device, F32, &[3000], seed)?.square()?)?;
            Ok(kept)
        };
        let (mut master, mut m, mut v) = (kept(1)?, kept(2)?, kept(3)?);
        let mut weights = Tensor::zeros(device, BF16, &[3000])?;
        let (config, step) = (AdamW::default(), step(device)?);
        let grads = random(device, F32, &[3000], 4)?;
        adamw(
            &config,
            &step,
            &mut master,
            &grads,
            &mut m,
            &mut v,
            Some(Rounded::nearest(&mut weights)),
        )?;
        Ok(vec![master, m, v, weights])
    })
}
