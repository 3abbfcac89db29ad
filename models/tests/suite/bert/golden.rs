//! Losses, logits and gradients against an independent implementation: `tests/golden/make_bert_golden.py` wrote the
//! numbers with PyTorch, in f64.

use ferrotron_autograd::Var;
use ferrotron_models::bert::{Bert, BertConfig, NormPlacement};
use ferrotron_models::data::{Batch, PairBatch};
use ferrotron_models::trainer::{Microbatch, Model};
use ferrotron_nn::{Context, Mode, Module, Param, Scope};
use ferrotron_parallel::mesh::Mesh;
use ferrotron_tensor::{DType, Device, Result, Tensor};
use serde_json::Value;

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

/// The largest difference may be `tolerance * max(1, largest wanted)`.
fn assert_close(what: &str, got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}: number of elements");
    let allowed = tolerance * want.iter().fold(1.0, |a: f64, b| a.max(b.abs()));
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= allowed, "{what}, element {i}: got {got}, want {want}");
    }
}

fn config(placement: NormPlacement, config: &Value) -> BertConfig {
    let size = |key: &str| config[key].as_u64().unwrap() as usize;
    let sizes = ["vocab_size", "num_layers", "hidden_size", "num_attention_heads", "seq_length"];
    let [vocab, layers, hidden, heads, positions] = sizes.map(size);
    BertConfig {
        ffn_hidden_size: size("ffn_hidden_size"),
        norm_epsilon: config["norm_epsilon"].as_f64().unwrap(),
        ..BertConfig::new(placement, vocab, layers, hidden, heads, positions)
    }
}

/// The formula of `make_golden.py` for weight `k`.
fn weights(k: usize, count: usize, norm: bool) -> Vec<f64> {
    let wave = |i: f64| (0.7 * i + 0.05 * i * i + k as f64).sin();
    let value = |wave: f64| if norm { 1.0 + 0.1 * wave } else { 0.3 * wave };
    (0..count).map(|i| value(wave(i as f64))).collect()
}

fn check(placement: NormPlacement, golden: &Value, dtype: DType, tolerance: f64) -> Result<()> {
    let device = Device::cpu(1)?;
    let config = config(placement, &golden["config"]);
    let bert = Bert::new(&Scope::new(&device, dtype, 0), &config)?;
    let (params, tensors) = (bert.params(), golden["tensors"].as_array().unwrap());
    let names: Vec<&str> = tensors.iter().map(|t| t["name"].as_str().unwrap()).collect();
    assert_eq!(params.iter().map(Param::name).collect::<Vec<_>>(), names);
    for (k, (param, tensor)) in params.iter().zip(tensors).enumerate() {
        let dims: Vec<usize> = numbers(&tensor["shape"]).iter().map(|&dim| dim as usize).collect();
        assert_eq!(param.leaf().dims(), dims, "{}", param.name());
        let values = weights(k, param.leaf().numel(), tensor["norm"] == true);
        param.leaf().set_value(&Tensor::from_slice(&device, &values, &dims)?.cast(dtype)?)?;
    }
    let (samples, length) = (2, config.max_position_embeddings);
    let mut batch = PairBatch::blank(0, samples, length, 0);
    batch.tokens = numbers(&golden["tokens"]).iter().map(|&id| id as u32).collect();
    batch.segments = numbers(&golden["segments"]).iter().map(|&id| id as u32).collect();
    batch.targets = numbers(&golden["targets"]).iter().map(|&id| id as i64).collect();
    batch.order = numbers(&golden["order"]).iter().map(|&id| id as i64).collect();
    let batch = Batch::try_from(batch)?;
    let ctx = Context::new(0, 0, Mode::Train, samples, length);
    let microbatch = Microbatch::new(&device, &Mesh::single(), &batch, ctx)?;

    let (tokens, segments) =
        (microbatch.get(PairBatch::TOKENS)?, microbatch.get(PairBatch::SEGMENTS)?);
    let output = bert.forward(microbatch.ctx(), tokens, segments)?;
    let what = |name: &str| format!("{placement:?} {dtype}, {name}");
    let values = |var: &Var| var.value().to_f64();
    let want = numbers(&golden["logits"]);
    assert_close(&what("logits"), &values(&output.token_logits)?, &want, tolerance);
    let order = output.order_logits.expect("there is a binary head");
    let want = numbers(&golden["order_logits"]);
    assert_close(&what("logits of the order"), &values(&order)?, &want, tolerance);

    let losses = Model::forward(&bert, &microbatch, None)?.losses;
    let terms = Bert::loss_terms(&config, &batch)?;
    let mut total: Option<Var> = None;
    for (((name, sum), term), want) in losses.iter().zip(&terms).zip(numbers(&golden["losses"])) {
        assert_eq!(*name, term.name);
        let mean = sum.mul_scalar(1.0 / term.count)?;
        assert_close(&what(name), &values(&mean)?, &[want], tolerance);
        total = Some(match total {
            Some(total) => total.add(&mean)?,
            None => mean,
        });
    }
    total.expect("two losses").backward()?;
    for param in &params {
        // The key biases' true gradient is 0: absolute differences say enough.
        let got = param.leaf().gradient()?.expect("every parameter has a gradient").to_f64()?;
        let want = numbers(&golden["grads"][param.name()]);
        assert_close(&what(param.name()), &got, &want, tolerance);
    }
    Ok(())
}

#[test]
fn losses_logits_and_gradients_equal_those_of_pytorch() -> Result<()> {
    let golden: Value =
        serde_json::from_str(include_str!("../../../../tests/golden/bert.json")).unwrap();
    for (placement, name) in [(NormPlacement::Post, "post"), (NormPlacement::Pre, "pre")] {
        for (dtype, tolerance) in [(DType::F64, 1e-9), (DType::F32, 1e-5)] {
            check(placement, &golden["models"][name], dtype, tolerance)?;
        }
    }
    Ok(())
}
