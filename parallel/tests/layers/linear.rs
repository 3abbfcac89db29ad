//! Linear layers as one operation against the mappings around a plain one: values and all gradients.

use ferrotron_autograd::{Leaf, Var, WeightGrads, backward};
use ferrotron_nn::{Bias, Init, Module};
use ferrotron_parallel::tensor_parallel::mappings::*;
use ferrotron_parallel::tensor_parallel::{
    ColumnParallelLinear, RowParallelLinear, SequenceParallel, TensorParallel,
};
use ferrotron_tensor::{Result, Tensor};

use crate::ranks::*;

const T: usize = 12;
const INIT: Init = Init::Normal { std: 0.5 };

/// y, dx and the gradients of the parameters.
fn run(
    module: &dyn Module,
    x: &Tensor,
    dy: &Tensor,
    mode: WeightGrads,
    f: impl Fn(&Var) -> Result<Var>,
) -> Result<Vec<(String, Tensor)>> {
    module.params().iter().for_each(|param| param.leaf().zero_gradient());
    let leaf = Leaf::new("x", x.clone());
    let y = f(&leaf.var()?)?;
    let deferred = backward(&[(&y, dy.clone())], mode)?;
    assert_eq!(deferred.len(), usize::from(mode == WeightGrads::Deferred));
    deferred.run()?;
    let mut found = vec![("y".to_string(), y.value().clone()), ("dx".to_string(), gradient(&leaf))];
    for param in module.params() {
        found.push((param.name().to_string(), gradient(param.leaf()).copy()?));
    }
    Ok(found)
}

/// y = x W^T + b of a module's parameters, the bias left out if `f` adds it later.
fn linear(module: &dyn Module, x: &Var) -> Result<Var> {
    let params = module.params();
    let bias = params.get(1).map(|bias| bias.var()).transpose()?;
    x.linear(&params[0].var()?, bias.as_ref())
}

fn composed_column(tp: &TensorParallel, module: &dyn Module, x: &Var) -> Result<Var> {
    let x = match tp.sequence() {
        SequenceParallel::Off => copy_to_tp(x, tp.group())?,
        SequenceParallel::On => gather_from_sp(x, 1, T, tp.group())?,
    };
    linear(module, &x)
}

fn composed_row(tp: &TensorParallel, module: &dyn Module, x: &Var) -> Result<Var> {
    let params = module.params();
    let y = x.linear(&params[0].var()?, None)?;
    let y = match tp.sequence() {
        SequenceParallel::Off => reduce_from_tp(&y, tp.group())?,
        SequenceParallel::On => reduce_scatter_to_sp(&y, 1, tp.group())?,
    };
    params.get(1).map_or(Ok(y.clone()), |bias| y.add(&bias.var()?))
}

#[test]
fn fused_layers_equal_composed_ones() {
    for (ranks, sequence) in (1..=4).flat_map(|n| BOTH.map(|sequence| (n, sequence))) {
        on_tensor_ranks(ranks, sequence, |tp| {
            let group = tp.group();
            for (inputs, outputs, bias) in
                [(5, 7, Bias::Yes), (5, 7, Bias::No), (8, 3, Bias::Yes), (3, 2, Bias::No)]
            {
                for mode in [WeightGrads::Now, WeightGrads::Deferred] {
                    let what = format!(
                        "{inputs} -> {outputs}, {bias:?}, {mode:?}, {sequence:?}, rank {} of {ranks}",
                        group.rank()
                    );
                    let own = |features: usize, site: &str| {
                        let cut = group.local_range(features);
                        normal(&[2, T, features], site).narrow(2, cut.start, cut.len())
                    };
                    let compare =
                        |fused: Vec<(String, Tensor)>, composed: Vec<(String, Tensor)>| {
                            assert_eq!(fused.len(), composed.len());
                            for ((name, got), (_, want)) in fused.iter().zip(&composed) {
                                let tolerance = rounding(2 * T);
                                assert_close(&format!("{what}: {name}"), got, want, tolerance);
                            }
                        };
                    let layer = ColumnParallelLinear::new(
                        &scope("l"),
                        &tp,
                        inputs,
                        &[outputs],
                        bias,
                        INIT,
                    )?;
                    let x = residual(&tp, &normal(&[2, T, inputs], "x"));
                    let dy = own(outputs, "dy")?;
                    let composed = run(&layer, &x, &dy, mode, |x| composed_column(&tp, &layer, x))?;
                    compare(run(&layer, &x, &dy, mode, |x| layer.forward(x))?, composed);

                    let layer =
                        RowParallelLinear::new(&scope("l"), &tp, inputs, outputs, bias, INIT)?;
                    let dy = residual(&tp, &normal(&[2, T, outputs], "dy"));
                    let x = own(inputs, "x")?;
                    let composed = run(&layer, &x, &dy, mode, |x| composed_row(&tp, &layer, x))?;
                    compare(run(&layer, &x, &dy, mode, |x| layer.forward(x))?, composed);
                }
            }
            Ok(())
        });
    }
}

/// A gradient that is not wanted is not exchanged, and the other is the same.
#[test]
fn a_gradient_that_nobody_wants_costs_nothing() {
    for sequence in BOTH {
        on_tensor_ranks(2, sequence, |tp| {
            let layer = ColumnParallelLinear::new(&scope("l"), &tp, 3, &[4], Bias::No, INIT)?;
            let weight = layer.params().remove(0);
            let x = residual(&tp, &normal(&[2, T, 3], "x"));
            let dy = normal(&[2, T, 2], "dy");
            let leaf = Leaf::new("x", x.clone());
            let wanted = layer.forward(&leaf.var()?)?;
            backward(&[(&wanted, dy.clone())], WeightGrads::Now)?.run()?;
            let want = gradient(weight.leaf()).copy()?;
            weight.leaf().zero_gradient();
            let calls = |tp: &TensorParallel| {
                ["all_reduce", "all_gather", "reduce_scatter"]
                    .map(|op| tp.group().traffic().calls_and_bytes(op).0)
            };
            let y = layer.forward(&Var::constant(x))?;
            let before = calls(&tp);
            backward(&[(&y, dy)], WeightGrads::Now)?.run()?;
            let gathers = before[1] + u64::from(sequence == SequenceParallel::On);
            assert_eq!(calls(&tp), [before[0], gathers, before[2]], "{sequence:?}");
            assert_equal("the weight's gradient", &gradient(weight.leaf()), &want);
            Ok(())
        });
    }
}
