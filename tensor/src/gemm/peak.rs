//! Multiplications on registers alone, with the instruction set of products: the peak that products are compared with.

use super::isa::Isa;
use super::kernel_table::{KernelTable, pair_kernels};
use crate::DType;

/// Multiplies `times` times, as products of two operands of `dtype` do, and returns the number of floating-point
/// operations done.
pub(crate) fn multiply_registers(dtype: DType, times: usize) -> usize {
    let level = Isa::best();
    // SAFETY: the processor has the best instruction set that was found.
    unsafe {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        if dtype == DType::BF16 && level.has_tiles() {
            return super::isa::amx::config::multiply_registers(times);
        }
        let pairs = (dtype == DType::BF16).then(|| pair_kernels(level)).flatten();
        match (pairs, dtype) {
            (Some(pairs), _) => 2 * (pairs.multiply)(times),
            (None, DType::F64) => (f64::kernels(level).multiply)(times),
            (None, _) => (f32::kernels(level).multiply)(times),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::kernel::SUMS;

    #[test]
    fn operations_are_counted_for_every_dtype() {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
            let once = multiply_registers(dtype, 1);
            assert!(once >= 2 * SUMS, "{dtype}: {once}");
            assert_eq!(multiply_registers(dtype, 100), 100 * once, "{dtype}");
        }
        // Twice as many numbers of half the size fit a register.
        let of = |dtype| multiply_registers(dtype, 1);
        assert_eq!(of(DType::F16), of(DType::F32));
        assert!(of(DType::F32) >= of(DType::F64) && of(DType::BF16) >= of(DType::F32));
    }
}
