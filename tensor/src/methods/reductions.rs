//! Reductions over dims: sums, means, extremes, variances and norms, and the softmax.

/// Implements the methods of this file for a type.
#[doc(hidden)]
#[macro_export]
#[allow(clippy::crate_in_macro_def)] // the invoking crate's operations
macro_rules! reduction_methods {
    ($Array:ident) => {
        impl $Array {
            /// Sum over `dims`.
            pub fn sum(
                &self,
                dims: &[isize],
                keep: $crate::ops::reduce::KeepDims,
            ) -> $crate::Result<$Array> {
                crate::ops::reduce::sum(self, dims, keep)
            }

            /// Mean over `dims`.
            pub fn mean(
                &self,
                dims: &[isize],
                keep: $crate::ops::reduce::KeepDims,
            ) -> $crate::Result<$Array> {
                crate::ops::reduce::mean(self, dims, keep)
            }

            /// Sum of all elements, a scalar.
            pub fn sum_all(&self) -> $crate::Result<$Array> {
                crate::ops::reduce::sum_all(self)
            }

            /// Mean of all elements, a scalar.
            pub fn mean_all(&self) -> $crate::Result<$Array> {
                self.sum_all()?.div_scalar(self.as_ref().numel() as f64)
            }

            /// Maximum over `dims`; NaN if there is one. Equal elements share the gradient, as in PyTorch.
            ///
            /// Errors if the reduced dims are empty.
            pub fn amax(
                &self,
                dims: &[isize],
                keep: $crate::ops::reduce::KeepDims,
            ) -> $crate::Result<$Array> {
                crate::ops::reduce::amax(self, dims, keep)
            }

            /// Minimum over `dims`; NaN if there is one. Equal elements share the gradient, as in PyTorch.
            ///
            /// Errors if the reduced dims are empty.
            pub fn amin(
                &self,
                dims: &[isize],
                keep: $crate::ops::reduce::KeepDims,
            ) -> $crate::Result<$Array> {
                self.neg()?.amax(dims, keep)?.neg()
            }

            /// Maximum along `dim` and its index (i64): the first maximum, or the first NaN if there is one. The
            /// gradient goes to that element.
            ///
            /// ```
            /// use ferrotron_tensor::{Device, Tensor, ops::reduce::KeepDims};
            /// let x = Tensor::from_slice(&Device::cpu(1)?, &[1.0_f32, 3.0, 2.0], &[3])?;
            /// let (value, index) = x.max(0, KeepDims::Drop)?;
            /// assert_eq!((value.item()?, index.to_vec::<i64>()?[0]), (3.0, 1));
            /// # Ok::<(), ferrotron_tensor::Error>(())
            /// ```
            pub fn max(
                &self,
                dim: isize,
                keep: $crate::ops::reduce::KeepDims,
            ) -> $crate::Result<($Array, $crate::Tensor)> {
                self.chosen(dim, self.argmax(dim, $crate::ops::reduce::KeepDims::Keep)?, keep)
            }

            /// Minimum along `dim` and its index (i64): the first minimum, or the first NaN if there is one. The
            /// gradient goes to that element.
            pub fn min(
                &self,
                dim: isize,
                keep: $crate::ops::reduce::KeepDims,
            ) -> $crate::Result<($Array, $crate::Tensor)> {
                self.chosen(dim, self.argmin(dim, $crate::ops::reduce::KeepDims::Keep)?, keep)
            }

            /// The elements at `index`, of size 1 along `dim`, and the index, as `keep` says.
            fn chosen(
                &self,
                dim: isize,
                index: $crate::Tensor,
                keep: $crate::ops::reduce::KeepDims,
            ) -> $crate::Result<($Array, $crate::Tensor)> {
                let value = self.gather(dim, &index)?;
                match keep {
                    $crate::ops::reduce::KeepDims::Keep => Ok((value, index)),
                    $crate::ops::reduce::KeepDims::Drop => {
                        Ok((value.squeeze(dim)?, index.squeeze(dim)?))
                    }
                }
            }

            /// Index (i64) of the first maximum along `dim`, or of the first NaN if there is one.
            ///
            /// Errors if the dim is empty.
            pub fn argmax(
                &self,
                dim: isize,
                keep: $crate::ops::reduce::KeepDims,
            ) -> $crate::Result<$crate::Tensor> {
                $crate::ops::reduce::argmax(self.as_ref(), dim, keep)
            }

            /// Index (i64) of the first minimum along `dim`, or of the first NaN if there is one.
            ///
            /// Errors if the dim is empty.
            pub fn argmin(
                &self,
                dim: isize,
                keep: $crate::ops::reduce::KeepDims,
            ) -> $crate::Result<$crate::Tensor> {
                $crate::ops::reduce::argmax(&self.as_ref().neg()?, dim, keep)
            }

            /// log(sum(exp(x))) over `dims`; its gradient is the softmax.
            pub fn log_sum_exp(
                &self,
                dims: &[isize],
                keep: $crate::ops::reduce::KeepDims,
            ) -> $crate::Result<$Array> {
                crate::ops::reduce::log_sum_exp(self, dims, keep)
            }

            /// Unbiased variance over `dims`: the squared differences from the mean, divided by n - 1.
            ///
            /// ```
            /// use ferrotron_tensor::{Device, Tensor, ops::reduce::KeepDims};
            /// let x = Tensor::from_slice(&Device::cpu(1)?, &[1.0_f32, 2.0, 3.0, 4.0, 5.0], &[5])?;
            /// assert_eq!(x.var(&[0], KeepDims::Drop)?.item()?, 2.5);
            /// assert_eq!(x.var_with_correction(&[0], 0, KeepDims::Drop)?.item()?, 2.0);
            /// # Ok::<(), ferrotron_tensor::Error>(())
            /// ```
            pub fn var(
                &self,
                dims: &[isize],
                keep: $crate::ops::reduce::KeepDims,
            ) -> $crate::Result<$Array> {
                self.var_with_correction(dims, 1, keep)
            }

            /// Variance over `dims`, with the divisor n - `correction`: 0 for that of a population. As in PyTorch, a
            /// divisor of 0 gives NaN or infinity.
            pub fn var_with_correction(
                &self,
                dims: &[isize],
                correction: usize,
                keep: $crate::ops::reduce::KeepDims,
            ) -> $crate::Result<$Array> {
                self.wide_var("var", dims, correction, keep)?.cast(self.dtype())
            }

            /// Square root of the unbiased variance over `dims`; its gradient is 0 where it is 0, as in PyTorch.
            pub fn std(
                &self,
                dims: &[isize],
                keep: $crate::ops::reduce::KeepDims,
            ) -> $crate::Result<$Array> {
                self.wide_var("std", dims, 1, keep)?.root()?.cast(self.dtype())
            }

            /// The variance in the accumulator dtype.
            fn wide_var(
                &self,
                op: &'static str,
                dims: &[isize],
                correction: usize,
                keep: $crate::ops::reduce::KeepDims,
            ) -> $crate::Result<$Array> {
                let sizes = dims.iter().map(|&dim| {
                    Ok(self.dims()[$crate::methods::dims::resolve_dim(op, self.dims(), dim)?])
                });
                let count: usize = sizes.product::<$crate::Result<usize>>()?;
                let x = self.cast(self.dtype().accumulator())?;
                let centred = x.sub(&x.mean(dims, $crate::ops::reduce::KeepDims::Keep)?)?;
                let divisor = count.saturating_sub(correction) as f64;
                centred.square()?.sum(dims, keep)?.mul_scalar(1.0 / divisor)
            }

            /// The norm of order `p` over `dims`: (sum |x|^p)^(1/p), the largest |x| if `p` is infinite. The gradient is 0
            /// where the element or the norm is 0, as in PyTorch.
            ///
            /// Errors unless `p` is positive.
            ///
            /// ```
            /// use ferrotron_tensor::{Device, Tensor, ops::reduce::KeepDims};
            /// let x = Tensor::from_slice(&Device::cpu(1)?, &[3.0_f32, -4.0], &[2])?;
            /// assert_eq!(x.norm(2.0, &[0], KeepDims::Drop)?.item()?, 5.0);
            /// assert_eq!(x.norm(f64::INFINITY, &[0], KeepDims::Drop)?.item()?, 4.0);
            /// # Ok::<(), ferrotron_tensor::Error>(())
            /// ```
            pub fn norm(
                &self,
                p: f64,
                dims: &[isize],
                keep: $crate::ops::reduce::KeepDims,
            ) -> $crate::Result<$Array> {
                if p <= 0.0 || p.is_nan() {
                    let message = format!("needs a positive order, got {p}");
                    return Err($crate::Error::value("norm", message));
                }
                let x = self.cast(self.dtype().accumulator())?;
                let norm = if p == f64::INFINITY {
                    x.abs()?.amax(dims, keep)?
                } else if p == 1.0 {
                    x.abs()?.sum(dims, keep)?
                } else if p == 2.0 {
                    x.square()?.sum(dims, keep)?.root()?
                } else {
                    x.abs()?.power(p)?.sum(dims, keep)?.power(1.0 / p)?
                };
                norm.cast(self.dtype())
            }

            /// x^p of numbers that are not negative, with value and derivative 0 at 0.
            fn power(&self, p: f64) -> $crate::Result<$Array> {
                let zero = $crate::Tensor::zeros(self.device(), self.dtype(), &[])?;
                let zeros = self.as_ref().eq(&zero)?;
                self.masked_fill(&zeros, 1.0)?.powf(p)?.masked_fill(&zeros, 0.0)
            }

            /// The square root, with derivative 0 at 0.
            fn root(&self) -> $crate::Result<$Array> {
                let zero = $crate::Tensor::zeros(self.device(), self.dtype(), &[])?;
                let zeros = self.as_ref().eq(&zero)?;
                self.masked_fill(&zeros, 1.0)?.sqrt()?.masked_fill(&zeros, 0.0)
            }

            /// e^x / sum e^x along `dim`.
            pub fn softmax(&self, dim: isize) -> $crate::Result<$Array> {
                crate::ops::softmax::softmax(self, dim)
            }

            /// x - log(sum e^x) along `dim`.
            pub fn log_softmax(&self, dim: isize) -> $crate::Result<$Array> {
                crate::ops::softmax::log_softmax(self, dim)
            }
        }
    };
}
