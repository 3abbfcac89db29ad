//! Sizes that cannot be sharded are refused with one line that names the numbers.

use ferrotron_nn::{AttentionConfig, Bias, DimShard, Init};
use ferrotron_parallel::context_parallel::ContextParallel;
use ferrotron_parallel::tensor_parallel::mappings::all_to_all;
use ferrotron_parallel::tensor_parallel::{
    ColumnParallelLinear, ParallelAttention, RowParallelLinear, SequenceParallel, TensorParallel,
    VocabParallelEmbedding,
};
use ferrotron_tensor::{ErrorKind, Result, Tensor};

use crate::ranks::*;

/// The same error on each of `ranks` ranks.
fn refused<T>(
    ranks: usize,
    sequence: SequenceParallel,
    f: impl Fn(&TensorParallel) -> Result<T> + Sync,
) -> String {
    let lines = on_tensor_ranks(ranks, sequence, |tp| {
        let Err(error) = f(&tp) else { panic!("accepted") };
        assert_ne!(error.kind(), ErrorKind::Communication);
        Ok(error.to_string())
    });
    assert!(lines.iter().all(|line| *line == lines[0]), "{lines:?}");
    assert!(!lines[0].contains('\n'), "{lines:?}");
    lines[0].clone()
}

fn attention(heads: usize, groups: usize, tp: &TensorParallel) -> Result<ParallelAttention> {
    let init = Init::Zeros;
    let config = AttentionConfig {
        groups,
        head_dim: 2,
        bias: Bias::No,
        init,
        residual_init: init,
        ..AttentionConfig::new(24, heads)
    };
    ParallelAttention::new(&scope("attn"), tp, &ContextParallel::single(), &config)
}

#[test]
fn heads_that_the_ranks_do_not_divide() {
    for (heads, groups, ranks, size) in [
        (6, 6, 4, "num-attention-heads 6"),
        (8, 2, 4, "num-query-groups 2"),
        (4, 1, 2, "num-query-groups 1"),
    ] {
        let line = refused(ranks, BOTH[0], |tp| attention(heads, groups, tp));
        let want = format!(
            "attn: attention: {size} is not a multiple of tensor-model-parallel-size {ranks}"
        );
        assert_eq!(line, want);
    }
}

#[test]
fn sequences_that_cannot_be_cut() {
    let line = refused(4, BOTH[1], |tp| tp.residual(&DimShard::unsharded(10)));
    let want = "sequence_parallel: 10 positions cannot be cut for tensor-model-parallel-size 4: with \
                sequence-parallel, seq-length / context-parallel-size must be a multiple of it";
    assert_eq!(line, want);
    for length in [0, 4, 12] {
        refused_nothing(length);
    }
    let line = refused(3, BOTH[0], |tp| ContextParallel::new(tp.group().clone()).sequence(9));
    let want = "context_parallel: sequences of 9 cannot be cut for context-parallel-size 3: seq-length must \
                be a multiple of 6";
    assert_eq!(line, want);
}

fn refused_nothing(length: usize) {
    let held = on_tensor_ranks(4, BOTH[1], |tp| tp.residual(&DimShard::unsharded(length)));
    assert!(held.iter().all(|extent| extent.len() == length / 4));
}

#[test]
fn sizes_of_zero_and_ids_that_nobody_has() -> Result<()> {
    let init = Init::Zeros;
    let column =
        |tp: &TensorParallel| ColumnParallelLinear::new(&scope("l"), tp, 3, &[], Bias::No, init);
    let want = "l: linear: sizes must be positive, got 3 inputs and 0 outputs";
    assert_eq!(refused(2, BOTH[0], column), want);
    let row = |tp: &TensorParallel| RowParallelLinear::new(&scope("l"), tp, 0, 2, Bias::No, init);
    let want = "l: linear: sizes must be positive, got 0 inputs and 2 outputs";
    assert_eq!(refused(2, BOTH[0], row), want);
    let wte = |tp: &TensorParallel| VocabParallelEmbedding::new(&scope("wte"), tp, 0, 2, init);
    let want = "wte: embedding: sizes must be positive, got 0 rows of 2";
    assert_eq!(refused(2, BOTH[0], wte), want);
    // Whichever rank would have had it.
    let ids = Tensor::from_slice(&device(), &[0_u32, 7], &[1, 2])?;
    let look_up = |tp: &TensorParallel| {
        VocabParallelEmbedding::new(&scope("wte"), tp, 7, 2, init)?.forward(&ids)
    };
    let want = "wte: embedding: index 7 at position [0, 1] is not below 7";
    assert_eq!(refused(3, BOTH[0], look_up), want);
    let x = ferrotron_autograd::Var::constant(normal(&[2, 3], "x"));
    let uneven = |tp: &TensorParallel| all_to_all(&x, 1, 0, tp.group());
    let want = "all_to_all: 2 ranks do not divide dim 1 of [2, 3]";
    assert_eq!(refused(2, BOTH[0], uneven), want);
    Ok(())
}
