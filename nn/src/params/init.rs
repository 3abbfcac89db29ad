//! Parameter initialisation. Each value is a function of (seed, global name, global index), so every sharding
//! initialises slices of the same global tensor.

use ferrotron_tensor::ops::random;
use ferrotron_tensor::ops::truncated_normal::truncated_normal;
use ferrotron_tensor::{Error, RandomKey, Result, ShardSpec, Tensor};

/// The initialisation of a parameter.
///
/// ```
/// use ferrotron_nn::{Bias, Fan, Init, Linear, Scope};
/// use ferrotron_tensor::{DType, Device};
/// let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1234);
/// // For a layer in front of a ReLU: a standard deviation of sqrt(2 / 512).
/// let fc = Linear::new(&scope.child("fc"), 512, 64, Bias::Yes, Init::KAIMING_NORMAL)?;
/// // PyTorch's default of `nn.Linear`: uniform on +-1 / sqrt(512).
/// let init = Init::KaimingUniform { fan: Fan::In, gain: (1.0_f64 / 3.0).sqrt() };
/// let fc = Linear::new(&scope.child("fc2"), 512, 64, Bias::Yes, init)?;
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// All zero: biases.
    Zeros,
    /// All one: norm weights.
    Ones,
    /// One value everywhere.
    Constant {
        /// The value.
        value: f64,
    },
    /// Normal with mean 0. GPT-2 uses a standard deviation of 0.02, divided by sqrt(2 layers) for projections whose
    /// output is added to the residual stream (arXiv 1909.08053, section 4).
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// Normal with mean 0, conditional on \[low, high\]: `torch.nn.init.trunc_normal_` with mean 0. Bounds are values,
    /// not multiples of `std`; PyTorch's defaults are -2 and 2.
    TruncatedNormal {
        /// Standard deviation before the truncation.
        std: f64,
        /// Smallest value.
        low: f64,
        /// Largest value.
        high: f64,
    },
    /// Uniform on +-sqrt(6 / (fan in + fan out)): Glorot and Bengio (2010), equation (16).
    XavierUniform,
    /// Normal with standard deviation sqrt(2 / (fan in + fan out)): Glorot and Bengio (2010).
    XavierNormal,
    /// Uniform on +-gain sqrt(3 / fan): He et al., arXiv 1502.01852.
    KaimingUniform {
        /// Inputs or outputs.
        fan: Fan,
        /// Factor for the activation after the layer (`torch.nn.init.calculate_gain`): sqrt(2) for ReLU, sqrt(2 / (1 +
        /// slope^2)) for a leaky one, 5/3 for tanh, 1 for none.
        gain: f64,
    },
    /// Normal with standard deviation gain / sqrt(fan): He et al., arXiv 1502.01852.
    KaimingNormal {
        /// Inputs or outputs.
        fan: Fan,
        /// Factor for the activation behind the layer, as in [`Init::KaimingUniform`].
        gain: f64,
    },
}

/// The number of connections by which Kaiming's initialisation scales. Of a weight (out, in, ..) these are the in or
/// out features times all further dims, of the global tensor. Packed tensors, such as queries, keys and values, count
/// as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fan {
    /// Inputs of each output: keeps the variance of activations in forward.
    In,
    /// Outputs of each input: keeps the variance of gradients in backward.
    Out,
}

impl Init {
    /// Kaiming's normal initialisation for ReLU: fan in, gain sqrt(2).
    pub const KAIMING_NORMAL: Init =
        Init::KaimingNormal { fan: Fan::In, gain: std::f64::consts::SQRT_2 };
    /// Kaiming's uniform initialisation for ReLU: fan in, gain sqrt(2).
    pub const KAIMING_UNIFORM: Init =
        Init::KaimingUniform { fan: Fan::In, gain: std::f64::consts::SQRT_2 };

    /// Fills `tensor`, the shard `place` of a global tensor, with values from the stream of `key`.
    ///
    /// Errors if the tensor has fewer than two dims and the initialisation depends on fans, and for parameters that
    /// make no distribution.
    pub fn fill(self, tensor: &mut Tensor, place: &ShardSpec, key: &RandomKey) -> Result<()> {
        let (device, dtype) = (tensor.device().clone(), tensor.dtype());
        let normal = |std: f64| random::normal(&device, dtype, place, key, 0.0, std);
        let uniform = |bound: f64| random::uniform(&device, dtype, place, key, -bound, bound);
        let fans = || fans(self, place.global_dims());
        let fan =
            |fan| fans().map(|(inputs, outputs)| if fan == Fan::In { inputs } else { outputs });
        let values = match self {
            Init::Zeros => return tensor.zero_fill(),
            Init::Ones => Tensor::full(&device, dtype, place.dims(), 1.0)?,
            Init::Constant { value } => Tensor::full(&device, dtype, place.dims(), value)?,
            Init::Normal { std } => normal(std)?,
            Init::TruncatedNormal { std, low, high } => {
                truncated_normal(&device, dtype, place, key, std, (low, high))?
            }
            Init::XavierNormal => normal(fans().map(|(a, b)| (2.0 / (a + b)).sqrt())?)?,
            Init::XavierUniform => uniform(fans().map(|(a, b)| (6.0 / (a + b)).sqrt())?)?,
            Init::KaimingNormal { fan: of, gain } => normal(gain / fan(of)?.sqrt())?,
            Init::KaimingUniform { fan: of, gain } => uniform(gain * (3.0 / fan(of)?).sqrt())?,
        };
        tensor.copy_from(&values)
    }
}

/// Fan in and fan out of a weight (out, in, ..).
fn fans(init: Init, dims: &[usize]) -> Result<(f64, f64)> {
    let [outputs, inputs, rest @ ..] = dims else {
        let message = format!("{init:?} needs a weight (out, in, ..), got {dims:?}");
        return Err(Error::shape("init", message));
    };
    let field = rest.iter().product::<usize>() as f64;
    Ok((*inputs as f64 * field, *outputs as f64 * field))
}
