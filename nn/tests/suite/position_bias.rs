//! Attention with biases by distance, against a composition in f64, by finite differences, and with a cache.

use ferrotron_autograd::Var;
use ferrotron_nn::{
    Attention, AttentionBias, AttentionConfig, AttentionHeads, AttentionMask, Context, Init,
    KvCache, Mode, Module, Param, PositionBias, Scope, WeightDecay,
};
use ferrotron_tensor::{DType, Device, Result, Tensor};

use crate::layers::{DIMS, attention_config, check, context, normal, scope};

const RELATIVE: PositionBias = PositionBias::Relative { buckets: 4, max_distance: 3 };

fn configs() -> impl Iterator<Item = AttentionConfig> {
    [PositionBias::Alibi, RELATIVE].into_iter().flat_map(|bias| {
        [AttentionMask::Causal, AttentionMask::None].into_iter().map(move |mask| AttentionConfig {
            mask,
            position_bias: Some(bias),
            ..attention_config(2, None, 0.0)
        })
    })
}

#[test]
fn every_bias_by_finite_differences() -> Result<()> {
    let device = Device::cpu(1)?;
    for config in configs() {
        let config =
            AttentionConfig { window: Some(2), softcap: Some(0.5), dropout: 0.3, ..config };
        let attention = Attention::new(&scope(&device).child("attn"), &config)?;
        for ctx in [context(Mode::Train), context(Mode::Train).with_key_lengths(&[3, 2])?] {
            let fresh = || ctx.clone().micro_batch(0, DIMS[0]);
            check(&device, &attention, |x| attention.forward(&fresh(), x, None))
                .map_err(|error| error.at(&format!("{config:?}")))?;
        }
    }
    Ok(())
}

/// The bias of head `head` of 4 for a query and a key, as the papers state it. Of 4 buckets up to a distance of 3, causal
/// queries give 0, 1 and 2 to these distances and 3 to all farther; others have two buckets in each direction.
fn stated(config: &AttentionConfig, table: &[f64], head: usize, query: usize, key: usize) -> f64 {
    let distance = query.abs_diff(key);
    let bucket = match (config.position_bias, config.mask) {
        (Some(PositionBias::Alibi), _) => {
            return -(distance as f64) * 0.25_f64.powi(head as i32 + 1);
        }
        (_, AttentionMask::Causal) => distance.min(3),
        _ => distance.min(1) + if key > query { 2 } else { 0 },
    };
    table[bucket * 4 + head]
}

#[test]
fn values_are_those_of_a_composition() -> Result<()> {
    let (device, [b, t, h, d]) = (Device::cpu(1)?, [2, 3, 4, 2]);
    for config in configs() {
        let attention = Attention::new(&scope(&device).child("attn"), &config)?;
        let params = attention.params();
        let table = params.iter().find(|param| param.name().ends_with("relative_bias"));
        let table = table.map_or(Ok(Vec::new()), |param| param.leaf().value()?.to_f64())?;
        let named = |name: &str| {
            params.iter().find(|param| param.name() == format!("attn.{name}")).unwrap().var()
        };
        let x = Var::constant(normal(&device, &DIMS, "x")?);
        let qkv = x.linear(&named("qkv.weight")?, Some(&named("qkv.bias")?))?;
        let mut heads = Vec::new();
        for head in 0..h {
            let part = |at: usize| qkv.narrow(2, at * d, d);
            let (q, k, v) = (part(head)?, part(h + head / 2)?, part(h + 2 + head / 2)?);
            let bias: Vec<f64> = (0..t * t)
                .map(|i| match config.mask == AttentionMask::Causal && i % t > i / t {
                    true => f64::NEG_INFINITY,
                    false => stated(&config, &table, head, i / t, i % t),
                })
                .collect();
            let bias = Var::constant(Tensor::from_slice(&device, &bias, &[t, t])?);
            let scores = q.matmul(&k.transpose(1, 2)?)?.mul_scalar(0.5_f64.sqrt())?.add(&bias)?;
            heads.push(scores.softmax(-1)?.matmul(&v)?);
        }
        let joined = Var::concat(&heads.iter().collect::<Vec<_>>(), 2)?;
        let want = joined.linear(&named("proj.weight")?, Some(&named("proj.bias")?))?;
        let got = attention.forward(&Context::eval(b, t), &x, None)?;
        for (got, want) in got.value().to_f64()?.iter().zip(want.value().to_f64()?) {
            assert!((got - want).abs() <= 1e-13, "{config:?}: {got}, {want}");
        }
    }
    Ok(())
}

