//! Scaled-dot-product attention, multi-head and grouped-query, without a T x S matrix.
//!
//! For batch b, query head h with key-value head g = h G / H, query i and key j (Vaswani et al., 2017;
//! tiles and backward as in Dao et al., "FlashAttention", 2022):
//!
//! - forward: `s = scale q_i . k_j`, `lse_i = log sum_j exp(s_ij)`, `p_ij = exp(s_ij - lse_i)`,
//!   `out_i = sum_j m_ij p_ij v_j`;
//! - backward: `dp_ij = m_ij (dout_i . v_j)`, `delta_i = dout_i . out_i`, `ds_ij = p_ij (dp_ij - delta_i)`,
//!   `dq_i = scale sum_j ds_ij k_j`, `dk_j = scale sum_i ds_ij q_i`, `dv_j = sum_i m_ij p_ij dout_i`.
//!
//! With a soft cap c, `s_ij = c tanh(x_ij / c)` where `x_ij = scale q_i . k_j`, and ds_ij is multiplied by
//! `1 - (s_ij / c)^2` before dq and dk. A bias is added to the capped s_ij. Its gradient is ds_ij before that
//! multiplication, summed over what shares an element of the bias.
//!
//! The sums over j run over the keys visible to query i, which are one range of keys: what mask, window and ranges have
//! in common. Blocks that no query of a tile sees are skipped. A query that sees nothing has out = 0, lse = -infinity and
//! no gradient. m is 1, or the dropout factor 0 or 1/(1-p), which backward
//! recomputes. A gradient needs q, k, v, out and lse. Everything is computed in Acc (f32; f64 for f64) and lse is
//! stored in it; 16-bit results are rounded once. Where bf16 is multiplied in pairs (AVX512-BF16, AMX), p and ds are
//! also rounded before their products. Keys are processed in blocks from key 0 on and summed in order. The bits of a
//! query's result therefore depend neither on the number of threads nor on the batch, the other heads or the other
//! queries. In backward, dk and dv of a key-value head are the sums over its query heads in order.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
mod backward;
mod bias;
pub(crate) mod config;
mod forward;
mod merge;
pub(crate) mod operands;
mod ranges;
#[cfg(test)]
mod tests;
mod tile;

pub use config::{AttentionConfig, AttentionDropout, AttentionMask};
pub use merge::merge_attention;
pub use ranges::KeyRanges;

use crate::cuda;
use crate::kernel_span::kernel_span;
use crate::numeric::disjoint::Disjoint;
use crate::ops::reduce::{KeepDims, sum};
use crate::{Element, Error, Result, Scalar, Tensor, dispatch_float};
use config::{OP, OP_BACKWARD};
pub(crate) use operands::{Operands, ScoreBias, Shape};
use operands::{check, dense_rows};
use tile::{AttentionOperands, HeadView, Target};

/// Views of the queries (B, T, H, D), keys and values (B, T, G, D) in a packed projection
/// (B, T, (H + 2G) D).
///
/// Errors if the last dim is not a multiple of heads + 2 groups.
pub fn split_packed(
    packed: &Tensor,
    heads: usize,
    groups: usize,
) -> Result<(Tensor, Tensor, Tensor)> {
    let parts = heads + 2 * groups;
    let &[batch, positions, all] = packed.dims() else {
        return Err(Error::shape(
            "split_packed",
            format!("the projection must be (B, T, (H + 2G) D), got {:?}", packed.dims()),
        ));
    };
    if parts == 0 || !all.is_multiple_of(parts) {
        return Err(Error::shape(
            "split_packed",
            format!("{heads} heads and 2 x {groups} do not divide {:?}", packed.dims()),
        ));
    }
    let by_head = packed.reshape(&[batch, positions, parts, all / parts])?;
    Ok((
        by_head.narrow(2, 0, heads)?,
        by_head.narrow(2, heads, groups)?,
        by_head.narrow(2, heads + groups, groups)?,
    ))
}

