//! Attention as in Megatron-LM's tests/unit_tests/transformer/test_attention.py: hidden 128, 4 heads, 4 sequences of
//! 256, in f64, and grouped-query attention; then the ring itself.

use ferrotron_autograd::{CallCounts, Leaf, Var, WeightGrads, backward, checkpoint};
use ferrotron_nn::{
    Attention, AttentionConfig, AttentionHeads, AttentionMask, Bias, Context, Init, KvCache, Mode,
    PositionBias,
};
use ferrotron_parallel::context_parallel::ContextParallel;
use ferrotron_parallel::tensor_parallel::{ParallelAttention, TensorParallel};
use ferrotron_tensor::{DType, Result};

use crate::ranks::*;

const INIT: Init = Init::Normal { std: 0.1 };

fn config(heads: usize, groups: usize, dropout: f64) -> AttentionConfig {
    AttentionConfig {
        groups,
        dropout,
        init: INIT,
        residual_init: INIT,
        ..AttentionConfig::new(128, heads)
    }
}

fn check(
    (batch, length): (usize, usize),
    config: &AttentionConfig,
    layouts: &[(usize, usize, usize)],
) -> Result<()> {
    check_restricted((batch, length), config, layouts, Ok)
}

/// [`check`] with key lengths or documents, which `restrict` adds.
fn check_restricted(
    (batch, length): (usize, usize),
    config: &AttentionConfig,
    layouts: &[(usize, usize, usize)],
    restrict: impl Fn(Context) -> Result<Context> + Sync,
) -> Result<()> {
    let dims = [batch, length, config.hidden];
    let (x, dy) = (normal(&dims, "x"), normal(&dims, "dy"));
    let serial = Attention::new(&scope("attn"), config)?;
    let leaf = Leaf::new("x", x.clone());
    let ctx = restrict(Context::new(SEED, 3, Mode::Train, batch, length))?;
    let y = serial.forward(&ctx, &leaf.var()?, None)?;
    backward(&[(&y, dy.clone())], WeightGrads::Now)?.run()?;
    let (want, dx, grads) = (y.value(), gradient(&leaf), gradients(&serial));
    let tolerance = rounding(batch * length);
    for &(tp, sequence, cp) in layouts {
        let spread = Spread { tp, sequence: BOTH[sequence], cp };
        on_ranks(spread.ranks(), |world| {
            let Rank { mesh, tp, cp, ctx } = spread.rank(&world, batch, length)?;
            let what = format!("{spread:?}, {} groups, rank {}", config.groups, world.rank());
            let ctx = restrict(ctx)?;
            let place = ctx.shard_spec(&[config.hidden])?;
            let attention = ParallelAttention::new(&scope("attn"), &tp, &cp, config)?;
            let leaf = Leaf::new("x", part(&x, &place));
            let y = attention.forward(&ctx, &leaf.var()?, None)?;
            assert_close(&format!("{what}: y"), y.value(), &part(want, &place), tolerance);
            backward(&[(&y, part(&dy, &place))], WeightGrads::Now)?.run()?;
            let want = part(&dx, &place);
            assert_close(&format!("{what}: dx"), &gradient(&leaf), &want, tolerance);
            assert_gradients(&what, &attention, &grads, (&mesh, tolerance))
        });
    }
    Ok(())
}

#[test]
fn megatron_layouts() -> Result<()> {
    let layouts = [(4, 0, 1), (4, 1, 1), (1, 0, 4), (2, 0, 2), (2, 1, 2)];
    check((4, 256), &config(4, 4, 0.0), &layouts)
}

#[test]
fn grouped_queries() -> Result<()> {
    check((2, 64), &config(4, 2, 0.1), &[(2, 0, 1), (2, 1, 1), (2, 0, 2), (2, 1, 2), (1, 0, 4)])?;
    check((2, 64), &config(8, 4, 0.1), &[(4, 0, 1), (4, 1, 2), (4, 0, 2)])?;
    // One key-value head; heads in fours.
    check((1, 32), &config(4, 1, 0.1), &[(1, 0, 2), (1, 0, 8)])
}

