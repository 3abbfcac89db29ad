//! Counts the collectives of a layer of attention and MLP: exactly those of Megatron-LM's papers.

use ferrotron_autograd::{Leaf, WeightGrads, backward};
use ferrotron_parallel::collective::{Group, Op};
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::Result;

use crate::block::{BLOCKS, ParallelBlock};
use crate::ranks::*;

/// Calls of every operation so far.
fn calls(group: &Group) -> [u64; 12] {
    Op::NAMES.map(|operation| group.traffic().calls_and_bytes(operation).0)
}

/// The counts of so many all-reduces, all-gathers and reduce-scatters, and nothing else.
fn only(all_reduce: u64, all_gather: u64, reduce_scatter: u64) -> [u64; 12] {
    [all_reduce, all_gather, reduce_scatter, 0, 0, 0, 0, 0, 0, 0, 0, 0]
}

#[test]
fn a_layer_communicates_as_often_as_it_should() {
    // Forward, and forward with backward. Of the six all-gathers two gather the columns' inputs again.
    for (sequence, forward, both) in [
        (SequenceParallel::Off, only(2, 0, 0), only(4, 0, 0)),
        (SequenceParallel::On, only(0, 2, 2), only(0, 6, 4)),
    ] {
        for (config, mode) in BLOCKS
            .into_iter()
            .flat_map(|config| [WeightGrads::Now, WeightGrads::Deferred].map(|mode| (config, mode)))
        {
            for ranks in [2, 4] {
                let spread = Spread { tp: ranks, sequence, cp: 1 };
                let bytes = on_ranks(ranks, |world| {
                    let rank = spread.rank(&world, 2, 24)?;
                    let block = ParallelBlock::new(&config, &rank)?;
                    let place = rank.ctx.shard_spec(&[config.hidden])?;
                    let x = Leaf::new("x", part(&normal(&[2, 24, config.hidden], "x"), &place));
                    let group = rank.tp.group();
                    let y = block.forward(&rank.ctx, &x.var()?)?;
                    assert_eq!(calls(group), forward, "forward, {spread:?}");
                    backward(&[(&y, y.value().clone())], mode)?.run()?;
                    assert_eq!(calls(group), both, "backward, {spread:?}, {mode:?}");
                    Ok(group.traffic().bytes())
                });
                // Each is of one activation of the residual stream. An all-reduce sends it 2 (n - 1) times over all
                // ranks, the others half as often.
                let activation = (2 * 24 * config.hidden * size_of::<f64>()) as u64;
                let halves = 2 * both[0] + both[1] + both[2];
                let want = halves * (ranks as u64 - 1) * activation;
                assert_eq!(bytes.iter().sum::<u64>(), want, "{spread:?}");
            }
        }
    }
}

#[test]
fn a_group_of_one_is_the_plain_layer() -> Result<()> {
    use ferrotron_nn::{Activation, Bias, Init, Module};
    use ferrotron_parallel::tensor_parallel::{ParallelMlp, TensorParallel};
    let config = ferrotron_nn::MlpConfig {
        hidden: 6,
        ffn_hidden: 7,
        activation: Activation::SwiGlu,
        bias: Bias::Yes,
        init: Init::XavierUniform,
        residual_init: Init::XavierUniform,
    };
    for sequence in BOTH {
        let tp = TensorParallel::new(Group::single(), sequence);
        let mlp = ParallelMlp::new(&scope("mlp"), &tp, &config)?;
        let serial = ferrotron_nn::Mlp::new(&scope("mlp"), &config)?;
        let x = Leaf::new("x", normal(&[2, 3, 6], "x"));
        let (got, want) = (mlp.forward(&x.var()?)?, serial.forward(&x.var()?)?);
        assert_equal("y", got.value(), want.value());
        assert_eq!(got.saved_bytes(), want.saved_bytes());
        backward(&[(&got, got.value().clone())], WeightGrads::Now)?.run()?;
        backward(&[(&want, want.value().clone())], WeightGrads::Now)?.run()?;
        for (got, want) in mlp.params().iter().zip(serial.params()) {
            assert_eq!(got.name(), want.name());
            assert_equal(got.name(), &gradient(got.leaf()), &gradient(want.leaf()));
        }
    }
    Ok(())
}
