//! Sums of 16-bit numbers, which backends add in f32 and round once.

use bytemuck::{cast_slice, cast_slice_mut};
use ferrotron_tensor::{DType, Element, bf16, f16};

/// Returns whether sums of this dtype are computed in f32 and rounded once.
pub fn is_narrow(dtype: DType) -> bool {
    matches!(dtype, DType::BF16 | DType::F16)
}

/// `sum += x`, where `x` are the bytes of 16-bit numbers.
pub fn widen_add(dtype: DType, sum: &mut [f32], x: &[u8]) {
    fn add<T: Element<Acc = f32>>(sum: &mut [f32], x: &[T]) {
        for (sum, x) in sum.iter_mut().zip(x) {
            *sum += x.acc();
        }
    }
    match dtype {
        DType::BF16 => add::<bf16>(sum, cast_slice(x)),
        _ => add::<f16>(sum, cast_slice(x)),
    }
}

/// Rounds sums to 16 bits, into the bytes `out`.
pub fn round(dtype: DType, out: &mut [u8], sum: &[f32]) {
    fn store<T: Element<Acc = f32>>(out: &mut [T], sum: &[f32]) {
        for (out, sum) in out.iter_mut().zip(sum) {
            *out = T::from_acc(*sum);
        }
    }
    match dtype {
        DType::BF16 => store::<bf16>(cast_slice_mut(out), sum),
        _ => store::<f16>(cast_slice_mut(out), sum),
    }
}