/// Attention of q (B, T, H, D) to k and v (B, S, G, D), where G divides H. Returns out (B, T, H, D), contiguous, and
/// lse (B, H, T) in Acc.
///
/// Operands may have any strides; one whose last dim is not dense is copied.
///
/// ```
/// use ferrotron_tensor::ops::attention::{AttentionConfig, attention, split_packed};
/// use ferrotron_tensor::{DType, Device, Tensor};
/// let packed = Tensor::full(&Device::cpu(1)?, DType::F32, &[2, 5, 12 * 8], 1.0)?;
/// let (q, k, v) = split_packed(&packed, 8, 2)?; // 8 query heads share 2 key-value heads
/// let (out, lse) = attention(&q, &k, &v, &AttentionConfig::causal(8))?;
/// assert_eq!((out.dims(), lse.dims()), (&[2, 5, 8, 8][..], &[2, 8, 5][..]));
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    config: &AttentionConfig,
) -> Result<(Tensor, Tensor)> {
    let shape = check(OP, q, k, v, config)?;
    let Shape { batch, queries, heads, width, .. } = shape;
    let device = q.device();
    let (q, k, v) = (dense_rows(q)?, dense_rows(k)?, dense_rows(v)?);
    if device.gpu().is_some() {
        return cuda::attention::forward(shape, [&q, &k, &v], config);
    }
    let mut out = Tensor::empty(device, q.dtype(), &[batch, queries, heads, width])?;
    dispatch_float!(OP, q.dtype(), T => {
        type Acc = <T as Element>::Acc;
        let mut lse = Tensor::empty(device, Acc::DTYPE, &[batch, heads, queries])?;
        let bias = ScoreBias::new(shape, Acc::DTYPE, config)?;
        let call = AttentionOperands::<T>::new(shape, [&q, &k, &v], config, bias.as_ref())?;
        let _span = kernel_span!(OP, q.dtype(), 2 * product_flops(&call, shape), [&q, &k, &v] => [&out, &lse]);
        let target = Disjoint::new(out.as_mut_slice::<T>()?);
        let to = Target::dense(&target, queries, heads, width);
        forward::run(device, &call, to, Disjoint::new(lse.as_mut_slice::<Acc>()?))?;
        Ok((out, lse))
    })
}

/// The gradients (dq, dk, dv) of [`attention`], each contiguous with the dims of its operand.
///
/// k and v may be one block of the keys, if `out` and `lse` cover all keys. Then dk and dv are the block's gradients,
/// and dq is the block's term of the sum over blocks. In 16 bits each term is rounded once; sum the terms in Acc.
pub fn attention_backward(
    dout: &Tensor,
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    (out, lse): (&Tensor, &Tensor),
    config: &AttentionConfig,
) -> Result<(Tensor, Tensor, Tensor)> {
    let shape = check(OP_BACKWARD, q, k, v, config)?;
    let operands = Operands::new(shape, dout, (q, k, v), (out, lse))?;
    let device = q.device();
    if device.gpu().is_some() {
        return cuda::attention::backward(shape, &operands, config);
    }
    let mut dq = Tensor::empty(device, q.dtype(), q.dims())?;
    let mut dk = Tensor::empty(device, q.dtype(), k.dims())?;
    let mut dv = Tensor::empty(device, q.dtype(), v.dims())?;
    dispatch_float!(OP_BACKWARD, q.dtype(), T => {
        let slices = (
            Disjoint::new(dq.as_mut_slice::<T>()?),
            Disjoint::new(dk.as_mut_slice::<T>()?),
            Disjoint::new(dv.as_mut_slice::<T>()?),
        );
        let Shape { queries, keys, heads, groups, width, .. } = shape;
        let targets = [
            Target::dense(&slices.0, queries, heads, width),
            Target::dense(&slices.1, keys, groups, width),
            Target::dense(&slices.2, keys, groups, width),
        ];
        write_gradients(shape, &operands, config, targets)?;
    });
    Ok((dq, dk, dv))
}

/// Like [`attention_backward`], into one tensor (B, T, (H + 2G) D) in the layout that [`split_packed`] splits. The
/// gradient reaches the projection without a copy.
///
/// Errors unless there are as many keys as queries.
pub fn attention_backward_packed(
    dout: &Tensor,
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    (out, lse): (&Tensor, &Tensor),
    config: &AttentionConfig,
) -> Result<Tensor> {
    let shape = check(OP_BACKWARD, q, k, v, config)?;
    let Shape { batch, queries, keys, heads, groups, width } = shape;
    if queries != keys {
        return Err(Error::shape(
            OP_BACKWARD,
            format!("packed gradients need equal lengths, q {:?}, k {:?}", q.dims(), k.dims()),
        ));
    }
    let operands = Operands::new(shape, dout, (q, k, v), (out, lse))?;
    let parts = heads + 2 * groups;
    if q.device().gpu().is_some() {
        let packed = cuda::attention::backward_packed(shape, &operands, config)?;
        return packed.reshape(&[batch, queries, parts * width]);
    }
    let mut packed = Tensor::empty(q.device(), q.dtype(), &[batch, queries, parts * width])?;
    dispatch_float!(OP_BACKWARD, q.dtype(), T => {
        let slice = Disjoint::new(packed.as_mut_slice::<T>()?);
        let whole = Target::dense(&slice, queries, parts, width);
        let targets = [whole, whole.starting_at(heads), whole.starting_at(heads + groups)];
        write_gradients(shape, &operands, config, targets)?;
    });
    Ok(packed)
}

