//! Operands whose sums are exact: sharded results equal the others, bit by bit. The idea is that of Megatron-LM's
//! tests/unit_tests/tensor_parallel/test_layers.py. Also, initial values are slices of the whole.

use ferrotron_autograd::{Leaf, WeightGrads, backward};
use ferrotron_nn::{Bias, Embedding, Init, Linear, Module, Scope};
use ferrotron_parallel::tensor_parallel::{
    ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding,
};
use ferrotron_tensor::{DType, RandomKey, Result, Tensor};
use std::collections::BTreeMap;

use crate::ranks::*;

const INPUTS: usize = 512;
const OUTPUTS: usize = 24;
const TYPES: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

/// Integers in -8..8.
fn integers(dims: &[usize], site: &str) -> Tensor {
    let key = RandomKey::new(SEED, 0, site);
    let count: usize = dims.iter().product();
    let values: Vec<f64> =
        (0..count as u64).map(|i| (key.uniform(i) * 16.0).floor() - 8.0).collect();
    tensor(&values, dims)
}

/// Zeros but for `each` integers a row, in columns of their own. Sums over them, their parts included, are at most 64 x
/// `each`, and are exact in 16 bits up to 256.
fn sparse(dims: [usize; 2], each: usize, site: &str) -> Tensor {
    let [rows, columns] = dims;
    let mut values = integers(&dims, site).to_f64().unwrap();
    for (i, value) in values.iter_mut().enumerate() {
        let (row, column) = (i / columns, i % columns);
        if column * 5 % columns / each != row % (columns / each) {
            *value = 0.0;
        }
    }
    assert!(rows <= columns / each, "every column has one row at most");
    tensor(&values, &dims)
}

/// Sets parameters to their parts of `values`.
fn set(module: &dyn Module, values: &BTreeMap<&str, Tensor>, dtype: DType) -> Result<()> {
    for param in module.params() {
        let whole = values[param.name()].cast(dtype)?;
        param.leaf().set_value(&part(&whole, param.shard_spec()).contiguous()?)?;
    }
    Ok(())
}

fn scope_of(dtype: DType, name: &str) -> Scope {
    Scope::new(&device(), dtype, SEED).child(name)
}

/// Operands of linear layers in a dtype. Ranks round partial sums in 16 bits when they exchange them, so there the
/// operands have few nonzero numbers.
fn operands(dtype: DType) -> (BTreeMap<&'static str, Tensor>, Tensor, Tensor) {
    let narrow = dtype.size() == 2;
    let weight = match narrow {
        true => sparse([OUTPUTS, INPUTS], 3, "weight"),
        false => integers(&[OUTPUTS, INPUTS], "weight"),
    };
    let tokens = if narrow { [1, 4] } else { [2, 6] };
    let x = integers(&[tokens[0], tokens[1], INPUTS], "x");
    let dy = integers(&[tokens[0], tokens[1], OUTPUTS], "dy");
    (BTreeMap::from([("l.weight", weight), ("l.bias", integers(&[OUTPUTS], "bias"))]), x, dy)
}

#[test]
fn linear_layers() -> Result<()> {
    for dtype in TYPES {
        let (values, x, dy) = operands(dtype);
        let (x, dy) = (x.cast(dtype)?, dy.cast(dtype)?);
        let serial = Linear::new(&scope_of(dtype, "l"), INPUTS, OUTPUTS, Bias::Yes, Init::Zeros)?;
        set(&serial, &values, dtype)?;
        let leaf = Leaf::new("x", x.clone());
        let y = serial.forward(&leaf.var()?)?;
        backward(&[(&y, dy.clone())], WeightGrads::Now)?.run()?;
        let (y, dx, grads) = (y.value(), gradient(&leaf), gradients(&serial));
        for ranks in 1..=8 {
            for sequence in BOTH {
                if sequence == BOTH[1] && x.dims()[1] % ranks != 0 {
                    continue;
                }
                on_tensor_ranks(ranks, sequence, |tp| {
                    let rank = tp.group().rank();
                    let own = |x: &Tensor| {
                        let cut = tp.group().local_range(x.dims()[2]);
                        x.narrow(2, cut.start, cut.len())
                    };
                    let compare = |what: &str, module: &dyn Module| {
                        for param in module.params() {
                            let mut got = gradient(param.leaf()).copy()?;
                            if param.grad_partial().contains(ferrotron_nn::Axis::Tensor) {
                                let sum = ferrotron_parallel::collective::Reduction::Sum;
                                got = tp.group().all_reduce(got, sum)?.wait()?;
                            }
                            let want = part(&grads[param.name()], param.shard_spec());
                            assert_equal(
                                &format!("{what}: gradient of {}", param.name()),
                                &got,
                                &want,
                            );
                        }
                        Ok::<_, ferrotron_tensor::Error>(())
                    };
                    let what = format!("column, {dtype}, rank {rank} of {ranks}, {sequence:?}");
                    let (scope, init) = (scope_of(dtype, "l"), Init::Zeros);
                    let column = ColumnParallelLinear::new(
                        &scope,
                        &tp,
                        INPUTS,
                        &[OUTPUTS],
                        Bias::Yes,
                        init,
                    )?;
                    set(&column, &values, dtype)?;
                    let leaf = Leaf::new("x", residual(&tp, &x));
                    let got = column.forward(&leaf.var()?)?;
                    assert_equal(&format!("{what}: y"), got.value(), &own(y)?);
                    backward(&[(&got, own(&dy)?)], WeightGrads::Now)?.run()?;
                    assert_equal(&format!("{what}: dx"), &gradient(&leaf), &residual(&tp, &dx));
                    compare(&what, &column)?;

                    let what = format!("row, {dtype}, rank {rank} of {ranks}, {sequence:?}");
                    let row =
                        RowParallelLinear::new(&scope, &tp, INPUTS, OUTPUTS, Bias::Yes, init)?;
                    set(&row, &values, dtype)?;
                    let leaf = Leaf::new("x", own(&x)?);
                    let got = row.forward(&leaf.var()?)?;
                    assert_equal(&format!("{what}: y"), got.value(), &residual(&tp, y));
                    backward(&[(&got, residual(&tp, &dy))], WeightGrads::Now)?.run()?;
                    assert_equal(&format!("{what}: dx"), &gradient(&leaf), &own(&dx)?);
                    compare(&what, &row)
                });
            }
        }
    }
    Ok(())
}

