//! Gradients of indexing: gather and scatter-add are each other's, index-select adds rows back.

use ferrotron_tensor::ops::index::{gather, index_add, index_select, scatter_add};
use ferrotron_tensor::{Result, Tensor};

use crate::{Grads, Var};

impl Var {
    /// Elements at `index` along `dim`: `out[i][j] = x[index[i][j]][j]` for dim 0.
    pub fn gather(&self, dim: isize, index: &Tensor) -> Result<Var> {
        let dims = self.dims().to_vec();
        Var::record(&[self], gather(self.value(), dim, index)?, || {
            let index = index.clone();
            move |dy: Tensor, dx: &mut Grads| {
                let base = Tensor::zeros(dy.device(), dy.dtype(), &dims)?;
                dx.give(0, scatter_add(base, dim, &index, &dy)?)
            }
        })
    }

    /// This tensor with the elements of `source` added at `index` along `dim`.
    pub fn scatter_add(&self, dim: isize, index: &Tensor, source: &Var) -> Result<Var> {
        let value = scatter_add(self.value().clone(), dim, index, source.value())?;
        Var::record(&[self, source], value, || {
            let index = index.clone();
            move |dy: Tensor, dx: &mut Grads| {
                if dx.needs(1) {
                    dx.give(1, gather(&dy, dim, &index)?)?;
                }
                dx.give(0, dy)
            }
        })
    }

    /// Slices at the positions `ids` of `dim`.
    pub fn index_select(&self, dim: isize, ids: &Tensor) -> Result<Var> {
        let size = self.value().dim(dim)?;
        Var::record(&[self], index_select(self.value(), dim, ids)?, || {
            let ids = ids.clone();
            move |dy: Tensor, dx: &mut Grads| dx.give(0, index_add(&dy, dim, &ids, size)?)
        })
    }
}
