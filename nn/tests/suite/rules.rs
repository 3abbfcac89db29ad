//! Update rules of a user's, options by name, and moving averages.

use ferrotron_nn::{
    BufferConfig, EMA, Init, Optimizer, OptimizerConfig, Param, ParamAndGradBuffer, ParamOptions,
    ParamPatterns, Rounding, Scope, ShardUnit, Sharding, StateShape, StateSpec, StepConfig,
    UpdateConfig, UpdateRule, UpdateStep, WeightDecay, WeightUpdate,
};
use ferrotron_tensor::{DType, Device, Result, Tensor};

use crate::gradients::{give_gradients, values};
use crate::heavy_ball::HeavyBall;
use crate::orthogonalized::Orthogonalized;

pub const LR: f64 = 0.05;
pub const SCALE: f64 = 0.5;

pub fn set_gradients(params: &[Param], step: usize) -> Result<Vec<Vec<f64>>> {
    let value =
        |k, i| (1.3 * i as f64 + 0.7 * step as f64 + k as f64 + 0.01 * (i * i) as f64).sin();
    give_gradients(params, value)
}

pub fn train(
    buffers: &ParamAndGradBuffer,
    optimizer: &mut Optimizer,
    params: &[Param],
    steps: usize,
) -> Result<()> {
    for step in 0..steps {
        set_gradients(params, step)?;
        optimizer.step(buffers, &StepConfig { lr: LR, grad_scale: SCALE })?;
    }
    Ok(())
}

/// A wide and a tall matrix, two packed ones, an embedding and a bias.
pub fn params(scope: &Scope) -> Result<Vec<Param>> {
    let normal = Init::Normal { std: 0.5 };
    Ok(vec![
        scope.param("wide", &[4, 7], normal, WeightDecay::On),
        scope.param("tall", &[6, 3], normal, WeightDecay::On),
        scope.param("packed", &[6, 5], normal, WeightDecay::On).packed(&[4, 2])?,
        scope.param("table", &[5, 3], normal, WeightDecay::On).as_embedding(),
        scope.param("bias", &[4], normal, WeightDecay::Off),
    ])
}

/// A user's SGD equals the kernel's: for 16-bit weights too, with and without a master copy, and with stochastic
/// rounding.
#[test]
fn a_rule_of_a_users_is_a_rule() -> Result<()> {
    let sgd = OptimizerConfig::Sgd { momentum: 0.9, weight_decay: 0.1 };
    let stochastic = Rounding::Stochastic { seed: 3 };
    for (dtype, weights, rounding) in [
        (DType::F64, WeightUpdate::MasterCopy, Rounding::Nearest),
        (DType::F32, WeightUpdate::MasterCopy, Rounding::Nearest),
        (DType::BF16, WeightUpdate::MasterCopy, Rounding::Nearest),
        (DType::BF16, WeightUpdate::InPlace, Rounding::Nearest),
        (DType::BF16, WeightUpdate::InPlace, stochastic),
        (DType::F16, WeightUpdate::MasterCopy, stochastic),
    ] {
        let update = UpdateConfig { weights, rounding, ..UpdateConfig::default() };
        let run = |config| -> Result<_> {
            let params = params(&Scope::new(&Device::cpu(2)?, dtype, 1))?;
            let buffers = ParamAndGradBuffer::new(&params)?;
            let mut optimizer = Optimizer::with_update(config, &buffers, &update)?;
            train(&buffers, &mut optimizer, &params, 5)?;
            values(&params)
        };
        let (got, want) =
            (run(OptimizerConfig::custom(&HeavyBall { weight_decay: 0.1 }))?, run(sgd)?);
        for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
            // One rounding may fall on the other side.
            let allowed = 4.0 * dtype.epsilon() * want.abs().max(1.0);
            assert!((got - want).abs() <= allowed, "{dtype} {rounding:?}: {got}, want {want}");
        }
    }
    Ok(())
}

/// A rule that declares what it cannot have.
#[derive(Debug)]
struct Declares(&'static str, StateShape, ShardUnit);

impl UpdateRule for Declares {
    fn name(&self) -> &'static str {
        "declares"
    }
    fn shard_unit(&self) -> ShardUnit {
        self.2
    }
    fn states(&self, _dims: &[usize]) -> Vec<StateSpec> {
        vec![StateSpec { name: self.0, shape: self.1, dtype: None }]
    }
    fn update(
        &self,
        _: &mut Tensor,
        _: &Tensor,
        _: &mut [&mut Tensor],
        _: &UpdateStep,
    ) -> Result<()> {
        Ok(())
    }
}

