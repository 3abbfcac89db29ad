//! Optimizers over flats of a GPU, which here is a stand-in on the CPU, take the same steps as on the CPU. Also, the
//! kernels that an MLP does not need, and that rotary tables are computed once.

#[path = "common/heavy_ball.rs"]
mod heavy_ball;

use ferrotron_autograd::{Accum, Leaf, Var, WeightGrads, backward};
use ferrotron_nn::loss::{CrossEntropyLoss, Reduction, binary_cross_entropy_with_logits};
use ferrotron_nn::shard_exchange::NoExchange;
use ferrotron_nn::{
    Activation, AdafactorConfig, Attention, AttentionConfig, Bias, BufferConfig, Context,
    GradDType, Init, Mlp, MlpConfig, Module, Optimizer, OptimizerConfig, Param, ParamAndGradBuffer,
    RopeScaling, Rounding, Scope, Sharding, StepConfig, StepSize, UpdateConfig, WeightDecay,
    WeightUpdate,
};
use ferrotron_tensor::ops::step::DeviceStepParams;
use ferrotron_tensor::{Category, DType, Device, MemoryKind, RandomKey, Result, Tensor};
use heavy_ball::HeavyBall;

const STEPS: usize = 3;
const EMA_DECAY: f64 = 0.9;
const OPTIMIZERS: [OptimizerConfig; 7] = [
    OptimizerConfig::ADAMW,
    OptimizerConfig::Sgd { momentum: 0.9, weight_decay: 0.1 },
    OptimizerConfig::NesterovSgd { momentum: 0.9, weight_decay: 0.1 },
    OptimizerConfig::Lion { beta1: 0.95, beta2: 0.98, weight_decay: 0.1 },
    OptimizerConfig::custom(&HeavyBall { weight_decay: 0.0 }),
    OptimizerConfig::Adafactor(ADAFACTOR),
    OptimizerConfig::Adafactor(AdafactorConfig {
        step_size: StepSize::Scheduled,
        beta1: 0.9,
        ..ADAFACTOR
    }),
];
const ADAFACTOR: AdafactorConfig = AdafactorConfig {
    step_size: StepSize::Relative,
    beta1: 0.0,
    decay_rate: 0.8,
    eps1: 1e-30,
    eps2: 1e-3,
    clip_threshold: 1.0,
    weight_decay: 0.1,
};

fn gpu(test: &str) -> Result<Option<Device>> {
    ferrotron_cuda_sim::gpu(test).map(|config| Device::cuda(&config)).transpose()
}

fn params(device: &Device, dtype: DType) -> Result<Vec<Param>> {
    let scope = Scope::new(device, dtype, 3);
    let normal = Init::Normal { std: 0.5 };
    Ok(vec![
        scope.param("embedding", &[70, 33], normal, WeightDecay::On),
        scope.param("packed", &[24, 40], normal, WeightDecay::On).packed(&[8, 16])?,
        scope.param("scale", &[33], Init::Ones, WeightDecay::Off),
        scope.param("bias", &[40], Init::Zeros, WeightDecay::Off),
    ])
}

/// Adds the same gradients on every device, multiples of 1/64 that any type holds.
fn add_gradients(params: &[Param], step: usize) -> Result<()> {
    for param in params {
        let key = RandomKey::new(5, step as u64, param.name());
        let numbers = (0..param.leaf().numel() as u64).map(|i| key.uniform(i) * 256.0);
        let numbers: Vec<f64> = numbers.map(|x| x.floor() / 64.0 - 2.0).collect();
        param.leaf().accumulate_with(|gradient, accum| {
            assert_eq!(accum, Accum::Replace);
            let values = Tensor::from_slice(gradient.device(), &numbers, gradient.dims())?;
            gradient.copy_from(&values.cast(gradient.dtype())?)
        })?;
    }
    Ok(())
}

