//! Operations on variables: the gradient of each operation of `ferrotron_tensor::ops`, in a file of the same name.
//! Each saves exactly the fields of its struct.

pub mod attach_loss;
pub mod attention;
pub mod cast;
pub mod concat;
pub mod cross_entropy;
pub mod dropout;
pub mod embedding;
pub mod glu;
pub mod index;
pub mod linear;
pub mod linear_cross_entropy;
pub mod matmul;
pub mod norm;
pub mod pointwise;
pub mod reduce;
pub mod rotary;
pub mod softmax;
pub mod view;

use crate::Var;

// The methods that `Tensor` has too.
ferrotron_tensor::shared_methods!(Var);