/// Every mask by global positions, over heads and over positions; windows that no rank's blocks cover, and documents that
/// begin and end within chunks.
#[test]
fn every_mask_in_every_layout() -> Result<()> {
    let layouts = [(2, 1, 1), (2, 0, 2), (1, 0, 4)];
    let documents = [vec![0, 3, 17, 18, 32], vec![0, 20, 29]];
    for mask in [AttentionMask::Causal, AttentionMask::None] {
        for window in [None, Some(3), Some(13)] {
            let softcap = window.map(|_| 1.5);
            let config = AttentionConfig { mask, window, softcap, ..config(4, 2, 0.1) };
            check((2, 32), &config, &layouts)?;
            let lengths = |ctx: Context| ctx.with_key_lengths(&[32, 11]);
            check_restricted((2, 32), &config, &layouts, lengths)?;
            let packed = |ctx: Context| ctx.with_documents(&documents);
            check_restricted((2, 32), &config, &layouts, packed)?;
        }
    }
    Ok(())
}

/// Norms of queries and keys, whose weights all heads share, a partial rotation, and a bias of the first layer alone.
#[test]
fn every_part_of_the_heads_in_every_layout() -> Result<()> {
    let config = AttentionConfig {
        bias: Bias::No,
        qkv_bias: Some(Bias::Yes),
        rotary_base: Some(100.0),
        rotary_dim: Some(6),
        qk_norm: Some(1e-5),
        ..config(4, 2, 0.1)
    };
    check((2, 32), &config, &[(2, 0, 1), (2, 1, 1), (2, 0, 2), (2, 1, 2), (1, 0, 4)])
}

/// Biases by distance: slopes of heads, and trained buckets, whose gradients come from heads and positions of all ranks.
#[test]
fn position_biases_in_every_layout() -> Result<()> {
    let layouts = [(2, 0, 1), (2, 1, 1), (2, 0, 2), (1, 0, 2), (1, 0, 4)];
    let relative = PositionBias::Relative { buckets: 8, max_distance: 12 };
    let documents = [vec![0, 3, 17, 18, 32], vec![0, 20, 29]];
    for bias in [PositionBias::Alibi, relative] {
        for mask in [AttentionMask::Causal, AttentionMask::None] {
            let config = AttentionConfig { mask, position_bias: Some(bias), ..config(4, 2, 0.1) };
            check((2, 32), &config, &layouts)?;
            let config = AttentionConfig { window: Some(13), softcap: Some(1.5), ..config };
            check_restricted((2, 32), &config, &layouts, |ctx| ctx.with_documents(&documents))?;
        }
    }
    Ok(())
}

/// The ring rounds each block's result once in 16 bits; sums over the ring are made in f32.
#[test]
fn the_ring_in_other_types() -> Result<()> {
    let (heads, groups, width, length) = (4, 2, 8, 24);
    let config = AttentionConfig { head_dim: width, ..config(heads, groups, 0.2) };
    let packed = [2, length, (heads + 2 * groups) * width];
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let x = normal(&packed, "packed").cast(dtype)?;
        let dy = normal(&[2, length, heads * width], "dy").cast(dtype)?;
        let serial = AttentionHeads::new(&scope("attn"), &config, 0..heads)?;
        let leaf = Leaf::new("packed", x.clone());
        let ctx = Context::new(SEED, 3, Mode::Train, 2, length);
        let y = serial.forward(&ctx, leaf.var()?, None, None)?;
        backward(&[(&y, dy.clone())], WeightGrads::Now)?.run()?;
        let (want, dx) = (y.value(), gradient(&leaf));
        for ranks in [2, 3] {
            let spread = Spread { tp: 1, sequence: BOTH[0], cp: ranks };
            on_ranks(ranks, |world| {
                let Rank { cp, ctx, .. } = spread.rank(&world, 2, length)?;
                let heads = AttentionHeads::new(&scope("attn"), &config, 0..heads)?;
                let leaf = Leaf::new("packed", part(&x, &ctx.shard_spec(&[packed[2]])?));
                let y = cp.attend(&heads, &ctx, leaf.var()?, None, None)?;
                let place = ctx.shard_spec(&dy.dims()[2..])?;
                // Probabilities are divided by 1 - p; a gradient is a sum over queries that weigh 1 in the
                // mean of each, of terms of the size of dy . v.
                let eps = 4.0 * dtype.epsilon() / 0.8;
                let what = format!("{dtype}, rank {} of {ranks}", world.rank());
                assert_close(&format!("{what}: y"), y.value(), &part(want, &place), 2.0 * eps);
                backward(&[(&y, part(&dy, &place))], WeightGrads::Now)?.run()?;
                let want = part(&dx, &ctx.shard_spec(&[packed[2]])?);
                let tolerance = eps * (width as f64).sqrt() * (length as f64).sqrt();
                assert_close(&format!("{what}: dx"), &gradient(&leaf), &want, tolerance);
                Ok(())
            });
        }
    }
    Ok(())
}

