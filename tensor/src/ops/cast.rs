//! Casts between any two dtypes.
//!
//! y = x in the target dtype. Floats round to nearest even; conversions to and from 16 bits go through f32 (as in
//! PyTorch). Float to integer truncates towards zero and saturates (NaN becomes 0). Integer to integer wraps like
//! Rust's `as`.
//! Gradient, float to float: dx = dy cast back; needs only the dtype.

use half::{bf16, f16};
use std::borrow::Cow;

use super::rows::{CHEAP, for_rows};
use crate::cuda;
use crate::kernel_span::kernel_span;
use crate::numeric::simd::vectorized;
use crate::{DType, Element, Result, Scalar, Tensor, dispatch_any};

/// Converts a `From` to this type, rounding if necessary.
trait CastFrom<From>: Sized {
    fn cast_from(value: From) -> Self;
}

macro_rules! primitive {
    ($($from:ty),* => $to:tt) => { $(impl CastFrom<$from> for $to {
        #[inline(always)]
        fn cast_from(value: $from) -> $to { value as $to }
    })* };
}
primitive!(f64, f32, u8, u32, i64 => f64);
primitive!(f64, f32, u8, u32, i64 => f32);
primitive!(f64, f32, u8, u32, i64 => u8);
primitive!(f64, f32, u8, u32, i64 => u32);
primitive!(f64, f32, u8, u32, i64 => i64);

macro_rules! half {
    ($($half:ident),*) => { $(
        half!(@from_half $half => f64, f32, u8, u32, i64);
        half!(@to_half f64, u8, u32, i64 => $half);
        impl CastFrom<f32> for $half {
            #[inline(always)]
            fn cast_from(value: f32) -> $half { $half::from_acc(value) }
        }
    )* };
    (@from_half $half:ident => $($to:ty),*) => { $(impl CastFrom<$half> for $to {
        #[inline(always)]
        fn cast_from(value: $half) -> $to { value.acc() as $to }
    })* };
    (@to_half $($from:ty),* => $half:ident) => { $(impl CastFrom<$from> for $half {
        #[inline(always)]
        fn cast_from(value: $from) -> $half { $half::from_acc(value as f32) }
    })* };
}
half!(bf16, f16);

macro_rules! between_halves {
    ($($from:ident => $to:ident),*) => { $(impl CastFrom<$from> for $to {
        #[inline(always)]
        fn cast_from(value: $from) -> $to { $to::from_acc(value.acc()) }
    })* };
}
between_halves!(bf16 => bf16, bf16 => f16, f16 => bf16, f16 => f16);

vectorized! {
    fn cast_slice<From: Scalar, To: CastFrom<From>>(x: &[From], y: &mut [To]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = To::cast_from(x);
        }
    }
}

/// Casts `x` to `dtype`; returns `x` itself if it already has it.
///
/// ```
/// use ferrotron_tensor::{DType, Device, Tensor, ops::cast::cast};
/// let x = Tensor::from_slice(&Device::cpu(1)?, &[1.9_f32, -2.7, 3.0], &[3])?;
/// assert_eq!(cast(&x, DType::I64)?.to_vec::<i64>()?, [1, -2, 3]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn cast(x: &Tensor, dtype: DType) -> Result<Tensor> {
    to_dtype(x, dtype).map(Cow::into_owned)
}

/// [`cast`] for a kernel, which need not hold the tensor itself.
pub(crate) fn to_dtype(x: &Tensor, dtype: DType) -> Result<Cow<'_, Tensor>> {
    if x.dtype() == dtype {
        return Ok(Cow::Borrowed(x));
    }
    let x = x.to_contiguous()?;
    let mut y = Tensor::empty(x.device(), dtype, x.dims())?;
    if x.device().gpu().is_some() {
        cuda::cast::cast(&x, &mut y)?;
        return Ok(Cow::Owned(y));
    }
    let _span = kernel_span!("cast", x.dtype(), 0, [&x] => [&y]);
    let work = x.numel() / CHEAP;
    dispatch_any!(x.dtype(), From => dispatch_any!(dtype, To => {
        let source = x.as_slice::<From>()?;
        for_rows(x.device(), (y.as_mut_slice::<To>()?, 1), work, |first, y| {
            cast_slice::<From, To>(&source[first..first + y.len()], y);
        });
    }));
    Ok(Cow::Owned(y))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;
    use crate::ops::testing::*;

    #[test]
    fn every_pair_of_dtypes_keeps_what_both_represent() {
        let device = Device::cpu(2).unwrap();
        let values: Vec<f64> = (0..20_000).map(|i| (i % 200) as f64).collect();
        let want = tensor(&device, DType::F64, &[100, 200], &values);
        for from in DType::ALL {
            for x in variants(&want) {
                let x = cast(&x, from).unwrap();
                for to in DType::ALL {
                    let y = cast(&x, to).unwrap();
                    assert_eq!((y.dtype(), y.dims()), (to, want.dims()));
                    let back = cast(&y, DType::F64).unwrap();
                    assert_close(&format!("cast {from} to {to}"), &back, &values, 0.0);
                }
            }
        }
    }

    #[test]
    fn floats_round_to_nearest_even_and_integers_saturate() {
        let device = Device::cpu(1).unwrap();
        let casted = |x: &[f64], dtype| {
            let x = tensor(&device, DType::F64, &[x.len()], x);
            cast(&cast(&x, dtype).unwrap(), DType::F64).unwrap().to_f64().unwrap()
        };
        let eps = DType::BF16.epsilon();
        // Halfway between two neighbours, and slightly above, where f32 still distinguishes them.
        let x = [1.0 + eps / 2.0, 1.0 + 1.5 * eps, 1.0 + eps / 2.0 + f64::from(f32::EPSILON)];
        assert_eq!(casted(&x, DType::BF16), [1.0, 1.0 + 2.0 * eps, 1.0 + eps]);
        let x = [-1.5, 300.7, f64::NAN, f64::INFINITY];
        assert_eq!(casted(&x, DType::U8), [0.0, 255.0, 0.0, 255.0]);
        assert_eq!(casted(&x[..2], DType::I64), [-1.0, 300.0]);
        assert_eq!(casted(&[1e5], DType::F16), [f64::INFINITY]);
    }

    #[test]
    fn the_same_dtype_costs_nothing() {
        let x = tensor(&Device::cpu(1).unwrap(), DType::F16, &[2], &[1.0, 2.0]);
        assert_eq!(cast(&x, DType::F16).unwrap().buffer_id(), x.buffer_id());
    }
}
