//! Joins attention to one block of keys with attention to those before it.

use crate::core::tensor::check_device;
use crate::cuda;
use crate::numeric::simd::vectorized;
use crate::ops::rows::{for_rows, for_rows2};
use crate::{Element, Error, Real, Result, Tensor, dispatch_float};

const OP: &str = "merge_attention";

/// Adds the attention to a further block of keys to `out` (B, T, H, D) and `lse` (B, H, T), both contiguous, unique and
/// in Acc. They become those of [`attention`](super::attention) to the earlier keys and the block's. The block's result
/// is that of the queries from `first` on, (B, T', H, D) in any floating-point dtype and (B, H, T') in Acc; the other
/// queries do not see it.
///
/// lse' = ln(e^lse + e^block_lse), out' = e^(lse - lse') out + e^(block_lse - lse') block_out (Liu et al., "Ring
/// Attention", 2023, section 3; Dao et al., "FlashAttention", 2022, section 3.1). A query whose lse is -infinity
/// has seen no key: what `out` holds there does not matter, so that the state begins with
/// [`Tensor::empty`] and an lse of -infinity. Dropout changes nothing, since lse is taken before it.
///
/// The gradient needs no function of its own: [`attention_backward`](super::attention_backward) with the out and
/// lse of all keys gives the block's dk and dv, and the block's part of dq, to be summed over the blocks.
///
/// ```
/// use ferrotron_tensor::ops::attention::{AttentionConfig, AttentionMask, attention, merge_attention};
/// use ferrotron_tensor::{DType, Device, RandomKey, Tensor};
/// let device = Device::cpu(1)?;
/// let x = |n, value| Tensor::full(&device, DType::F32, &[1, n, 2, 8], value);
/// let (q, k, v) = (x(3, 1.0)?, x(4, 0.5)?, x(4, 2.0)?);
/// let config = AttentionConfig { mask: AttentionMask::None, ..AttentionConfig::causal(8) };
/// let mut out = Tensor::empty(&device, DType::F32, &[1, 3, 2, 8])?;
/// let mut lse = Tensor::full(&device, DType::F32, &[1, 2, 3], f64::NEG_INFINITY)?;
/// for start in [0, 2] {
///     let (k, v) = (k.narrow(1, start, 2)?, v.narrow(1, start, 2)?);
///     let (block_out, block_lse) = attention(&q, &k, &v, &config)?;
///     merge_attention((&mut out, &mut lse), 0, (&block_out, &block_lse))?;
/// }
/// let want = attention(&q, &k, &v, &config)?.1.to_f64()?;
/// assert!(lse.to_f64()?.iter().zip(want).all(|(lse, want)| (lse - want).abs() < 1e-6));
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn merge_attention(
    (out, lse): (&mut Tensor, &mut Tensor),
    first: usize,
    (block_out, block_lse): (&Tensor, &Tensor),
) -> Result<()> {
    for tensor in [&*lse, block_out, block_lse] {
        check_device(OP, out, tensor)?;
    }
    let fits = match (out.dims(), block_out.dims()) {
        (&[batch, queries, heads, width], &[_, rows, _, _]) => {
            block_out.dims() == [batch, rows, heads, width]
                && lse.dims() == [batch, heads, queries]
                && block_lse.dims() == [batch, heads, rows]
                && first.checked_add(rows).is_some_and(|end| end <= queries)
        }
        _ => false,
    };
    if !fits {
        return Err(Error::shape(
            OP,
            format!(
                "needs out (B, T, H, D), lse (B, H, T) and a block of queries among them, got {:?}, {:?} and, \
                 from query {first} on, {:?}, {:?}",
                out.dims(),
                lse.dims(),
                block_out.dims(),
                block_lse.dims()
            ),
        ));
    }
    if block_out.numel() == 0 {
        return Ok(());
    }
    let (block_out, block_lse) = (block_out.contiguous()?, block_lse.contiguous()?);
    if out.device().gpu().is_some() {
        return cuda::attention::merge(out, lse, first, &block_out, &block_lse);
    }
    dispatch_float!(OP, block_out.dtype(), T => merge::<T>(out, lse, first, &block_out, &block_lse))
}

fn merge<T: Element>(
    out: &mut Tensor,
    lse: &mut Tensor,
    first: usize,
    block_out: &Tensor,
    block_lse: &Tensor,
) -> Result<()> {
    let &[_, queries, heads, width] = out.dims() else { unreachable!("dims are checked") };
    let rows = block_out.dims()[1];
    let device = out.device().clone();
    // Of each head and query: the factors of what is there and of what comes.
    let mut factors = vec![[T::Acc::ZERO; 2]; block_lse.numel()];
    let work = 4 * block_lse.numel();
    let lse = (lse.as_mut_slice::<T::Acc>()?, queries);
    let out = out.as_mut_slice::<T::Acc>()?;
    let other = block_lse.as_slice::<T::Acc>()?;
    for_rows2(&device, lse, (&mut factors, rows), work, |head, lse, factors| {
        let heads = lse.chunks_exact_mut(queries).zip(factors.chunks_exact_mut(rows));
        for (i, (lse, factors)) in heads.enumerate() {
            let other = &other[(head + i) * rows..][..rows];
            for ((lse, factors), &other) in lse[first..].iter_mut().zip(factors).zip(other) {
                (*lse, *factors) = join(*lse, other);
            }
        }
    });
    let block = block_out.as_slice::<T>()?.chunks_exact(rows * heads * width);
    let samples = out.chunks_exact_mut(queries * heads * width).zip(block);
    for ((out, block), factors) in samples.zip(factors.chunks_exact(heads * rows)) {
        let out = &mut out[first * heads * width..][..block.len()];
        for_rows(&device, (out, heads * width), block.len() / 2, |row, out| {
            let block = block[row * heads * width..].chunks_exact(width);
            for (i, (out, block)) in out.chunks_exact_mut(width).zip(block).enumerate() {
                let (query, head) = (row + i / heads, i % heads);
                blend(out, block, factors[head * rows + query]);
            }
        });
    }
    Ok(())
}

/// ln(e^a + e^b), and by how much of it e^a and e^b are; both 0 if neither saw anything.
fn join<A: Real>(a: A, b: A) -> (A, [A; 2]) {
    if a == A::NEG_INFINITY && b == A::NEG_INFINITY {
        return (a, [A::ZERO; 2]);
    }
    let max = a.max(b);
    let (a, b) = ((a - max).exp(), (b - max).exp());
    let sum = a + b;
    (max + sum.ln(), [a / sum, b / sum])
}

vectorized! {
    /// out = kept out + gained block, without reading `out` where nothing of it is kept.
    fn blend<T: Element>(out: &mut [T::Acc], block: &[T], factors: [T::Acc; 2]) {
        let [kept, gained] = factors;
        if kept == T::Acc::ZERO {
            for (out, x) in out.iter_mut().zip(block) {
                *out = gained * x.acc();
            }
        } else if gained != T::Acc::ZERO {
            for (out, x) in out.iter_mut().zip(block) {
                *out = kept * *out + gained * x.acc();
            }
        }
    }
}
