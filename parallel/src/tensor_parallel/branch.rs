//! The branch of a residual connection: what attention or MLP adds to the residual stream.

use ferrotron_autograd::Var;
use ferrotron_tensor::Result;

/// The result of a layer that may have added the residual itself.
///
/// A GPU does so in the pass of the layer's last product, in 16 bits. The layer returns its own result where no residual
/// was given, on other devices, in wider types, and on several tensor-parallel ranks, whose products are parts of a sum.
/// A caller gives no residual if a norm, dropout or the end of a recomputed region lies between product and sum.
#[derive(Debug, Clone)]
pub enum Branch {
    /// The layer's own result.
    Term(Var),
    /// The residual plus the layer's result.
    Sum(Var),
}

impl Branch {
    /// Applies `f`, such as a norm, to a layer's own result.
    pub fn map(self, f: impl FnOnce(Var) -> Result<Var>) -> Result<Branch> {
        match self {
            Branch::Term(y) => f(y).map(Branch::Term),
            Branch::Sum(_) => Ok(self),
        }
    }

    /// The value: without a residual, the layer's own result.
    pub fn into_var(self) -> Var {
        match self {
            Branch::Term(y) | Branch::Sum(y) => y,
        }
    }

    /// The residual that the layer was given plus its result, to which `f` is applied first, if it is a [`Branch::Term`].
    pub fn onto(&self, residual: &Var, f: impl FnOnce(&Var) -> Result<Var>) -> Result<Var> {
        match self {
            Branch::Term(y) => residual.add(&f(y)?),
            Branch::Sum(sum) => Ok(sum.clone()),
        }
    }
}
