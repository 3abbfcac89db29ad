//! Matrix products C = A B of the last two dims, batched over the others.
//!
//! Operands may have any strides, so transposes are free. Sums accumulate in [`Element::Acc`] and are rounded once.
//! Results go to a new tensor or, with [`Accum`], into an existing one. Its dtype may be wider than that of the
//! operands: gradients of 16-bit weights accumulate in f32.

use smallvec::SmallVec;
use std::sync::OnceLock;

use crate::core::layout::{Dims, Layout, broadcast_dims};
use crate::core::tensor::{check_device, check_pair};
use crate::cuda;
use crate::gemm::{MatMut, MatRef, gemm};
use crate::kernel_span::bytes;
use crate::numeric::disjoint::Disjoint;
use crate::{DType, Element, Error, Real, Result, Tensor, ThreadTeam, bf16, dispatch_float, f16};

pub use crate::gemm::Accum;

/// Products with fewer multiplications than this are computed by one thread.
const SMALL: usize = 64 * 64 * 64;

/// A B for (.., M, K) and (.., K, N): (.., M, N). Leading dims are broadcast; a matrix B makes one product.
///
/// ```
/// use ferrotron_tensor::{Device, Tensor, ops::matmul::matmul};
/// let device = Device::cpu(1)?;
/// let a = Tensor::from_slice(&device, &[1.0_f32, 2.0, 3.0, 4.0], &[2, 2])?;
/// assert_eq!(matmul(&a, &a.transpose(0, 1)?)?.to_vec::<f32>()?, [5.0, 11.0, 11.0, 25.0]);
/// let b = Tensor::zeros(&device, a.dtype(), &[3, 2])?;
/// let error = matmul(&a, &b).unwrap_err().to_string();
/// assert_eq!(error, "matmul: inner dimensions differ: lhs [2, 2] x rhs [3, 2]");
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn matmul(lhs: &Tensor, rhs: &Tensor) -> Result<Tensor> {
    let dims = product_dims(lhs, rhs)?;
    // A matrix on the right makes one product of all rows, if strides permit.
    let rows = dims[..dims.len() - 1].iter().product();
    if let (3.., &[k, columns]) = (lhs.rank(), rhs.dims())
        && let Some(matrix) = lhs.layout().reshape(&[rows, k])
    {
        let mut out = Tensor::empty(lhs.device(), lhs.dtype(), &[rows, columns])?;
        matmul_into(&mut out, Accum::Replace, &lhs.with_layout(matrix), rhs)?;
        return out.reshape(&dims);
    }
    let mut out = Tensor::empty(lhs.device(), lhs.dtype(), &dims)?;
    matmul_into(&mut out, Accum::Replace, lhs, rhs)?;
    Ok(out)
}

/// Like [`matmul`], into the unique `out`, replacing or adding to its contents.
pub fn matmul_into(out: &mut Tensor, accum: Accum, lhs: &Tensor, rhs: &Tensor) -> Result<()> {
    named_product_into("matmul", out, accum, lhs, rhs)
}

/// [`matmul_into`] under another name in profiles.
pub(super) fn named_product_into(
    name: &'static str,
    out: &mut Tensor,
    accum: Accum,
    lhs: &Tensor,
    rhs: &Tensor,
) -> Result<()> {
    let dims = product_dims(lhs, rhs)?;
    product_into(name, out, accum, lhs, rhs, None, &dims)
}

pub(super) fn product_dims(lhs: &Tensor, rhs: &Tensor) -> Result<Dims> {
    check_pair("matmul", lhs, rhs)?;
    let (l, r) = (lhs.dims(), rhs.dims());
    if l.len() < 2 || r.len() < 2 {
        return Err(Error::shape(
            "matmul",
            format!("needs two dims or more: lhs {l:?} x rhs {r:?}"),
        ));
    }
    if l[l.len() - 1] != r[r.len() - 2] {
        return Err(Error::shape(
            "matmul",
            format!("inner dimensions differ: lhs {l:?} x rhs {r:?}"),
        ));
    }
    let mut dims = broadcast_dims("matmul", &l[..l.len() - 2], &r[..r.len() - 2])?;
    dims.extend([l[l.len() - 2], r[r.len() - 1]]);
    Ok(dims)
}

/// Errors unless `out` has the dims and device of the product.
pub(super) fn check_place(out: &Tensor, lhs: &Tensor, dims: &[usize]) -> Result<()> {
    if out.dims() != dims {
        return Err(Error::shape(
            "matmul",
            format!("the result is {dims:?}, the destination {:?}", out.dims()),
        ));
    }
    check_device("matmul", out, lhs)
}

pub(super) fn product_into(
    name: &'static str,
    out: &mut Tensor,
    accum: Accum,
    lhs: &Tensor,
    rhs: &Tensor,
    bias: Option<&Tensor>,
    dims: &[usize],
) -> Result<()> {
    check_place(out, lhs, dims)?;
    let (flops, held) = (2 * out.numel() * lhs.dims()[lhs.rank() - 1], accum == Accum::Add);
    let _span = tracing::trace_span!(
        "kernel",
        name,
        dtype = %lhs.dtype(),
        flops = flops as u64,
        read = bytes(lhs) + bytes(rhs) + u64::from(held) * bytes(out),
        written = bytes(out)
    )
    .entered();
    dispatch_float!("matmul", lhs.dtype(), T => match (lhs.dtype(), out.dtype()) {
        (a, b) if a == b => product::<T, T>(out, accum, lhs, rhs, bias),
        (DType::BF16, DType::F32) => product::<bf16, f32>(out, accum, lhs, rhs, None),
        (DType::F16, DType::F32) => product::<f16, f32>(out, accum, lhs, rhs, None),
        (a, b) => Err(Error::dtype("matmul", format!("cannot put a product of {a} into {b}"))),
    })
}