/// Everything that there is after some steps: name, dtype and elements.
type Outcome = Vec<(String, DType, Vec<f64>)>;

fn train(
    device: &Device,
    (dtype, gradients): (DType, GradDType),
    config: OptimizerConfig,
    update: &UpdateConfig,
) -> Result<Outcome> {
    let params = params(device, dtype)?;
    let buffers = BufferConfig { gradients, ..BufferConfig::default() };
    let buffers = ParamAndGradBuffer::with_config(&params, &buffers)?;
    let mut optimizer = Optimizer::with_update(config, &buffers, update)?;
    let mut outcome = Outcome::new();
    for step in 0..STEPS {
        buffers.zero_gradients();
        add_gradients(&params, step)?;
        outcome.push(("norm".into(), DType::F64, vec![buffers.sq_norm()?]));
        optimizer.step(&buffers, &StepConfig { lr: 1e-2, grad_scale: 0.5 })?;
    }
    assert!(buffers.weights_are_finite()? && buffers.first_non_finite()?.is_none());
    for param in &params {
        let value = param.leaf().value()?;
        outcome.push((param.name().to_string(), value.dtype(), value.to_f64()?));
    }
    optimizer.visit(|param, moment, _, value| {
        assert_eq!(value.memory_kind(), update.states, "{param} {moment}");
        outcome.push((format!("{param}, {moment}"), value.dtype(), value.to_f64()?));
        Ok(())
    })?;
    Ok(outcome)
}

/// Every step, a few units in the last place of the largest number.
fn tolerance(dtype: DType, numbers: &[f64]) -> f64 {
    let rounded = if dtype == dtype.accumulator() { 0.0 } else { dtype.epsilon() };
    let epsilon = 16.0 * dtype.accumulator().epsilon() + rounded;
    let largest = numbers.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    STEPS as f64 * epsilon * largest
}

/// How far the averages of this name may be off because their weights are: each step takes over `1 - EMA_DECAY` of what
/// these are off, and keeps `EMA_DECAY` of before. Zero for other names, and for averages of a master copy.
fn tolerance_of_average(name: &str, outcome: &Outcome) -> f64 {
    let Some(param) = name.strip_suffix(", ema") else { return 0.0 };
    let find = |name: &str| outcome.iter().find(|(other, ..)| other == name);
    match (find(&format!("{param}, master")), find(param)) {
        (None, Some((_, dtype, weights))) => {
            (1.0 - EMA_DECAY.powi(STEPS as i32)) * tolerance(*dtype, weights)
        }
        _ => 0.0,
    }
}

/// Asserts that numbers differ by a few units in the last place of the largest in every step.
fn assert_same(what: &str, got: &Outcome, want: &Outcome) {
    assert_eq!(got.len(), want.len(), "{what}");
    for ((name, dtype, got), (other, _, numbers)) in got.iter().zip(want) {
        assert_eq!((name, got.len()), (other, numbers.len()), "{what}");
        let tolerance = tolerance(*dtype, numbers) + tolerance_of_average(name, want);
        for (i, (got, want)) in got.iter().zip(numbers).enumerate() {
            let off = (got - want).abs();
            assert!(off <= tolerance, "{what}, {name} {dtype} [{i}]: got {got}, want {want}");
        }
    }
}

