//! Matrix products, by cuBLASLt.

use ferrotron_cuda::cublaslt::{Matrices, Order, Product};
use smallvec::SmallVec;

use super::copy::{copy, fill_zero};
use crate::gemm::Accum;
use crate::layout::{Dims, Layout};
use crate::{Error, Result, Tensor};

/// `out = [out +] lhs rhs [+ bias]` over the last two dims; the others are those of `out`, to which the operands are
/// broadcast. The bias is contiguous.
pub(crate) fn product(
    out: &mut Tensor,
    accum: Accum,
    lhs: &Tensor,
    rhs: &Tensor,
    bias: Option<&Tensor>,
) -> Result<()> {
    if !out.is_unique() || out.layout().overlaps() {
        let message = format!("{out:?} has other holders or shows an element twice: no place");
        return Err(Error::memory("matmul", message));
    }
    if out.numel() == 0 {
        return Ok(());
    }
    if lhs.dims()[lhs.rank() - 1] == 0 {
        return nothing(out, accum, bias);
    }
    if rows(out.layout()).is_none() {
        // (lhs rhs)^T = rhs^T lhs^T
        let swapped = transposed(out.layout())?;
        if bias.is_none() && rows(&swapped).is_some() {
            let (lhs, rhs) = (lhs.transpose(-1, -2)?, rhs.transpose(-1, -2)?);
            return out.with_layout_mut(swapped, |out| product(out, accum, &rhs, &lhs, None));
        }
        let mut dense = match accum {
            Accum::Replace => Tensor::empty(out.device(), out.dtype(), out.dims())?,
            Accum::Add => out.contiguous()?,
        };
        product(&mut dense, accum, lhs, rhs, bias)?;
        return copy(&dense, out);
    }
    products(out, accum, &readable(lhs)?, &readable(rhs)?, bias)
}

/// The products themselves, of operands that cuBLASLt can read and a result that it can write.
fn products(
    out: &mut Tensor,
    accum: Accum,
    lhs: &Tensor,
    rhs: &Tensor,
    bias: Option<&Tensor>,
) -> Result<()> {
    let gpu = out.device().gpu().ok_or_else(|| Error::device("matmul", "the device is no GPU"))?;
    let outer = &out.dims()[..out.rank() - 2];
    let stretched = |operand: &Tensor| {
        let mut dims: Dims = outer.into();
        dims.extend_from_slice(&operand.dims()[operand.rank() - 2..]);
        operand.layout().broadcast_to(&dims)
    };
    let layouts = [stretched(lhs)?, stretched(rhs)?, out.layout().clone()];
    let (batch, others) = batch(&layouts);
    let [left, right] = [&layouts[0], &layouts[1]].map(lies);
    let (Some(left), Some(right), Some(leading)) = (left, right, rows(out.layout())) else {
        return Err(Error::shape("matmul", "a view without dense rows or columns"));
    };
    let base = [lhs.address(), rhs.address(), out.address()];
    let calls = others.iter().map(|(size, _)| size).product::<usize>();
    for call in 0..calls {
        // Bytes to the call's first matrices.
        let mut offsets = [0; 3];
        let mut rest = call;
        for &(size, strides) in others.iter().rev() {
            for (offset, stride) in offsets.iter_mut().zip(strides) {
                *offset += rest % size * stride;
            }
            rest /= size;
        }
        let matrices = |i: usize, dtype: crate::DType, (order, leading)| Matrices {
            address: base[i] + (offsets[i] * dtype.size()) as u64,
            order,
            leading,
            batch_stride: batch.1[i],
        };
        let product = Product {
            batch: batch.0,
            sizes: [out.dim(-2)?, out.dim(-1)?, lhs.dim(-1)?],
            operands: lhs.dtype().into(),
            result: out.dtype().into(),
            left: matrices(0, lhs.dtype(), left),
            right: matrices(1, rhs.dtype(), right),
            out: matrices(2, out.dtype(), (Order::Rows, leading)),
            beta: if accum == Accum::Add { 1.0 } else { 0.0 },
            bias: bias.map(Tensor::address),
        };
        if let Some(bias) = bias
            && !gpu.products().supports(&product).map_err(Error::of_gpu)?
        {
            copy(&bias.broadcast_to(out.dims())?, out)?;
            return products(out, Accum::Add, lhs, rhs, None);
        }
        // SAFETY: the matrices are within the buffers by construction of the layouts, and no two elements of `out`, whose
        // buffer has no other holder, overlap. Memory comes back to the pool in the order of the one stream.
        unsafe { gpu.product(&product) }.map_err(Error::of_gpu)?;
    }
    Ok(())
}

