//! Rows of the shared list of methods: views, choices, reductions, indexing.

use ferrotron_autograd::Var;
use ferrotron_tensor::ops::argsort::SortOrder;
use ferrotron_tensor::ops::reduce::KeepDims;
use ferrotron_tensor::{Result, Tensor};

use super::{BINARY, CUBE, OpCase, ROWS, UNARY, ids, row};

const TWO_ROWS: &[super::Shapes] = &[&[&[2, 3], &[2, 3]], &[&[1, 1], &[1, 1]], &[&[0, 3], &[0, 3]]];
const HALVES: &[super::Shapes] = &[&[&[2, 3, 4]], &[&[1, 2]], &[&[0, 4]], &[&[2, 0]]];
const MATRICES: &[super::Shapes] = &[&[&[2, 3, 4]], &[&[3, 3]], &[&[1, 1]], &[&[0, 3]]];

pub fn views() -> Vec<OpCase> {
    vec![
        row("reshape", "", CUBE, |x| {
            let d = x[0].dims();
            x[0].reshape(&[d[0] * d[1], d[2]])
        }),
        row("transpose", "", CUBE, |x| x[0].transpose(0, -1)),
        row("permute", "", CUBE, |x| x[0].permute(&[1, 2, 0])),
        row("broadcast_to", "", &[&[&[3, 1]], &[&[1, 1]], &[&[0, 1]]], |x| {
            x[0].broadcast_to(&[2, x[0].dims()[0], 4])
        }),
        row("narrow", "", ROWS, |x| x[0].narrow(-1, 1, x[0].dims()[1] - 1)),
        row("slice", "", ROWS, |x| x[0].slice(-1, ..-1)),
        row("select", "", ROWS, |x| x[0].select(1, -1)),
        row("squeeze", "", &[&[&[2, 1, 3]], &[&[1, 1]], &[&[0, 1]]], |x| x[0].squeeze(1)),
        row("unsqueeze", "", ROWS, |x| x[0].unsqueeze(-1)),
        row("flatten", "", CUBE, |x| x[0].flatten(0, 1)),
        row("split", "", ROWS, |x| {
            let parts = x[0].split(&[1, x[0].dims()[1] - 1], 1)?;
            Var::concat(&[&parts[1], &parts[0], &parts[1]], 1)
        }),
        row("split", "one part unused", ROWS, |x| {
            Ok(x[0].split(&[1, x[0].dims()[1] - 1], 1)?.remove(0))
        }),
        row("chunk", "", ROWS, |x| {
            let parts = x[0].chunk(2, 1)?;
            Var::concat(&[parts.last().unwrap(), &parts[0]], 1)
        }),
        row(
            "concat",
            "",
            &[&[&[2, 3], &[2, 2]], &[&[2, 2], &[2, 2]], &[&[1, 1], &[1, 3]], &[&[2, 0], &[2, 2]]],
            |x| Var::concat(&[&x[0], &x[1]], 1),
        ),
        row("stack", "", TWO_ROWS, |x| Var::stack(&[&x[0], &x[1]], 1)),
        row("repeat", "", CUBE, |x| x[0].repeat(&[2, 1, 1, 3])),
    ]
}

pub fn choices() -> Vec<OpCase> {
    vec![
        row("clamp", "", UNARY, |x| x[0].clamp(-0.75, 0.5)),
        row("where_cond", "", BINARY, |x| x[0].where_cond(&flags(&x[0], x[0].dims())?, &x[1])),
        row("masked_fill", "", ROWS, |x| {
            let mask = flags(&x[0], &x[0].dims()[1..])?;
            x[0].masked_fill(&mask, -0.5)
        }),
        row("tril", "", MATRICES, |x| x[0].tril(-1)),
        row("triu", "", MATRICES, |x| x[0].triu(1)),
    ]
}

