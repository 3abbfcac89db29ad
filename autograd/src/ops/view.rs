//! Gradients of views: the inverse view, or accumulation into the viewed range.

use ferrotron_tensor::ops::concat::concat;
use ferrotron_tensor::ops::pointwise::add_assign;
use ferrotron_tensor::{Result, Tensor};

use crate::engine::node::Named;
use crate::{Accum, Backward, Cotangents, InputGrads, Var, forward_span};

/// The same elements under other dims, in row-major order.
pub(crate) fn reshape(x: &Var, dims: &[usize]) -> Result<Var> {
    let _span = forward_span("reshape");
    let original = x.dims().to_vec();
    Var::record(&[x], x.value().reshape(dims)?, || {
        Named("reshape", move |dy: Tensor, dx: &mut InputGrads| {
            dx.accumulate(0, dy.reshape(&original)?)
        })
    })
}

/// Reorders the dims.
pub(crate) fn permute(x: &Var, order: &[usize]) -> Result<Var> {
    let _span = forward_span("permute");
    let value = x.value().permute(order)?;
    let mut inverse = vec![0; order.len()];
    for (to, &from) in order.iter().enumerate() {
        inverse[from] = to;
    }
    Var::record(&[x], value, || {
        Named("permute", move |dy: Tensor, dx: &mut InputGrads| {
            dx.accumulate(0, dy.permute(&inverse)?)
        })
    })
}

/// Expands dims of size 1 and adds leading dims (NumPy's rule).
pub(crate) fn broadcast_to(x: &Var, dims: &[usize]) -> Result<Var> {
    let _span = forward_span("broadcast_to");
    // `accumulate` sums a gradient back to the operand's dims.
    Var::record(&[x], x.value().broadcast_to(dims)?, || {
        Named("broadcast_to", move |dy: Tensor, dx: &mut InputGrads| dx.accumulate(0, dy))
    })
}

/// Elements `start..start + len` of one dim, counted from the end if negative.
pub(crate) fn narrow(x: &Var, dim: isize, start: usize, len: usize) -> Result<Var> {
    let _span = forward_span("narrow");
    Var::record(&[x], x.value().narrow(dim, start, len)?, || {
        Named("narrow", move |dy: Tensor, dx: &mut InputGrads| {
            dx.accumulate_with(0, |whole, accum| {
                if accum == Accum::Replace {
                    whole.zero_fill()?;
                }
                whole.narrow_mut(dim, start, len, |part| add_assign(part, &dy.cast(part.dtype())?))
            })
        })
    })
}

/// Splits one dim into consecutive ranges of these sizes; their gradients are concatenated in one buffer.
pub(crate) fn split(x: &Var, sizes: &[usize], dim: isize) -> Result<Vec<Var>> {
    let _span = forward_span("split");
    let parts = x.value().split(sizes, dim)?;
    Var::record_many(&[x], parts.clone(), || SplitBackward {
        dim,
        dims: parts.iter().map(|part| part.dims().to_vec()).collect(),
    })
}

struct SplitBackward {
    dim: isize,
    dims: Vec<Vec<usize>>,
}

impl Backward for SplitBackward {
    fn name(&self) -> &'static str {
        "split"
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let dy = dy.into_vec();
        let Some(like) = dy.iter().flatten().next().cloned() else { return Ok(()) };
        let parts = dy
            .into_iter()
            .zip(&self.dims)
            .map(|(dy, dims)| {
                dy.map_or_else(|| Tensor::zeros(like.device(), like.dtype(), dims), Ok)
            })
            .collect::<Result<Vec<_>>>()?;
        dx.accumulate(0, concat(&parts.iter().collect::<Vec<_>>(), self.dim)?)
    }
}
