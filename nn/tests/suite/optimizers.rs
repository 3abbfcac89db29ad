//! Parameter groups and the optimizers over them, against loops one can read.

use ferrotron_nn::{
    Init, Optimizer, OptimizerConfig, Param, ParamAndGradBuffer, Scope, StepConfig, WeightDecay,
    clip_coefficient,
};
use ferrotron_tensor::{DType, Device, ErrorKind, Result, Tensor};

use crate::gradients::{give_gradients, values};

/// A matrix that decays, between two vectors that do not.
fn params(device: &Device, dtype: DType) -> Vec<Param> {
    let scope = Scope::new(device, dtype, 1).child("layer");
    let normal = Init::Normal { std: 0.5 };
    vec![
        scope.param("scale", &[3], Init::Ones, WeightDecay::Off),
        scope.param("weight", &[3, 2], normal, WeightDecay::On),
        scope.param("bias", &[4], normal, WeightDecay::Off),
    ]
}

/// Gradients that change from step to step.
fn set_gradients(params: &[Param], step: usize) -> Result<Vec<Vec<f64>>> {
    give_gradients(params, |k, i| (1.3 * i as f64 + 0.7 * step as f64 + k as f64).sin())
}

fn assert_close(got: &[Vec<f64>], want: &[Vec<f64>], tolerance: f64) {
    for (k, (got, want)) in got.iter().zip(want).enumerate() {
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            let allowed = tolerance * want.abs().max(1.0);
            assert!(
                (got - want).abs() <= allowed,
                "parameter {k}, element {i}: {got}, want {want}"
            );
        }
    }
}

const STEPS: usize = 6;
const LR: f64 = 0.05;
const SCALE: f64 = 0.5;
const DECAY: f64 = 0.1;

fn train(
    buffers: &ParamAndGradBuffer,
    optimizer: &mut Optimizer,
    params: &[Param],
    steps: std::ops::Range<usize>,
) -> Result<()> {
    for step in steps {
        set_gradients(params, step)?;
        optimizer.step(buffers, &StepConfig { lr: LR, grad_scale: SCALE })?;
    }
    Ok(())
}

/// Each of the steps rounds a handful of times.
fn tolerance(dtype: DType) -> f64 {
    8.0 * STEPS as f64 * dtype.epsilon()
}

#[test]
fn adamw_equals_a_loop_and_decays_only_its_group() -> Result<()> {
    for dtype in [DType::F64, DType::F32] {
        let device = Device::cpu(2)?;
        let params = params(&device, dtype);
        let (beta1, beta2, eps) = (0.9, 0.95, 1e-8);
        let mut want = values(&params)?;
        let buffers = ParamAndGradBuffer::new(&params)?;
        let config = OptimizerConfig::AdamW { beta1, beta2, eps, weight_decay: DECAY };
        let mut optimizer = Optimizer::new(config, &buffers)?;
        assert_eq!(values(&params)?, want, "moving into flats changed a value");
        train(&buffers, &mut optimizer, &params, 0..STEPS)?;
        let mut moments: Vec<Vec<(f64, f64)>> =
            want.iter().map(|w| vec![(0.0, 0.0); w.len()]).collect();
        let after = values(&params)?;
        for step in 0..STEPS {
            let gradients = set_gradients(&params, step)?;
            let correct = |beta: f64| 1.0 - beta.powi(step as i32 + 1);
            for (k, w) in want.iter_mut().enumerate() {
                for (i, w) in w.iter_mut().enumerate() {
                    let g = SCALE * gradients[k][i];
                    let (m, v) = &mut moments[k][i];
                    *m = beta1 * *m + (1.0 - beta1) * g;
                    *v = beta2 * *v + (1.0 - beta2) * g * g;
                    if k == 1 {
                        *w -= LR * DECAY * *w;
                    }
                    *w -= LR * (*m / correct(beta1)) / ((*v / correct(beta2)).sqrt() + eps);
                }
            }
        }
        assert_close(&after, &want, tolerance(dtype));
        assert_eq!(optimizer.steps(), STEPS as u64);
    }
    Ok(())
}