#[test]
fn a_cache_continues_the_positions() -> Result<()> {
    let device = Device::cpu(1)?;
    for config in configs().filter(|config| config.mask == AttentionMask::Causal) {
        let attention = Attention::new(&scope(&device).child("attn"), &config)?;
        let x = Var::constant(normal(&device, &[2, 9, 4], "x")?);
        let want = attention.forward(&Context::eval(2, 9), &x, None)?.value().to_f64()?;
        let mut cache = KvCache::new(&device, DType::F64, 2, 9, &config)?;
        let mut parts = Vec::new();
        for (start, len) in [(0, 4), (4, 1), (5, 3), (8, 1)] {
            let part = x.narrow(1, start, len)?;
            parts.push(attention.forward(&Context::eval(2, len), &part, Some(&mut cache))?);
        }
        let got = Var::concat(&parts.iter().collect::<Vec<_>>(), 1)?.value().to_f64()?;
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() <= 1e-13, "{config:?}: {got}, {want}");
        }
    }
    Ok(())
}

#[test]
fn buckets_that_hold_no_distance_are_refused() -> Result<()> {
    let device = Device::cpu(1)?;
    let says = |buckets, max_distance, mask| {
        let position_bias = Some(PositionBias::Relative { buckets, max_distance });
        let config = AttentionConfig { mask, position_bias, ..attention_config(2, None, 0.0) };
        Attention::new(&scope(&device).child("attn"), &config).unwrap_err().to_string()
    };
    assert_eq!(
        says(1, 128, AttentionMask::Causal),
        "attn: attention: relative positions need 2 or more buckets and a max_distance above 0, got 1 buckets and 128"
    );
    assert_eq!(
        says(32, 8, AttentionMask::None),
        "attn: attention: relative positions need an even number of 4 or more buckets and a max_distance above 8, \
         got 32 buckets and 8"
    );
    Ok(())
}

/// Two layers, of which the second one has a bias of its own, and biases that they share.
#[derive(Module)]
struct Sharing {
    first: Attention,
    second: Attention,
    table: AttentionBias,
    given: Param,
}

#[test]
fn given_and_shared_biases_by_finite_differences() -> Result<()> {
    let device = Device::cpu(1)?;
    for config in configs() {
        let plain = AttentionConfig { position_bias: None, ..config };
        for dims in [&[2, 4, 3, 3][..], &[4, 3, 3], &[2, 1, 1, 3], &[4, 3, 1], &[3], &[]] {
            let init = Init::Normal { std: 0.5 };
            let scope = scope(&device);
            let layers = Sharing {
                first: Attention::new(&scope.child("first"), &plain)?,
                second: Attention::new(&scope.child("second"), &config)?,
                table: AttentionBias::new(&scope.child("table"), &config, 0..4)?,
                given: scope.param("given", dims, init, WeightDecay::Off),
            };
            let ctx = context(Mode::Train);
            check(&device, &layers, |x| {
                let bias = layers.table.forward(&ctx)?.add(&layers.given.var()?)?;
                let y = layers.first.forward_with_bias(&ctx, x, &bias, None)?;
                layers.second.forward_with_bias(&ctx, &y, &bias, None)
            })
            .map_err(|error| error.at(&format!("{dims:?} {config:?}")))?;
        }
    }
    Ok(())
}

