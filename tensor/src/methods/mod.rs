//! The one list of methods that [`Tensor`] and autograd's `Var` share, as macros.
//!
//! Each macro of this folder implements a part of the list for a type. A method either calls the function of its name
//! in the invoking crate's `ops`, which has kernels here and a gradient in autograd, or is composed of other methods of
//! the list; its gradient then follows from theirs.

mod creation;
pub mod dims;
pub mod einsum;
mod indexing;
mod operators;
mod pointwise;
mod products;
mod reductions;
mod views;

use crate::{DType, Result, Tensor};

/// Implements every shared method and operator for a type of the invoking crate.
#[doc(hidden)]
#[macro_export]
macro_rules! shared_methods {
    ($Array:ident) => {
        $crate::creation_methods!($Array);
        $crate::indexing_methods!($Array);
        $crate::operators!($Array);
        $crate::pointwise_methods!($Array);
        $crate::product_methods!($Array);
        $crate::reduction_methods!($Array);
        $crate::view_methods!($Array);
    };
}

shared_methods!(Tensor);

/// Rows plus `diagonal` (M, 1) and columns (1, N) of the matrices (.., M, N), for triangles.
#[doc(hidden)]
pub fn coordinates(op: &'static str, x: &Tensor, diagonal: isize) -> Result<(Tensor, Tensor)> {
    let rows = x.dims()[dims::resolve_dim(op, x.dims(), -2)?];
    let columns = x.dims()[x.rank() - 1];
    // Any diagonal beyond the matrix is like the next one, and all numbers stay exact.
    let diagonal = diagonal.clamp(-(rows as isize), columns as isize);
    let (first, last) = (diagonal as f64, diagonal as f64 + rows as f64);
    let row = Tensor::arange(x.device(), DType::I64, first, last, 1.0)?;
    let column = Tensor::arange(x.device(), DType::I64, 0.0, columns as f64, 1.0)?;
    Ok((row.reshape(&[rows, 1])?, column.reshape(&[1, columns])?))
}

impl AsRef<Tensor> for Tensor {
    fn as_ref(&self) -> &Tensor {
        self
    }
}
