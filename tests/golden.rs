//! Losses, logits, gradients and optimizer steps of two tiny GPTs against an independent implementation:
//! `tests/golden/make_golden.py` wrote the numbers with PyTorch, in f64.

use ferrotron_autograd::ops::cross_entropy::Loss;
use ferrotron_models::gpt::{Gpt, GptConfig};
use ferrotron_nn::{
    BufferConfig, Context, EMA, Init, Mode, Module, MuonConfig, MuonScale, Nesterov, NewtonSchulz,
    Optimizer, OptimizerConfig, Param, ParamAndGradBuffer, Scope, StepConfig, UpdateConfig,
    WeightDecay, clip_coefficient,
};
use ferrotron_tensor::ops::cross_entropy::CrossEntropyConfig;
use ferrotron_tensor::{DType, Device, Result, Tensor};
use serde_json::Value;

/// The bounds: absolute below 1, relative to the largest element of a tensor above.
const F64_TOLERANCE: f64 = 1e-9;
const F32_TOLERANCE: f64 = 1e-5;

fn golden() -> Value {
    let golden: Value = serde_json::from_str(include_str!("golden/golden.json")).unwrap();
    assert_eq!(golden["format"], "ferrotron-golden-1");
    golden
}

fn floats(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

fn integers(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|x| x.as_i64().unwrap()).collect()
}

fn size(config: &Value, key: &str) -> usize {
    config[key].as_u64().unwrap_or_else(|| panic!("no {key}")) as usize
}

/// The largest difference may be `tolerance * max(1, largest wanted)`.
fn assert_close(what: &str, got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}: number of elements");
    let allowed = tolerance * want.iter().fold(1.0, |a: f64, b| a.max(b.abs()));
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(
            (got - want).abs() <= allowed,
            "{what}, element {i}: got {got}, want {want} +- {allowed}"
        );
    }
}

/// A model of the file with the weights of its formula, and a batch.
struct Case {
    gpt: Gpt,
    params: Vec<Param>,
    tokens: Tensor,
    targets: Tensor,
    ctx: Context,
}

impl Case {
    /// The model named by `case` and its tokens, in `dtype`.
    fn new(golden: &Value, case: &Value, dtype: DType) -> Result<Case> {
        let device = Device::cpu(2)?;
        let model = &golden["models"][case["model"].as_str().unwrap()];
        let config = &model["config"];
        let gpt = Gpt::new(&Scope::new(&device, dtype, 0), &gpt_config(config))?;
        let params = gpt.params();
        let tensors = model["tensors"].as_array().unwrap();
        let names: Vec<&str> = tensors.iter().map(|t| t["name"].as_str().unwrap()).collect();
        assert_eq!(params.iter().map(Param::name).collect::<Vec<_>>(), names);
        for (k, (param, tensor)) in params.iter().zip(tensors).enumerate() {
            let shape: Vec<usize> =
                integers(&tensor["shape"]).into_iter().map(|size| size as usize).collect();
            assert_eq!(param.leaf().dims(), shape, "{}", param.name());
            let values = weights(k, param.leaf().numel(), tensor["norm"] == true);
            let values = Tensor::from_slice(&device, &values, &shape)?.cast(dtype)?;
            param.leaf().set_value(&values)?;
        }
        let (batch, length) = (size(config, "batch_size"), size(config, "seq_length"));
        let tokens: Vec<u32> = integers(&case["tokens"]).into_iter().map(|id| id as u32).collect();
        Ok(Case {
            gpt,
            params,
            tokens: Tensor::from_slice(&device, &tokens, &[batch, length])?,
            targets: Tensor::from_slice(&device, &integers(&case["targets"]), &[batch, length])?,
            ctx: Context::new(0, 0, Mode::Train, batch, length),
        })
    }

    /// The loss through the fused head, as training computes it.
    fn loss(&self) -> Result<Loss> {
        self.gpt.loss(&self.ctx, &self.tokens, &self.targets)
    }

    /// The loss through the logits.
    fn loss_of_logits(&self, label_smoothing: f64) -> Result<Loss> {
        let config = CrossEntropyConfig { label_smoothing, ..CrossEntropyConfig::default() };
        self.gpt.forward(&self.ctx, &self.tokens)?.cross_entropy(&self.targets, &config)
    }

