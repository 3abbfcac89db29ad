//! Tensors from nothing: ones, ranges, random numbers, one-hot rows, and constants like another array.

use crate::ops::random::{normal, uniform};
use crate::{DType, Device, Error, RandomKey, Result, ShardSpec, Tensor};

/// Implements the methods of this file for a type. The results are constants.
#[doc(hidden)]
#[macro_export]
macro_rules! creation_methods {
    ($Array:ident) => {
        impl $Array {
            /// Zeros with the dims, dtype and device of this array.
            pub fn zeros_like(&self) -> $crate::Result<$Array> {
                $crate::Tensor::zeros(self.device(), self.dtype(), self.dims()).map(<$Array>::from)
            }

            /// Ones with the dims, dtype and device of this array.
            pub fn ones_like(&self) -> $crate::Result<$Array> {
                self.full_like(1.0)
            }

            /// One value, with the dims, dtype and device of this array.
            pub fn full_like(&self, value: f64) -> $crate::Result<$Array> {
                $crate::Tensor::full(self.device(), self.dtype(), self.dims(), value)
                    .map(<$Array>::from)
            }

            /// Normal numbers, as of `Tensor::randn`, with the dims, dtype and device of this array.
            pub fn randn_like(&self, key: &$crate::RandomKey) -> $crate::Result<$Array> {
                $crate::Tensor::randn(self.device(), self.dtype(), self.dims(), key)
                    .map(<$Array>::from)
            }
        }
    };
}

impl Tensor {
    /// A tensor of ones.
    pub fn ones(device: &Device, dtype: DType, dims: &[usize]) -> Result<Tensor> {
        Self::full(device, dtype, dims, 1.0)
    }

    /// The numbers `start`, `start + step`, ... below `end`, or above it if `step` is negative. Each is computed in
    /// f64 as `start + i * step`.
    ///
    /// Errors if `step` is 0, or leads away from `end`.
    ///
    /// ```
    /// use ferrotron_tensor::{DType, Device, Tensor};
    /// let positions = Tensor::arange(&Device::cpu(1)?, DType::I64, 0.0, 4.0, 1.0)?;
    /// assert_eq!(positions.to_vec::<i64>()?, [0, 1, 2, 3]);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn arange(
        device: &Device,
        dtype: DType,
        start: f64,
        end: f64,
        step: f64,
    ) -> Result<Tensor> {
        let count = ((end - start) / step).ceil();
        if !(count >= 0.0 && count < (1_u64 << 53) as f64) {
            let message = format!("no steps of {step} lead from {start} to {end}");
            return Err(Error::value("arange", message));
        }
        let numbers = Self::numbers(device, dtype, count as usize, |i| start + i as f64 * step);
        numbers.unwrap_or_else(|| {
            let message =
                format!("no memory for the {count} steps of {step} from {start} to {end}");
            Err(Error::memory("arange", message))
        })
    }

    /// `count` numbers at equal distances from `start` to `end`, both included.
    ///
    /// ```
    /// use ferrotron_tensor::{DType, Device, Tensor};
    /// let x = Tensor::linspace(&Device::cpu(1)?, DType::F32, -1.0, 1.0, 5)?;
    /// assert_eq!(x.to_vec::<f32>()?, [-1.0, -0.5, 0.0, 0.5, 1.0]);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn linspace(
        device: &Device,
        dtype: DType,
        start: f64,
        end: f64,
        count: usize,
    ) -> Result<Tensor> {
        let step = (end - start) / count.saturating_sub(1).max(1) as f64;
        // From both ends, so that the last number is `end` itself.
        let numbers = Self::numbers(device, dtype, count, |i| {
            if 2 * i < count {
                start + i as f64 * step
            } else {
                end - (count - 1 - i) as f64 * step
            }
        });
        numbers.unwrap_or_else(|| {
            let message = format!("no memory for {count} numbers from {start} to {end}");
            Err(Error::memory("linspace", message))
        })
    }

    /// A vector of numbers that depend only on their position; `None` if the host has no memory for them.
    fn numbers(
        device: &Device,
        dtype: DType,
        count: usize,
        f: impl Fn(usize) -> f64,
    ) -> Option<Result<Tensor>> {
        let mut numbers: Vec<f64> = Vec::new();
        numbers.try_reserve_exact(count).ok()?;
        numbers.extend((0..count).map(f));
        Some(Self::constant(device, &numbers, &[count]).and_then(|numbers| numbers.cast(dtype)))
    }

    /// Normal numbers of mean 0 and variance 1. They are a function of `key` and the element's index: the same key gives
    /// the same tensor, so each use needs a key of its own.
    ///
    /// ```
    /// use ferrotron_tensor::{DType, Device, RandomKey, Tensor};
    /// let device = Device::cpu(1)?;
    /// let noise = |step| {
    ///     Tensor::randn(&device, DType::F32, &[2, 3], &RandomKey::new(1234, step, "noise"))
    /// };
    /// assert_eq!(noise(0)?.to_vec::<f32>()?, noise(0)?.to_vec::<f32>()?);
    /// assert_ne!(noise(0)?.to_vec::<f32>()?, noise(1)?.to_vec::<f32>()?);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn randn(device: &Device, dtype: DType, dims: &[usize], key: &RandomKey) -> Result<Tensor> {
        normal(device, dtype, &ShardSpec::unsharded(dims), key, 0.0, 1.0)
    }

    /// Uniform numbers on \[0, 1), as a function of `key` like those of [`Tensor::randn`].
    pub fn rand(device: &Device, dtype: DType, dims: &[usize], key: &RandomKey) -> Result<Tensor> {
        uniform(device, dtype, &ShardSpec::unsharded(dims), key, 0.0, 1.0)
    }

    /// Rows of zeros with a 1 at each of these indices: (..) to (.., classes), in i64.
    ///
    /// Errors if an index is not below `classes`.
    ///
    /// ```
    /// use ferrotron_tensor::{Device, Tensor};
    /// let experts = Tensor::from_slice(&Device::cpu(1)?, &[2_i64, 0], &[2])?;
    /// assert_eq!(experts.one_hot(3)?.to_vec::<i64>()?, [0, 0, 1, 1, 0, 0]);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn one_hot(&self, classes: usize) -> Result<Tensor> {
        crate::ops::index::one_hot(self, classes)
    }
}
