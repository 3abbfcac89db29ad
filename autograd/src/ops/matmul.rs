//! Gradient of the batched matrix product: dA = dC B^T, dB = A^T dC.

use ferrotron_tensor::ops::matmul::matmul;
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
            dx.accumulate(0, matmul(&dy, &rhs.value()?.transpose(-1, -2)?)?)?;
        }
        if let Some(lhs) = &self.lhs {
            dx.accumulate(1, matmul(&lhs.value()?.transpose(-1, -2)?, &dy)?)?;
        }
        Ok(())
    }
}

impl Var {
    /// The matrix product of the last two dims, (.., M, K) x (.., K, N) -> (.., M, N); leading dims are
    /// broadcast.
    pub fn matmul(&self, rhs: &Var) -> Result<Var> {
        let _span = forward_span("matmul");
        Var::record(&[self, rhs], matmul(self.value(), rhs.value())?, || MatmulBackward {
            lhs: rhs.needs_gradient().then(|| self.save()),
            rhs: self.needs_gradient().then(|| rhs.save()),
        })
    }
}