#[test]
fn sgd_equals_a_loop() -> Result<()> {
    for (dtype, momentum) in [(DType::F64, 0.9), (DType::F32, 0.9), (DType::F64, 0.0)] {
        let device = Device::cpu(1)?;
        let params = params(&device, dtype);
        let mut want = values(&params)?;
        let buffers = ParamAndGradBuffer::new(&params)?;
        let config = OptimizerConfig::Sgd { momentum, weight_decay: DECAY };
        let mut optimizer = Optimizer::new(config, &buffers)?;
        train(&buffers, &mut optimizer, &params, 0..STEPS)?;
        let after = values(&params)?;
        let mut velocity: Vec<Vec<f64>> = want.iter().map(|w| vec![0.0; w.len()]).collect();
        for step in 0..STEPS {
            let gradients = set_gradients(&params, step)?;
            for (k, w) in want.iter_mut().enumerate() {
                for (i, w) in w.iter_mut().enumerate() {
                    let decay = if k == 1 { DECAY } else { 0.0 };
                    velocity[k][i] =
                        momentum * velocity[k][i] + SCALE * gradients[k][i] + decay * *w;
                    *w -= LR * velocity[k][i];
                }
            }
        }
        assert_close(&after, &want, tolerance(dtype));
    }
    Ok(())
}

#[test]
fn moments_carry_over_to_the_last_bit() -> Result<()> {
    let make = || -> Result<(Vec<Param>, ParamAndGradBuffer, Optimizer)> {
        let params = params(&Device::cpu(1)?, DType::F32);
        let buffers = ParamAndGradBuffer::new(&params)?;
        let optimizer = Optimizer::new(OptimizerConfig::ADAMW, &buffers)?;
        Ok((params, buffers, optimizer))
    };
    let (first, buffers, mut optimizer) = make()?;
    train(&buffers, &mut optimizer, &first, 0..3)?;
    let (second, other_buffers, mut other) = make()?;
    for (from, to) in first.iter().zip(&second) {
        let (from, to) = (from.leaf().value()?, to.leaf());
        to.set_value(&Tensor::from_slice(to.device(), &from.to_vec::<f32>()?, from.dims())?)?;
    }
    let mut moments = Vec::new();
    optimizer.visit(|name, moment, _, value| {
        moments.push((name.to_string(), moment, value.to_vec::<f32>()?));
        Ok(())
    })?;
    assert_eq!(moments.len(), 2 * 3);
    other.visit_mut(|name, moment, _, value| {
        let saved = moments.iter().find(|saved| saved.0 == name && saved.1 == moment);
        value.as_mut_slice::<f32>()?.copy_from_slice(&saved.expect("every moment was seen").2);
        Ok(())
    })?;
    other.set_steps(optimizer.steps());
    train(&buffers, &mut optimizer, &first, 3..STEPS)?;
    train(&other_buffers, &mut other, &second, 3..STEPS)?;
    assert_eq!(values(&first)?, values(&second)?);
    Ok(())
}

#[test]
fn groups_and_norms() -> Result<()> {
    let device = Device::cpu(1)?;
    let params = params(&device, DType::F64);
    let buffers = ParamAndGradBuffer::new(&params)?;
    let names: Vec<(WeightDecay, Vec<&str>)> = buffers
        .groups()
        .iter()
        .map(|group| (group.decay, group.params.iter().map(Param::name).collect()))
        .collect();
    let vectors = vec!["layer.scale", "layer.bias"];
    // From the last parameter to the first, as backward completes them.
    assert_eq!(names, [(WeightDecay::Off, vectors), (WeightDecay::On, vec!["layer.weight"])]);
    assert_eq!(buffers.numel(), 13);
    let gradients = set_gradients(&params, 0)?;
    let want: f64 = gradients.iter().flatten().map(|g| g * g).sum();
    assert!((buffers.sq_norm()? - want).abs() <= 13.0 * f64::EPSILON * want);
    assert_eq!(clip_coefficient(4.0, 1.0), 1.0 / (4.0 + 1e-6));
    assert_eq!((clip_coefficient(0.5, 1.0), clip_coefficient(4.0, 0.0)), (1.0, 1.0));
    Ok(())
}