#[test]
fn optimizers_step_as_on_the_cpu() -> Result<()> {
    let Some(gpu) = gpu("optimizers_step_as_on_the_cpu")? else { return Ok(()) };
    let cpu = Device::cpu(1)?;
    let stochastic = Rounding::Stochastic { seed: 7 };
    for config in OPTIMIZERS {
        for (types, weights, rounding) in [
            ((DType::F64, GradDType::Weight), WeightUpdate::InPlace, Rounding::Nearest),
            ((DType::F32, GradDType::Weight), WeightUpdate::InPlace, Rounding::Nearest),
            ((DType::BF16, GradDType::Accumulator), WeightUpdate::MasterCopy, Rounding::Nearest),
            ((DType::F16, GradDType::Weight), WeightUpdate::MasterCopy, Rounding::Nearest),
            ((DType::BF16, GradDType::Weight), WeightUpdate::InPlace, Rounding::Nearest),
            ((DType::BF16, GradDType::Accumulator), WeightUpdate::InPlace, stochastic),
            ((DType::BF16, GradDType::Weight), WeightUpdate::MasterCopy, stochastic),
        ] {
            for states in [MemoryKind::Device, MemoryKind::Host] {
                let update = UpdateConfig { weights, rounding, states, ema_decay: Some(EMA_DECAY) };
                let what = format!("{config:?}, {types:?}, {update:?}");
                let want = train(&cpu, types, config, &update)?;
                assert_same(&what, &train(&gpu, types, config, &update)?, &want);
            }
        }
    }
    Ok(())
}

/// Offloaded states pass through the device in three runs of a sixty-fourth each.
#[test]
fn offloaded_states_take_a_twentieth() -> Result<()> {
    let name = "offloaded_states_take_a_twentieth";
    let Some(config) = ferrotron_cuda_sim::gpu(name) else { return Ok(()) };
    const NUMEL: usize = 64 * 16384;
    for (dtype, kept) in [(DType::F32, 2), (DType::BF16, 3)] {
        let run = |states, hasty: Option<()>| -> Result<(Vec<f64>, usize)> {
            let device = Device::cuda(&config)?;
            if let (Some(()), Some(gpu)) = (hasty, device.gpu()) {
                ferrotron_cuda_sim::hasten(gpu.copies());
            }
            let scope = Scope::new(&device, dtype, 3);
            let params =
                [scope.param("w", &[64, 16384], Init::Normal { std: 0.5 }, WeightDecay::On)];
            let buffers = ParamAndGradBuffer::new(&params)?;
            let update = UpdateConfig { states, ..UpdateConfig::default() };
            let mut optimizer = Optimizer::with_update(OptimizerConfig::ADAMW, &buffers, &update)?;
            buffers.zero_gradients();
            // Runs differ, so that moments in another run's place are other numbers.
            let numbers: Vec<f32> =
                (0..NUMEL).map(|i| ((i * 7 % 23) as f32 - 11.0) / 8.0).collect();
            params[0].leaf().accumulate_with(|gradient, _| {
                let numbers = Tensor::from_slice(&device, &numbers, gradient.dims())?;
                gradient.copy_from(&numbers.cast(gradient.dtype())?)
            })?;
            device.reset_memory_peaks();
            for _ in 0..2 {
                optimizer.step(&buffers, &StepConfig { lr: 1e-2, grad_scale: 0.5 })?;
            }
            let peak = device.memory().peak;
            let mut numbers = params[0].leaf().value()?.to_f64()?;
            optimizer.visit(|_, _, _, value| {
                numbers.extend(value.to_f64()?);
                Ok(())
            })?;
            Ok((numbers, peak))
        };
        let (want, all) = run(MemoryKind::Device, None)?;
        for hasty in [None, Some(())] {
            let (got, peak) = run(MemoryKind::Host, hasty)?;
            assert!(got == want, "{dtype}: other numbers");
            let (offloaded, near) = (4 * kept * NUMEL, 3 * 4 * kept * NUMEL / 64);
            assert_eq!(all - peak, offloaded - near, "{dtype}");
        }
    }
    Ok(())
}