#[test]
fn states_that_do_not_fit_are_refused_by_name() -> Result<()> {
    let params = params(&Scope::new(&Device::cpu(1)?, DType::F32, 1))?;
    let buffers = ParamAndGradBuffer::new(&params)?;
    let refusal = |rule: &'static Declares| {
        let rule = OptimizerConfig::custom(rule);
        Optimizer::new(rule, &buffers).err().expect("a refusal").to_string()
    };
    let error = refusal(&Declares("rows", StateShape::PerRow, ShardUnit::Elements));
    assert!(error.contains("the state 'rows' has fewer numbers than elements"), "{error}");
    let error = refusal(&Declares("master", StateShape::PerElement, ShardUnit::Elements));
    assert!(error.contains("the name of the state 'master' is taken"), "{error}");
    let error = refusal(&Declares("a.b", StateShape::PerElement, ShardUnit::Elements));
    assert!(error.contains("a state cannot be named 'a.b'"), "{error}");
    let error = refusal(&Declares("rows", StateShape::PerRow, ShardUnit::Parameters));
    assert!(error.contains("'bias' of [4] has no rows and columns"), "{error}");
    Ok(())
}

/// A mistake in a rule for whole matrices.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Mistake {
    /// It updates whole parameters, and gathers.
    Parameters,
    /// It passes something else than its shard.
    Own,
    /// It returns something else than a matrix of the same dims.
    Result,
    /// Its fallback needs whole tensors.
    Fallback,
}

impl UpdateRule for Mistake {
    fn name(&self) -> &'static str {
        "mistake"
    }
    fn shard_unit(&self) -> ShardUnit {
        match self {
            Mistake::Parameters => ShardUnit::Parameters,
            _ => ShardUnit::HiddenMatrices,
        }
    }
    fn fallback(&self) -> Option<Box<dyn UpdateRule>> {
        (*self == Mistake::Fallback).then(|| OptimizerConfig::custom(&Orthogonalized).rule())
    }
    fn states(&self, _dims: &[usize]) -> Vec<StateSpec> {
        Vec::new()
    }
    fn update(
        &self,
        _: &mut Tensor,
        gradient: &Tensor,
        _: &mut [&mut Tensor],
        step: &UpdateStep,
    ) -> Result<()> {
        let own = match self {
            Mistake::Own => gradient.narrow(0, 0, 1)?,
            _ => gradient.clone(),
        };
        let transposed = |whole: &Tensor| whole.transpose(0, 1);
        step.on_whole_matrix(&own, transposed).map(drop)
    }
}

#[test]
fn mistakes_with_whole_matrices_are_named() -> Result<()> {
    let refusal = |rule: &'static Mistake| -> Result<String> {
        let params = params(&Scope::new(&Device::cpu(1)?, DType::F32, 1))?;
        let optimizer = OptimizerConfig::custom(rule);
        let layout = BufferConfig { optimizer, ..BufferConfig::default() };
        let buffers = ParamAndGradBuffer::with_config(&params, &layout)?;
        set_gradients(&params, 0)?;
        let step = StepConfig { lr: LR, grad_scale: SCALE };
        let result = Optimizer::new(optimizer, &buffers)
            .and_then(|mut optimizer| optimizer.step(&buffers, &step));
        Ok(result.unwrap_err().to_string())
    };
    let error = refusal(&Mistake::Parameters)?;
    let want = "optimizer: shards are gathered for rules with `ShardUnit::HiddenMatrices` only";
    assert_eq!(error, want);
    let error = refusal(&Mistake::Own)?;
    assert!(error.contains("a tensor of [1] is not this rank's shard ["), "{error}");
    let error = refusal(&Mistake::Result)?;
    assert!(error.contains("a result of [") && error.contains("] instead of ["), "{error}");
    let error = refusal(&Mistake::Fallback)?;
    let want = "optimizer: rule 'mistake': its fallback 'orthogonalized' does not update elements: choose another, such as \
                AdamW";
    assert_eq!(error, want);
    Ok(())
}

