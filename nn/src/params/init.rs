//! Parameter initialisation. Each value is a function of (seed, global name, global index), so every sharding
//! initialises slices of the same global tensor.

use ferrotron_tensor::ops::random;
use ferrotron_tensor::{RandomKey, Result, ShardSpec, Tensor};

/// The initialisation of a parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// All zero: biases.
    Zeros,
    /// All one: norm weights.
    Ones,
    /// Normal with mean 0. GPT-2 uses a standard deviation of 0.02, divided by sqrt(2 layers) for projections whose
    /// output is added to the residual stream (arXiv 1909.08053, section 4).
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// Uniform on +-sqrt(6 / (fan in + fan out)): Glorot and Bengio (2010), equation (16).
    XavierUniform,
    /// Normal with standard deviation sqrt(2 / (fan in + fan out)): Glorot and Bengio (2010).
    XavierNormal,
}

impl Init {
    /// Fills `tensor`, the shard `place` of a global tensor, with values from the stream of `key`.
    pub fn fill(self, tensor: &mut Tensor, place: &ShardSpec, key: &RandomKey) -> Result<()> {
        let (device, dtype) = (tensor.device().clone(), tensor.dtype());
        let fans: usize = place.global_dims().iter().sum(); // (out, in) for a matrix
        let values = match self {
            Init::Zeros => return tensor.zero_fill(),
            Init::Ones => Tensor::full(&device, dtype, place.dims(), 1.0)?,
            Init::Normal { std } => random::normal(&device, dtype, place, key, 0.0, std)?,
            Init::XavierNormal => {
                random::normal(&device, dtype, place, key, 0.0, (2.0 / fans as f64).sqrt())?
            }
            Init::XavierUniform => {
                let bound = (6.0 / fans as f64).sqrt();
                random::uniform(&device, dtype, place, key, -bound, bound)?
            }
        };
        tensor.copy_from(&values)
    }
}
