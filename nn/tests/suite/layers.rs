//! Checks every layer by finite differences over its input and all its parameters. Results do not depend on the
//! division of a batch or on feeding a sequence in parts.

use ferrotron_autograd::{GradcheckOptions, Leaf, Var, gradcheck_leaves};
use ferrotron_nn::{
    Activation, Attention, AttentionConfig, AttentionMask, Bias, Context, Dropout, Embedding, Init,
    KvCache, LayerNorm, Linear, Mlp, MlpConfig, Mode, Module, Norm, NormGain, RmsNorm, Scope,
};
use ferrotron_tensor::ops::random;
use ferrotron_tensor::{DType, Device, RandomKey, Result, ShardSpec, Tensor};

/// Batch, positions, width.
pub const DIMS: [usize; 3] = [2, 3, 4];
const NORMAL: Init = Init::Normal { std: 0.5 };

pub fn scope(device: &Device) -> Scope {
    Scope::new(device, DType::F64, 1234)
}

pub fn normal(device: &Device, dims: &[usize], site: &str) -> Result<Tensor> {
    let key = RandomKey::new(99, 0, site);
    random::normal(device, DType::F64, &ShardSpec::unsharded(dims), &key, 0.0, 0.7)
}

pub fn context(mode: Mode) -> Context {
    Context::new(7, 3, mode, DIMS[0], DIMS[1])
}

/// Checks `f` over an input of dims [`DIMS`] and the parameters of `layer`; none of them is zero or one.
pub fn check(device: &Device, layer: &dyn Module, f: impl Fn(&Var) -> Result<Var>) -> Result<()> {
    let x = Leaf::new("x", normal(device, &DIMS, "x")?);
    let mut leaves = vec![x.clone()];
    for param in layer.params() {
        let leaf = param.leaf();
        let noise = normal(device, leaf.dims(), param.name())?;
        leaf.set_value(&leaf.value()?.add(&noise.mul_scalar(0.3)?)?)?;
        leaves.push(leaf.clone());
    }
    gradcheck_leaves(|| f(&x.var()?), &leaves, &GradcheckOptions::default())
}

#[test]
fn linear_layers_and_norms() -> Result<()> {
    let device = Device::cpu(1)?;
    let scope = scope(&device);
    for bias in [Bias::Yes, Bias::No] {
        let linear = Linear::new(&scope.child("linear"), 4, 5, bias, NORMAL)?;
        check(&device, &linear, |x| linear.forward(x))?;
        let norm = Norm::Layer(LayerNorm::new(&scope.child("norm"), 4, bias, 1e-5));
        check(&device, &norm, |x| norm.forward(x))?;
    }
    for gain in [NormGain::Weight, NormGain::OnePlusWeight] {
        let norm = Norm::Rms(RmsNorm::with_gain(&scope.child("norm"), 4, 1e-5, gain));
        check(&device, &norm, |x| norm.forward(x))?;
        let norm = LayerNorm::with_gain(&scope.child("norm"), 4, Bias::Yes, 1e-5, gain);
        check(&device, &norm, |x| norm.forward(x))?;
    }
    Ok(())
}

/// Both norms begin as the same function, and 1 + w is computed in f32 where weights have 16 bits.
#[test]
fn a_gain_around_one_keeps_small_weights() -> Result<()> {
    let device = Device::cpu(1)?;
    let scope = Scope::new(&device, DType::BF16, 7);
    let x = Var::constant(normal(&device, &[3, 8], "x")?.cast(DType::BF16)?);
    let [plain, centered] = [NormGain::Weight, NormGain::OnePlusWeight]
        .map(|gain| RmsNorm::with_gain(&scope.child("norm"), 8, 1e-5, gain));
    let values = |norm: &RmsNorm| norm.forward(&x)?.value().to_f64();
    assert_eq!(values(&plain)?, values(&centered)?);
    // Rounded to bf16, 1 + w would be 1.
    let small = Tensor::full(&device, DType::BF16, &[8], 2.0_f64.powi(-9))?;
    centered.params()[0].leaf().set_value(&small)?;
    assert_ne!(values(&plain)?, values(&centered)?);
    Ok(())
}

#[test]
fn embeddings() -> Result<()> {
    let device = Device::cpu(1)?;
    let table = Embedding::new(&scope(&device).child("wte"), 6, 4, NORMAL)?;
    let ids = Tensor::from_slice(&device, &[5_u32, 0, 0, 3, 5, 5], &[2, 3])?;
    check(&device, &table, |x| table.forward(&ids)?.mul(x))
}

#[test]
fn every_mlp() -> Result<()> {
    let device = Device::cpu(1)?;
    for activation in [
        Activation::GeluTanh,
        Activation::GeluErf,
        Activation::Relu,
        Activation::SwiGlu,
        Activation::GeGlu,
    ] {
        for bias in [Bias::Yes, Bias::No] {
            let (init, residual_init) = (NORMAL, NORMAL);
            let config =
                MlpConfig { hidden: 4, ffn_hidden: 5, activation, bias, init, residual_init };
            let mlp = Mlp::new(&scope(&device).child("mlp"), &config)?;
            check(&device, &mlp, |x| mlp.forward(x))?;
        }
    }
    Ok(())
}

