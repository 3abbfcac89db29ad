//! The op table: one row per way of calling an operation on variables, with sample shapes. Every check of
//! the suite iterates it, and [`crate::coverage`] fails where an operation has no row.

#[path = "table/alone.rs"]
mod alone;
#[path = "table/linear.rs"]
mod linear;
#[path = "table/methods.rs"]
mod methods;

use std::sync::Arc;

use ferrotron_autograd::Var;
use ferrotron_autograd::ops::attention::{
    attention, attention_with_bias, packed_attention, packed_attention_with_bias,
};
use ferrotron_autograd::ops::linear_cross_entropy::HeadVars;
use ferrotron_autograd::ops::pointwise::{binary, unary};
use ferrotron_tensor::ops::attention::AttentionMask;
use ferrotron_tensor::ops::cross_entropy::{CrossEntropyConfig, VocabShard};
use ferrotron_tensor::ops::rotary::RotaryTable;
use ferrotron_tensor::ops::table::{Binary, Unary};
use ferrotron_tensor::{DType, Device, RandomKey, Result, ShardSpec, Tensor};

use crate::scores::{restricted, scores};
use alone::Alone;

/// The dims of each input of an operation.
pub type Shapes = &'static [&'static [usize]];

type Apply = Box<dyn Fn(&[Var]) -> Result<Var> + Send + Sync>;

/// The range of sample values.
#[derive(Clone, Copy, PartialEq)]
pub enum Domain {
    /// Distinct values of all inputs in [-2, 2), none closer to 0 than 1/128.
    Any,
    /// Values in [1/4, 2).
    Positive,
}

/// One row.
pub struct OpCase {
    /// The operation's name: that of its `pub fn`, or of its row in the pointwise table.
    pub op: &'static str,
    /// The form of the call, where an operation has several.
    pub case: &'static str,
    /// Ordinary shapes first, then those with dims of size 1 and 0.
    pub shapes: &'static [Shapes],
    pub domain: Domain,
    pub f: Apply,
}

impl OpCase {
    pub fn name(&self) -> String {
        if self.case.is_empty() { self.op.into() } else { format!("{} ({})", self.op, self.case) }
    }
}

const UNARY: &[Shapes] = &[&[&[2, 3]], &[&[]], &[&[1, 3]], &[&[0, 3]]];
const BINARY: &[Shapes] = &[
    &[&[2, 3], &[2, 3]],
    &[&[2, 1, 3], &[4, 1]],
    &[&[3], &[2, 3]],
    &[&[], &[2]],
    &[&[1, 1], &[1]],
    &[&[0, 3], &[3]],
];
const ROWS: &[Shapes] = &[&[&[2, 3]], &[&[1, 3]], &[&[2, 1]], &[&[0, 3]]];
const CUBE: &[Shapes] = &[&[&[2, 3, 4]], &[&[1, 3, 1]], &[&[2, 0, 4]]];
const MATMUL: &[Shapes] = &[
    &[&[2, 5, 2, 3], &[3, 4]],
    &[&[2, 3], &[3, 4]],
    &[&[3, 3], &[3, 3]],
    &[&[2, 1, 3, 4], &[5, 4, 2]],
    &[&[1, 1], &[1, 1]],
    &[&[0, 3], &[3, 2]],
    &[&[2, 0], &[0, 3]],
    &[&[0, 2, 3], &[3, 2]],
];
const NORM: &[Shapes] = &[
    &[&[2, 3, 4], &[4], &[4]],
    &[&[4], &[4], &[4]],
    &[&[1, 4], &[4], &[4]],
    &[&[3, 1], &[1], &[1]],
    &[&[0, 4], &[4], &[4]],
];
const PLAIN_NORM: &[Shapes] =
    &[&[&[2, 3, 4], &[4]], &[&[4], &[4]], &[&[1, 4], &[4]], &[&[3, 1], &[1]], &[&[0, 4], &[4]]];
