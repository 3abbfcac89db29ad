//! Whole GPTs: finite differences over all parameters, generation against the full forward pass, and what
//! must not depend on micro-batches or threads.

use ferrotron_autograd::{GradcheckOptions, Leaf, gradcheck_leaves, missing_gradients};
use ferrotron_models::gpt::{Gpt, GptConfig};
use ferrotron_nn::{Context, Mode, Module, Param, Scope};
use ferrotron_tensor::ops::random;
use ferrotron_tensor::{DType, Device, RandomKey, Result, ShardSpec, Tensor};

const BATCH: usize = 2;
const LENGTH: usize = 5;
const VOCAB: usize = 11;

/// GPT-2 style with dropout everywhere, and Llama style with grouped queries.
fn configs() -> [GptConfig; 2] {
    let (hidden_dropout, attention_dropout) = (0.2, 0.3);
    [
        GptConfig { hidden_dropout, attention_dropout, ..GptConfig::gpt2(VOCAB, 2, 8, 2, LENGTH) },
        GptConfig { ffn_hidden_size: 12, ..GptConfig::llama(VOCAB, 2, 8, 4, 2, LENGTH) },
    ]
}

/// A model whose parameters are all away from their initial zeros and ones.
fn model(device: &Device, dtype: DType, config: &GptConfig) -> Result<Gpt> {
    let gpt = Gpt::new(&Scope::new(device, dtype, 1234), config)?;
    for param in gpt.params() {
        let (leaf, key) = (param.leaf(), RandomKey::new(5, 0, param.name()));
        let noise =
            random::normal(device, dtype, &ShardSpec::unsharded(leaf.dims()), &key, 0.0, 0.2)?;
        leaf.set_value(&leaf.value()?.add(&noise)?)?;
    }
    Ok(gpt)
}

/// Tokens and targets; one target is ignored.
fn batch_of(device: &Device, dims: &[usize], vocab: usize) -> Result<(Tensor, Tensor)> {
    let count = dims.iter().product();
    let tokens: Vec<u32> = (0..count).map(|i| ((7 * i + i * i + 3) % vocab) as u32).collect();
    let target = |i: usize| if i == 4 { -100 } else { ((5 * i + 2) % vocab) as i64 };
    let targets: Vec<i64> = (0..count).map(target).collect();
    Ok((Tensor::from_slice(device, &tokens, dims)?, Tensor::from_slice(device, &targets, dims)?))
}

fn batch(device: &Device) -> Result<(Tensor, Tensor)> {
    batch_of(device, &[BATCH, LENGTH], VOCAB)
}

fn context(mode: Mode) -> Context {
    Context::new(1234, 3, mode, BATCH, LENGTH)
}

fn leaves(gpt: &Gpt) -> Vec<Leaf> {
    gpt.params().iter().map(Param::leaf).cloned().collect()
}

#[test]
fn gradients_of_all_parameters_are_the_derivatives() -> Result<()> {
    let device = Device::cpu(1)?;
    let (tokens, targets) = batch(&device)?;
    for config in configs() {
        let gpt = model(&device, DType::F64, &config)?;
        let loss = || Ok(gpt.loss(&context(Mode::Train), &tokens, &targets)?.sum);
        gradcheck_leaves(loss, &leaves(&gpt), &GradcheckOptions::default())?;
        assert!(missing_gradients(&leaves(&gpt)).is_empty());
    }
    Ok(())
}

