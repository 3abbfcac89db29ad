//! Launches dtype conversions.

use super::kernel;
use crate::{DType, Result, Tensor};

/// `y = x` in the dtype of `y`, both contiguous.
pub(crate) fn cast(x: &Tensor, y: &mut Tensor) -> Result<()> {
    let name = match y.dtype() {
        DType::F64 => "cast_to_f64",
        DType::F32 => "cast_to_f32",
        DType::BF16 => "cast_to_bf16",
        DType::F16 => "cast_to_f16",
        DType::U8 => "cast_to_u8",
        DType::U32 => "cast_to_u32",
        DType::I64 => "cast_to_i64",
    };
    let n = x.numel();
    kernel(x.device(), "cast", x.dtype(), name)?.input(x).output(y).value(n as u64).run_elements(n)
}