pub fn attention_config(groups: usize, rotary_base: Option<f64>, dropout: f64) -> AttentionConfig {
    AttentionConfig {
        groups,
        head_dim: 2,
        bias: if rotary_base.is_some() { Bias::No } else { Bias::Yes },
        rotary_base,
        dropout,
        init: NORMAL,
        residual_init: NORMAL,
        ..AttentionConfig::new(DIMS[2], 4)
    }
}

/// Multi-head and grouped-query, learned and rotary positions, without and with dropout.
fn attention_configs() -> Vec<AttentionConfig> {
    let mut all = Vec::new();
    for groups in [4, 2, 1] {
        for rotary_base in [None, Some(100.0)] {
            for dropout in [0.0, 0.3] {
                let config = attention_config(groups, rotary_base, dropout);
                all.push(config);
                all.push(AttentionConfig {
                    window: Some(2),
                    softmax_scale: Some(0.7),
                    softcap: Some(0.5),
                    qkv_bias: Some(Bias::Yes),
                    bias: Bias::No,
                    head_dim: 4,
                    rotary_dim: rotary_base.map(|_| 2),
                    qk_norm: Some(1e-5),
                    qk_norm_gain: match dropout > 0.0 {
                        true => NormGain::OnePlusWeight,
                        false => NormGain::Weight,
                    },
                    ..config
                });
            }
        }
    }
    all
}

#[test]
fn every_attention() -> Result<()> {
    let device = Device::cpu(1)?;
    for config in attention_configs() {
        let attention = Attention::new(&scope(&device).child("attn"), &config)?;
        check(&device, &attention, |x| attention.forward(&context(Mode::Train), x, None))
            .map_err(|error| error.at(&format!("{config:?}")))?;
    }
    Ok(())
}

/// Masks of the layer with lengths or documents of the batch.
#[test]
fn every_mask_of_attention() -> Result<()> {
    let device = Device::cpu(1)?;
    let contexts = [
        context(Mode::Train),
        context(Mode::Train).with_key_lengths(&[3, 2])?,
        context(Mode::Train).with_documents(&[vec![0, 1, 3], vec![0, 2, 3]])?,
        context(Mode::Train)
            .with_key_lengths(&[3, 2])?
            .with_documents(&[vec![0, 1, 3], vec![0, 2, 3]])?,
    ];
    for mask in [AttentionMask::Causal, AttentionMask::None] {
        for (window, softcap) in
            [(None, None), (Some(2), None), (None, Some(0.5)), (Some(2), Some(0.5))]
        {
            let config =
                AttentionConfig { mask, window, softcap, ..attention_config(2, Some(100.0), 0.3) };
            let attention = Attention::new(&scope(&device).child("attn"), &config)?;
            for ctx in &contexts {
                let fresh = || ctx.clone().micro_batch(0, DIMS[0]);
                check(&device, &attention, |x| attention.forward(&fresh(), x, None))
                    .map_err(|error| error.at(&format!("{config:?} {:?}", ctx.key_ranges)))?;
            }
        }
    }
    Ok(())
}

/// A padded sample gives what it gives alone, without its padding.
#[test]
fn padding_changes_nothing_before_it() -> Result<()> {
    let device = Device::cpu(1)?;
    let config =
        AttentionConfig { mask: AttentionMask::None, ..attention_config(2, Some(100.0), 0.0) };
    let attention = Attention::new(&scope(&device).child("attn"), &config)?;
    let x = normal(&device, &DIMS, "x")?;
    let lengths: Vec<usize> = (0..DIMS[0]).map(|sample| 1 + (DIMS[1] - 1) * sample).collect();
    let ctx = Context::eval(DIMS[0], DIMS[1]).with_key_lengths(&lengths)?;
    let padded = attention.forward(&ctx, &Var::constant(x.clone()), None)?.into_value();
    for (sample, &length) in lengths.iter().enumerate() {
        let part = |x: &Tensor| x.narrow(0, sample, 1)?.narrow(1, 0, length);
        let alone =
            attention.forward(&Context::eval(1, length), &Var::constant(part(&x)?), None)?;
        let (got, want) = (part(&padded)?.to_f64()?, alone.value().to_f64()?);
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() <= 1e-13, "sample {sample}: {got}, {want}");
        }
    }
    Ok(())
}

#[test]
fn a_cache_gives_what_the_whole_sequence_gives() -> Result<()> {
    let device = Device::cpu(1)?;
    let ctx = context(Mode::Eval);
    for config in attention_configs() {
        let attention = Attention::new(&scope(&device).child("attn"), &config)?;
        let x = normal(&device, &DIMS, "x")?;
        let whole = attention.forward(&ctx, &Var::constant(x.clone()), None)?.into_value();
        // All at once, one by one, and two at first.
        for cuts in [vec![3], vec![1, 1, 1], vec![2, 1]] {
            let mut cache = KvCache::new(&device, DType::F64, DIMS[0], DIMS[1], &config)?;
            for count in cuts {
                let start = cache.len();
                let part = Var::constant(x.narrow(1, start, count)?);
                let got =
                    attention.forward(&ctx, &part, Some(&mut cache))?.into_value().to_f64()?;
                let want = whole.narrow(1, start, count)?.to_f64()?;
                for (got, want) in got.iter().zip(want) {
                    assert!((got - want).abs() <= 1e-12, "{config:?} from {start}: {got}, {want}");
                }
            }
            let error =
                attention.forward(&ctx, &Var::constant(x.narrow(1, 0, 1)?), Some(&mut cache));
            let message = error.unwrap_err().to_string();
            assert!(message.contains("3 + 1 positions exceed the room for 3"), "{message}");
        }
    }
    Ok(())
}