const LOGITS: &[Shapes] = &[&[&[2, 3, 5]], &[&[1, 5]], &[&[3, 1]], &[&[0, 5]]];
const HEAD: &[Shapes] =
    &[&[&[2, 3, 4], &[5, 4]], &[&[1, 4], &[5, 4]], &[&[3, 1], &[1, 1]], &[&[0, 4], &[5, 4]]];
const BIASED_HEAD: &[Shapes] = &[
    &[&[2, 3, 4], &[5, 4], &[5]],
    &[&[1, 4], &[5, 4], &[5]],
    &[&[3, 1], &[1, 1], &[1]],
    &[&[0, 4], &[5, 4], &[5]],
];
const MULTI_HEAD: &[Shapes] = &[
    &[&[1, 3, 2, 2], &[1, 3, 2, 2], &[1, 3, 2, 2]],
    &[&[2, 2, 1, 2], &[2, 4, 1, 2], &[2, 4, 1, 2]],
    &[&[1, 1, 1, 1], &[1, 1, 1, 1], &[1, 1, 1, 1]],
    &[&[0, 3, 2, 2], &[0, 3, 2, 2], &[0, 3, 2, 2]],
    &[&[1, 0, 2, 2], &[1, 0, 2, 2], &[1, 0, 2, 2]],
];
const GROUPED: &[Shapes] = &[
    &[&[2, 3, 4, 2], &[2, 3, 2, 2], &[2, 3, 2, 2]],
    &[&[1, 2, 4, 2], &[1, 5, 1, 2], &[1, 5, 1, 2]],
    &[&[0, 3, 4, 2], &[0, 3, 2, 2], &[0, 3, 2, 2]],
];
/// Grouped, with a bias in each way of broadcasting.
const BIASED: &[Shapes] = &[
    &[&[2, 3, 4, 2], &[2, 3, 2, 2], &[2, 3, 2, 2], &[4, 3, 3]],
    &[&[2, 2, 2, 2], &[2, 4, 1, 2], &[2, 4, 1, 2], &[2, 2, 2, 4]],
    &[&[2, 2, 2, 2], &[2, 4, 1, 2], &[2, 4, 1, 2], &[2, 1, 1, 4]],
    &[&[1, 2, 4, 2], &[1, 5, 1, 2], &[1, 5, 1, 2], &[4, 1, 5]],
    &[&[1, 2, 1, 2], &[1, 2, 1, 2], &[1, 2, 1, 2], &[2]],
    &[&[0, 3, 4, 2], &[0, 3, 2, 2], &[0, 3, 2, 2], &[4, 3, 3]],
    &[&[1, 0, 2, 2], &[1, 3, 2, 2], &[1, 3, 2, 2], &[2, 1, 3]],
];
/// Four heads, two groups, with a bias.
const PACKED_BIASED: &[Shapes] =
    &[&[&[2, 3, 16], &[3, 3]], &[&[1, 1, 8], &[1, 1]], &[&[0, 3, 16], &[3, 3]]];
/// Two heads, two groups.
const PACKED: &[Shapes] =
    &[&[&[1, 3, 12]], &[&[2, 2, 6]], &[&[1, 1, 6]], &[&[0, 3, 12]], &[&[1, 0, 12]]];
/// Four heads, two groups.
const PACKED_GROUPED: &[Shapes] = &[&[&[2, 3, 16]], &[&[1, 1, 8]], &[&[0, 3, 16]]];

fn row(
    op: &'static str,
    case: &'static str,
    shapes: &'static [Shapes],
    f: impl Fn(&[Var]) -> Result<Var> + Send + Sync + 'static,
) -> OpCase {
    OpCase { op, case, shapes, domain: Domain::Any, f: Box::new(f) }
}

/// Every row.
pub fn table() -> Vec<OpCase> {
    let mut all = pointwise();
    all.extend(methods::views());
    all.extend(methods::choices());
    all.extend(methods::reductions());
    all.extend(methods::indexing());
    all.extend(products_and_norms());
    all.extend(linear::layers());
    all.extend(embeddings());
    all.extend(losses_and_attention());
    all
}