    /// Compares a loss and the gradients of all parameters with those of `case`.
    fn check(&self, what: &str, case: &Value, loss: Loss, tolerance: f64) -> Result<()> {
        let scale = 1.0 / loss.num_valid_tokens()? as f64;
        let want = case["loss"].as_f64().unwrap();
        assert_close(what, &[loss.sum.value().item()? * scale], &[want], tolerance);
        self.params.iter().for_each(|param| param.leaf().zero_gradient());
        loss.sum.backward_scaled(scale)?;
        for param in &self.params {
            // The key biases' true gradient is 0: absolute differences say enough.
            let got = param.leaf().gradient()?.expect("every parameter has a gradient").to_f64()?;
            let want = floats(&case["grads"][param.name()]);
            assert_close(&format!("{what}, gradient of {}", param.name()), &got, &want, tolerance);
        }
        Ok(())
    }
}

fn gpt_config(config: &Value) -> GptConfig {
    let [vocab, layers, hidden, heads, groups, positions] = [
        "vocab_size",
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "seq_length",
    ]
    .map(|key| size(config, key));
    let style = match config["kind"].as_str() {
        Some("gpt2") => GptConfig::gpt2(vocab, layers, hidden, heads, positions),
        Some("llama") => GptConfig {
            rotary_base: config["rotary_base"].as_f64().unwrap(),
            ..GptConfig::llama(vocab, layers, hidden, heads, groups, positions)
        },
        kind => panic!("unknown kind {kind:?}"),
    };
    assert_eq!(style.tie_embeddings, config["tied"] == true);
    GptConfig {
        ffn_hidden_size: size(config, "ffn_hidden_size"),
        kv_channels: size(config, "head_dim"),
        norm_epsilon: config["norm_epsilon"].as_f64().unwrap(),
        ..style
    }
}

/// The formula of `make_golden.py` for weight `k`.
fn weights(k: usize, count: usize, norm: bool) -> Vec<f64> {
    (0..count)
        .map(|i| {
            let i = i as f64;
            let wave = (0.7 * i + 0.05 * i * i + k as f64).sin();
            if norm { 1.0 + 0.1 * wave } else { 0.3 * wave }
        })
        .collect()
}

fn check_all(dtype: DType, tolerance: f64) -> Result<()> {
    let golden = golden();
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 6);
    for case in cases {
        let name = format!("{} {dtype}", case["name"].as_str().unwrap());
        let built = Case::new(&golden, case, dtype)?;
        let logits = built.gpt.forward(&built.ctx, &built.tokens)?.into_value().to_f64()?;
        assert_close(&format!("{name}, logits"), &logits, &floats(&case["logits"]), tolerance);
        let smoothing = case["label_smoothing"].as_f64().unwrap();
        let of_logits = built.loss_of_logits(smoothing)?;
        built.check(&format!("{name} through logits"), case, of_logits, tolerance)?;
        if smoothing == 0.0 {
            built.check(&name, case, built.loss()?, tolerance)?;
        }
    }
    Ok(())
}

#[test]
fn f64_equals_pytorch() -> Result<()> {
    check_all(DType::F64, F64_TOLERANCE)
}

#[test]
fn f32_equals_pytorch() -> Result<()> {
    check_all(DType::F32, F32_TOLERANCE)
}

#[test]
fn five_steps_of_adamw_equal_pytorch() -> Result<()> {
    let golden = golden();
    let want = &golden["adamw"];
    let case = Case::new(&golden, want, DType::F64)?;
    let number = |key: &str| want[key].as_f64().unwrap();
    let [beta1, beta2] = floats(&want["betas"])[..] else { panic!("two betas") };
    let (eps, weight_decay) = (number("eps"), number("weight_decay"));
    let buffers = ParamAndGradBuffer::new(&case.params)?;
    let config = OptimizerConfig::AdamW { beta1, beta2, eps, weight_decay };
    let mut optimizer = Optimizer::new(config, &buffers)?;
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for _ in 0..size(want, "steps") {
        buffers.zero_gradients();
        let loss = case.loss()?;
        let scale = 1.0 / loss.num_valid_tokens()? as f64;
        losses.push(loss.sum.value().item()? * scale);
        loss.sum.backward_scaled(scale)?;
        buffers.check_gradients()?;
        let norm = buffers.sq_norm()?.sqrt();
        let grad_scale = clip_coefficient(norm, number("clip_grad"));
        optimizer.step(&buffers, &StepConfig { lr: number("lr"), grad_scale })?;
        norms.push(norm);
    }
    assert_close("losses", &losses, &floats(&want["losses"]), F64_TOLERANCE);
    assert_close("norms", &norms, &floats(&want["grad_norms"]), F64_TOLERANCE);
    let after = case.loss()?;
    let after = after.sum.value().item()? / after.num_valid_tokens()? as f64;
    assert_close("loss after", &[after], &[number("loss_after")], F64_TOLERANCE);
    for param in &case.params {
        let got = param.leaf().value()?.to_f64()?;
        let want = &want["final"][param.name()];
        let squares: f64 = got.iter().map(|x| x * x).sum();
        let (name, number) = (param.name(), |key: &str| want[key].as_f64().unwrap());
        assert_close(
            &format!("sum of {name}"),
            &[got.iter().sum()],
            &[number("sum")],
            F64_TOLERANCE,
        );
        let of_squares = [number("sum_of_squares")];
        assert_close(&format!("sum of squares of {name}"), &[squares], &of_squares, F64_TOLERANCE);
        let first = floats(&want["first"]);
        assert_close(&format!("first of {name}"), &got[..first.len()], &first, F64_TOLERANCE);
    }
    Ok(())
}

