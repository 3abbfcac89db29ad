//! A block of a transformer, serial and spread over ranks: values, all gradients and dropout do not depend on how.

use ferrotron_autograd::{Leaf, Var, WeightGrads, backward};
use ferrotron_nn::{
    Activation, Attention, AttentionConfig, Bias, Context, Dropout, Init, LayerNorm, Mlp,
    MlpConfig, Mode, Module, Scope,
};
use ferrotron_parallel::tensor_parallel::{ParallelAttention, ParallelMlp};
use ferrotron_tensor::Result;

use crate::ranks::*;

/// Options of a block that the tests vary.
#[derive(Debug, Clone, Copy)]
pub struct BlockConfig {
    pub hidden: usize,
    pub heads: usize,
    pub groups: usize,
    pub ffn_hidden: usize,
    pub activation: Activation,
    pub rotary_base: Option<f64>,
    pub dropout: f64,
}

/// Blocks of GPT-2 and of Llama; features that the ranks do not divide.
pub const BLOCKS: [BlockConfig; 2] = [
    BlockConfig {
        hidden: 12,
        heads: 4,
        groups: 4,
        ffn_hidden: 13,
        activation: Activation::GeluTanh,
        rotary_base: None,
        dropout: 0.25,
    },
    BlockConfig {
        hidden: 6,
        heads: 8,
        groups: 4,
        ffn_hidden: 7,
        activation: Activation::SwiGlu,
        rotary_base: Some(100.0),
        dropout: 0.25,
    },
];

const INIT: Init = Init::Normal { std: 0.3 };

impl BlockConfig {
    pub fn attention(&self) -> AttentionConfig {
        AttentionConfig {
            groups: self.groups,
            head_dim: 4,
            rotary_base: self.rotary_base,
            dropout: self.dropout,
            init: INIT,
            residual_init: INIT,
            ..AttentionConfig::new(self.hidden, self.heads)
        }
    }

    pub fn mlp(&self) -> MlpConfig {
        MlpConfig {
            hidden: self.hidden,
            ffn_hidden: self.ffn_hidden,
            activation: self.activation,
            bias: Bias::Yes,
            init: INIT,
            residual_init: INIT,
        }
    }
}

/// The residual stream, which both kinds share.
#[derive(Module)]
struct Stream {
    norms: [LayerNorm; 2],
    dropouts: [Dropout; 2],
}

impl Stream {
    fn new(scope: &Scope, config: &BlockConfig) -> Result<Stream> {
        let norm = |name| LayerNorm::new(&scope.child(name), config.hidden, Bias::Yes, 1e-5);
        let dropout = |name| Dropout::new(&scope.child(name), config.dropout);
        Ok(Stream {
            norms: [norm("norm1"), norm("norm2")],
            dropouts: [dropout("dropout1")?, dropout("dropout2")?],
        })
    }

    /// x + dropout(part(norm(x)))
    fn add(
        &self,
        i: usize,
        ctx: &Context,
        x: &Var,
        part: impl FnOnce(&Var) -> Result<Var>,
    ) -> Result<Var> {
        x.add(&self.dropouts[i].forward(ctx, &part(&self.norms[i].forward(x)?)?)?)
    }
}

#[derive(Module)]
pub struct SerialBlock {
    stream: Stream,
    attention: Attention,
    mlp: Mlp,
}

impl SerialBlock {
    pub fn new(config: &BlockConfig) -> Result<SerialBlock> {
        let scope = scope("block");
        Ok(SerialBlock {
            stream: Stream::new(&scope, config)?,
            attention: Attention::new(&scope.child("attn"), &config.attention())?,
            mlp: Mlp::new(&scope.child("mlp"), &config.mlp())?,
        })
    }

    pub fn forward(&self, ctx: &Context, x: &Var) -> Result<Var> {
        let x = self.stream.add(0, ctx, x, |x| self.attention.forward(ctx, x, None))?;
        self.stream.add(1, ctx, &x, |x| self.mlp.forward(x))
    }
}

#[derive(Module)]
pub struct ParallelBlock {
    stream: Stream,
    attention: ParallelAttention,
    mlp: ParallelMlp,
}

impl ParallelBlock {
    pub fn new(config: &BlockConfig, Rank { tp, cp, .. }: &Rank) -> Result<ParallelBlock> {
        let scope = scope("block");
        Ok(ParallelBlock {
            stream: Stream::new(&tp.residual_scope(&scope), config)?,
            attention: ParallelAttention::new(&scope.child("attn"), tp, cp, &config.attention())?,
            mlp: ParallelMlp::new(&scope.child("mlp"), tp, &config.mlp())?,
        })
    }