/// A product over k = 0.
fn nothing(out: &mut Tensor, accum: Accum, bias: Option<&Tensor>) -> Result<()> {
    match (accum, bias) {
        (Accum::Add, _) => Ok(()),
        (Accum::Replace, Some(bias)) => copy(&bias.broadcast_to(out.dims())?, out),
        (Accum::Replace, None) if out.is_contiguous() => fill_zero(out),
        (Accum::Replace, None) => copy(&Tensor::zeros(out.device(), out.dtype(), out.dims())?, out),
    }
}

/// Itself if cuBLASLt can read it, else a dense copy.
fn readable(operand: &Tensor) -> Result<Tensor> {
    match lies(operand.layout()) {
        Some(_) => Ok(operand.clone()),
        None => operand.contiguous(),
    }
}

/// How the matrices of the last two dims lie, and their leading dimension.
fn lies(layout: &Layout) -> Option<(Order, usize)> {
    let [matrix, transpose] = [last_two(layout), last_two(layout).map(|[a, b]| [b, a])];
    // A single row or column lies in both; the longer leading dimension is the one of its length.
    match (leading(matrix), leading(transpose)) {
        (Some(rows), Some(columns)) if rows < columns => Some((Order::Columns, columns)),
        (Some(rows), _) => Some((Order::Rows, rows)),
        (None, columns) => Some((Order::Columns, columns?)),
    }
}

/// The leading dimension of matrices that lie in rows.
fn rows(layout: &Layout) -> Option<usize> {
    leading(last_two(layout))
}

/// Elements from row to row, if those of a row lie side by side and rows do not overlap.
fn leading([[rows, columns], [row_stride, column_stride]]: [[usize; 2]; 2]) -> Option<usize> {
    let leading = if rows == 1 { columns } else { row_stride };
    ((column_stride == 1 || columns == 1) && leading >= columns).then_some(leading)
}

/// The last two dims and their strides.
fn last_two(layout: &Layout) -> [[usize; 2]; 2] {
    [layout.dims(), layout.strides()].map(|of| [of[of.len() - 2], of[of.len() - 1]])
}

fn transposed(layout: &Layout) -> Result<Layout> {
    let mut order: SmallVec<[usize; 6]> = (0..layout.rank()).collect();
    order.swap(layout.rank() - 2, layout.rank() - 1);
    layout.permute(&order)
}

/// A dim of a batch: its size, and the strides of the three matrices.
type BatchDim = (usize, [usize; 3]);

/// The longest dim of the batch, which is one call's, and the others, which are gone through: dims that lie one in the
/// other are one.
fn batch(layouts: &[Layout; 3]) -> (BatchDim, SmallVec<[BatchDim; 4]>) {
    let mut joined: SmallVec<[BatchDim; 4]> = SmallVec::new();
    for d in 0..layouts[0].rank() - 2 {
        let (size, strides) = (layouts[0].dims()[d], [0, 1, 2].map(|i| layouts[i].strides()[d]));
        match joined.last_mut() {
            _ if size == 1 => {}
            Some((outer, steps)) if *steps == strides.map(|stride| stride * size) => {
                (*outer, *steps) = (*outer * size, strides);
            }
            _ => joined.push((size, strides)),
        }
    }
    let longest = (0..joined.len()).max_by_key(|&i| joined[i].0);
    let one = longest.map_or((1, [0; 3]), |i| joined.remove(i));
    (one, joined)
}