#[test]
fn shards_are_kept_and_placed() -> Result<()> {
    let Some(gpu) = gpu("shards_are_kept_and_placed")? else { return Ok(()) };
    let run = |device: &Device| -> Result<Outcome> {
        let params = params(device, DType::BF16)?;
        let config =
            BufferConfig { sharding: Sharding::Weights, shard: (1, 3), ..BufferConfig::default() };
        let buffers = ParamAndGradBuffer::with_config(&params, &config)?;
        let mut optimizer = Optimizer::new(OptimizerConfig::ADAMW, &buffers)?;
        let mut outcome = Outcome::new();
        for group in buffers.groups() {
            for accum in [Accum::Replace, Accum::Add] {
                group.alloc_gradients()?;
                let flat = &group.gradients;
                flat.lock().unwrap().with_slice_mut(.., |gradients| {
                    let numbers = (0..gradients.numel()).map(|i| (i % 64) as f32 / 64.0);
                    let numbers: Vec<f32> = numbers.collect();
                    gradients.copy_from(&Tensor::from_slice(device, &numbers, gradients.dims())?)
                })?;
                group.write_back_gradients(accum)?;
            }
            group.set_contributed(Some(vec![true; group.params.len()]));
        }
        outcome.push(("norm".into(), DType::F64, vec![buffers.sq_norm()?]));
        let step = optimizer.numbers(&StepConfig { lr: 1e-2, grad_scale: 0.5 });
        optimizer.step_with(&buffers, &DeviceStepParams::new(device, &step)?, &NoExchange)?;
        for group in buffers.groups() {
            group.alloc_weights()?;
            group.copy_in_weights()?;
            let mut weights = group.weights.lock().unwrap();
            // Those of the others are not here.
            for other in [0..group.owned.start, group.owned.end..weights.numel()] {
                weights.with_slice_mut(other, Tensor::zero_fill)?;
            }
            drop(weights);
            group.divide_weights(3)?;
            let weights = group.weights.lock().unwrap().slice(..)?;
            outcome.push(("weights".into(), DType::BF16, weights.to_f64()?));
        }
        Ok(outcome)
    };
    assert_same("shards", &run(&gpu)?, &run(&Device::cpu(1)?)?);
    Ok(())
}

#[test]
fn an_mlp_needs_no_kernels_for_biases_and_gelu() -> Result<()> {
    let Some(device) = gpu("an_mlp_needs_no_kernels_for_biases_and_gelu")? else { return Ok(()) };
    let launches = || device.gpu().map_or(0, |gpu| gpu.launches());
    for (dtype, bias) in
        [DType::BF16, DType::F16, DType::F32].iter().flat_map(|d| [(*d, Bias::Yes), (*d, Bias::No)])
    {
        let normal = Init::Normal { std: 0.5 };
        let config = MlpConfig {
            hidden: 16,
            ffn_hidden: 32,
            activation: Activation::GeluTanh,
            bias,
            init: normal,
            residual_init: normal,
        };
        let mlp = Mlp::new(&Scope::new(&device, dtype, 3), &config)?;
        let gradients = GradDType::Accumulator;
        let buffers = BufferConfig { gradients, ..BufferConfig::default() };
        let buffers = ParamAndGradBuffer::with_config(&mlp.params(), &buffers)?;
        let x = Leaf::input("x", Tensor::full(&device, dtype, &[2, 3, 16], 0.5)?);
        buffers.zero_gradients();
        for micro_batch in 0..2 {
            let before = launches();
            let y = mlp.forward(&x.var()?)?;
            // Both of 16 bits are two products and nothing else.
            let forward = u64::from(dtype == DType::F32);
            assert_eq!(launches() - before, forward, "{dtype} {bias:?} forward {micro_batch}");
            let dy = Tensor::full(&device, dtype, &[2, 3, 16], 1.0)?;
            let before = launches();
            backward(&[(&y, dy)], WeightGrads::Now)?.run()?;
            // GELU's value is made again. From Hopper on its derivative comes with a product. A bias's gradient is copied
            // to its place, or added there.
            let major = device.gpu().map_or(0, |gpu| gpu.context().architecture().major);
            let derivative = u64::from(dtype == DType::F32 || major < 9);
            let biases = if bias == Bias::Yes { 2 * micro_batch } else { 0 };
            let what = format!("{dtype} {bias:?} backward {micro_batch}");
            assert_eq!(launches() - before, 1 + derivative + biases, "{what}");
        }
    }
    Ok(())
}

