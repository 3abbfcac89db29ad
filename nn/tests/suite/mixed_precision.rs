//! Weights of 16 bits: what their optimizer keeps, and that small updates are not lost. The techniques are those
//! of Micikevicius et al., "Mixed Precision Training", arXiv 1710.03740.

use ferrotron_autograd::Accum;
use ferrotron_nn::shard_exchange::NoExchange;
use ferrotron_nn::{
    BufferConfig, GradDType, Init, MASTER, Optimizer, OptimizerConfig, ParamAndGradBuffer,
    Rounding, Scope, Sharding, StepConfig, UpdateConfig, WeightDecay, WeightUpdate,
};
use ferrotron_tensor::ops::step::DeviceStepParams;
use ferrotron_tensor::{Category, DType, Device, Error, Result, Tensor};

/// Ones of `dtype`, with gradients of -1.
fn ones(dtype: DType, numel: usize, config: &BufferConfig) -> Result<ParamAndGradBuffer> {
    let scope = Scope::new(&Device::cpu(1)?, dtype, 1);
    let param = scope.param("weight", &[numel], Init::Ones, WeightDecay::Off);
    let buffers = ParamAndGradBuffer::with_config(std::slice::from_ref(&param), config)?;
    if config.sharding < Sharding::Gradients {
        param.leaf().accumulate_with(|gradient, _| {
            let minus = Tensor::full(gradient.device(), gradient.dtype(), &[numel], -1.0)?;
            gradient.copy_from(&minus)
        })?;
    }
    Ok(buffers)
}

/// The mean of 4096 ones after 1000 updates of 1e-4 each.
fn after_1000_updates(dtype: DType, update: WeightUpdate, rounding: Rounding) -> Result<f64> {
    let buffers = ones(dtype, 4096, &BufferConfig::default())?;
    let update = UpdateConfig { weights: update, rounding, ..UpdateConfig::default() };
    let mut optimizer = Optimizer::with_update(OptimizerConfig::SGD, &buffers, &update)?;
    for _ in 0..1000 {
        optimizer.step(&buffers, &StepConfig { lr: 1e-4, grad_scale: 1.0 })?;
    }
    let weights = buffers.groups()[0].params[0].leaf().value()?.to_f64()?;
    Ok(weights.iter().sum::<f64>() / weights.len() as f64)
}

#[test]
fn small_updates_need_a_master_copy_or_random_rounding() -> Result<()> {
    let (in_place, master) = (WeightUpdate::InPlace, WeightUpdate::MasterCopy);
    let stochastic = Rounding::Stochastic { seed: 1 };
    for dtype in [DType::BF16, DType::F16] {
        // Half the spacing above 1 is 2^-9 in bf16 and 2^-12 in f16, both more than 1e-4.
        assert_eq!(after_1000_updates(dtype, in_place, Rounding::Nearest)?, 1.0, "{dtype}");
        let spacing = dtype.epsilon();
        let exact = after_1000_updates(dtype, master, Rounding::Nearest)?;
        assert!((exact - 1.1).abs() <= spacing / 2.0, "{dtype}: {exact}");
        // Of 4096 weights whose errors are at most a random walk of 1000 half spacings.
        let tolerance = 5.0 * 0.5 * spacing * (1000.0_f64 / 4096.0).sqrt();
        let random = after_1000_updates(dtype, in_place, stochastic)?;
        assert!((random - 1.1).abs() <= tolerance, "{dtype}: {random}");
        let both = after_1000_updates(dtype, master, stochastic)?;
        assert!((both - 1.1).abs() <= 5.0 * 0.5 * spacing / 64.0, "{dtype}: {both}");
    }
    Ok(())
}

/// An element's random number is that of its place in the global tensor, whichever rank updates it.
#[test]
fn random_rounding_is_the_same_in_every_shard() -> Result<()> {
    for weights in [WeightUpdate::InPlace, WeightUpdate::MasterCopy] {
        let rounding = Rounding::Stochastic { seed: 1 };
        let update = UpdateConfig { weights, rounding, ..UpdateConfig::default() };
        let run = |shard| {
            let config =
                BufferConfig { sharding: Sharding::Optimizer, shard, ..BufferConfig::default() };
            let buffers = ones(DType::BF16, 1000, &config)?;
            let device = buffers.groups()[0].params[0].leaf().device().clone();
            let mut optimizer = Optimizer::with_update(OptimizerConfig::SGD, &buffers, &update)?;
            for _ in 0..3 {
                let step = optimizer.numbers(&StepConfig { lr: 1e-3, grad_scale: 1.0 });
                let step = DeviceStepParams::new(&device, &step)?;
                optimizer.step_with(&buffers, &step, &NoExchange)?;
            }
            let group = &buffers.groups()[0];
            Ok::<_, Error>((group.owned.clone(), group.params[0].leaf().value()?.to_f64()?))
        };
        let (_, whole) = run((0, 1))?;
        assert!(whole.contains(&1.0) && whole.contains(&1.0078125), "nothing is random");
        for rank in 0..3 {
            let (owned, part) = run((rank, 3))?;
            assert_eq!(part[owned.clone()], whole[owned], "{weights:?}, rank {rank}");
        }
    }
    Ok(())
}

