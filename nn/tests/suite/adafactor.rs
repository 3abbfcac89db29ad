//! Adafactor against the algorithm of the paper, one parameter at a time, and what it keeps.

use ferrotron_nn::{
    Activation, AdafactorConfig, Attention, AttentionConfig, Bias, BufferConfig, Init, MASTER, Mlp,
    MlpConfig, Module, Optimizer, OptimizerConfig, Param, ParamAndGradBuffer, Scope, Sharding,
    StepConfig, StepSize, WeightDecay,
};
use ferrotron_tensor::{Category, DType, Device, ErrorKind, Result, ShardSpec};

use crate::adafactor_reference::Reference;
use crate::gradients::{give_gradients, values};

const STEPS: usize = 5;
const LR: f64 = 0.05;
const SCALE: f64 = 0.5;

/// A matrix and two matrices in one tensor that decay, a vector and a number that do not.
fn params(device: &Device, dtype: DType) -> Vec<Param> {
    let scope = Scope::new(device, dtype, 1);
    let normal = Init::Normal { std: 0.5 };
    vec![
        scope.param("scale", &[1], Init::Ones, WeightDecay::Off),
        scope.param("matrix", &[5, 3], normal, WeightDecay::On),
        scope.param("bias", &[7], normal, WeightDecay::Off),
        scope.param("two", &[2, 4, 3], Init::Normal { std: 1e-5 }, WeightDecay::On),
    ]
}

/// Element `i` of the gradient of parameter `k`: of very different sizes, and other ones in each step; now and then a
/// row has none.
fn gradient(step: usize, k: usize, i: usize) -> f64 {
    if i < 3 && step % 2 == 1 {
        return 0.0;
    }
    let size = 10.0_f64.powi((i % 4) as i32 - 2 * k as i32);
    size * (1.3 * i as f64 + 0.7 * step as f64 + k as f64).sin()
}

fn set_gradients(params: &[Param], step: usize) -> Result<Vec<Vec<f64>>> {
    give_gradients(params, |k, i| gradient(step, k, i))
}

fn configs() -> impl Iterator<Item = AdafactorConfig> {
    let relative = AdafactorConfig::default();
    let scheduled = AdafactorConfig { step_size: StepSize::Scheduled, ..relative };
    [
        scheduled,
        AdafactorConfig { weight_decay: 0.1, ..relative },
        AdafactorConfig { beta1: 0.9, weight_decay: 0.1, clip_threshold: 0.3, ..scheduled },
        AdafactorConfig { decay_rate: 0.5, eps1: 1e-3, eps2: 1.0, ..relative },
    ]
    .into_iter()
}

#[test]
fn it_equals_the_algorithm_of_the_paper() -> Result<()> {
    for (dtype, tolerance) in [(DType::F64, 1e-13), (DType::F32, 1e-5)] {
        for config in configs() {
            let device = Device::cpu(2)?;
            let params = params(&device, dtype);
            let before = values(&params)?;
            let mut want: Vec<Reference> = params
                .iter()
                .zip(&before)
                .map(|(p, w)| Reference::new(p.leaf().dims(), w.clone()))
                .collect();
            let buffers = ParamAndGradBuffer::new(&params)?;
            let mut optimizer = Optimizer::new(OptimizerConfig::Adafactor(config), &buffers)?;
            for step in 0..STEPS {
                let gradients = set_gradients(&params, step)?;
                optimizer.step(&buffers, &StepConfig { lr: LR, grad_scale: SCALE })?;
                for (k, reference) in want.iter_mut().enumerate() {
                    let g: Vec<f64> = gradients[k].iter().map(|g| SCALE * g).collect();
                    // Weight decay is a matter of the group.
                    let decays = params[k].decay() == WeightDecay::On;
                    let weight_decay = if decays { config.weight_decay } else { 0.0 };
                    reference.step(step + 1, LR, &g, &AdafactorConfig { weight_decay, ..config });
                }
            }
            for (k, (got, want)) in values(&params)?.iter().zip(&want).enumerate() {
                let moved = want.w.iter().zip(&before[k]).any(|(new, old)| new != old);
                assert!(moved, "parameter {k} stayed where it was");
                for (i, (got, want)) in got.iter().zip(&want.w).enumerate() {
                    let allowed = tolerance * want.abs().max(LR * STEPS as f64);
                    assert!(
                        (got - want).abs() <= allowed,
                        "{dtype}, {config:?}, parameter {k}, element {i}: {got}, want {want}"
                    );
                }
            }
        }
    }
    Ok(())
}

