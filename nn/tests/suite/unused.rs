//! Parameters that a step does not use: refused, or left alone with all their state.

use ferrotron_autograd::Var;
use ferrotron_nn::{
    AdafactorConfig, Bias, BufferConfig, Init, Linear, Module, MuonConfig, Optimizer,
    OptimizerConfig, Param, ParamAndGradBuffer, Rounding, Scope, StepConfig, Unused, UpdateConfig,
};
use ferrotron_tensor::{DType, Device, MemoryKind, Result, Tensor};
use std::collections::BTreeMap;

use crate::gradients::values;
use crate::heavy_ball::HeavyBall;

const STEP: StepConfig = StepConfig { lr: 0.1, grad_scale: 0.5 };

fn expert(device: &Device, dtype: DType, name: &str) -> Result<Linear> {
    let scope = Scope::new(device, dtype, 1).child(name);
    Linear::new(&scope, 3, 3, Bias::Yes, Init::Normal { std: 0.5 })
}

/// Adds the gradient of a loss that depends on `expert`.
fn learn(expert: &Linear, dtype: DType, value: f64) -> Result<()> {
    let x = Tensor::full(expert.weight().leaf().device(), DType::F64, &[2, 3], value)?;
    expert.forward(&Var::constant(x.cast(dtype)?))?.square()?.sum_all()?.backward()
}

fn optimizers() -> [OptimizerConfig; 8] {
    let adafactor = AdafactorConfig { weight_decay: 0.1, ..AdafactorConfig::default() };
    [
        OptimizerConfig::ADAMW,
        OptimizerConfig::Sgd { momentum: 0.9, weight_decay: 0.1 },
        OptimizerConfig::Adafactor(adafactor),
        OptimizerConfig::Adafactor(AdafactorConfig { beta1: 0.9, ..adafactor }),
        OptimizerConfig::NesterovSgd { momentum: 0.9, weight_decay: 0.1 },
        OptimizerConfig::Lion { beta1: 0.9, beta2: 0.99, weight_decay: 0.1 },
        OptimizerConfig::Muon(MuonConfig::default()),
        OptimizerConfig::custom(&HeavyBall { weight_decay: 0.1 }),
    ]
}

/// The optimizer state of the parameters whose names begin so.
fn state(optimizer: &Optimizer, start: &str) -> Result<BTreeMap<String, Vec<f64>>> {
    let mut all = BTreeMap::new();
    optimizer.visit(|param, moment, place, tensor| {
        if param.starts_with(start) {
            all.insert(format!("{param} {moment} {place:?}"), tensor.to_f64()?);
        }
        Ok(())
    })?;
    Ok(all)
}

#[test]
fn an_unused_parameter_is_named_and_nothing_changes() -> Result<()> {
    let device = Device::cpu(1)?;
    let experts = [expert(&device, DType::F64, "a")?, expert(&device, DType::F64, "b")?];
    let params: Vec<Param> = experts.iter().flat_map(Module::params).collect();
    let buffers = ParamAndGradBuffer::new(&params)?;
    let mut optimizer = Optimizer::new(OptimizerConfig::ADAMW, &buffers)?;
    let mut before = values(&params)?;
    for step in 0..2 {
        buffers.zero_gradients();
        learn(&experts[0], DType::F64, 1.0)?;
        // Neither the zeros that a fresh buffer holds nor the gradient of the last step.
        let by_group = |error: String| error.contains("the loss does not depend on b.");
        assert!(by_group(buffers.sq_norm().unwrap_err().to_string()));
        assert!(by_group(optimizer.step(&buffers, &STEP).unwrap_err().to_string()));
        assert_eq!((values(&params)?, optimizer.steps()), (before.clone(), step));
        learn(&experts[1], DType::F64, 1.0)?;
        optimizer.step(&buffers, &STEP)?;
        before = values(&params)?;
    }
    Ok(())
}

#[test]
fn an_unused_parameter_that_is_skipped_keeps_its_weight_and_state() -> Result<()> {
    let device = Device::cpu(1)?;
    let averaged = UpdateConfig { ema_decay: Some(0.75), ..UpdateConfig::default() };
    let host = UpdateConfig { states: MemoryKind::Host, ..UpdateConfig::default() };
    let stochastic =
        UpdateConfig { rounding: Rounding::Stochastic { seed: 7 }, ..UpdateConfig::default() };
    for config in optimizers() {
        for (dtype, update) in [
            (DType::F64, UpdateConfig::default()),
            (DType::F64, averaged),
            (DType::BF16, averaged),
            (DType::F32, host),
            (DType::BF16, UpdateConfig::default()),
            (DType::BF16, stochastic),
        ] {
            // The first expert beside the second, and alone.
            let run = |used: &[&[usize]], names: &[&str]| -> Result<Vec<Vec<f64>>> {
                let what = format!("{config:?} {dtype} {update:?}");
                let experts: Vec<Linear> =
                    names.iter().map(|name| expert(&device, dtype, name)).collect::<Result<_>>()?;
                let params: Vec<Param> = experts.iter().flat_map(Module::params).collect();
                let layout = BufferConfig {
                    unused: Unused::Skip,
                    optimizer: config,
                    ..BufferConfig::default()
                };
                let buffers = ParamAndGradBuffer::with_config(&params, &layout)?;
                let mut optimizer = Optimizer::with_update(config, &buffers, &update)?;
                for (step, used) in used.iter().enumerate() {
                    buffers.zero_gradients();
                    for &i in used.iter().filter(|&&i| i < experts.len()) {
                        learn(&experts[i], dtype, 0.3 + step as f64)?;
                    }
                    let before: Vec<_> = names
                        .iter()
                        .enumerate()
                        .map(|(i, name)| {
                            Ok((values(&experts[i].params())?, state(&optimizer, name)?))
                        })
                        .collect::<Result<_>>()?;
                    let norm = buffers.sq_norm()?;
                    let gradients = params.iter().filter_map(|p| p.leaf().gradient().transpose());
                    let want: f64 = gradients
                        .map(|g| Ok(g?.to_f64()?.iter().map(|g| g * g).sum::<f64>()))
                        .sum::<Result<f64>>()?;
                    assert!((norm - want).abs() <= 1e-6 * want, "{what}: {norm} {want}");
                    optimizer.step(&buffers, &STEP)?;
                    for (i, name) in names.iter().enumerate() {
                        let after = (values(&experts[i].params())?, state(&optimizer, name)?);
                        let same = after == before[i];
                        assert_eq!(same, !used.contains(&i), "{what}: step {step}, expert {i}");
                    }
                }
                values(&experts[0].params())
            };
            let used: [&[usize]; 4] = [&[0], &[0, 1], &[0], &[0, 1]];
            assert_eq!(run(&used, &["a", "b"])?, run(&used, &["a"])?, "{config:?} {dtype}");
        }
    }
    Ok(())
}
