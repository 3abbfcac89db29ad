//! Finite differences through collectives: one rank's shard is perturbed, or what all ranks have alike on all.

use ferrotron_autograd::{GradcheckOptions, Leaf, Var, gradcheck};
use ferrotron_nn::{Activation, Axis, Bias, Init, MlpConfig, Module};
use ferrotron_parallel::collective::Group;
use ferrotron_parallel::gradcheck::gradcheck_params;
use ferrotron_parallel::tensor_parallel::mappings::*;
use ferrotron_parallel::tensor_parallel::{
    ColumnParallelLinear, ParallelMlp, RowParallelLinear, SequenceParallel,
};
use ferrotron_tensor::Result;

use crate::block::{BLOCKS, ParallelBlock};
use crate::ranks::*;

/// A number that depends on every element and on the rank, and is the same on every rank. It is the sum over the ranks
/// of weighted sums of their results.
fn joined(y: &Var, group: &Group) -> Result<Var> {
    let weights = Var::constant(normal(y.dims(), &format!("weights of {}", group.rank())));
    reduce_from_tp(&y.tanh()?.mul(&weights)?.sum_all()?, group)
}

/// A number of a result that is the same on every rank.
fn alike(y: &Var) -> Result<Var> {
    y.tanh()?.mul(&Var::constant(normal(y.dims(), "weights")))?.sum_all()
}

/// Every mapping. Inputs are whole on every rank, and perturbed on all; parts are cut from them within, so that
/// the perturbation reaches one rank.
#[test]
fn mappings_are_conjugate() {
    type Case = (&'static str, fn(&Var, &Group) -> Result<Var>);
    let cases: [Case; 8] = [
        ("copy_to_tp", |x, group| joined(&copy_to_tp(x, group)?, group)),
        ("scatter_to_tp", |x, group| joined(&scatter_to_tp(x, 1, group)?, group)),
        ("reduce_from_tp", |x, group| {
            // Each rank's part of the sum is another function of what is the same on all.
            let x = copy_to_tp(x, group)?.mul_scalar(1.0 + group.rank() as f64)?.gelu_tanh()?;
            alike(&reduce_from_tp(&x, group)?)
        }),
        ("gather_from_tp", |x, group| {
            let part = scatter_to_tp(x, 1, group)?.square()?;
            alike(&gather_from_tp(&part, 1, x.dims()[1], group)?)
        }),
        ("gather_from_sp", |x, group| {
            let part = scatter_to_tp(x, 0, group)?.square()?;
            joined(&gather_from_sp(&part, 0, x.dims()[0], group)?, group)
        }),
        ("reduce_scatter_to_sp", |x, group| {
            let x = copy_to_tp(x, group)?.mul_scalar(1.0 + group.rank() as f64)?.gelu_tanh()?;
            joined(&reduce_scatter_to_sp(&x, 0, group)?, group)
        }),
        ("all_to_all", |x, group| {
            let part = scatter_to_tp(x, 0, group)?.square()?; // parts of dim 0 ..
            joined(&all_to_all(&part, 2, 0, group)?, group) // .. become parts of dim 2
        }),
        ("all_to_all, back", |x, group| {
            let part = scatter_to_tp(x, 2, group)?.square()?;
            joined(&all_to_all(&part, 0, 2, group)?, group)
        }),
    ];
    for ranks in 1..=3 {
        on_tensor_ranks(ranks, SequenceParallel::Off, |tp| {
            for (name, f) in cases {
                // Dim 1 is cut unevenly.
                let x = normal(&[6, 2 * ranks + 1, 6], name);
                let check = |x: &[Var]| f(&x[0], tp.group());
                gradcheck(check, &[x], &GradcheckOptions::default())
                    .unwrap_or_else(|error| panic!("{name} on {ranks} ranks: {error}"));
            }
            Ok(())
        });
    }
}

/// The check fails where a mapping's gradient is wrong: here its reduction is missing.
#[test]
fn a_missing_reduction_is_found() {
    let found = on_tensor_ranks(2, SequenceParallel::Off, |tp| {
        let check = |x: &[Var]| joined(&x[0], tp.group());
        Ok(gradcheck(check, &[normal(&[3, 2], "x")], &GradcheckOptions::default()).is_err())
    });
    assert_eq!(found, [true, true]);
}

#[test]
fn linear_layers_and_mlp() {
    let init = Init::Normal { std: 0.5 };
    for (ranks, sequence) in [(2, BOTH[0]), (2, BOTH[1]), (3, BOTH[0]), (3, BOTH[1])] {
        on_tensor_ranks(ranks, sequence, |tp| {
            let options = GradcheckOptions::default();
            let group = tp.group();
            let place = (group, Axis::Tensor);
            // What the residual stream holds is the same on every rank, or some of the positions.
            let out = |y: &Var| match sequence {
                SequenceParallel::On => joined(y, group),
                SequenceParallel::Off => alike(y),
            };
            let x = Var::constant(residual(&tp, &normal(&[2, 6, 3], "x")));
            let column = ColumnParallelLinear::new(&scope("fc"), &tp, 3, &[4, 3], Bias::Yes, init)?;
            gradcheck_params(
                || joined(&column.forward(&x)?, group),
                &column.params(),
                place,
                &options,
            )?;
            let row = RowParallelLinear::new(&scope("proj"), &tp, 5, 3, Bias::Yes, init)?;
            let wide = normal(&[2, 6, 5], "wide");
            let own = group.local_range(5);
            let wide = Var::constant(wide.narrow(2, own.start, own.len())?);
            gradcheck_params(|| out(&row.forward(&wide)?), &row.params(), place, &options)?;
            let config = MlpConfig {
                hidden: 3,
                ffn_hidden: 5,
                activation: Activation::SwiGlu,
                bias: Bias::Yes,
                init,
                residual_init: init,
            };
            let mlp = ParallelMlp::new(&scope("mlp"), &tp, &config)?;
            gradcheck_params(|| out(&mlp.forward(&x)?), &mlp.params(), place, &options)
        });
    }
}

/// A whole block with dropout, along both axes; the input is a leaf, and every rank has its part.
#[test]
fn blocks() {
    for spread in [
        Spread { tp: 2, sequence: SequenceParallel::Off, cp: 1 },
        Spread { tp: 2, sequence: SequenceParallel::On, cp: 1 },
        Spread { tp: 1, sequence: SequenceParallel::Off, cp: 2 },
    ] {
        let config = BLOCKS[1];
        on_ranks(spread.ranks(), |world| {
            let rank = spread.rank(&world, 1, 8)?;
            let block = ParallelBlock::new(&config, &rank)?;
            let x =
                part(&normal(&[1, 8, config.hidden], "x"), &rank.ctx.shard_spec(&[config.hidden])?);
            let x = Leaf::new("x", x);
            let axis = if spread.cp == 1 { Axis::Tensor } else { Axis::Context };
            let group = rank.mesh.axis(axis);
            let loss = || {
                let y = block.forward(&rank.ctx, &x.var()?)?;
                match (axis, spread.sequence) {
                    (Axis::Tensor, SequenceParallel::Off) => alike(&y),
                    _ => joined(&y, group),
                }
            };
            let options = GradcheckOptions { directions: 2, ..GradcheckOptions::default() };
            gradcheck_params(loss, &block.params(), (group, axis), &options)
        });
    }
}
