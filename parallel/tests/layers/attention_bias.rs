//! Biases of attention scores that the caller gives, over heads and positions: values, and gradients of the parameters
//! that the biases come from. Two layers share each bias.

use ferrotron_autograd::{Leaf, Var, WeightGrads, backward};
use ferrotron_nn::{
    Attention, AttentionBias, AttentionConfig, AttentionMask, Context, Init, Mode, Module, Param,
    PositionBias, Scope, WeightDecay,
};
use ferrotron_parallel::tensor_parallel::ParallelAttention;
use ferrotron_tensor::{Result, Tensor};

use crate::ranks::*;

const INIT: Init = Init::Normal { std: 0.3 };
const BATCH: usize = 2;
const LENGTH: usize = 16;
const HEADS: usize = 4;

fn config(mask: AttentionMask) -> AttentionConfig {
    AttentionConfig {
        mask,
        groups: 2,
        dropout: 0.1,
        init: INIT,
        residual_init: INIT,
        ..AttentionConfig::new(32, HEADS)
    }
}

/// Two layers, the table that they share, and another bias.
#[derive(Module)]
struct Layers<A: Module> {
    first: A,
    second: A,
    table: AttentionBias,
    bias: Param,
}

impl<A: Module> Layers<A> {
    fn new(
        (config, dims): (&AttentionConfig, &[usize]),
        held: std::ops::Range<usize>,
        scope_of_bias: &Scope,
        layer: impl Fn(&Scope, &AttentionConfig) -> Result<A>,
    ) -> Result<Layers<A>> {
        let relative = PositionBias::Relative { buckets: 8, max_distance: 12 };
        let with_table = AttentionConfig { position_bias: Some(relative), ..*config };
        let alibi = AttentionConfig { position_bias: Some(PositionBias::Alibi), ..*config };
        Ok(Layers {
            first: layer(&scope("first"), config)?,
            // Its own bias is added to the shared ones.
            second: layer(&scope("second"), &alibi)?,
            table: AttentionBias::new(&scope("table"), &with_table, held)?,
            bias: scope_of_bias.param("bias", dims, INIT, WeightDecay::Off),
        })
    }

    fn forward(
        &self,
        ctx: &Context,
        x: &Var,
        cut: impl Fn(Var) -> Result<Var>,
        layer: impl Fn(&A, &Var, &Var) -> Result<Var>,
    ) -> Result<Var> {
        let (table, bias) = (self.table.forward(ctx)?, cut(self.bias.var()?)?);
        let rows = bias.dims()[bias.dims().len() - 2];
        let local = if rows == ctx.sequence.len() || rows == 1 {
            bias
        } else {
            let rows = ctx.sequence.pieces.iter().map(|&(start, len)| bias.narrow(-2, start, len));
            let rows = rows.collect::<Result<Vec<_>>>()?;
            Var::concat(&rows.iter().collect::<Vec<_>>(), -2)?
        };
        let both = table.add(&local)?;
        layer(&self.second, &layer(&self.first, x, &both)?, &both)
    }
}

fn check(config: &AttentionConfig, dims: &[usize]) -> Result<()> {
    let (x, dy) = (normal(&[BATCH, LENGTH, 32], "x"), normal(&[BATCH, LENGTH, 32], "dy"));
    let layers = Layers::new((config, dims), 0..HEADS, &scope("given"), Attention::new)?;
    let leaf = Leaf::new("x", x.clone());
    let ctx = Context::new(SEED, 3, Mode::Train, BATCH, LENGTH);
    let y = layers.forward(&ctx, &leaf.var()?, Ok, |layer, x, bias| {
        layer.forward_with_bias(&ctx, x, bias, None)
    })?;
    backward(&[(&y, dy.clone())], WeightGrads::Now)?.run()?;
    let (want, dx, grads) = (y.value(), gradient(&leaf), gradients(&layers));
    let tolerance = rounding(BATCH * LENGTH) * 8.0;
    for (tp, sequence, cp) in [(2, 0, 1), (2, 1, 2), (2, 1, 1), (2, 0, 2), (1, 0, 2), (1, 0, 4)] {
        let spread = Spread { tp, sequence: BOTH[sequence], cp };
        on_ranks(spread.ranks(), |world| {
            let Rank { mesh, tp, cp, ctx } = spread.rank(&world, BATCH, LENGTH)?;
            let what = format!("{spread:?}, {dims:?}, rank {}", world.rank());
            let place = ctx.shard_spec(&[32])?;
            let layers = Layers::new(
                (config, dims),
                tp.group().local_range(HEADS),
                &tp.residual_scope(&scope("given")),
                |scope, config| ParallelAttention::new(scope, &tp, &cp, config),
            )?;
            let leaf = Leaf::new("x", part(&x, &place));
            let y = layers.forward(
                &ctx,
                &leaf.var()?,
                |bias| tp.local_bias(&bias, HEADS),
                |layer, x, bias| layer.forward_with_bias(&ctx, x, bias, None),
            )?;
            assert_close(&format!("{what}: y"), y.value(), &part(want, &place), tolerance);
            backward(&[(&y, part(&dy, &place))], WeightGrads::Now)?.run()?;
            let want = part(&dx, &place);
            assert_close(&format!("{what}: dx"), &gradient(&leaf), &want, tolerance);
            assert_gradients(&what, &layers, &grads, (&mesh, tolerance))
        });
    }
    Ok(())
}

