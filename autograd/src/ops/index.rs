//! Gradients of indexing: gather and scatter-add are each other's adjoints, as are index-select and index-add. The
//! indices are saved.

use ferrotron_tensor::ops::index as kernels;
use ferrotron_tensor::{DType, Result, Tensor};

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
        dx.accumulate(0, kernels::scatter_add(base, self.dim, &self.index, &dy)?)
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
            dx.accumulate(1, kernels::gather(&dy, self.dim, &self.index)?)?;
        }
        dx.accumulate(0, dy)
    }
}

struct ScatterBackward {
    dim: isize,
    index: Tensor,
}

impl Backward for ScatterBackward {
    fn name(&self) -> &'static str {
        "scatter"
    }

    fn saved(&self) -> Vec<Tensor> {
        vec![self.index.clone()]
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let (dy, dim, index) = (dy.single()?, self.dim, &self.index);
        if dx.needs_input_grad(1) {
            // An element counts where reading back the numbers that were scattered gives its own.
            let numbers = Tensor::arange(dy.device(), DType::F64, 0.0, index.numel() as f64, 1.0)?;
            let numbers = numbers.reshape(index.dims())?;
            let places = Tensor::zeros(dy.device(), DType::F64, dy.dims())?;
            let last = kernels::scatter(places, dim, index, &numbers)?.gather(dim, index)?;
            let written = kernels::gather(&dy, dim, index)?;
            dx.accumulate(1, written.masked_fill(&last.ne(&numbers)?, 0.0)?)?;
        }
        if dx.needs_input_grad(0) {
            let zeros = Tensor::zeros(dy.device(), dy.dtype(), index.dims())?;
            dx.accumulate(0, kernels::scatter(dy, dim, index, &zeros)?)?;
        }
        Ok(())
    }
}

struct IndexSelectBackward {
    dims: Vec<usize>,
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
        let dy = dy.single()?;
        let base = Tensor::zeros(dy.device(), dy.dtype(), &self.dims)?;
        dx.accumulate(0, kernels::index_add(base, self.dim, &self.ids, &dy)?)
    }
}

struct IndexAddBackward {
    dim: isize,
    ids: Tensor,
}

impl Backward for IndexAddBackward {
    fn name(&self) -> &'static str {
        "index_add"
    }

    fn saved(&self) -> Vec<Tensor> {
        vec![self.ids.clone()]
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let dy = dy.single()?;
        if dx.needs_input_grad(1) {
            dx.accumulate(1, kernels::index_select(&dy, self.dim, &self.ids)?)?;
        }
        dx.accumulate(0, dy)
    }
}

/// Elements at `index` along `dim`.
pub(crate) fn gather(x: &Var, dim: isize, index: &Tensor) -> Result<Var> {
    let _span = forward_span("gather");
    let value = kernels::gather(x.value(), dim, index)?;
    Var::record(&[x], value, || GatherBackward {
        dims: x.dims().to_vec(),
        dim,
        index: index.clone(),
    })
}

/// Adds the elements of `source` to `base` at `index` along `dim`.
pub(crate) fn scatter_add(base: Var, dim: isize, index: &Tensor, source: &Var) -> Result<Var> {
    let _span = forward_span("scatter_add");
    let value = kernels::scatter_add(base.value().clone(), dim, index, source.value())?;
    Var::record(&[&base, source], value, || ScatterAddBackward { dim, index: index.clone() })
}

/// Replaces the elements of `base` at `index` along `dim` by those of `source`.
pub(crate) fn scatter(base: Var, dim: isize, index: &Tensor, source: &Var) -> Result<Var> {
    let _span = forward_span("scatter");
    let value = kernels::scatter(base.value().clone(), dim, index, source.value())?;
    Var::record(&[&base, source], value, || ScatterBackward { dim, index: index.clone() })
}

/// Slices at the positions `ids` of `dim`.
pub(crate) fn index_select(x: &Var, dim: isize, ids: &Tensor) -> Result<Var> {
    let _span = forward_span("index_select");
    let value = kernels::index_select(x.value(), dim, ids)?;
    Var::record(&[x], value, || IndexSelectBackward {
        dims: x.dims().to_vec(),
        dim,
        ids: ids.clone(),
    })
}

/// Adds the slices of `source` to `base` at the positions `ids` of `dim`.
pub(crate) fn index_add(base: Var, dim: isize, ids: &Tensor, source: &Var) -> Result<Var> {
    let _span = forward_span("index_add");
    let value = kernels::index_add(base.value().clone(), dim, ids, source.value())?;
    Var::record(&[&base, source], value, || IndexAddBackward { dim, ids: ids.clone() })
}
