//! Launches matrix products with cuBLASLt.

use ferrotron_cuda::cublaslt::{Epilogue, Matmul, Matrices, StorageOrder};
use ferrotron_cuda::gpu::Gpu;
use smallvec::SmallVec;

use super::copy::{copy, zero_fill};
use super::launched::product_launched;
use crate::core::layout::{Dims, Layout};
use crate::gemm::Accum;
use crate::{DType, Error, Result, Tensor};

/// `out = [out +] lhs rhs [+ bias]` over the last two dims. The leading dims are those of `out`, to which the
/// operands are broadcast. A bias must be contiguous and excludes leading dims.
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
    let (lhs, rhs) = (readable(lhs)?, readable(rhs)?);
    match bias {
        None => products(out, accum, &lhs, &rhs),
        Some(bias)
            if fused_product(out, accum, &lhs, &rhs, Epilogue::Bias(bias.address()), None)? =>
        {
            Ok(())
        }
        Some(bias) => {
            copy(&bias.broadcast_to(out.dims())?, out)?;
            products(out, Accum::Add, &lhs, &rhs)
        }
    }
}

/// h = x W^T + b and gelu(h), tanh form, in one pass, for x (M, K), W^T (K, N) and a contiguous b. `None` if cuBLASLt
/// does not support these operands.
pub(crate) fn linear_gelu(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<Option<(Tensor, Tensor)>> {
    // The precision of cuBLASLt's tanh is undocumented. Rounding to 16 bits hides it; f32 might not.
    if !matches!(x.dtype(), DType::BF16 | DType::F16) {
        return Ok(None);
    }
    let dims = [x.dim(0)?, weight.dim(1)?];
    let empty = || Tensor::empty(x.device(), x.dtype(), &dims);
    let (input, mut out) = (empty()?, empty()?);
    let leading = dims[1];
    let epilogue =
        Epilogue::Gelu { bias: bias.map(Tensor::address), input: input.address(), leading };
    let (x, weight) = (readable(x)?, readable(weight)?);
    let done = fused_product(&mut out, Accum::Replace, &x, &weight, epilogue, None)?;
    Ok(done.then_some((input, out)))
}

/// `lhs rhs` of two matrices, times the derivative of GELU, tanh form, at `input`, in one pass. `None` if cuBLASLt does
/// not support these operands, and before Hopper, where this epilogue takes longer than a pass of its own (llm.c, issue
/// 338).
pub(crate) fn product_and_gelu_derivative(
    lhs: &Tensor,
    rhs: &Tensor,
    input: &Tensor,
) -> Result<Option<Tensor>> {
    let is_half = matches!(lhs.dtype(), DType::BF16 | DType::F16); // as in `linear_gelu`
    let major = gpu(lhs)?.context().architecture().major;
    let dims = [lhs.dim(0)?, rhs.dim(1)?];
    let fits = input.dtype() == lhs.dtype() && input.dims() == dims && input.is_contiguous();
    if !is_half || major < 9 || !fits {
        return Ok(None);
    }
    let mut out = Tensor::empty(lhs.device(), lhs.dtype(), &dims)?;
    let epilogue = Epilogue::GeluDerivative { input: input.address(), leading: dims[1] };
    let (lhs, rhs) = (readable(lhs)?, readable(rhs)?);
    let done = fused_product(&mut out, Accum::Replace, &lhs, &rhs, epilogue, None)?;
    Ok(done.then_some(out))
}

/// Like [`product`] of two matrices, and computes the row sums of `lhs`, in the dtype of `out`, in the same pass.
/// `None` if cuBLASLt does not support these operands; then nothing was written.
pub(crate) fn product_and_row_sums(
    out: &mut Tensor,
    accum: Accum,
    lhs: &Tensor,
    rhs: &Tensor,
) -> Result<Option<Tensor>> {
    let sums = Tensor::empty(out.device(), out.dtype(), &lhs.dims()[..1])?;
    let epilogue = Epilogue::RowSums(sums.address());
    let done = fused_product(out, accum, &readable(lhs)?, &readable(rhs)?, epilogue, None)?;
    Ok(done.then_some(sums))
}

/// residual + x W^T + b in one pass, for x (M, K), W^T (K, N), a contiguous b and a residual (M, N). `None` if cuBLASLt
/// does not support these operands.
pub(crate) fn linear_onto(
    residual: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<Option<Tensor>> {
    let Some(leading) = rows(residual.layout()) else { return Ok(None) };
    let (address, order) = (residual.address(), StorageOrder::Rows);
    let addend = Matrices { address, order, leading, batch_stride: 0 };
    let mut out = Tensor::empty(x.device(), x.dtype(), residual.dims())?;
    let epilogue = bias.map_or(Epilogue::None, |bias| Epilogue::Bias(bias.address()));
    let (x, weight) = (readable(x)?, readable(weight)?);
    let done = fused_product(&mut out, Accum::Add, &x, &weight, epilogue, Some(addend))?;
    Ok(done.then_some(out))
}

/// The product of two matrices with an epilogue and an addend whose addresses belong to other tensors. Returns false,
/// without writing, if cuBLASLt does not support it for these types and sizes.
fn fused_product(
    out: &mut Tensor,
    accum: Accum,
    lhs: &Tensor,
    rhs: &Tensor,
    epilogue: Epilogue,
    addend: Option<Matrices>,
) -> Result<bool> {
    let empty = out.numel() == 0 || lhs.numel() == 0;
    if empty || out.rank() != 2 || !out.is_unique() || rows(out.layout()).is_none() {
        return Ok(false);
    }
    let gpu = gpu(out)?;
    for call in calls(out, accum, lhs, rhs)? {
        let call = Matmul { epilogue, addend, ..call };
        if !gpu.products().supports(&call).map_err(Error::from_gpu)? {
            return Ok(false);
        }
        product_launched(&call, lhs.dtype(), out.dtype());
        // SAFETY: as in `products`. There is one call. The epilogue's tensors have the declared sizes, and are either
        // uniquely held or only read.
        unsafe { gpu.product(&call) }.map_err(Error::from_gpu)?;
    }
    Ok(true)
}

/// Products of operands that cuBLASLt can read into a result that it can write.
fn products(out: &mut Tensor, accum: Accum, lhs: &Tensor, rhs: &Tensor) -> Result<()> {
    let gpu = gpu(out)?;
    for call in calls(out, accum, lhs, rhs)? {
        product_launched(&call, lhs.dtype(), out.dtype());
        // SAFETY: the matrices are within the buffers by construction of the layouts, and no two elements of `out`, whose
        // buffer has no other holder, overlap. Memory comes back to the pool in the order of the one stream.
        unsafe { gpu.product(&call) }.map_err(Error::from_gpu)?;
    }
    Ok(())
}

fn gpu(out: &Tensor) -> Result<&Gpu> {
    out.device().gpu().ok_or_else(|| Error::device("matmul", "the device is no GPU"))
}

/// The cuBLASLt calls of a product; exactly one for two matrices.
fn calls(out: &Tensor, accum: Accum, lhs: &Tensor, rhs: &Tensor) -> Result<SmallVec<[Matmul; 1]>> {
    let outer = &out.dims()[..out.rank() - 2];
    let stretched = |operand: &Tensor| {
        let mut dims = Dims::from_slice(outer);
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
    let sizes = [out.dim(-2)?, out.dim(-1)?, lhs.dim(-1)?];
    let call = |call: usize| {
        // Element offsets of the first matrices of the call.
        let mut offsets = [0; 3];
        let mut rest = call;
        for &(size, strides) in others.iter().rev() {
            for (offset, stride) in offsets.iter_mut().zip(strides) {
                *offset += rest % size * stride;
            }
            rest /= size;
        }
        let matrices = |i: usize, dtype: DType, (order, leading)| Matrices {
            address: base[i] + (offsets[i] * dtype.size()) as u64,
            order,
            leading,
            batch_stride: batch.1[i],
        };
        Matmul {
            batch: batch.0,
            sizes,
            operands: lhs.dtype().into(),
            result: out.dtype().into(),
            left: matrices(0, lhs.dtype(), left),
            right: matrices(1, rhs.dtype(), right),
            out: matrices(2, out.dtype(), (StorageOrder::Rows, leading)),
            beta: if accum == Accum::Add { 1.0 } else { 0.0 },
            addend: None,
            epilogue: Epilogue::None,
        }
    };
    let count = others.iter().map(|(size, _)| size).product::<usize>();
    Ok((0..count).map(call).collect())
}

/// A product with k = 0.
fn nothing(out: &mut Tensor, accum: Accum, bias: Option<&Tensor>) -> Result<()> {
    match (accum, bias) {
        (Accum::Add, _) => Ok(()),
        (Accum::Replace, Some(bias)) => copy(&bias.broadcast_to(out.dims())?, out),
        (Accum::Replace, None) if out.is_contiguous() => zero_fill(out),
        (Accum::Replace, None) => copy(&Tensor::zeros(out.device(), out.dtype(), out.dims())?, out),
    }
}

/// The operand itself if cuBLASLt can read it, else a contiguous copy.
fn readable(operand: &Tensor) -> Result<Tensor> {
    match lies(operand.layout()) {
        Some(_) => Ok(operand.clone()),
        None => operand.contiguous(),
    }
}

/// The storage order of the matrices in the last two dims, and their leading dimension.
fn lies(layout: &Layout) -> Option<(StorageOrder, usize)> {
    let [matrix, transpose] = [last_two(layout), last_two(layout).map(|[a, b]| [b, a])];
    // A single row or column fits both orders; the larger leading dimension is its length.
    match (leading(matrix), leading(transpose)) {
        (Some(rows), Some(columns)) if rows < columns => Some((StorageOrder::Columns, columns)),
        (Some(rows), _) => Some((StorageOrder::Rows, rows)),
        (None, columns) => Some((StorageOrder::Columns, columns?)),
    }
}

/// The leading dimension of row-major matrices.
fn rows(layout: &Layout) -> Option<usize> {
    leading(last_two(layout))
}

/// The stride between rows, if the elements of a row are adjacent and rows do not overlap.
fn leading([[rows, columns], [row_stride, column_stride]]: [[usize; 2]; 2]) -> Option<usize> {
    let leading = if rows == 1 { columns } else { row_stride };
    ((column_stride == 1 || columns == 1) && leading >= columns).then_some(leading)
}

/// The last two dims and their strides.
fn last_two(layout: &Layout) -> [[usize; 2]; 2] {
    [layout.dims(), layout.strides()].map(|of| [of[of.len() - 2], of[of.len() - 1]])
}

fn transposed(layout: &Layout) -> Result<Layout> {
    let mut order: Dims = (0..layout.rank()).collect();
    order.swap(layout.rank() - 2, layout.rank() - 1);
    layout.permute(&order)
}

/// A dim of a batch: its size, and the strides of the three matrices.
type BatchDim = (usize, [usize; 3]);

/// The longest batch dim, which one call covers, and the remaining dims, which are looped over. Contiguously nested
/// dims are merged first.
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