/// The directions of wide, tall and packed matrices have singular values near 1; tables and biases are Lion's.
#[test]
fn a_users_rule_sees_whole_matrices_and_has_a_fallback() -> Result<()> {
    let choice = OptimizerConfig::custom(&Orthogonalized);
    let run = |optimizer: OptimizerConfig| -> Result<_> {
        let params = params(&Scope::new(&Device::cpu(1)?, DType::F64, 1))?;
        let layout = BufferConfig { optimizer, ..BufferConfig::default() };
        let buffers = ParamAndGradBuffer::with_config(&params, &layout)?;
        let before = values(&params)?;
        let mut optimizer = Optimizer::new(optimizer, &buffers)?;
        train(&buffers, &mut optimizer, &params, 1)?;
        Ok((before, values(&params)?))
    };
    let (before, after) = run(choice)?;
    let lion = OptimizerConfig::Lion { beta1: 0.9, beta2: 0.99, weight_decay: 0.1 };
    assert_eq!(after[3..], run(lion)?.1[3..]);
    for (k, first, rows, columns) in [(0, 0, 4, 7), (1, 0, 6, 3), (2, 0, 4, 5), (2, 4, 2, 5)] {
        let range = first * columns..(first + rows) * columns;
        let moved = before[k][range.clone()].iter().zip(&after[k][range]);
        // The sum of squares of such a direction is its rank, or less where a gradient has none.
        let squares: f64 = moved.map(|(w, v)| ((w * (1.0 - LR * 0.1) - v) / LR).powi(2)).sum();
        assert!(squares <= rows.min(columns) as f64 + 1e-6, "{k}: {squares}");
        assert!(squares > 0.9, "{k}: {squares}");
    }
    Ok(())
}

/// One name in a list is mistyped.
#[test]
fn a_pattern_of_options_that_matches_no_parameter_is_refused_in_the_first_step() -> Result<()> {
    let slow = |of_run| ParamOptions { lr_multiplier: 0.1, ..of_run };
    let refusal = |patterns: &[&str]| -> Result<Option<String>> {
        let patterns = ParamPatterns::new(patterns.iter().copied())?;
        let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1).with_options_for(&patterns, slow);
        let params = params(&scope)?;
        drop(scope);
        let buffers = ParamAndGradBuffer::new(&params)?;
        let mut optimizer = Optimizer::new(OptimizerConfig::SGD, &buffers)?;
        Ok(train(&buffers, &mut optimizer, &params, 1).err().map(|error| error.to_string()))
    };
    assert_eq!(refusal(&["wide", "tall"])?, None);
    let want = "options: the pattern 'tabel' of `Scope::with_options_for` or `with_accumulator_dtype` matches none of 5 \
                parameters: `Module::summary` has their names";
    assert_eq!(refusal(&["wide", "tabel"])?.as_deref(), Some(want));
    Ok(())
}

#[test]
fn options_by_name_are_those_of_separate_optimizers() -> Result<()> {
    let lion = OptimizerConfig::Lion { beta1: 0.9, beta2: 0.99, weight_decay: 0.3 };
    let of_run = ParamOptions::default();
    let options = move |name: &str| match name {
        "wide" => ParamOptions { lr_multiplier: 0.25, ..of_run },
        "tall" => ParamOptions { weight_decay: Some(0.7), ..of_run },
        "table" => ParamOptions { lr_multiplier: 0.0, ..of_run },
        "bias" => ParamOptions { optimizer: Some(lion), weight_decay: Some(0.2), ..of_run },
        _ => of_run,
    };
    let adamw =
        |weight_decay| OptimizerConfig::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay };
    let run = |config, scope: Scope, lr, sharding| -> Result<_> {
        let params = params(&scope)?;
        let layout = BufferConfig { sharding, ..BufferConfig::default() };
        let buffers = ParamAndGradBuffer::with_config(&params, &layout)?;
        let mut optimizer = Optimizer::new(config, &buffers)?;
        for step in 0..4 {
            set_gradients(&params, step)?;
            optimizer.step(&buffers, &StepConfig { lr, grad_scale: SCALE })?;
        }
        values(&params)
    };
    let scope = || -> Result<Scope> { Ok(Scope::new(&Device::cpu(1)?, DType::F64, 1)) };
    let got = run(adamw(0.1), scope()?.with_options(options), LR, Sharding::None)?;
    let start = values(&params(&scope()?)?)?;
    assert_eq!(got[0], run(adamw(0.1), scope()?, 0.25 * LR, Sharding::None)?[0]);
    assert_eq!(got[1], run(adamw(0.7), scope()?, LR, Sharding::None)?[1]);
    assert_eq!(got[2], run(adamw(0.1), scope()?, LR, Sharding::None)?[2]);
    assert_eq!(got[3], start[3]);
    let decayed = move |_: &str| ParamOptions { weight_decay: Some(0.2), ..of_run };
    assert_eq!(got[4], run(lion, scope()?.with_options(decayed), LR, Sharding::None)?[4]);
    Ok(())
}

