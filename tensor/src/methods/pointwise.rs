//! Functions of elements: the rows of [the pointwise table](crate::ops::table), comparisons, choices and limits.

/// Implements the methods of this file for a type.
#[doc(hidden)]
#[macro_export]
#[allow(clippy::crate_in_macro_def)] // the invoking crate's operations
macro_rules! pointwise_methods {
    ($Array:ident) => {
        $crate::pointwise_methods! { @unary $Array
            neg Neg "-x";
            abs Abs "|x|, with derivative 0 at 0.";
            exp Exp "e^x";
            log Log "Natural logarithm.";
            sqrt Sqrt "Square root.";
            recip Recip "1 / x";
            square Square "x^2";
            sin Sin "Sine.";
            cos Cos "Cosine.";
            sign Sign "-1, 0 or 1; 0 for NaN. Its derivative is 0.";
            log1p Log1p "ln(1 + x), exact near 0.";
            expm1 Expm1 "e^x - 1, exact near 0.";
            tanh Tanh "Hyperbolic tangent.";
            sigmoid Sigmoid "1 / (1 + e^-x)";
            relu Relu "max(x, 0), with derivative 0 at 0.";
            silu Silu "x sigmoid(x)";
            gelu_tanh GeluTanh "GELU, tanh form.";
            gelu_erf GeluErf "GELU, exact form.";
        }
        $crate::pointwise_methods! { @parameter $Array
            powf Powf "x^p";
            add_scalar AddScalar "x + p";
            mul_scalar MulScalar "x p";
            div_scalar DivScalar "x / p";
            softcap Softcap "p tanh(x / p): linear near 0, within -p and p.";
            clamp_min ClampMin "max(x, p), with derivative 1 where x >= p; NaN stays.";
            clamp_max ClampMax "min(x, p), with derivative 1 where x <= p; NaN stays.";
        }
        $crate::pointwise_methods! { @binary $Array
            add Add "Sum, broadcast.";
            sub Sub "Difference, broadcast.";
            mul Mul "Product, broadcast.";
            div Div "Quotient, broadcast.";
            pow Pow "Power, broadcast; the base must be positive.";
            maximum Maximum "The larger, broadcast; equal elements share the gradient.";
            minimum Minimum "The smaller, broadcast; equal elements share the gradient.";
        }
        $crate::pointwise_methods! { @compare $Array
            eq Eq "A u8 tensor that is 1 where the elements are equal; broadcast.";
            ne Ne "A u8 tensor that is 1 where the elements differ; broadcast.";
            lt Lt "A u8 tensor that is 1 where the element is less than that of `rhs`; broadcast.";
            le Le "A u8 tensor that is 1 where the element is at most that of `rhs`; broadcast.";
            gt Gt "A u8 tensor that is 1 where the element is greater than that of `rhs`; broadcast.";
            ge Ge "A u8 tensor that is 1 where the element is at least that of `rhs`; broadcast.";
        }

        impl $Array {
            /// silu(gate) up, (.., F), of gate and up side by side, (.., 2F): Shazeer, arXiv 2002.05202.
            pub fn swiglu(&self) -> $crate::Result<$Array> {
                crate::ops::glu::swiglu(self)
            }

            /// gelu(gate) up, (.., F), of gate and up side by side, (.., 2F), with GELU in its tanh form.
            pub fn geglu(&self) -> $crate::Result<$Array> {
                crate::ops::glu::geglu(self)
            }

            /// Limits elements to `min..=max`. The derivative is 1 within the limits, bounds included, else 0.
            ///
            /// Errors if `min` exceeds `max`.
            ///
            /// ```
            /// use ferrotron_tensor::{Device, Tensor};
            /// let x = Tensor::from_slice(&Device::cpu(1)?, &[-2.0_f32, 0.5, 7.0], &[3])?;
            /// assert_eq!(x.clamp(-1.0, 1.0)?.to_vec::<f32>()?, [-1.0, 0.5, 1.0]);
            /// # Ok::<(), ferrotron_tensor::Error>(())
            /// ```
            pub fn clamp(&self, min: f64, max: f64) -> $crate::Result<$Array> {
                if min > max || min.is_nan() || max.is_nan() {
                    let message = format!("min {min} is not at most max {max}");
                    return Err($crate::Error::value("clamp", message));
                }
                self.clamp_min(min)?.clamp_max(max)
            }

            /// Elements of this array where the u8 `condition` is not 0, else of `other`; all three broadcast.
            pub fn where_cond(
                &self,
                condition: &$crate::Tensor,
                other: &$Array,
            ) -> $crate::Result<$Array> {
                crate::ops::pointwise::where_cond(condition, self, other)
            }

            /// `value` where the u8 `mask`, broadcast to this array, is not 0; else the elements of this array.
            ///
            /// ```
            /// use ferrotron_tensor::{Device, Tensor};
            /// let x = Tensor::from_slice(&Device::cpu(1)?, &[1.0_f32, 2.0, 3.0], &[3])?;
            /// let mask = x.gt(&Tensor::full(x.device(), x.dtype(), &[], 1.5)?)?;
            /// assert_eq!(x.masked_fill(&mask, 0.0)?.to_vec::<f32>()?, [1.0, 0.0, 0.0]);
            /// # Ok::<(), ferrotron_tensor::Error>(())
            /// ```
            pub fn masked_fill(&self, mask: &$crate::Tensor, value: f64) -> $crate::Result<$Array> {
                let mask = mask.broadcast_to(self.dims())?;
                let value = $crate::Tensor::full(self.device(), self.dtype(), &[], value)?;
                crate::ops::pointwise::where_cond(&mask, &<$Array>::from(value), self)
            }
        }
    };
    (@unary $Array:ident $($method:ident $row:ident $doc:literal;)*) => {
        impl $Array { $(
            #[doc = $doc]
            pub fn $method(&self) -> $crate::Result<$Array> {
                crate::ops::pointwise::unary($crate::ops::table::Unary::$row, 0.0, self)
            }
        )* }
    };
    (@parameter $Array:ident $($method:ident $row:ident $doc:literal;)*) => {
        impl $Array { $(
            #[doc = $doc]
            pub fn $method(&self, p: f64) -> $crate::Result<$Array> {
                crate::ops::pointwise::unary($crate::ops::table::Unary::$row, p, self)
            }
        )* }
    };
    (@binary $Array:ident $($method:ident $row:ident $doc:literal;)*) => {
        impl $Array { $(
            #[doc = $doc]
            pub fn $method(&self, rhs: &$Array) -> $crate::Result<$Array> {
                crate::ops::pointwise::binary($crate::ops::table::Binary::$row, self, rhs)
            }
        )* }
    };
    (@compare $Array:ident $($method:ident $row:ident $doc:literal;)*) => {
        impl $Array { $(
            #[doc = $doc]
            pub fn $method(&self, rhs: &$Array) -> $crate::Result<$crate::Tensor> {
                let comparison = $crate::ops::pointwise::Comparison::$row;
                $crate::ops::pointwise::compare(comparison, self.as_ref(), rhs.as_ref())
            }
        )* }
    };
}