#[test]
fn step_by_step_generation_equals_the_full_forward_pass() -> Result<()> {
    let device = Device::cpu(1)?;
    let (tokens, _) = batch(&device)?;
    let ctx = context(Mode::Eval);
    for config in configs() {
        let gpt = model(&device, DType::F64, &config)?;
        let full = gpt.forward(&ctx, &tokens)?.into_value(); // (B, T, V)
        for prompt in [1, 3, LENGTH] {
            let mut caches = gpt.caches(BATCH, usize::MAX)?;
            for end in prompt..=LENGTH {
                let start = if end == prompt { 0 } else { end - 1 };
                let part = tokens.narrow(1, start, end - start)?;
                let got = gpt.next_token_logits(&ctx, &part, &mut caches)?.into_value();
                assert_eq!(got.dims(), [BATCH, VOCAB]);
                let want = full.narrow(1, end - 1, 1)?.to_f64()?;
                for (got, want) in got.to_f64()?.iter().zip(want) {
                    assert!((got - want).abs() <= 1e-12, "position {end}: {got}, want {want}");
                }
            }
            let one = tokens.narrow(1, 0, 1)?;
            let error = gpt.next_token_logits(&ctx, &one, &mut caches).unwrap_err().to_string();
            assert!(error.contains("6 positions exceed max-position-embeddings 5"), "{error}");
        }
    }
    Ok(())
}

/// Loss and gradients, flat.
fn numbers(gpt: &Gpt, parts: &[(Context, Tensor, Tensor)]) -> Result<Vec<f64>> {
    leaves(gpt).iter().for_each(Leaf::zero_gradient);
    let mut sum = 0.0;
    for (ctx, tokens, targets) in parts {
        let loss = gpt.loss(ctx, tokens, targets)?;
        sum += loss.sum.value().item()?;
        loss.sum.backward()?;
    }
    let mut all = vec![sum];
    for leaf in leaves(gpt) {
        all.extend(leaf.gradient()?.expect("every parameter has a gradient").to_f64()?);
    }
    Ok(all)
}

#[test]
fn micro_batches_add_up_to_the_batch() -> Result<()> {
    let device = Device::cpu(1)?;
    let (tokens, targets) = batch(&device)?;
    for config in configs() {
        let gpt = model(&device, DType::F64, &config)?;
        let ctx = context(Mode::Train);
        let whole = numbers(&gpt, &[(ctx.clone(), tokens.clone(), targets.clone())])?;
        let part = |i: usize| -> Result<(Context, Tensor, Tensor)> {
            let ctx = ctx.clone().micro_batch(i, 1);
            Ok((ctx, tokens.narrow(0, i, 1)?, targets.narrow(0, i, 1)?))
        };
        let parts = numbers(&gpt, &(0..BATCH).map(part).collect::<Result<Vec<_>>>()?)?;
        // Only the order of sums differs.
        let allowed = |want: f64| 64.0 * f64::EPSILON * want.abs().max(1.0);
        for (i, (got, want)) in parts.iter().zip(&whole).enumerate() {
            assert!((got - want).abs() <= allowed(*want), "number {i}: {got}, want {want}");
        }
    }
    Ok(())
}

/// Large enough that loops and products are shared out.
#[test]
fn threads_do_not_change_a_bit() -> Result<()> {
    let (batch, length, vocab) = (4, 32, 500);
    for config in configs() {
        let config = GptConfig {
            vocab_size: vocab,
            hidden_size: 64,
            ffn_hidden_size: 192,
            kv_channels: 64 / config.num_attention_heads,
            max_position_embeddings: length,
            ..config
        };
        for dtype in [DType::F32, DType::BF16] {
            let run = |threads: usize| {
                let device = Device::cpu(threads)?;
                let (tokens, targets) = batch_of(&device, &[batch, length], vocab)?;
                let gpt = model(&device, dtype, &config)?;
                let ctx = Context::new(1234, 3, Mode::Train, batch, length);
                numbers(&gpt, &[(ctx, tokens, targets)])
            };
            assert_eq!(run(1)?, run(2)?, "{dtype}");
        }
    }
    Ok(())
}

#[test]
fn parameters_are_counted_without_making_them() -> Result<()> {
    let device = Device::cpu(1)?;
    for config in configs() {
        let gpt = Gpt::new(&Scope::new(&device, DType::F64, 0), &config)?;
        let counted: usize = gpt.params().iter().map(|param| param.leaf().numel()).sum();
        assert_eq!(config.num_parameters(), counted as u64);
        assert_eq!(device.memory().current, 0);
    }
    Ok(())
}
