//! The compiled kernels of each instruction set.

use super::isa::Isa;
use super::isa::portable;
#[cfg(target_arch = "x86_64")]
use super::isa::{avx2, avx512, avx512_bf16};
use super::kernel::{Compute, GemmKernels};

/// An accumulator with kernels for every instruction set.
pub(super) trait KernelTable: Compute {
    /// The kernels of an instruction set.
    fn kernels(isa: Isa) -> &'static GemmKernels<Self>;
}

macro_rules! kernel_table {
    ($type:ty, $table:ident) => {
        impl KernelTable for $type {
            fn kernels(isa: Isa) -> &'static GemmKernels<Self> {
                match isa {
                    #[cfg(test)]
                    Isa::PortablePairs => &portable::$table,
                    Isa::Portable => &portable::$table,
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => &avx2::$table,
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 | Isa::Avx512Bf16 => &avx512::$table,
                    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
                    Isa::Amx => &avx512::$table,
                }
            }
        }
    };
}
kernel_table!(f32, F32);
kernel_table!(f64, F64);

/// Kernels for products of two bf16 matrices in words, if the instruction set has them.
pub(super) fn pair_kernels(isa: Isa) -> Option<&'static GemmKernels<f32>> {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 => Some(&avx512_bf16::PAIRS),
        #[cfg(test)]
        Isa::PortablePairs => Some(&portable::PAIRS),
        _ => None,
    }
}
