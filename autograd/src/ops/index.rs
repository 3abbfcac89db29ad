//! Gradients of indexing: gather and scatter-add are each other's adjoints, and index-select's adds rows back. The
//! indices are saved.

use ferrotron_tensor::ops::index::{gather, index_add, index_select, scatter_add};
use ferrotron_tensor::{Result, Tensor};

use crate::{Backward, Cotangents, InputGrads, Var, forward_span};

struct GatherBackward {
    dims: Vec<usize>,
    dim: isize,
    index: Tensor,
}

impl Backward for GatherBackward {
    fn name(&self) -> &'static str {
        "gather"
    }

    fn saved(&self) -> Vec<Tensor> {
        vec![self.index.clone()]
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let dy = dy.single()?;
        let base = Tensor::zeros(dy.device(), dy.dtype(), &self.dims)?;
        dx.accumulate(0, scatter_add(base, self.dim, &self.index, &dy)?)
    }
}

struct ScatterAddBackward {
    dim: isize,
    index: Tensor,
}

impl Backward for ScatterAddBackward {
    fn name(&self) -> &'static str {
        "scatter_add"
    }

    fn saved(&self) -> Vec<Tensor> {
        vec![self.index.clone()]
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let dy = dy.single()?;
        if dx.needs_input_grad(1) {
            dx.accumulate(1, gather(&dy, self.dim, &self.index)?)?;
        }
        dx.accumulate(0, dy)
    }
}

struct IndexSelectBackward {
    size: usize,
    dim: isize,
    ids: Tensor,
}

impl Backward for IndexSelectBackward {
    fn name(&self) -> &'static str {
        "index_select"
    }

    fn saved(&self) -> Vec<Tensor> {
        vec![self.ids.clone()]
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        dx.accumulate(0, index_add(&dy.single()?, self.dim, &self.ids, self.size)?)
    }
}

impl Var {
    /// Elements at `index` along `dim`: `out[i][j] = x[index[i][j]][j]` for dim 0.
    pub fn gather(&self, dim: isize, index: &Tensor) -> Result<Var> {
        let _span = forward_span("gather");
        let value = gather(self.value(), dim, index)?;
        Var::record(&[self], value, || GatherBackward {
            dims: self.dims().to_vec(),
            dim,
            index: index.clone(),
        })
    }

    /// Adds the elements of `source` to this tensor at `index` along `dim`.
    pub fn scatter_add(&self, dim: isize, index: &Tensor, source: &Var) -> Result<Var> {
        let _span = forward_span("scatter_add");
        let value = scatter_add(self.value().clone(), dim, index, source.value())?;
        Var::record(&[self, source], value, || ScatterAddBackward { dim, index: index.clone() })
    }

    /// Slices at the positions `ids` of `dim`.
    pub fn index_select(&self, dim: isize, ids: &Tensor) -> Result<Var> {
        let _span = forward_span("index_select");
        let size = self.value().dim(dim)?;
        let value = index_select(self.value(), dim, ids)?;
        Var::record(&[self], value, || IndexSelectBackward { size, dim, ids: ids.clone() })
    }
}
