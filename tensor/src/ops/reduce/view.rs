//! The form in which reductions read a tensor.

use crate::cuda::reduce::Operand;
use crate::ops::rows::around;
use crate::{DType, Dims, Error, Result, Tensor};
use smallvec::SmallVec;

/// Whether a reduced dim is kept with size 1 or dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepDims {
    /// Reduced dims have size 1 in the result.
    Keep,
    /// Reduced dims are removed from the result.
    Drop,
}

/// A contiguous tensor as (outer, reduced, inner); the middle dim is reduced.
pub(super) struct ReduceView {
    pub x: Tensor,
    pub outer: usize,
    pub reduced: usize,
    pub inner: usize,
    /// The dims of the result with and without the reduced ones.
    keep: Dims,
    drop: Dims,
}

impl ReduceView {
    /// A result of `dtype` that `f` fills on a GPU; `None` on other devices.
    pub(super) fn on_gpu(
        &self,
        dtype: DType,
        keep: KeepDims,
        f: impl FnOnce(Operand, &mut Tensor) -> Result<()>,
    ) -> Result<Option<Tensor>> {
        if self.x.device().gpu().is_none() {
            return Ok(None);
        }
        let mut out = Tensor::empty(self.x.device(), dtype, self.dims(keep))?;
        let ReduceView { x, outer, reduced, inner, .. } = self;
        f(Operand { x, outer: *outer, reduced: *reduced, inner: *inner }, &mut out)?;
        Ok(Some(out))
    }

    pub(super) fn dims(&self, keep: KeepDims) -> &[usize] {
        if keep == KeepDims::Keep { &self.keep } else { &self.drop }
    }
}

/// A flag per dim: whether it is reduced. Errors if a dim is out of range or repeated.
pub(super) fn chosen(op: &'static str, x: &Tensor, dims: &[isize]) -> Result<SmallVec<[bool; 8]>> {
    let mut goes = SmallVec::from_elem(false, x.rank());
    for &dim in dims {
        if std::mem::replace(&mut goes[x.resolve(op, dim)?], true) {
            return Err(Error::shape(op, format!("dim {dim} is given twice in {dims:?}")));
        }
    }
    Ok(goes)
}

/// Permutes `x` to a form that the kernels read; `rows` requires inner = 1.
pub(super) fn view(x: &Tensor, goes: &[bool], rows: bool) -> Result<ReduceView> {
    let dims = x.dims();
    let (kept, reduced): (Dims, Dims) = (0..x.rank()).partition(|&d| !goes[d]);
    let size = |set: &[usize]| set.iter().map(|&d| dims[d]).product::<usize>();
    let made = |x: Tensor, outer, inner| ReduceView {
        x,
        outer,
        inner,
        reduced: size(&reduced),
        keep: (0..dims.len()).map(|d| if goes[d] { 1 } else { dims[d] }).collect(),
        drop: kept.iter().map(|&d| dims[d]).collect(),
    };
    let order = |first: &[usize], last: &[usize]| {
        x.permute(&first.iter().chain(last).copied().collect::<Dims>())
    };
    let kept_first = order(&kept, &reduced)?;
    if kept_first.is_contiguous() {
        return Ok(made(kept_first, size(&kept), 1));
    }
    if !rows {
        let reduced_first = order(&reduced, &kept)?;
        if reduced_first.is_contiguous() {
            return Ok(made(reduced_first, 1, size(&kept)));
        }
        let long: Dims = reduced.iter().copied().filter(|&d| dims[d] != 1).collect();
        if let (Some(&first), Some(&last)) = (long.first(), long.last())
            && (first..=last).all(|d| goes[d] || dims[d] == 1)
        {
            let (outer, inner) = (around(dims, first).0, around(dims, last).2);
            return Ok(made(x.contiguous()?, outer, inner));
        }
    }
    Ok(made(kept_first.contiguous()?, size(&kept), 1))
}