pub fn reductions() -> Vec<OpCase> {
    vec![
        row("sum", "inner dim, kept", CUBE, |x| x[0].sum(&[1], KeepDims::Keep)),
        row("sum", "two dims, dropped", CUBE, |x| x[0].sum(&[-1, 0], KeepDims::Drop)),
        row("mean", "", ROWS, |x| x[0].mean(&[-1], KeepDims::Drop)),
        row("mean", "two dims, kept", &[&[&[2, 3, 4]], &[&[1, 3, 1]]], |x| {
            x[0].mean(&[0, 2], KeepDims::Keep)
        }),
        row("sum_all", "", UNARY, |x| x[0].sum_all()),
        row("mean_all", "", &[&[&[2, 3]], &[&[]], &[&[1, 1]]], |x| x[0].mean_all()),
        row("amax", "last dim, dropped", ROWS, |x| x[0].amax(&[-1], KeepDims::Drop)),
        row("amax", "two dims, kept", &[&[&[2, 3, 2]], &[&[1, 3, 1]], &[&[2, 0, 1]]], |x| {
            x[0].amax(&[0, 2], KeepDims::Keep)
        }),
        row("amin", "", ROWS, |x| x[0].amin(&[-1], KeepDims::Drop)),
        row("max", "", ROWS, |x| Ok(x[0].max(-1, KeepDims::Drop)?.0)),
        row("min", "first dim, kept", &[&[&[2, 3]], &[&[1, 3]], &[&[2, 0]]], |x| {
            Ok(x[0].min(0, KeepDims::Keep)?.0)
        }),
        row("log_sum_exp", "last dim, dropped", ROWS, |x| x[0].log_sum_exp(&[-1], KeepDims::Drop)),
        row("log_sum_exp", "two dims, kept", &[&[&[2, 3, 2]], &[&[1, 3, 1]]], |x| {
            x[0].log_sum_exp(&[0, 2], KeepDims::Keep)
        }),
        row("var", "", &[&[&[2, 3]], &[&[1, 3]], &[&[0, 3]]], |x| x[0].var(&[-1], KeepDims::Drop)),
        row("var_with_correction", "two dims", CUBE, |x| {
            x[0].var_with_correction(&[0, -1], 0, KeepDims::Keep)
        }),
        row("std", "", &[&[&[2, 3]], &[&[1, 3]], &[&[0, 3]]], |x| x[0].std(&[-1], KeepDims::Drop)),
        row("norm", "of order 2", ROWS, |x| x[0].norm(2.0, &[-1], KeepDims::Drop)),
        row("norm", "of order 1", ROWS, |x| x[0].norm(1.0, &[-1], KeepDims::Drop)),
        row("norm", "of order 3", ROWS, |x| x[0].norm(3.0, &[-1], KeepDims::Drop)),
        row("norm", "of order 1/2", ROWS, |x| x[0].norm(0.5, &[-1], KeepDims::Drop)),
        row("norm", "infinite", ROWS, |x| x[0].norm(f64::INFINITY, &[-1], KeepDims::Drop)),
        row("softmax", "last dim", ROWS, |x| x[0].softmax(-1)),
        row("softmax", "inner dim", CUBE, |x| x[0].softmax(1)),
        row("log_softmax", "last dim", ROWS, |x| x[0].log_softmax(-1)),
        row("log_softmax", "inner dim", CUBE, |x| x[0].log_softmax(1)),
        row("swiglu", "", HALVES, |x| x[0].swiglu()),
        row("geglu", "", HALVES, |x| x[0].geglu()),
    ]
}

pub fn indexing() -> Vec<OpCase> {
    const FROM_ONE: &[super::Shapes] = &[&[&[3, 4]], &[&[1, 1]], &[&[0, 4]]];
    vec![
        row("gather", "", FROM_ONE, |x| {
            let d = x[0].dims();
            x[0].gather(1, &ids(x[0].device(), &[d[0] - d[0] / 3, d[1] + 1], d[1])?)
        }),
        row("gather", "first dim", &[&[&[4, 3]], &[&[1, 1]], &[&[4, 0]]], |x| {
            let d = x[0].dims();
            x[0].gather(0, &ids(x[0].device(), &[d[0] + 1, d[1]], d[0])?)
        }),
        row(
            "scatter_add",
            "",
            &[&[&[4, 3], &[5, 2]], &[&[3, 3], &[3, 3]], &[&[1, 1], &[1, 1]], &[&[4, 3], &[0, 3]]],
            |x| {
                let index = ids(x[0].device(), x[1].dims(), x[0].dims()[0])?;
                x[0].scatter_add(0, &index, &x[1])
            },
        ),
        row(
            "scatter",
            "",
            &[&[&[4, 3], &[5, 2]], &[&[3, 3], &[3, 3]], &[&[1, 1], &[1, 1]], &[&[4, 3], &[0, 3]]],
            |x| {
                let index = ids(x[0].device(), x[1].dims(), x[0].dims()[0])?;
                x[0].scatter(0, &index, &x[1])
            },
        ),
        row("index_select", "", FROM_ONE, |x| {
            let size = x[0].dims()[1];
            x[0].index_select(1, &ids(x[0].device(), &[size + 1], size)?)
        }),
        row(
            "index_add",
            "",
            &[&[&[4, 3], &[5, 3]], &[&[3, 3], &[3, 3]], &[&[1, 1], &[2, 1]], &[&[4, 0], &[2, 0]]],
            |x| {
                let index = ids(x[0].device(), &x[1].dims()[..1], x[0].dims()[0])?;
                x[0].index_add(0, &index, &x[1])
            },
        ),
        row("topk", "", &[&[&[2, 3]], &[&[1, 2]], &[&[0, 2]]], |x| Ok(x[0].topk(2, -1)?.0)),
        row("topk", "first dim", &[&[&[4, 3]], &[&[2, 0]]], |x| Ok(x[0].topk(2, 0)?.0)),
        row("sort", "", CUBE, |x| Ok(x[0].sort(1, SortOrder::Descending)?.0)),
        row("sort", "ascending", ROWS, |x| Ok(x[0].sort(-1, SortOrder::Ascending)?.0)),
    ]
}

/// A condition of these dims; every third element is 0.
fn flags(x: &Var, dims: &[usize]) -> Result<Tensor> {
    let count: usize = dims.iter().product();
    let flags: Vec<u8> = (0..count).map(|i| u8::from(!i.is_multiple_of(3))).collect();
    Tensor::from_slice(x.device(), &flags, dims)
}