#[test]
fn given_biases_in_every_layout() -> Result<()> {
    for dims in [
        &[HEADS, LENGTH, LENGTH][..],
        &[BATCH, HEADS, LENGTH, LENGTH],
        &[BATCH, 1, 1, LENGTH],
        &[LENGTH, LENGTH],
        &[HEADS, LENGTH, 1],
    ] {
        check(&config(AttentionMask::Causal), dims)?;
    }
    let windowed =
        AttentionConfig { window: Some(5), softcap: Some(1.5), ..config(AttentionMask::None) };
    check(&windowed, &[HEADS, 1, LENGTH])?;
    check(&windowed, &[BATCH, HEADS, LENGTH, LENGTH])
}

/// The layer itself takes its rows of a bias of all positions, and columns of the keys in transit.
#[test]
fn rows_of_all_positions_are_cut() -> Result<()> {
    for dims in [vec![LENGTH, LENGTH], vec![1, LENGTH], vec![LENGTH, 1], vec![1], vec![]] {
        let bias = Var::constant(normal(&dims, "bias"));
        let x = normal(&[BATCH, LENGTH, 32], "x");
        let config = config(AttentionMask::Causal);
        let ctx = Context::new(SEED, 3, Mode::Train, BATCH, LENGTH);
        let serial = Attention::new(&scope("attn"), &config)?;
        let want = serial.forward_with_bias(&ctx, &Var::constant(x.clone()), &bias, None)?;
        let spread = Spread { tp: 2, sequence: BOTH[0], cp: 2 };
        on_ranks(4, |world| {
            let Rank { tp, cp, ctx, .. } = spread.rank(&world, BATCH, LENGTH)?;
            let attention = ParallelAttention::new(&scope("attn"), &tp, &cp, &config)?;
            let place = ctx.shard_spec(&[32])?;
            let y =
                attention.forward_with_bias(&ctx, &Var::constant(part(&x, &place)), &bias, None)?;
            let want: Tensor = part(want.value(), &place);
            assert_close(&format!("{dims:?}"), y.value(), &want, rounding(LENGTH));
            Ok(())
        });
    }
    Ok(())
}

#[test]
fn biases_of_other_heads_are_refused() -> Result<()> {
    let config = config(AttentionMask::Causal);
    on_ranks(2, |world| {
        let spread = Spread { tp: 2, sequence: BOTH[0], cp: 1 };
        let Rank { tp, cp, ctx, .. } = spread.rank(&world, BATCH, LENGTH)?;
        let attention = ParallelAttention::new(&scope("attn"), &tp, &cp, &config)?;
        let x = Var::constant(normal(&[BATCH, LENGTH, 32], "x"));
        let says =
            |bias: &Var| attention.forward_with_bias(&ctx, &x, bias, None).unwrap_err().to_string();
        let trained = Leaf::new("bias", normal(&[LENGTH, LENGTH], "bias")).var()?;
        assert_eq!(
            says(&trained),
            "attn: attention: 2 ranks have heads of the bias [16, 16], and each a part of its gradient: give \
             `tp.local_bias(&bias, heads)`"
        );
        assert_eq!(
            says(&Var::constant(normal(&[HEADS, LENGTH, LENGTH], "bias"))),
            "attn: attention: a bias must broadcast to (B, H, T, S) = [2, 2, 16, 16] of the local samples, heads and \
             queries, got [4, 16, 16]; `TensorParallel::local_bias` cuts one of all heads"
        );
        let refused = tp.local_bias(&Var::constant(normal(&[3, 16, 16], "bias")), HEADS);
        assert_eq!(
            refused.unwrap_err().to_string(),
            "attention: a bias must be (.., 4 heads or 1, T, S) to be cut by heads, got [3, 16, 16]"
        );
        Ok(())
    });
    Ok(())
}