fn product<T: Element, D: Element<Acc = T::Acc>>(
    out: &mut Tensor,
    accum: Accum,
    lhs: &Tensor,
    rhs: &Tensor,
    bias: Option<&Tensor>,
) -> Result<()> {
    if out.device().gpu().is_some() {
        return cuda::matmul::product(out, accum, lhs, rhs, bias);
    }
    let device = out.device().clone();
    let layout = out.layout().clone();
    let bias = bias.map(Tensor::as_slice::<D>).transpose()?;
    let batch = &layout.dims()[..layout.rank() - 2];
    let stretched = |operand: &Tensor| {
        let mut dims = Dims::from_slice(batch);
        dims.extend_from_slice(&operand.dims()[operand.rank() - 2..]);
        operand.layout().broadcast_to(&dims)
    };
    let (l, r) = (stretched(lhs)?, stretched(rhs)?);
    let (a, b) = (lhs.buffer_slice::<T>()?, rhs.buffer_slice::<T>()?);
    let [m, n] = last_two(layout.dims());
    let k = l.dims()[l.rank() - 1];
    let count: usize = batch.iter().product();
    let c = Disjoint::new(out.buffer_slice_mut::<D>()?);
    let work = m.saturating_mul(n).saturating_mul(k);
    if count == 0 || m * n == 0 || device.is_fake() {
        return Ok(());
    }
    // From the first to the last element of a result.
    let [row, column] = last_two(layout.strides());
    let span = (m - 1) * row + (n - 1) * column + 1;

    let one = |index: usize, team: &ThreadTeam| {
        let ([ars, acs], [brs, bcs], [crs, ccs]) =
            (last_two(l.strides()), last_two(r.strides()), last_two(layout.strides()));
        let dst = MatMut {
            data: c.at(matrix_offset(&layout, index), span),
            rows: m,
            cols: n,
            row_stride: crs as isize,
            col_stride: ccs as isize,
        };
        let lhs = MatRef {
            data: a.as_ptr().wrapping_add(matrix_offset(&l, index)),
            rows: m,
            cols: k,
            row_stride: ars as isize,
            col_stride: acs as isize,
        };
        let rhs = MatRef {
            data: b.as_ptr().wrapping_add(matrix_offset(&r, index)),
            rows: k,
            cols: n,
            row_stride: brs as isize,
            col_stride: bcs as isize,
        };
        // SAFETY: the elements of a matrix of the batch lie inside the buffers by construction of the
        // layouts; no two elements of `out` overlap, and its buffer is unique.
        unsafe { gemm(team, dst, accum, T::Acc::ONE, lhs, rhs, bias) }
    };
    if count >= device.threads() && count > 1 {
        let failure = OnceLock::new();
        device.for_each(count, count.saturating_mul(work) / 16, &|index| {
            if let Err(error) = one(index, ThreadTeam::alone()) {
                failure.get_or_init(|| error);
            }
        });
        failure.into_inner().map_or(Ok(()), Err)
    } else {
        let team = if work < SMALL { ThreadTeam::alone() } else { device.team() };
        (0..count).try_for_each(|index| one(index, team))
    }
}

fn last_two(values: &[usize]) -> [usize; 2] {
    [values[values.len() - 2], values[values.len() - 1]]
}

/// Offset of the `index`-th matrix of a batch.
fn matrix_offset(layout: &Layout, index: usize) -> usize {
    let outer = layout.rank() - 2;
    let coordinates: SmallVec<[usize; 4]> = {
        let mut rest = index;
        let mut out = SmallVec::from_elem(0, outer);
        for d in (0..outer).rev() {
            out[d] = rest % layout.dims()[d];
            rest /= layout.dims()[d];
        }
        out
    };
    layout.offset() + coordinates.iter().zip(layout.strides()).map(|(c, s)| c * s).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;

    #[test]
    fn batches_broadcast_and_strides_are_free() -> Result<()> {
        let device = Device::cpu(2)?;
        let a =
            Tensor::from_slice(&device, &(0..24).map(f64::from).collect::<Vec<_>>(), &[2, 3, 4])?;
        let b = Tensor::from_slice(&device, &(0..8).map(f64::from).collect::<Vec<_>>(), &[2, 4])?
            .transpose(0, 1)?;
        let c = matmul(&a, &b)?; // (2, 3, 2)
        assert_eq!(c.dims(), [2, 3, 2]);
        for (i, got) in c.to_f64()?.iter().enumerate() {
            let want: f64 = (0..4).map(|k| (i / 2 * 4 + k) as f64 * (i % 2 * 4 + k) as f64).sum();
            assert_eq!(*got, want);
        }
        let mut sum = Tensor::full(&device, DType::F64, &[2, 3, 2], 1.0)?;
        matmul_into(&mut sum, Accum::Add, &a, &b)?;
        assert_eq!(sum.to_f64()?, c.add_scalar(1.0)?.to_f64()?);
        Ok(())
    }

    #[test]
    fn sixteen_bit_operands_accumulate_into_f32() -> Result<()> {
        let device = Device::cpu(1)?;
        let ones = Tensor::full(&device, DType::F16, &[1, 4096], 1.0)?;
        let mut sum = Tensor::zeros(&device, DType::F32, &[1, 1])?;
        matmul_into(&mut sum, Accum::Add, &ones, &ones.transpose(0, 1)?)?;
        assert_eq!(sum.item()?, 4096.0);
        Ok(())
    }
}
