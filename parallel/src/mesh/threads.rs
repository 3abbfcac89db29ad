//! Runs a function once for each rank of a layout, on threads of this process.

use ferrotron_tensor::Result;

use super::{Mesh, ParallelDims};
use crate::collective::{WorldConfig, run_threads};
use crate::tensor_parallel::SequenceParallel;

impl Mesh {
    /// Runs `f` once for each rank of `layout`, each on a thread of its own and without sequence parallelism. Returns
    /// the results in the order of the ranks. For tests and examples.
    ///
    /// ```
    /// use ferrotron_nn::Axis;
    /// use ferrotron_parallel::mesh::{Mesh, ParallelDims};
    /// let layout = ParallelDims::new(4, 1, 1, 2)?; // pp 2, and what remains is dp 2
    /// let stages = Mesh::run_threads(layout, |mesh| Ok(mesh.axis(Axis::Pipeline).rank()))?;
    /// assert_eq!(stages, [0, 0, 1, 1]);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    ///
    /// # Errors
    /// The first error of a rank. A rank that returns an error or panics ends the calls of all others.
    pub fn run_threads<T: Send>(
        layout: ParallelDims,
        f: impl Fn(&Mesh) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let ranks = run_threads(layout.world(), &WorldConfig::default(), |world| {
            f(&Mesh::new(&world, layout, SequenceParallel::Off)?)
        });
        ranks.into_iter().collect()
    }
}