/// Queries, keys and values, stored as one parameter, take the same steps as three parameters: clipping in one of them
/// changes nothing in the others. As one tensor they take others.
#[test]
fn packed_tensors_step_as_if_they_were_apart() -> Result<()> {
    let blocks = [5, 2, 2];
    let device = Device::cpu(2)?;
    // Steps of three parameters, or of one that holds them, with `packed` or without.
    let run = |config: AdafactorConfig, dims: &[usize], packed: Option<bool>| -> Result<Vec<f64>> {
        let (scope, init) = (Scope::new(&device, DType::F32, 1), Init::Normal { std: 0.5 });
        let with = |rows: usize| [&[rows], dims].concat();
        // In a scope of its own, since it is not always trained.
        let whole =
            Scope::new(&device, DType::F32, 1).param("whole", &with(9), init, WeightDecay::On);
        let value = whole.leaf().value()?;
        let mut start = 0;
        let params: Vec<Param> = match packed {
            Some(true) => vec![whole.packed(&blocks)?],
            Some(false) => vec![whole],
            None => blocks
                .iter()
                .enumerate()
                .map(|(i, &rows)| {
                    let part =
                        scope.param(&format!("part {i}"), &with(rows), init, WeightDecay::On);
                    part.leaf().set_value(&value.narrow(0, start, rows)?.contiguous()?)?;
                    start += rows;
                    Ok(part)
                })
                .collect::<Result<_>>()?,
        };
        let buffers = ParamAndGradBuffer::new(&params)?;
        let mut optimizer = Optimizer::new(OptimizerConfig::Adafactor(config), &buffers)?;
        let width = value.numel() / 9;
        let keys = 5 * width..7 * width;
        for step in 0..STEPS {
            // The gradients of keys are but a millionth of the others.
            let size = |i: usize| if keys.contains(&i) { 1e-6 } else { 1.0 };
            let mut whole = (0..).map(|i| gradient(step, 0, i) * size(i));
            give_gradients(&params, |_, _| whole.next().expect("there is no last one"))?;
            optimizer.step(&buffers, &StepConfig { lr: LR, grad_scale: SCALE })?;
        }
        Ok(values(&params)?.concat())
    };
    for config in configs() {
        for dims in [&[][..], &[4], &[3, 2]] {
            let apart = run(config, dims, None)?;
            assert_eq!(run(config, dims, Some(true))?, apart, "{config:?} {dims:?}");
            // Matrices that are the last two dims are apart anyhow, but for clipping and scale.
            assert_ne!(run(config, dims, Some(false))?, apart, "{config:?} {dims:?}");
        }
    }
    let scope = Scope::new(&device, DType::F32, 1);
    let error =
        scope.param("bias", &[9], Init::Zeros, WeightDecay::Off).packed(&[4, 4]).unwrap_err();
    assert!(
        error.to_string().contains("'bias' of [9] cannot consist of blocks of [4, 4]"),
        "{error}"
    );
    Ok(())
}

/// An n x m matrix has n + m numbers of state, not n x m. A block of GPT-2 takes a hundredth of a byte per parameter,
/// where AdamW takes eight bytes.
#[test]
fn the_state_of_a_block_of_gpt_2_is_next_to_nothing() -> Result<()> {
    const C: usize = 768;
    let device = Device::cpu(1)?;
    let scope = Scope::new(&device, DType::F32, 1);
    let config = AttentionConfig {
        init: Init::Zeros,
        residual_init: Init::Zeros,
        ..AttentionConfig::new(C, 12)
    };
    let attention = Attention::new(&scope.child("attn"), &config)?;
    let mlp = MlpConfig {
        hidden: C,
        ffn_hidden: 4 * C,
        activation: Activation::GeluTanh,
        bias: Bias::Yes,
        init: Init::Zeros,
        residual_init: Init::Zeros,
    };
    let mlp = Mlp::new(&scope.child("mlp"), &mlp)?;
    let buffers = ParamAndGradBuffer::new(&[attention.params(), mlp.params()].concat())?;
    let bytes = |beta1| -> Result<f64> {
        let config = AdafactorConfig { beta1, ..AdafactorConfig::default() };
        let optimizer = Optimizer::new(OptimizerConfig::Adafactor(config), &buffers)?;
        let bytes = device.memory().bytes(Category::Optimizer) as f64 / buffers.numel() as f64;
        drop(optimizer);
        Ok(bytes)
    };
    // Rows and columns of q, k, v, of three more matrices, and the biases.
    let numbers = 3 * 2 * C + 2 * C + 2 * 5 * C + (3 + 1 + 4 + 1) * C;
    assert_eq!(bytes(0.0)?, 4.0 * numbers as f64 / buffers.numel() as f64);
    assert!(bytes(0.0)? < 0.012 && (4.0..4.012).contains(&bytes(0.9)?), "{}", bytes(0.0)?);
    Ok(())
}