fn pointwise() -> Vec<OpCase> {
    let of_one = Unary::ALL.iter().map(|&op| {
        let p = match op {
            Unary::Powf => 1.5,
            Unary::AddScalar => 0.75,
            Unary::MulScalar => -1.25,
            Unary::DivScalar => 0.7,
            Unary::Softcap => 0.8,
            Unary::ClampMin => -0.75,
            Unary::ClampMax => 0.5,
            _ => 0.0,
        };
        let positive =
            matches!(op, Unary::Log | Unary::Log1p | Unary::Sqrt | Unary::Recip | Unary::Powf);
        let domain = if positive { Domain::Positive } else { Domain::Any };
        OpCase { domain, ..row(op.name(), "", UNARY, move |x| unary(op, p, &x[0])) }
    });
    let of_two = Binary::ALL.iter().map(|&op| {
        let positive = matches!(op, Binary::Div | Binary::Pow);
        let domain = if positive { Domain::Positive } else { Domain::Any };
        OpCase { domain, ..row(op.name(), "", BINARY, move |x| binary(op, &x[0], &x[1])) }
    });
    of_one.chain(of_two).collect()
}

fn products_and_norms() -> Vec<OpCase> {
    const EPS: f64 = 1e-5;
    vec![
        row("cast", "", ROWS, |x| x[0].cast(DType::F64)),
        // Another weight than 0 is no derivative of the value: the example of the operation tests it.
        row("attach_loss", "of weight 0", UNARY, |x| x[0].attach_loss(&x[0].sum_all()?, 0.0)),
        row("matmul", "", MATMUL, |x| x[0].matmul(&x[1])),
        row(
            "einsum",
            "",
            &[&[&[2, 3, 4], &[3, 5, 2]], &[&[1, 1, 1], &[1, 1, 1]], &[&[2, 0, 4], &[0, 5, 2]]],
            |x| Var::einsum("bij,ikb->bk", &[&x[0], &x[1]]),
        ),
        row(
            "einsum",
            "of elements",
            &[&[&[2, 3], &[3, 4]], &[&[1, 1], &[1, 1]], &[&[0, 3], &[3, 4]]],
            |x| Var::einsum("ij,jk->kij", &[&x[0], &x[1]]),
        ),
        row("einsum", "of one operand", CUBE, |x| Var::einsum("bij->jb", &[&x[0]])),
        row(
            "einsum",
            "of three operands",
            &[&[&[2, 3, 4], &[2, 4, 5], &[5]], &[&[1, 1, 1], &[1, 1, 1], &[1]]],
            |x| Var::einsum("bij,bjk,k->bi", &[&x[0], &x[1], &x[2]]),
        ),
        row("layer_norm", "", PLAIN_NORM, |x| x[0].layer_norm(&x[1], None, EPS)),
        row("layer_norm", "with bias", NORM, |x| x[0].layer_norm(&x[1], Some(&x[2]), EPS)),
        row("centered_gain", "", UNARY, |x| x[0].centered_gain()),
        row("rms_norm", "weight around 0", PLAIN_NORM, |x| {
            x[0].rms_norm(&x[1].centered_gain()?, EPS)
        }),
        row("rms_norm", "", PLAIN_NORM, |x| x[0].rms_norm(&x[1], EPS)),
        row("layer_norm", "in a residual", PLAIN_NORM, |x| {
            let sum = x[0].mul_scalar(1.5)?;
            sum.layer_norm(&x[1], None, EPS)?.add(&sum)
        }),
        row("rms_norm", "in a residual", PLAIN_NORM, |x| {
            let sum = x[0].mul_scalar(1.5)?;
            sum.rms_norm(&x[1], EPS)?.add(&sum)
        }),
        row(
            "rotary",
            "part of the heads and of their width",
            &[&[&[1, 3, 3, 4]], &[&[2, 1, 1, 2]], &[&[0, 3, 2, 4]], &[&[1, 0, 2, 4]]],
            |x| {
                let d = x[0].dims();
                let table = RotaryTable::new(x[0].device(), x[0].dtype(), 2..2 + d[1], 2, 100.0)?;
                x[0].rotary(&table, d[2] - d[2] / 3)
            },
        ),
        row("dropout", "", &[&[&[4, 5]], &[&[1, 6]], &[&[0, 3]]], |x| {
            x[0].dropout(0.4, &RandomKey::new(7, 0, "dropout"), &ShardSpec::unsharded(x[0].dims()))
        }),
    ]
}

