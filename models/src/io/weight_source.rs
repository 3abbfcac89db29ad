//! Weights by the names of a model's parameters, wherever they are stored.

use ferrotron_tensor::{Result, ShardSpec, Tensor};

/// Stored weights.
pub(crate) trait WeightSource {
    /// Writes the shard `place` of the parameter `name` to `target`, a tensor of its local dims, in the target's type. What
    /// begins [fresh](WeightSource::fresh) stays as it is.
    ///
    /// # Errors
    /// A tensor that is missing or of another shape; files that cannot be read.
    fn copy(&mut self, name: &str, place: &ShardSpec, target: &mut Tensor) -> Result<()>;

    /// The parameters that are not stored and keep their initial values.
    fn fresh(&self) -> Vec<String>;
}