/// Kept are the packed projection, the output and the log-sum-exp; computed again, the bits are the same.
#[test]
fn the_ring_keeps_what_attention_keeps() {
    let config = config(4, 4, 0.1);
    let spread = Spread { tp: 1, sequence: BOTH[0], cp: 2 };
    on_ranks(2, |world| {
        let Rank { tp, cp, ctx, .. } = spread.rank(&world, 1, 16)?;
        let attention = ParallelAttention::new(&scope("attn"), &tp, &cp, &config)?;
        let x = Leaf::new("x", normal(&[1, 8, 128], "x"));
        let dy = normal(&[1, 8, 128], "dy");
        let y = attention.forward(&ctx, &x.var()?, None)?;
        // qkv 3 C, out C (which is also the input of proj), and one number a head, in f64; x is a leaf.
        assert_eq!(y.saved_bytes(), 8 * (4 * 128 + 4) * 8);
        backward(&[(&y, dy.clone())], WeightGrads::Now)?.run()?;
        let (plain, dx) = (y.value().clone(), gradient(&x).copy()?);
        x.zero_gradient();
        // The same pass once more, from its first call on.
        let ctx = Context { calls: CallCounts::default(), ..ctx };
        let forward = move |x: &[Var]| Ok(vec![attention.forward(&ctx, &x[0], None)?]);
        let y = checkpoint(&[&x.var()?], forward)?.remove(0);
        backward(&[(&y, dy)], WeightGrads::Now)?.run()?;
        assert_equal("recomputed y", y.value(), &plain);
        assert_equal("recomputed dx", &gradient(&x), &dx);
        Ok(())
    });
}

/// Keys and values go round once in forward, and once more in backward with their gradients, which come home.
#[test]
fn the_ring_sends_each_block_once_round() {
    for ranks in 2..=4 {
        let spread = Spread { tp: 1, sequence: BOTH[0], cp: ranks };
        let config = config(8, 2, 0.0);
        on_ranks(ranks, |world| {
            let Rank { cp, ctx, .. } = spread.rank(&world, 2, 24)?;
            let heads = AttentionHeads::new(&scope("attn"), &config, 0..8)?;
            let x = Leaf::new("x", normal(&[2, 24 / ranks, 12 * 16], "x"));
            let block = (2 * (24 / ranks) * 4 * 16 * size_of::<f64>()) as u64;
            let turns = ranks as u64;
            let y = cp.attend(&heads, &ctx, x.var()?, None, None)?;
            let sent = cp.group().traffic();
            assert_eq!(sent.calls_and_bytes("send_recv"), (turns - 1, (turns - 1) * block));
            backward(&[(&y, y.value().clone())], WeightGrads::Now)?.run()?;
            let sent = cp.group().traffic();
            assert_eq!(sent.calls_and_bytes("send_recv"), (3 * turns - 2, (3 * turns - 2) * block));
            assert_eq!(sent.bytes(), (3 * turns - 2) * block, "nothing else is sent");
            Ok(())
        });
    }
}

/// With caches, each context-parallel rank has whole sequences of its own.
#[test]
fn a_cached_sequence_is_that_of_the_plain_layer() -> Result<()> {
    let config = config(4, 4, 0.0);
    let check = |tp: TensorParallel, cp: ContextParallel| -> Result<()> {
        let ctx = Context::new(SEED, 3, Mode::Eval, 1, 8);
        let attention = ParallelAttention::new(&scope("attn"), &tp, &cp, &config)?;
        let serial = Attention::new(&scope("attn"), &config)?;
        let empty = || KvCache::new(&device(), DType::F64, 1, 8, &config);
        let mut caches = [empty()?, empty()?];
        for positions in [5, 1, 2] {
            let x = Var::constant(normal(&[1, positions, 128], "x"));
            let got = attention.forward(&ctx, &x, Some(&mut caches[0]))?;
            let want = serial.forward(&ctx, &x, Some(&mut caches[1]))?;
            assert_equal("with a cache", got.value(), want.value());
        }
        assert_eq!(cp.group().traffic().bytes(), 0);
        Ok(())
    };
    check(TensorParallel::single(), ContextParallel::single())?;
    on_ranks(2, |world| {
        let Rank { tp, cp, .. } = Spread { tp: 1, sequence: BOTH[0], cp: 2 }.rank(&world, 1, 8)?;
        check(tp, cp)
    });
    Ok(())
}