#[test]
fn the_master_copy_takes_the_steps_of_f32_weights() -> Result<()> {
    let wide = ones(DType::F32, 1000, &BufferConfig::default())?;
    let narrow = ones(DType::BF16, 1000, &BufferConfig::default())?;
    let mut optimizers = [
        Optimizer::new(OptimizerConfig::ADAMW, &wide)?,
        Optimizer::new(OptimizerConfig::ADAMW, &narrow)?,
    ];
    for step in 1..=50 {
        for (optimizer, buffers) in optimizers.iter_mut().zip([&wide, &narrow]) {
            optimizer.step(buffers, &StepConfig { lr: 1e-3 / f64::from(step), grad_scale: 0.5 })?;
        }
    }
    let want = wide.groups()[0].params[0].leaf().value()?;
    let mut masters = 0;
    optimizers[1].visit(|_, moment, _, value| {
        if moment == MASTER {
            assert_eq!(value.to_vec::<f32>()?, want.to_vec::<f32>()?);
            masters += 1;
        }
        Ok(())
    })?;
    assert_eq!(masters, 1);
    let weights = narrow.groups()[0].params[0].leaf().value()?;
    assert_eq!(weights.to_f64()?, want.cast(DType::BF16)?.to_f64()?);
    Ok(())
}

/// Bytes a parameter of weights, gradients and optimizer on one of `ranks`. They are those of ZeRO (Rajbhandari et al.,
/// arXiv 1910.02054, section 3) for Adam, 2 + 2 + 12, with 4 for gradients unless they are in 16 bits too.
#[test]
fn bytes_are_those_of_zero() -> Result<()> {
    const NUMEL: usize = 1 << 20;
    for ranks in [1, 4] {
        for (sharding, gradients, wanted) in [
            (Sharding::None, GradDType::Accumulator, [2.0, 4.0, 12.0]),
            (Sharding::None, GradDType::Weight, [2.0, 2.0, 12.0]),
            (Sharding::Optimizer, GradDType::Accumulator, [2.0, 4.0, 12.0 / ranks as f64]),
            (
                Sharding::Gradients,
                GradDType::Accumulator,
                [2.0, 4.0 / ranks as f64, 12.0 / ranks as f64],
            ),
            (Sharding::Weights, GradDType::Accumulator, [2.0, 4.0, 12.0].map(|b| b / ranks as f64)),
            (Sharding::Weights, GradDType::Weight, [2.0, 2.0, 12.0].map(|b| b / ranks as f64)),
        ] {
            let config =
                BufferConfig { sharding, gradients, shard: (0, ranks), ..BufferConfig::default() };
            let buffers = ones(DType::BF16, NUMEL, &config)?;
            let device = buffers.groups()[0].params[0].leaf().device().clone();
            let optimizer = Optimizer::new(OptimizerConfig::ADAMW, &buffers)?;
            let stats = device.memory();
            let found = [Category::Weights, Category::Gradients, Category::Optimizer]
                .map(|category| stats.bytes(category) as f64 / NUMEL as f64);
            assert_eq!(found, wanted, "{sharding:?}, {gradients:?}, {ranks} ranks");
            drop(optimizer);
        }
    }
    Ok(())
}

#[test]
fn gradients_of_16_bit_weights_are_added_up_in_f32() -> Result<()> {
    for (gradients, want) in
        [(GradDType::Accumulator, 1.0 + 99.0 / 1024.0), (GradDType::Weight, 1.0)]
    {
        let buffers = ones(DType::BF16, 8, &BufferConfig { gradients, ..BufferConfig::default() })?;
        let leaf = buffers.groups()[0].params[0].leaf().clone();
        leaf.zero_gradient();
        for i in 0..100 {
            let part = if i == 0 { 1.0 } else { 1.0 / 1024.0 };
            leaf.accumulate_with(|sum, accum| {
                let part = Tensor::full(sum.device(), sum.dtype(), &[8], part)?;
                match accum {
                    Accum::Replace => sum.copy_from(&part),
                    Accum::Add => ferrotron_tensor::ops::pointwise::add_assign(sum, &part),
                }
            })?;
        }
        let sums = buffers.groups()[0].gradients.lock().unwrap().tensor(0)?.to_f64()?;
        assert_eq!(sums, [want; 8], "{gradients:?}");
    }
    Ok(())
}

/// An f16 that counts ones stops at 2048, where 1 is half the spacing; every sum here is kept in f32 or wider.
#[test]
fn a_sum_of_4096_ones_in_f16_is_4096() -> Result<()> {
    use ferrotron_tensor::f16;
    let naive = (0..4096).fold(f16::ZERO, |sum, _| sum + f16::ONE);
    assert_eq!(naive.to_f64(), 2048.0);
    let device = Device::cpu(1)?;
    let ones = Tensor::full(&device, DType::F16, &[1, 4096], 1.0)?;
    assert_eq!(ferrotron_tensor::ops::reduce::sum_all(&ones)?.to_f64()?, [4096.0]);
    let product = ferrotron_tensor::ops::matmul::matmul(&ones, &ones.transpose(0, 1)?)?;
    assert_eq!(product.to_f64()?, [4096.0]);
    Ok(())
}