fn embeddings() -> Vec<OpCase> {
    vec![
        row("embedding", "", &[&[&[5, 3]], &[&[1, 3]], &[&[5, 1]], &[&[5, 0]]], |x| {
            let rows = x[0].dims()[0];
            x[0].embedding(&ids(x[0].device(), &[2, rows + 1], rows)?)
        }),
        row("embedding_shard", "", &[&[&[5, 3]], &[&[1, 3]], &[&[5, 1]], &[&[5, 0]]], |x| {
            // The last of two shards; ids of both.
            let rows = x[0].dims()[0];
            let shard = VocabShard { offset: rows, global: 2 * rows, shards: 2 };
            x[0].embedding_shard(&ids(x[0].device(), &[2, 2 * rows + 1], 2 * rows)?, shard)
        }),
        row("embedding", "no ids", &[&[&[5, 3]]], |x| {
            x[0].embedding(&ids(x[0].device(), &[0], 5)?)
        }),
    ]
}

fn losses_and_attention() -> Vec<OpCase> {
    let entropy =
        |smoothing| CrossEntropyConfig { label_smoothing: smoothing, ..Default::default() };
    let head = move |bytes: usize, smoothing: f64| {
        move |x: &[Var]| {
            let targets = targets(&x[0], x[1].dims()[0])?;
            Ok(x[0].linear_cross_entropy(&x[1], &targets, &entropy(smoothing), bytes)?.sum)
        }
    };
    let biased_head = move |bytes: usize, softcap: Option<f64>| {
        move |x: &[Var]| {
            let targets = targets(&x[0], x[1].dims()[0])?;
            let head = HeadVars { weight: &x[1], bias: Some(&x[2]), softcap };
            Ok(x[0].linear_cross_entropy(head, &targets, &entropy(0.0), bytes)?.sum)
        }
    };
    let attend = |mask: AttentionMask, dropout: f64| {
        move |x: &[Var]| {
            let ([b, t, h], s) = ([x[0].dims()[0], x[0].dims()[1], x[0].dims()[2]], x[1].dims()[1]);
            attention(&x[0], &x[1], &x[2], &scores(mask, dropout, &[b, h, t, s], 2)?)
        }
    };
    // Windows, documents with key lengths, and a soft cap, alone and together.
    let restricted = |mask: AttentionMask, options: [bool; 3]| {
        move |x: &[Var]| attention(&x[0], &x[1], &x[2], &restricted(x, mask, options)?)
    };
    let biased = |mask: AttentionMask, options: [bool; 3]| {
        move |x: &[Var]| {
            attention_with_bias(&x[0], &x[1], &x[2], &x[3], &self::restricted(x, mask, options)?)
        }
    };
    let packed = |heads: usize, groups: usize, dropout: f64| {
        move |x: &[Var]| {
            let [b, t] = [x[0].dims()[0], x[0].dims()[1]];
            let config = scores(AttentionMask::Causal, dropout, &[b, heads, t, t], 2)?;
            packed_attention(&x[0], heads, groups, &config)
        }
    };
    vec![
        row("cross_entropy", "ignore", LOGITS, move |x| {
            let targets = targets(&x[0], x[0].value().dim(-1)?)?;
            Ok(x[0].cross_entropy(&targets, &entropy(0.0))?.sum)
        }),
        row("cross_entropy", "label smoothing", LOGITS, move |x| {
            let targets = targets(&x[0], x[0].value().dim(-1)?)?;
            Ok(x[0].cross_entropy(&targets, &entropy(0.1))?.sum)
        }),
        row("linear_cross_entropy", "kept", HEAD, head(1 << 20, 0.0)),
        row("linear_cross_entropy", "in chunks", HEAD, head(0, 0.0)),
        row("linear_cross_entropy", "bias, kept", BIASED_HEAD, biased_head(1 << 20, None)),
        row("linear_cross_entropy", "bias, in chunks", BIASED_HEAD, biased_head(0, None)),
        row("linear_cross_entropy", "in chunks, label smoothing", HEAD, head(0, 0.1)),
        row("linear_cross_entropy", "soft cap, kept", BIASED_HEAD, biased_head(1 << 20, Some(0.9))),
        row("linear_cross_entropy", "soft cap, in chunks", BIASED_HEAD, biased_head(0, Some(0.9))),
        row("linear_cross_entropy_shard", "the only shard", HEAD, move |x| {
            let (bound, global) = (0, x[1].dims()[0]);
            let targets = targets(&x[0], global)?;
            let shard = (VocabShard { offset: 0, global, shards: 1 }, Arc::new(Alone) as _);
            let config = entropy(0.1);
            Ok(x[0].linear_cross_entropy_shard(&x[1], &targets, &config, bound, shard)?.sum)
        }),
        row("attention", "multi-head", MULTI_HEAD, attend(AttentionMask::Causal, 0.0)),
        row("attention", "all keys", MULTI_HEAD, attend(AttentionMask::None, 0.0)),
        row("attention", "grouped", GROUPED, attend(AttentionMask::Causal, 0.0)),
        row("attention", "grouped, dropout", GROUPED, attend(AttentionMask::Causal, 0.3)),
        row(
            "attention",
            "window",
            GROUPED,
            restricted(AttentionMask::Causal, [true, false, false]),
        ),
        row("attention", "ranges", GROUPED, restricted(AttentionMask::None, [false, true, false])),
        row("attention", "softcap", GROUPED, restricted(AttentionMask::None, [false, false, true])),
        row(
            "attention",
            "all options",
            GROUPED,
            restricted(AttentionMask::Causal, [true, true, true]),
        ),
        row(
            "attention_with_bias",
            "all keys",
            BIASED,
            biased(AttentionMask::None, [false, false, false]),
        ),
        row(
            "attention_with_bias",
            "all options",
            BIASED,
            biased(AttentionMask::Causal, [true, true, true]),
        ),
        row("packed_attention_with_bias", "", PACKED_BIASED, |x| {
            let config = scores(AttentionMask::Causal, 0.0, &[], 2)?;
            packed_attention_with_bias(&x[0], &x[1], 4, 2, &config)
        }),
        row("packed_attention", "multi-head", PACKED, packed(2, 2, 0.0)),
        row("packed_attention", "grouped", PACKED_GROUPED, packed(4, 2, 0.0)),
        row("packed_attention", "grouped, dropout", PACKED_GROUPED, packed(4, 2, 0.3)),
    ]
}

/// Indices below `size` with repeats, in a scattered order.
fn ids(device: &Device, dims: &[usize], size: usize) -> Result<Tensor> {
    let count: usize = dims.iter().product();
    let ids: Vec<i64> = (0..count).map(|i| ((i * i * 7 + 3 * i + 1) % size) as i64).collect();
    Tensor::from_slice(device, &ids, dims)
}

/// A class for each row of `x`, every fourth ignored.
fn targets(x: &Var, classes: usize) -> Result<Tensor> {
    let dims = &x.dims()[..x.dims().len() - 1];
    let count: usize = dims.iter().product();
    let class = |i: usize| if i % 4 == 3 { -100 } else { ((5 * i + 2) % classes) as i64 };
    Tensor::from_slice(x.device(), &(0..count).map(class).collect::<Vec<_>>(), dims)
}
