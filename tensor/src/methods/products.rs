//! Matrix products, and casts.

/// Implements the methods of this file for a type.
#[doc(hidden)]
#[macro_export]
#[allow(clippy::crate_in_macro_def)] // the invoking crate's operations
macro_rules! product_methods {
    ($Array:ident) => {
        impl $Array {
            /// The matrix product of the last two dims, (.., M, K) x (.., K, N) -> (.., M, N); leading dims are
            /// broadcast. A right operand (K, N) makes one product of all rows.
            ///
            /// Errors, with both shapes, if the inner dims differ.
            ///
            /// ```
            /// use ferrotron_tensor::{Device, Tensor};
            /// let a = Tensor::from_slice(&Device::cpu(1)?, &[1.0_f32, 2.0, 3.0, 4.0], &[2, 2])?;
            /// assert_eq!(a.matmul(&a.transpose(0, 1)?)?.to_vec::<f32>()?, [5.0, 11.0, 11.0, 25.0]);
            /// # Ok::<(), ferrotron_tensor::Error>(())
            /// ```
            pub fn matmul(&self, rhs: &$Array) -> $crate::Result<$Array> {
                crate::ops::matmul::matmul(self, rhs)
            }

            /// Casts to another dtype; returns the same elements if they already have it. Only between floats is there
            /// a gradient, which is cast back.
            pub fn cast(&self, dtype: $crate::DType) -> $crate::Result<$Array> {
                crate::ops::cast::cast(self, dtype)
            }

            /// The sum of products that `equation` names, as matrix products from left to right: "bij,bjk->bik" is the
            /// batched matrix product. Without an arrow the result has the labels that occur once, in alphabetical
            /// order.
            ///
            /// Errors, naming the label, if the equation does not fit the operands.
            ///
            /// ```
            /// use ferrotron_tensor::{Device, Tensor};
            /// let device = Device::cpu(1)?;
            /// let a = Tensor::from_slice(&device, &[1.0_f32, 2.0, 3.0, 4.0], &[2, 2])?;
            /// assert_eq!(Tensor::einsum("ij,kj->ik", &[&a, &a])?.to_vec::<f32>()?, [5.0, 11.0, 11.0, 25.0]);
            /// # Ok::<(), ferrotron_tensor::Error>(())
            /// ```
            pub fn einsum(equation: &str, operands: &[&$Array]) -> $crate::Result<$Array> {
                use $crate::methods::einsum::{Product, order, others, parse};
                use $crate::ops::reduce::KeepDims;
                let all: Vec<&[usize]> = operands.iter().map(|x| x.dims()).collect();
                let (labels, output) = parse(equation, &all)?;
                let mut result: Option<($Array, Vec<char>)> = None;
                for (i, (x, own)) in operands.iter().zip(&labels).enumerate() {
                    let wanted = [&output[..], &labels[i + 1..].concat()].concat();
                    // What neither the other operand nor a later one has is summed first.
                    let summed = |x: &$Array, own: &[char], other: &[char]| {
                        let wanted = [&wanted[..], other].concat();
                        let kept: Vec<char> =
                            own.iter().copied().filter(|label| wanted.contains(label)).collect();
                        let dims = others(own, &wanted);
                        let x =
                            if dims.is_empty() { x.clone() } else { x.sum(&dims, KeepDims::Drop)? };
                        Ok::<_, $crate::Error>((x, kept))
                    };
                    result = Some(match result {
                        None => summed(x, own, &[])?,
                        Some((y, had)) => {
                            let (y, had) = summed(&y, &had, own)?;
                            let (x, own) = summed(x, own, &had)?;
                            let plan = Product::new((&had, y.dims()), (&own, x.dims()), &wanted);
                            let y = y.permute(&order(&had, &plan.lhs))?.reshape(&plan.lhs_dims)?;
                            let x = x.permute(&order(&own, &plan.rhs))?.reshape(&plan.rhs_dims)?;
                            let y = if plan.elementwise { y.mul(&x)? } else { y.matmul(&x)? };
                            (y.reshape(&plan.dims)?, plan.labels)
                        }
                    });
                }
                let message = "needs one operand or more, got none";
                let (y, had) = result.ok_or_else(|| $crate::Error::shape("einsum", message))?;
                y.permute(&order(&had, &output))
            }
        }
    };
}