/// The gradient of the bias of [`attention`], with its dims, in Acc. It computes the scores once more.
///
/// Errors if there is no bias, or as [`attention_backward`].
pub fn attention_backward_bias(
    dout: &Tensor,
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    (out, lse): (&Tensor, &Tensor),
    config: &AttentionConfig,
) -> Result<Tensor> {
    let shape = check(OP_BACKWARD, q, k, v, config)?;
    let Some(bias) = &config.bias else {
        return Err(Error::value(OP_BACKWARD, "there is no bias, and so no gradient of it"));
    };
    let Operands { q, k, v, dout, out, lse } = Operands::new(shape, dout, (q, k, v), (out, lse))?;
    let Shape { queries, keys, heads, .. } = shape;
    // Samples are added where the bias has one for all.
    let samples = if bias.rank() == 4 { bias.dims()[0] } else { 1 };
    let (device, acc) = (q.device(), q.dtype().accumulator());
    let dims = [samples, heads, queries, keys];
    let mut scores = Tensor::zeros(device, acc, &dims)?;
    if device.gpu().is_some() {
        let operands = Operands { q, k, v, dout, out, lse };
        cuda::attention::backward_bias(shape, &operands, config, &mut scores)?;
    } else {
        dispatch_float!(OP_BACKWARD, q.dtype(), T => {
            type Acc = <T as Element>::Acc;
            let view = ScoreBias::new(shape, acc, config)?;
            let call = AttentionOperands::<T>::new(shape, [&q, &k, &v], config, view.as_ref())?;
            let outputs =
                (HeadView::from_tensor(&dout)?, HeadView::from_tensor(&out)?, lse.as_slice()?);
            let to = Disjoint::new(scores.as_mut_slice::<Acc>()?);
            bias::run(device, &call, outputs, samples, &to)?;
        });
    }
    // Dims along which the bias is one number for all.
    let missing = 4 - bias.rank();
    let shared = (0..4).filter(|&d| d < missing || bias.dims()[d - missing] != dims[d]);
    let shared: Vec<isize> = shared.map(|d| d as isize).collect();
    if !shared.is_empty() {
        scores = sum(&scores, &shared, KeepDims::Keep)?;
    }
    scores.reshape(bias.dims())
}

fn write_gradients<T: Element>(
    shape: Shape,
    operands: &Operands,
    config: &AttentionConfig,
    targets: [Target<'_, T>; 3],
) -> Result<()> {
    let Operands { q, k, v, dout, out, lse } = operands;
    let bias = ScoreBias::new(shape, T::Acc::DTYPE, config)?;
    let call = AttentionOperands::<T>::new(shape, [q, k, v], config, bias.as_ref())?;
    let outputs =
        (HeadView::from_tensor(dout)?, HeadView::from_tensor(out)?, lse.as_slice::<T::Acc>()?);
    let flops = || 5 * product_flops(&call, shape);
    let _span =
        kernel_span!(OP_BACKWARD, q.dtype(), flops(), [q, k, v, dout, out, lse] => [q, k, v]);
    backward::run(q.device(), &call, outputs, targets)
}

/// Floating-point operations of the product of queries and the keys that they see.
fn product_flops<T: Element>(call: &AttentionOperands<T>, shape: Shape) -> usize {
    let Shape { batch, queries, heads, width, .. } = shape;
    let pairs = (0..batch).flat_map(|b| (0..queries).map(move |query| (b, query)));
    let seen = pairs.map(|(b, query)| {
        let [start, end] = call.visible(b, query);
        end.saturating_sub(start)
    });
    2 * width * heads * seen.sum::<usize>()
}
