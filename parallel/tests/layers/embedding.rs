//! The token embedding and the head that shares its table, against serial ones.

use ferrotron_autograd::{GradcheckOptions, Leaf, Var};
use ferrotron_nn::{Axis, Embedding, Init, Module};
use ferrotron_parallel::gradcheck::gradcheck_params;
use ferrotron_parallel::tensor_parallel::{TensorParallel, VocabParallelEmbedding};
use ferrotron_tensor::ops::cross_entropy::CrossEntropyConfig;
use ferrotron_tensor::{Result, Tensor};

use crate::ranks::*;

const INIT: Init = Init::Normal { std: 0.5 };
const CONFIG: CrossEntropyConfig = CrossEntropyConfig { ignore_index: -100, label_smoothing: 0.1 };

fn batch(vocab: i64) -> Result<(Tensor, Tensor)> {
    let ids: Vec<i64> = (0..24).map(|i| (i * i * 5 + 3 * i) % vocab).collect();
    let targets: Vec<i64> =
        (0..24).map(|i| if i % 5 == 4 { -100 } else { (7 * i + 1) % vocab }).collect();
    let ids = Tensor::from_slice(&device(), &ids, &[2, 12])?;
    Ok((ids, Tensor::from_slice(&device(), &targets, &[2, 12])?))
}

/// A model of nothing else: the loss of tanh(embedding), with the table as the head.
fn tied_loss(
    tp: &TensorParallel,
    wte: &VocabParallelEmbedding,
    (ids, targets): &(Tensor, Tensor),
) -> Result<Var> {
    let x = wte.forward(ids)?.tanh()?;
    Ok(tp.linear_cross_entropy(&x, wte.weight(), targets, &CONFIG, 100)?.sum)
}

#[test]
fn a_tied_table() -> Result<()> {
    // The last has fewer rows than ranks.
    for (vocab, width) in [(13, 5), (16, 4), (3, 6)] {
        let batch = batch(vocab as i64)?;
        let serial = Embedding::new(&scope("wte"), vocab, width, INIT)?;
        let x = serial.forward(&batch.0)?.tanh()?;
        let want = x.linear_cross_entropy(&serial.weight().var()?, &batch.1, &CONFIG, 100)?.sum;
        want.backward()?;
        let (want, grads) = (want.value(), gradients(&serial));
        let tolerance = rounding(24 * width);
        for (ranks, sequence) in (1..=4).flat_map(|n| BOTH.map(|sequence| (n, sequence))) {
            on_tensor_ranks(ranks, sequence, |tp| {
                let what =
                    format!("V {vocab}, rank {} of {ranks}, {sequence:?}", tp.group().rank());
                let wte = VocabParallelEmbedding::new(&scope("wte"), &tp, vocab, width, INIT)?;
                let loss = tied_loss(&tp, &wte, &batch)?;
                assert_close(&what, loss.value(), want, tolerance);
                loss.backward()?;
                let param = wte.weight();
                let want = part(&grads[param.name()], param.shard_spec());
                assert_close(&what, &gradient(param.leaf()), &want, tolerance);
                wte.params().iter().for_each(|param| param.leaf().zero_gradient());
                let loss = || tied_loss(&tp, &wte, &batch);
                let options = GradcheckOptions::default();
                gradcheck_params(loss, &wte.params(), (tp.group(), Axis::Tensor), &options)
            });
        }
    }
    Ok(())
}

/// The whole table of positions under sequence parallelism: each rank's gradient is that of its positions.
#[test]
fn positions_are_looked_up_where_they_are() -> Result<()> {
    let serial = Embedding::new(&scope("wpe"), 12, 3, INIT)?;
    let x = Leaf::new("x", normal(&[2, 12, 3], "x"));
    let ids = Tensor::from_slice(&device(), &(0..12_u32).collect::<Vec<_>>(), &[12])?;
    let y = x.var()?.mul(&serial.forward(&ids)?)?;
    y.sum_all()?.backward()?;
    let (y, grads) = (y.value(), gradients(&serial));
    for spread in [
        Spread { tp: 3, sequence: BOTH[1], cp: 1 },
        Spread { tp: 3, sequence: BOTH[0], cp: 1 },
        Spread { tp: 3, sequence: BOTH[1], cp: 2 },
        Spread { tp: 1, sequence: BOTH[0], cp: 3 },
    ] {
        on_ranks(spread.ranks(), |world| {
            let Rank { mesh, tp, ctx, .. } = spread.rank(&world, 2, 12)?;
            let place = ctx.shard_spec(&[3])?;
            let wpe = Embedding::new(&tp.residual_scope(&scope("wpe")), 12, 3, INIT)?;
            let ids: Vec<u32> =
                ctx.residual.coordinates().map(|position| position as u32).collect();
            let ids = Tensor::from_slice(&device(), &ids, &[ids.len()])?;
            let x = Var::constant(part(&normal(&[2, 12, 3], "x"), &place));
            let got = x.mul(&wpe.forward(&ids)?)?;
            assert_equal(&format!("{spread:?}"), got.value(), &part(y, &place));
            got.sum_all()?.backward()?;
            assert_gradients(&format!("{spread:?}"), &wpe, &grads, (&mesh, rounding(2)))
        });
    }
    Ok(())
}