#[test]
fn layers_refuse_what_does_not_fit_and_say_where() -> Result<()> {
    let device = Device::cpu(1)?;
    let scope = scope(&device).child("blocks.3");
    let message = |result: Result<()>| result.unwrap_err().to_string();
    let linear = Linear::new(&scope.child("fc"), 4, 5, Bias::No, NORMAL)?;
    let wrong = Var::constant(normal(&device, &[2, 3], "x")?);
    assert!(message(linear.forward(&wrong).map(drop)).starts_with("blocks.3.fc: linear: "));
    let no_outputs = Linear::new(&scope.child("fc"), 4, 0, Bias::No, NORMAL).map(drop);
    assert!(message(no_outputs).contains("got 4 inputs and 0 outputs"));
    let config = AttentionConfig { groups: 3, ..attention_config(4, None, 0.0) };
    assert_eq!(
        message(Attention::new(&scope.child("attn"), &config).map(drop)),
        "blocks.3.attn: attention: 3 key/value groups must divide 4 heads (of width 2)"
    );
    for (config, want) in [
        (
            AttentionConfig::new(8, 3),
            "the head width is 0: 3 heads do not divide the width 8, unless `head_dim` is given",
        ),
        (
            AttentionConfig { dropout: -0.5, ..AttentionConfig::new(8, 2) },
            "dropout must be in 0 <= p < 1, got -0.5",
        ),
        (
            AttentionConfig { dropout: f64::NAN, ..AttentionConfig::new(8, 2) },
            "dropout must be in 0 <= p < 1, got NaN",
        ),
        (
            AttentionConfig { rotary_dim: Some(2), ..AttentionConfig::new(8, 2) },
            "rotary_dim 2 needs rotary positions: give `rotary_base`",
        ),
    ] {
        let error = message(Attention::new(&scope.child("attn"), &config).map(drop));
        assert_eq!(error, format!("blocks.3.attn: attention: {want}"));
    }
    let config = AttentionConfig { window: Some(0), ..attention_config(4, None, 0.0) };
    assert_eq!(
        message(Attention::new(&scope.child("attn"), &config).map(drop)),
        "blocks.3.attn: attention: a window must be at least 1, got 0: a query sees itself"
    );
    let config = AttentionConfig { mask: AttentionMask::None, ..attention_config(4, None, 0.0) };
    let attention = Attention::new(&scope.child("attn"), &config)?;
    let mut cache = KvCache::new(&device, DType::F64, DIMS[0], DIMS[1], &config)?;
    let x = Var::constant(normal(&device, &DIMS, "x")?);
    assert_eq!(
        message(attention.forward(&context(Mode::Eval), &x, Some(&mut cache)).map(drop)),
        "blocks.3.attn: attention: attention that is not causal and a cache of keys and values do not go together"
    );
    // A share of the positions, of context or sequence parallelism, is not the sequence.
    let [samples, positions, _] = DIMS;
    let mut share = Context::eval(samples, 2 * positions);
    share.sequence = share.sequence.narrow(0..positions);
    let error = message(attention.forward(&share, &x, None).map(drop));
    let want = format!("attention: the context has {positions} of {} positions", 2 * positions);
    assert!(error.contains(&want) && error.contains("use `ParallelAttention`"), "{error}");
    let whole = Context::eval(samples, 2 * positions);
    let error = message(attention.forward(&whole, &x, None).map(drop));
    let packed = [samples, positions, config.packed_widths().iter().sum()];
    let want =
        format!("got {packed:?}, {positions} positions where the context has {}", 2 * positions);
    assert!(error.contains(&want), "{error}");
    let config =
        AttentionConfig { rotary_dim: Some(3), head_dim: 4, ..attention_config(4, Some(1e4), 0.0) };
    assert_eq!(
        message(Attention::new(&scope.child("attn"), &config).map(drop)),
        "blocks.3.attn: attention: the rotary dim must be even and at most the head width 4, got 3"
    );
    let config = AttentionConfig { head_dim: 3, ..attention_config(4, Some(1e4), 0.0) };
    assert!(message(Attention::new(&scope.child("attn"), &config).map(drop)).contains("got 3"));
    assert!(message(Dropout::new(&scope.child("dropout"), 1.5).map(drop)).contains("got 1.5"));
    assert!(
        message(Embedding::new(&scope.child("wte"), 0, 4, NORMAL).map(drop)).contains("0 rows")
    );
    Ok(())
}