/// An input of ones on the diagonal and a weight of ones: ones out, and a gradient of 8.
#[test]
fn a_frozen_weight() {
    for ranks in [1, 8] {
        on_tensor_ranks(ranks, BOTH[0], |tp| {
            let eye: Vec<f64> = (0..64).map(|i| if i % 9 == 0 { 1.0 } else { 0.0 }).collect();
            let x = Leaf::new("x", tensor(&eye, &[1, 8, 8]));
            let layer = ColumnParallelLinear::new(&scope("l"), &tp, 8, &[8], Bias::No, Init::Ones)?;
            let y = layer.forward(&x.var()?)?;
            let ones = |dims: &[usize]| Tensor::full(&device(), DType::F64, dims, 1.0);
            assert_equal("y", y.value(), &ones(&[1, 8, 8 / ranks])?);
            backward(&[(&y, ones(&[1, 8, 8 / ranks])?)], WeightGrads::Now)?.run()?;
            assert_equal("dx", &gradient(&x), &ones(&[1, 8, 8])?.mul_scalar(8.0)?);
            Ok(())
        });
    }
}

#[test]
fn embeddings() -> Result<()> {
    let (rows, width) = (37, 5);
    let ids: Vec<u32> = (0..2 * 24).map(|i| (i * i * 5 + 3 * i) % 37).collect();
    let ids = Tensor::from_slice(&device(), &ids, &[2, 24])?;
    for dtype in TYPES {
        let table = BTreeMap::from([("wte.weight", integers(&[rows, width], "table"))]);
        let dy = integers(&[2, 24, width], "dy").cast(dtype)?;
        let serial = Embedding::new(&scope_of(dtype, "wte"), rows, width, Init::Zeros)?;
        set(&serial, &table, dtype)?;
        let y = serial.forward(&ids)?;
        backward(&[(&y, dy.clone())], WeightGrads::Now)?.run()?;
        let (y, grads) = (y.value(), gradients(&serial));
        for (ranks, sequence) in (1..=8).flat_map(|n| BOTH.map(|sequence| (n, sequence))) {
            if 24 % ranks != 0 && sequence == BOTH[1] {
                continue;
            }
            on_tensor_ranks(ranks, sequence, |tp| {
                let what = format!("{dtype}, rank {} of {ranks}, {sequence:?}", tp.group().rank());
                let scope = scope_of(dtype, "wte");
                let wte = VocabParallelEmbedding::new(&scope, &tp, rows, width, Init::Zeros)?;
                set(&wte, &table, dtype)?;
                let got = wte.forward(&ids)?;
                assert_equal(&what, got.value(), &residual(&tp, y));
                backward(&[(&got, residual(&tp, &dy))], WeightGrads::Now)?.run()?;
                let param = wte.weight();
                let want = part(&grads[param.name()], param.shard_spec());
                assert_equal(&format!("{what}: gradient"), &gradient(param.leaf()), &want);
                Ok(())
            });
        }
    }
    Ok(())
}

/// Shard r of a parameter begins as slice r of the whole: test_initialization.py, and uneven sizes.
#[test]
fn initial_values_are_slices_of_the_whole() -> Result<()> {
    let init = Init::Normal { std: 0.02 };
    for (inputs, outputs, rows, width) in [(16, 16, 16, 4), (7, 13, 11, 3)] {
        let linear = Linear::new(&scope("l"), inputs, outputs, Bias::Yes, init)?;
        let embedding = Embedding::new(&scope("e"), rows, width, init)?;
        let mut whole = BTreeMap::new();
        for param in [linear.params(), embedding.params()].concat() {
            whole.insert(param.name().to_string(), param.leaf().value()?);
        }
        for ranks in 1..=5 {
            on_tensor_ranks(ranks, BOTH[0], |tp| {
                let (l, e) = (scope("l"), scope("e"));
                let column =
                    ColumnParallelLinear::new(&l, &tp, inputs, &[outputs], Bias::Yes, init)?;
                let row = RowParallelLinear::new(&l, &tp, inputs, outputs, Bias::Yes, init)?;
                let embedding = VocabParallelEmbedding::new(&e, &tp, rows, width, init)?;
                for param in [column.params(), row.params(), embedding.params()].concat() {
                    let want = part(&whole[param.name()], param.shard_spec());
                    let what = format!("{}, rank {} of {ranks}", param.name(), tp.group().rank());
                    assert_equal(&what, &param.leaf().value()?, &want);
                }
                let cut = tp.group().local_range(outputs);
                assert_eq!(column.params()[0].shard_spec().pieces(0), [(cut.start, cut.len())]);
                Ok(())
            });
        }
    }
    Ok(())
}
