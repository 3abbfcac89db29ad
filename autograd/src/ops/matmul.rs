//! Gradient of the batched matrix product: dA = dC B^T, dB = A^T dC.

use ferrotron_tensor::ops::matmul as kernels;
use ferrotron_tensor::{Result, Tensor};

use crate::{Backward, Cotangents, InputGrads, Saved, Var, forward_span};

struct MatmulBackward {
    lhs: Option<Saved>,
    rhs: Option<Saved>,
}

impl Backward for MatmulBackward {
    fn name(&self) -> &'static str {
        "matmul"
    }

    fn saved(&self) -> Vec<Tensor> {
        self.lhs.iter().chain(&self.rhs).filter_map(Saved::resident_tensor).collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let dy = dy.single()?;
        if let Some(rhs) = &self.rhs {
            dx.accumulate(0, kernels::matmul(&dy, &rhs.value()?.transpose(-1, -2)?)?)?;
        }
        if let Some(lhs) = &self.lhs {
            dx.accumulate(1, kernels::matmul(&lhs.value()?.transpose(-1, -2)?, &dy)?)?;
        }
        Ok(())
    }
}

/// The matrix product of the last two dims; leading dims are broadcast.
pub(crate) fn matmul(lhs: &Var, rhs: &Var) -> Result<Var> {
    // One product of all rows, whose weight gradient is one product too.
    if let (&[ref outer @ .., rows, inner], &[_, columns]) = (lhs.dims(), rhs.dims())
        && !outer.is_empty()
        && rhs.value().dim(0)? == inner
    {
        let dims = [outer, &[rows, columns]].concat();
        let all = outer.iter().product::<usize>() * rows;
        return matmul(&lhs.reshape(&[all, inner])?, rhs)?.reshape(&dims);
    }
    let _span = forward_span("matmul");
    Var::record(&[lhs, rhs], kernels::matmul(lhs.value(), rhs.value())?, || MatmulBackward {
        lhs: rhs.needs_gradient().then(|| lhs.save()),
        rhs: lhs.needs_gradient().then(|| rhs.save()),
    })
}