/// An n x m matrix has n + m numbers of state, not n x m.
#[test]
fn it_keeps_rows_and_columns() -> Result<()> {
    for (beta1, dtype, per_number) in
        [(0.0, DType::F32, 4), (0.9, DType::F32, 4), (0.0, DType::F64, 8), (0.0, DType::BF16, 4)]
    {
        let device = Device::cpu(1)?;
        let init = Init::Normal { std: 0.02 };
        let scope = Scope::new(&device, dtype, 1);
        let weight =
            scope.param("weight", &[300, 200], init, WeightDecay::On).packed(&[200, 60, 40])?;
        let bias = scope.param("bias", &[200], init, WeightDecay::Off);
        let buffers = ParamAndGradBuffer::new(&[weight, bias])?;
        let config = AdafactorConfig { beta1, ..AdafactorConfig::default() };
        let optimizer = Optimizer::new(OptimizerConfig::Adafactor(config), &buffers)?;
        let numel = 300 * 200 + 200;
        let copies = usize::from(beta1 > 0.0) + usize::from(dtype == DType::BF16);
        let numbers = (300 + 3 * 200) + 200 + copies * numel;
        assert_eq!(device.memory().bytes(Category::Optimizer), numbers * per_number);
        let mut names = Vec::new();
        optimizer.visit(|name, moment, place, _| {
            names.push(format!("{moment}.{name} {:?}", place.dims()));
            Ok(())
        })?;
        for part in [
            "exp_avg_sq_row.weight [60]",
            "exp_avg_sq_col.weight [1, 200]",
            "exp_avg_sq.bias [200]",
        ] {
            assert!(names.iter().any(|name| name == part), "{part} is not among {names:?}");
        }
        assert_eq!(names.iter().any(|name| name.starts_with("exp_avg.")), beta1 > 0.0);
        assert_eq!(names.iter().any(|name| name.starts_with(MASTER)), dtype == DType::BF16);
    }
    Ok(())
}

/// Weights of 16 bits are updated in f32: a run of many small steps ends where that in f32 ends.
#[test]
fn master_weights_are_what_f32_weights_are() -> Result<()> {
    let device = Device::cpu(1)?;
    let config = AdafactorConfig::default();
    let (wide, narrow) = (params(&device, DType::F32), params(&device, DType::BF16));
    for (wide, narrow) in wide.iter().zip(&narrow) {
        wide.leaf().set_value(&narrow.leaf().value()?.cast(DType::F32)?)?;
    }
    let buffers = [ParamAndGradBuffer::new(&wide)?, ParamAndGradBuffer::new(&narrow)?];
    let config = OptimizerConfig::Adafactor(config);
    let mut optimizers =
        [Optimizer::new(config, &buffers[0])?, Optimizer::new(config, &buffers[1])?];
    for step in 0..STEPS {
        let gradients = set_gradients(&narrow, step)?;
        give_gradients(&wide, |k, i| gradients[k][i])?;
        for (optimizer, buffers) in optimizers.iter_mut().zip(&buffers) {
            optimizer.step(buffers, &StepConfig { lr: LR, grad_scale: SCALE })?;
        }
    }
    let mut masters = 0;
    optimizers[1].visit(|name, moment, _, value| {
        let same = wide.iter().find(|param| moment == MASTER && param.name() == name);
        if let Some(param) = same {
            assert_eq!(value.to_vec::<f32>()?, param.leaf().value()?.to_vec::<f32>()?, "{name}");
            masters += 1;
        }
        Ok(())
    })?;
    assert_eq!(masters, wide.len());
    Ok(())
}

#[test]
fn what_it_cannot_see_whole_is_refused() -> Result<()> {
    let device = Device::cpu(1)?;
    let config = OptimizerConfig::Adafactor(AdafactorConfig::default());
    let sharded =
        BufferConfig { sharding: Sharding::Optimizer, shard: (0, 2), ..BufferConfig::default() };
    let params = params(&device, DType::F32);
    let buffers = ParamAndGradBuffer::with_config(&params, &sharded)?;
    let error = Optimizer::new(config, &buffers).err().expect("a refusal").to_string();
    assert!(error.contains("adafactor: has to see the whole of '"), "{error}");
    drop(buffers);
    let whole = BufferConfig { optimizer: config, ..sharded };
    Optimizer::new(config, &ParamAndGradBuffer::with_config(&params, &whole)?)?;

    let rows = ShardSpec::new(&[6, 4], &[&[(0, 3)], &[(0, 4)]])?;
    let scope = Scope::new(&device, DType::F32, 1);
    let part = [scope.param_at("rows", rows, Init::Ones, WeightDecay::On)];
    let buffers = ParamAndGradBuffer::new(&part)?;
    let mut optimizer = Optimizer::new(config, &buffers)?;
    set_gradients(&part, 0)?;
    let error = optimizer.step(&buffers, &StepConfig { lr: LR, grad_scale: 1.0 }).unwrap_err();
    assert!(error.to_string().contains("parameters are cut between ranks"), "{error}");
    assert_eq!(optimizer.steps(), 0);

    for (config, part) in [
        (
            AdafactorConfig { beta1: 1.0, ..AdafactorConfig::default() },
            "beta1 must be in [0, 1), got 1",
        ),
        (
            AdafactorConfig { eps1: 0.0, ..AdafactorConfig::default() },
            "eps1 must be positive, got 0",
        ),
        (
            AdafactorConfig { clip_threshold: f64::NAN, ..AdafactorConfig::default() },
            "the clip threshold must be positive, got NaN",
        ),
    ] {
        let error =
            Optimizer::new(OptimizerConfig::Adafactor(config), &buffers).err().expect("a refusal");
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains(part), "{error}");
    }
    Ok(())
}