#[test]
fn losses_and_truncated_values_are_those_of_the_cpu() -> Result<()> {
    let Some(gpu) = gpu("losses")? else { return Ok(()) };
    let run = |device: &Device| {
        let scope = Scope::new(device, DType::F32, 3);
        let init = Init::TruncatedNormal { std: 1.0, low: -1.5, high: 2.0 };
        let logits = scope.param("logits", &[5, 7], init, WeightDecay::On);
        let targets = Tensor::from_slice(device, &[3_i64, -100, 0, 6, 1], &[5])?;
        let weights = Tensor::from_slice(device, &[1.0_f32, 0.5, 2.0, 0.25, 1.0], &[5])?;
        let mut found = vec![logits.leaf().value()?.to_f64()?];
        for reduction in [Reduction::None, Reduction::Mean] {
            let loss = CrossEntropyLoss { z_loss: 0.1, reduction, ..CrossEntropyLoss::default() };
            let loss = loss.forward(&logits.var()?, &targets, Some(&weights))?;
            found.push(loss.value().to_f64()?);
            loss.sum_all()?.backward()?;
        }
        let half = Tensor::full(device, DType::F32, &[5, 7], 0.5)?;
        let loss = binary_cross_entropy_with_logits(&logits.var()?, &half, 2.0, Reduction::Mean)?;
        found.push(loss.value().to_f64()?);
        loss.backward()?;
        found.push(logits.leaf().gradient()?.expect("a gradient").to_f64()?);
        Ok::<_, ferrotron_tensor::Error>(found)
    };
    let (got, want) = (run(&gpu)?, run(&Device::cpu(1)?)?);
    assert_eq!(got[0], want[0]);
    for (got, want) in got.concat().iter().zip(want.concat()) {
        assert!((got - want).abs() <= 1e-6 * want.abs().max(1.0), "{got} for {want}");
    }
    Ok(())
}

/// The first forward of the first layer computes the table on the GPU in five kernels; no later step, layer or shorter
/// sequence launches one of them.
#[test]
fn rotary_tables_are_computed_once_a_run() -> Result<()> {
    let Some(gpu) = gpu("rotary_tables_are_computed_once_a_run")? else { return Ok(()) };
    let scope = Scope::new(&gpu, DType::F32, 3);
    let layer = |name: &str| {
        let config = AttentionConfig {
            rotary_base: Some(500_000.0),
            rotary_dim: Some(4),
            rope_scaling: Some(RopeScaling::llama3(8.0)),
            ..AttentionConfig::new(16, 2)
        };
        Attention::new(&scope.child(name), &config)
    };
    let layers = (0..3).map(|index| layer(&format!("{index}"))).collect::<Result<Vec<_>>>()?;
    let forward = |layer: &Attention, positions: usize| {
        let x = Var::constant(Tensor::ones(&gpu, DType::F32, &[1, positions, 16])?);
        let launches = || gpu.gpu().map_or(0, |gpu| gpu.launches());
        let before = launches();
        layer.forward(&Context::eval(1, positions), &x, None)?;
        Ok::<_, ferrotron_tensor::Error>(launches() - before)
    };
    // The weights are made where they are first read.
    for layer in &layers {
        layer.params().iter().try_for_each(|param| param.leaf().value().map(drop))?;
    }
    let first = forward(&layers[0], 12)?;
    let usual = forward(&layers[0], 12)?;
    assert_eq!(first, usual + 5);
    for _step in 0..3 {
        for layer in &layers {
            assert_eq!((forward(layer, 12)?, forward(layer, 7)?), (usual, usual));
        }
    }
    assert_eq!(gpu.memory().bytes(Category::Tables), 2 * 12 * 2 * 4);
    Ok(())
}
