//! The end of sharding: of weights that were gathered for a while, and of all parameters at the end of an owner.

use ferrotron_tensor::Result;

use super::DataParallel;

impl DataParallel {
    /// Frees weights that were gathered, so that
    /// [`ParamAndGradBucket::write_weight`](ferrotron_nn::ParamAndGradBucket::write_weight) can change the shards that
    /// they came from.
    pub fn reshard_weights(&self) -> Result<()> {
        self.shared.reshard_weights()
    }

    /// Gives each parameter back, with memory of its own and without a gradient. Another `DataParallel` may then take it,
    /// with other parameters [frozen](ferrotron_nn::Module::freeze).
    ///
    /// With sharded weights ([`Sharding::Weights`](ferrotron_nn::Sharding::Weights)) all ranks call this, and gather them;
    /// dropping would lose them. With less sharding dropping suffices.
    ///
    /// ```
    /// use ferrotron_nn::{Bias, Init, Linear, Module, Sharding};
    /// use ferrotron_parallel::data_parallel::{DataParallel, DataParallelConfig};
    /// use ferrotron_parallel::mesh::{Mesh, ParallelDims};
    /// use ferrotron_tensor::{DType, Device};
    ///
    /// let counts = Mesh::run_threads(ParallelDims::new(2, 1, 1, 1)?, |mesh| {
    ///     let layer = Linear::new(&mesh.scope(&Device::cpu(1)?, DType::F32, 1), 3, 2, Bias::Yes, Init::Ones)?;
    ///     let config = DataParallelConfig { sharding: Sharding::Weights, ..DataParallelConfig::default() };
    ///     layer.freeze(|name| name == "weight")?;
    ///     let parallel = DataParallel::new(&[&layer], mesh, &config)?;
    ///     let before = parallel.buffers().numel();
    ///     parallel.unshard()?;
    ///     layer.weight().set_trainable(true)?;
    ///     Ok((before, DataParallel::new(&[&layer], mesh, &config)?.buffers().numel()))
    /// })?;
    /// assert_eq!(counts, [(2, 8), (2, 8)]);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn unshard(self) -> Result<()> {
        self.buffers().params().try_for_each(|param| param.leaf().unbind())
    }
}