/// Ten steps of one matrix, with the gradients of `make_optimizers`.
fn ten_steps(
    config: OptimizerConfig,
    dtype: DType,
    ema_decay: Option<f64>,
) -> Result<[Vec<f64>; 2]> {
    let golden = golden();
    let given = &golden["optimizers"];
    let dims: Vec<usize> = integers(&given["shape"]).iter().map(|&dim| dim as usize).collect();
    let scope = Scope::new(&Device::cpu(2)?, dtype, 1);
    let param = scope.param("w", &dims, Init::Zeros, WeightDecay::On);
    let leaf = param.leaf();
    let tensor = |x: &[f64]| Tensor::from_slice(leaf.device(), x, &dims)?.cast(dtype);
    leaf.set_value(&tensor(&floats(&given["start"]))?)?;
    let layout = BufferConfig { optimizer: config, ..BufferConfig::default() };
    let buffers = ParamAndGradBuffer::with_config(std::slice::from_ref(&param), &layout)?;
    let update = UpdateConfig { ema_decay, ..UpdateConfig::default() };
    let mut optimizer = Optimizer::with_update(config, &buffers, &update)?;
    for step in 1..=size(given, "steps") {
        let target = |i: usize| {
            let i = i as f64;
            (0.7 * i + 0.3 * step as f64 + 0.05 * i * i).sin()
        };
        let weights = leaf.value()?.to_f64()?;
        let gradient: Vec<f64> = weights.iter().enumerate().map(|(i, w)| w - target(i)).collect();
        let gradient = tensor(&gradient)?;
        buffers.zero_gradients();
        leaf.accumulate_with(|into, _| into.copy_from(&gradient))?;
        let lr = given["lr"].as_f64().unwrap();
        optimizer.step(&buffers, &StepConfig { lr, grad_scale: 1.0 })?;
    }
    let mut average = Vec::new();
    optimizer.visit(|_, state, _, value| {
        if state == EMA {
            average = value.to_f64()?;
        }
        Ok(())
    })?;
    Ok([leaf.value()?.to_f64()?, average])
}

#[test]
fn ten_steps_of_every_rule_equal_pytorch_and_optax() -> Result<()> {
    let golden = golden();
    let want = |key: &str| floats(&golden["optimizers"][key]);
    let number = |key: &str| golden["optimizers"][key].as_f64().unwrap();
    let (momentum, weight_decay) = (0.9, number("weight_decay"));
    let nesterov = OptimizerConfig::NesterovSgd { momentum, weight_decay };
    for (dtype, tolerance) in [(DType::F64, F64_TOLERANCE), (DType::F32, 1e-6)] {
        for (name, config) in [
            ("sgd", OptimizerConfig::Sgd { momentum, weight_decay }),
            ("nesterov", nesterov),
            ("lion", OptimizerConfig::Lion { beta1: 0.9, beta2: 0.99, weight_decay }),
        ] {
            let [got, _] = ten_steps(config, dtype, None)?;
            assert_close(&format!("{name} in {dtype}"), &got, &want(name), tolerance);
        }
        // Optax's Lion is in f32.
        let lion = OptimizerConfig::Lion { beta1: 0.9, beta2: 0.99, weight_decay };
        let [got, _] = ten_steps(lion, dtype, None)?;
        assert_close(&format!("Optax's lion in {dtype}"), &got, &want("lion_optax"), 1e-6);
        let [got, average] = ten_steps(nesterov, dtype, Some(number("ema_decay")))?;
        assert_close("nesterov beside an average", &got, &want("nesterov"), tolerance);
        assert_close(&format!("average in {dtype}"), &average, &want("ema"), tolerance);
        // PyTorch's iterates in bfloat16.
        let muon = OptimizerConfig::Muon(MuonConfig {
            momentum: 0.95,
            nesterov: Nesterov::On,
            coefficients: NewtonSchulz::Simple,
            scale: MuonScale::ShapeScaling,
            weight_decay,
            ..MuonConfig::default()
        });
        let [got, _] = ten_steps(muon, dtype, None)?;
        assert_close(&format!("muon in {dtype}"), &got, &want("muon"), 2e-2);
    }
    Ok(())
}