#[test]
fn missing_and_broken_gradients_are_named() -> Result<()> {
    let device = Device::cpu(1)?;
    let params = params(&device, DType::F32);
    let buffers = ParamAndGradBuffer::new(&params)?;
    buffers.zero_gradients();
    set_gradients(&params[..2], 0)?;
    let error = buffers.check_gradients().unwrap_err().to_string();
    let line = "backward: the loss does not depend on layer.bias; if that may happen, choose `Unused::Skip`";
    assert_eq!(error, line);
    set_gradients(&params, 0)?;
    buffers.check_gradients()?;
    assert_eq!(buffers.first_non_finite()?, None);
    let poison = |gradient: &mut Tensor| {
        gradient.as_mut_slice::<f32>()?[1] = f32::NAN;
        Ok(())
    };
    params[2].leaf().accumulate_with(|gradient, _| poison(gradient))?;
    assert_eq!(buffers.first_non_finite()?.unwrap(), "the gradient of 'layer.bias'");
    let infinite = Tensor::full(&device, DType::F32, &[3], f64::INFINITY)?;
    params[0].leaf().set_value(&infinite)?;
    assert_eq!(buffers.first_non_finite()?.unwrap(), "the value of 'layer.scale'");
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused() -> Result<()> {
    let device = Device::cpu(1)?;
    let message = |result: Result<()>| result.unwrap_err().to_string();
    let twice = [params(&device, DType::F32), params(&device, DType::F32)].concat();
    let error = message(ParamAndGradBuffer::new(&twice).map(drop));
    assert!(error.contains("two parameters are named 'layer.scale'"), "{error}");
    let mixed = [&params(&device, DType::F32)[..1], &params(&device, DType::F64)[1..]].concat();
    let error = message(ParamAndGradBuffer::new(&mixed).map(drop));
    assert!(error.contains("'layer.weight' has another dtype than 'layer.scale'"), "{error}");
    let buffers = ParamAndGradBuffer::new(&params(&device, DType::F32))?;
    let adamw =
        |beta1: f64, eps: f64| OptimizerConfig::AdamW { beta1, beta2: 0.9, eps, weight_decay: 0.0 };
    for (config, part) in [
        (adamw(1.0, 1e-8), "beta1 must be in [0, 1), got 1"),
        (adamw(0.9, f64::NAN), "eps must be at least 0, got NaN"),
        (
            OptimizerConfig::Sgd { momentum: -0.1, weight_decay: 0.0 },
            "momentum must be in [0, 1), got -0.1",
        ),
    ] {
        let error = Optimizer::new(config, &buffers).err().expect("a refusal");
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains(part), "{error}");
    }
    Ok(())
}

/// A graph, or anybody else, that still reads a weight: the step is refused as a whole.
#[test]
fn a_weight_that_is_held_is_named_and_nothing_is_updated() -> Result<()> {
    let device = Device::cpu(1)?;
    let params = params(&device, DType::F64);
    let buffers = ParamAndGradBuffer::new(&params)?;
    let mut optimizer =
        Optimizer::new(OptimizerConfig::Sgd { momentum: 0.9, weight_decay: 0.0 }, &buffers)?;
    set_gradients(&params, 0)?;
    let before = values(&params)?;
    let held = params[1].leaf().value()?; // in the second group
    let step = StepConfig { lr: LR, grad_scale: 1.0 };
    let error = optimizer.step(&buffers, &step).unwrap_err().to_string();
    assert!(error.contains("'layer.weight' cannot be written"), "{error}");
    drop(held);
    assert_eq!(values(&params)?, before);
    assert_eq!(optimizer.steps(), 0);
    optimizer.step(&buffers, &step)?;
    assert_ne!(values(&params)?, before);
    Ok(())
}