/// A shared table is what two layers would have of their own with equal tables, also with a cache.
#[test]
fn a_shared_bias_is_that_of_the_layer() -> Result<()> {
    let device = Device::cpu(1)?;
    for config in configs() {
        let plain = AttentionConfig { position_bias: None, ..config };
        // Equal paths have equal initial values.
        let own = Attention::new(&scope(&device).child("attn"), &config)?;
        let other = Attention::new(&scope(&device).child("attn"), &plain)?;
        let bias = AttentionBias::new(&scope(&device).child("attn"), &config, 0..4)?;
        let x = Var::constant(normal(&device, &[2, 9, 4], "x")?);
        let ctx = Context::eval(2, 9);
        let want = own.forward(&ctx, &x, None)?.value().to_f64()?;
        let got = other.forward_with_bias(&ctx, &x, &bias.forward(&ctx)?, None)?;
        assert_eq!(got.value().to_f64()?, want, "{config:?}");
        if config.mask == AttentionMask::None {
            continue;
        }
        let mut cache = KvCache::new(&device, DType::F64, 2, 9, &config)?;
        for (start, len) in [(0, 4), (4, 5)] {
            let (queries, keys): (Vec<_>, Vec<_>) =
                ((start..start + len).collect(), (0..start + len).collect());
            let bias = bias.at_positions(&queries, &keys)?;
            let part = x.narrow(1, start, len)?;
            let ctx = Context::eval(2, len);
            let got = other.forward_with_bias(&ctx, &part, &bias, Some(&mut cache))?;
            for (i, got) in got.value().to_f64()?.iter().enumerate() {
                let (sample, rest) = (i / (len * 4), i % (len * 4));
                let want = want[sample * 9 * 4 + start * 4 + rest];
                assert!((got - want).abs() <= 1e-13, "{config:?}: {got}, {want}");
            }
        }
    }
    Ok(())
}

#[test]
fn biases_that_do_not_fit_are_refused() -> Result<()> {
    let device = Device::cpu(1)?;
    let config = attention_config(2, None, 0.0);
    let attention = Attention::new(&scope(&device).child("attn"), &config)?;
    let x = Var::constant(normal(&device, &DIMS, "x")?);
    let bias = Var::constant(normal(&device, &[3, 3, 3], "bias")?);
    let refused = attention.forward_with_bias(&context(Mode::Eval), &x, &bias, None);
    assert_eq!(
        refused.unwrap_err().to_string(),
        "attn: attention: a bias must broadcast to (B, H, T, S) = [2, 4, 3, 3] of the local samples, heads and queries, \
         got [3, 3, 3]; `TensorParallel::local_bias` cuts one of all heads"
    );
    let refused = AttentionBias::new(&scope(&device).child("attn"), &config, 0..4);
    assert_eq!(
        refused.unwrap_err().to_string(),
        "attn: attention: a bias of its own needs `position_bias: Some(..)`, got None"
    );
    Ok(())
}

/// ALiBi in f32 at 32,768 positions: distances are exact, so errors are those of scores near 1. A bias relative to the last
/// key would have steps of 2^-10 at the first queries.
#[test]
fn slopes_are_exact_at_any_position() -> Result<()> {
    let (device, positions) = (Device::cpu(2)?, 1 << 15);
    // The window bounds the time of the test, and no distance.
    let config = AttentionConfig {
        window: Some(40),
        position_bias: Some(PositionBias::Alibi),
        ..AttentionConfig::new(16, 8)
    };
    let packed = normal(&device, &[1, positions, 48], "packed")?;
    let attend = |dtype: DType| -> Result<Vec<f64>> {
        let scope = Scope::new(&device, dtype, 1);
        let heads = AttentionHeads::new(&scope.child("attn"), &config, 0..8)?;
        let qkv = Var::constant(packed.cast(DType::F32)?.cast(dtype)?);
        heads.forward(&Context::eval(1, positions), qkv, None, None)?.value().to_f64()
    };
    for (i, (got, want)) in attend(DType::F32)?.into_iter().zip(attend(DType::F64)?).enumerate() {
        assert!((got - want).abs() <= 2e-6, "position {}: {got}, not {want}", i / 16);
    }
    Ok(())
}