#[test]
fn options_out_of_range_name_the_parameter() -> Result<()> {
    let refusal = |options: ParamOptions| -> Result<String> {
        let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1).with_options(move |_| options);
        let buffers = ParamAndGradBuffer::new(&params(&scope)?)?;
        let refused = Optimizer::new(OptimizerConfig::ADAMW, &buffers).err();
        Ok(refused.expect("a refusal").to_string())
    };
    let of_run = ParamOptions::default();
    let error = refusal(ParamOptions { lr_multiplier: -1.0, ..of_run })?;
    assert!(
        error.contains("the learning-rate multiplier of 'bias' must be at least 0, got -1"),
        "{error}"
    );
    let error = refusal(ParamOptions { weight_decay: Some(f64::NAN), ..of_run })?;
    assert!(error.contains("the weight decay of 'bias' must be at least 0, got NaN"), "{error}");
    let relative = OptimizerConfig::Adafactor(ferrotron_nn::AdafactorConfig::default());
    let error = refusal(ParamOptions { optimizer: Some(relative), ..of_run })?;
    assert!(error.contains("has an optimizer with a learning rate of its own"), "{error}");
    Ok(())
}

#[test]
fn moving_averages_are_exact_for_narrow_weights() -> Result<()> {
    for (dtype, weights) in [
        (DType::F64, WeightUpdate::MasterCopy),
        (DType::BF16, WeightUpdate::MasterCopy),
        (DType::BF16, WeightUpdate::InPlace),
    ] {
        let params = params(&Scope::new(&Device::cpu(1)?, dtype, 1))?;
        let buffers = ParamAndGradBuffer::new(&params)?;
        let update = UpdateConfig { weights, ema_decay: Some(0.75), ..UpdateConfig::default() };
        let config = OptimizerConfig::ADAMW;
        let mut optimizer = Optimizer::with_update(config, &buffers, &update)?;
        let mut want: Vec<f64> = Vec::new();
        for step in 0..4 {
            set_gradients(&params, step)?;
            optimizer.step(&buffers, &StepConfig { lr: LR, grad_scale: SCALE })?;
            // What is averaged: the master weights if there are any.
            let has_master = dtype == DType::BF16 && weights == WeightUpdate::MasterCopy;
            let now: Vec<f64> = match has_master {
                true => states(&optimizer, "master")?,
                false => in_order_of_states(&optimizer, &params)?,
            };
            match step {
                0 => want = now,
                _ => want.iter_mut().zip(now).for_each(|(a, w)| *a = 0.75 * *a + 0.25 * w),
            }
        }
        let got = states(&optimizer, EMA)?;
        for (got, want) in got.iter().zip(&want) {
            let allowed = 16.0 * dtype.accumulator().epsilon();
            assert!((got - want).abs() <= allowed, "{dtype}: {got}, want {want}");
        }
    }
    Ok(())
}

/// A state of every parameter, end to end.
fn states(optimizer: &Optimizer, wanted: &str) -> Result<Vec<f64>> {
    let mut all = Vec::new();
    optimizer.visit(|_, state, _, value| {
        if state == wanted {
            all.extend(value.to_f64()?);
        }
        Ok(())
    })?;
    Ok(all)
}

fn in_order_of_states(optimizer: &Optimizer, params: &[Param]) -> Result<Vec<f64>> {
    let mut all = Vec::new();
    optimizer.visit(|name, state, _, _| {
        if state == EMA {
            let param = params.iter().find(|param| param.name() == name).expect("a parameter");
            all.extend(param.leaf().value()?.to_f64()?);
        }
        Ok(())
    })?;
    Ok(all)
}