    pub fn forward(&self, ctx: &Context, x: &Var) -> Result<Var> {
        let x = self.stream.add(0, ctx, x, |x| self.attention.forward(ctx, x, None))?;
        self.stream.add(1, ctx, &x, |x| self.mlp.forward(x))
    }
}

#[test]
fn a_block_does_not_depend_on_how_it_is_spread() -> Result<()> {
    const B: usize = 2;
    const T: usize = 24;
    for config in BLOCKS {
        let dims = [B, T, config.hidden];
        let (x, dy) = (normal(&dims, "x"), normal(&dims, "dy"));
        let serial = SerialBlock::new(&config)?;
        let leaf = Leaf::new("x", x.clone());
        let y = serial.forward(&Context::new(SEED, 3, Mode::Train, B, T), &leaf.var()?)?;
        backward(&[(&y, dy.clone())], WeightGrads::Now)?.run()?;
        let (want, dx, grads) = (y.value(), gradient(&leaf), gradients(&serial));
        let tolerance = rounding(B * T * config.hidden);
        for (tp, sequence, cp) in [
            (1, 0, 1),
            (2, 0, 1),
            (4, 0, 1),
            (2, 1, 1),
            (4, 1, 1),
            (1, 0, 2),
            (1, 0, 3),
            (1, 0, 4),
            (2, 0, 2),
            (2, 1, 2),
            (2, 1, 3),
            (4, 1, 2),
        ] {
            for mode in [WeightGrads::Now, WeightGrads::Deferred] {
                let spread = Spread { tp, sequence: BOTH[sequence], cp };
                on_ranks(spread.ranks(), |world| {
                    let rank = spread.rank(&world, B, T)?;
                    let what = format!("{spread:?}, rank {}", world.rank());
                    let place = rank.ctx.shard_spec(&[config.hidden])?;
                    let block = ParallelBlock::new(&config, &rank)?;
                    let leaf = Leaf::new("x", part(&x, &place));
                    let y = block.forward(&rank.ctx, &leaf.var()?)?;
                    assert_close(&format!("{what}: y"), y.value(), &part(want, &place), tolerance);
                    backward(&[(&y, part(&dy, &place))], mode)?.run()?;
                    let want = part(&dx, &place);
                    assert_close(&format!("{what}: dx"), &gradient(&leaf), &want, tolerance);
                    assert_gradients(&what, &block, &grads, (&rank.mesh, tolerance))
                });
            }
        }
    }
    Ok(())
}

/// The same with all dropout: masks do not depend on the layout, and are not all alike.
#[test]
fn masks_are_those_of_the_place_in_the_batch() -> Result<()> {
    let config = BLOCKS[0];
    let dims = [2, 24, config.hidden];
    let ctx = Context::new(SEED, 3, Mode::Train, 2, 24);
    let x = Var::constant(normal(&dims, "x"));
    let y = SerialBlock::new(&config)?.forward(&ctx, &x)?;
    let without = BlockConfig { dropout: 0.0, ..config };
    let fake = SerialBlock::new(&without)?.forward(&ctx, &x)?;
    let kept = y
        .value()
        .to_f64()?
        .iter()
        .zip(fake.value().to_f64()?)
        .filter(|(y, fake)| **y == *fake)
        .count();
    assert_eq!(kept, 0, "dropout changes every element");
    let x = x.value();
    for (tp, sequence, cp) in [(4, 0, 1), (4, 1, 1), (1, 0, 4), (2, 1, 2)] {
        let spread = Spread { tp, sequence: BOTH[sequence], cp };
        on_ranks(spread.ranks(), |world| {
            let rank = spread.rank(&world, 2, 24)?;
            // The second sample alone, as a micro-batch.
            let ctx = Context { batch: ferrotron_nn::DimShard::part(2, 1, 1), ..rank.ctx.clone() };
            let place = ctx.shard_spec(&[config.hidden])?;
            let block = ParallelBlock::new(&config, &rank)?;
            let got = block.forward(&ctx, &Var::constant(part(x, &place)))?;
            let tolerance = rounding(config.hidden * 24);
            assert_close(&format!("{spread:?}"), got.value(), &part(y.value(), &place), tolerance);
            Ok(())
        });
    }
    Ok(())
}
