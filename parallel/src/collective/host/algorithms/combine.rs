//! Kernels of reductions, which combine two pieces.

use bytemuck::{cast_slice, cast_slice_mut};
use ferrotron_tensor::{DType, bf16, f16};

use crate::collective::Reduction;

/// Kernels of one dtype and reduction, on bytes of whole elements.
#[derive(Clone, Copy)]
pub struct ReduceKernels {
    /// `out = a + b`
    pub combine: fn(out: &mut [u8], a: &[u8], b: &[u8]),
    /// `a += b`
    pub accumulate: fn(a: &mut [u8], b: &[u8]),
}

/// The kernels. No call sums 16-bit numbers with them: those are added in f32, see `narrow_sums`.
pub fn kernels(dtype: DType, reduction: Reduction) -> ReduceKernels {
    macro_rules! pick {
        ($rule:ident: $($dtype:ident $type:ty),*) => {
            match dtype { $(DType::$dtype => kernel_pair::<$type, $rule>(),)* }
        };
    }
    match reduction {
        Reduction::Sum => {
            pick!(Sum: F64 f64, F32 f32, BF16 bf16, F16 f16, U8 u8, U32 u32, I64 i64)
        }
        Reduction::Max => {
            pick!(Max: F64 f64, F32 f32, BF16 bf16, F16 f16, U8 u8, U32 u32, I64 i64)
        }
    }
}

trait Rule<T> {
    fn join(a: T, b: T) -> T;
}

struct Sum;
struct Max;

macro_rules! sums {
    ($($type:ty: |$a:ident, $b:ident| $sum:expr;)*) => { $(
        impl Rule<$type> for Sum {
            #[inline(always)]
            fn join($a: $type, $b: $type) -> $type { $sum }
        }
    )* };
}
sums! {
    f64: |a, b| a + b;
    f32: |a, b| a + b;
    bf16: |a, b| a + b;
    f16: |a, b| a + b;
    u8: |a, b| a.wrapping_add(b);
    u32: |a, b| a.wrapping_add(b);
    i64: |a, b| a.wrapping_add(b);
}

impl<T: PartialOrd + Copy> Rule<T> for Max {
    /// NaN if either is, so that it does not get lost.
    #[inline(always)]
    #[allow(clippy::eq_op)]
    fn join(a: T, b: T) -> T {
        if a >= b || a != a { a } else { b }
    }
}

fn kernel_pair<T: bytemuck::Pod, R: Rule<T>>() -> ReduceKernels {
    ReduceKernels {
        combine: |out, a, b| {
            let (out, a, b) = (cast_slice_mut::<_, T>(out), cast_slice(a), cast_slice(b));
            for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
                *out = R::join(*a, *b);
            }
        },
        accumulate: |a, b| {
            for (a, b) in cast_slice_mut::<_, T>(a).iter_mut().zip(cast_slice(b)) {
                *a = R::join(*a, *b);
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn max_keeps_nan_whichever_side_it_is_on() {
        let max = kernels(DType::F32, Reduction::Max);
        let mut out = [0.0_f32; 3];
        let (a, b) = ([f32::NAN, 1.0, -1.0], [1.0, f32::NAN, -2.0]);
        (max.combine)(cast_slice_mut(&mut out), cast_slice(&a), cast_slice(&b));
        assert!(out[0].is_nan() && out[1].is_nan() && out[2] == -1.0, "{out:?}");
    }

    #[test]
    fn sums_of_integers_wrap() {
        let mut a = [250_u8, 1];
        (kernels(DType::U8, Reduction::Sum).accumulate)(&mut a, &[10, 1]);
        assert_eq!(a, [4, 2]);
    }
}
