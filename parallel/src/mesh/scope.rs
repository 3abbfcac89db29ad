//! Scopes of models on a mesh: parameters made in them say how their gradients are reduced.

use ferrotron_nn::{Axis, Scope};
use ferrotron_tensor::{DType, Device};

use super::Mesh;

impl Mesh {
    /// The root scope of a model on this mesh: [`Scope::new`], with the facts of the residual stream
    /// ([`TensorParallel::residual_scope`](crate::tensor_parallel::TensorParallel::residual_scope)). With sequence parallelism the gradients of norms, of biases and of every
    /// other parameter that ranks along the tensor axis replicate are then summed over that axis, in plain layers too.
    /// A parameter behind a gather of all positions needs [`Scope::with_whole_gradients`].
    ///
    /// ```
    /// use ferrotron_nn::{Axis, RmsNorm, Module};
    /// use ferrotron_parallel::mesh::{Mesh, ParallelDims};
    /// use ferrotron_parallel::tensor_parallel::SequenceParallel;
    /// use ferrotron_tensor::{DType, Device};
    /// let mesh = Mesh::fake(ParallelDims::new(2, 2, 1, 1)?, 0, SequenceParallel::On)?;
    /// let scope = mesh.scope(&Device::cpu(1)?, DType::F32, 1234);
    /// let norm = RmsNorm::new(&scope.child("norm"), 32, 1e-5);
    /// assert!(norm.params()[0].grad_partial().contains(Axis::Tensor));
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn scope(&self, device: &Device, dtype: DType, seed: u64) -> Scope {
        self.tensor_parallel().residual_scope(&Scope::new(device, dtype, seed))
    }

    /// The scope of a parameter that the first and the last pipeline stage both hold, such as tied embeddings. Their
    /// gradients are summed, and it counts once. With one stage, `scope`.
    pub fn tied_scope(&self, scope: &Scope) -> Scope {
        match self.layout.size(Axis::Pipeline) {
            1 => scope.clone(),
            _ => scope
                .clone()
                .replicated_along(Axis::Pipeline)
                .with_partial_gradients(Axis::Pipeline),
        }
    }
}
