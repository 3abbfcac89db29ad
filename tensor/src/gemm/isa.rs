//! Instruction sets that products run with, and which of them this processor has.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(super) mod amx;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512_bf16;
pub(super) mod portable;
pub(super) mod vector;

#[cfg(target_arch = "x86_64")]
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::SimdLevel;
use crate::{Error, Result};

/// The place in [`Isa::ALL`] of the best one that may be used.
static BEST: AtomicUsize = AtomicUsize::new(usize::MAX);

/// An instruction set to run with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Isa {
    #[cfg(test)]
    PortablePairs,
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    Amx,
}

/// Whether Intel made the processor.
#[cfg(target_arch = "x86_64")]
fn is_of_intel() -> bool {
    use std::arch::x86_64::__cpuid;
    // The instruction is slow on virtual machines, which carry it out in software.
    static INTEL: LazyLock<bool> = LazyLock::new(|| {
        let vendor = __cpuid(0);
        [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
    });
    *INTEL
}

impl Isa {
    /// Every one, the best last.
    const ALL: &[Isa] = &[
        #[cfg(test)]
        Isa::PortablePairs,
        Isa::Portable,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16,
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        Isa::Amx,
    ];

    /// Whether this processor has it, and it may be used.
    fn is_here(self) -> bool {
        let best = Isa::ALL.get(BEST.load(Relaxed));
        best.is_none_or(|&best| self as usize <= best as usize) && self.is_of_processor()
    }

    fn is_of_processor(self) -> bool {
        match self {
            #[cfg(test)]
            Isa::PortablePairs => true,
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => SimdLevel::detect() >= SimdLevel::Avx2,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => SimdLevel::detect() == SimdLevel::Avx512,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => crate::numeric::simd::with_avx512_bf16!(detected!),
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Isa::Amx => Isa::Avx512.is_here() && amx::permission() == amx::Permission::Granted,
        }
    }

    /// The instruction sets that can be tested here, AMX also where it must be emulated.
    #[cfg(test)]
    pub(super) fn available() -> impl Iterator<Item = Isa> {
        Isa::ALL.iter().copied().filter(|&level| {
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            if level == Isa::Amx && Isa::Avx512.is_here() {
                return level.is_here() || amx::emulator::install();
            }
            level.is_here()
        })
    }

    /// The best that this processor has.
    pub(super) fn best() -> Isa {
        let here = Isa::ALL.iter().rev().find(|level| level.is_here() && level.pays());
        *here.expect("plain Rust runs everywhere")
    }

    /// Whether products are faster with it than with the one before it, or someone has named it in [`Isa::limit`].
    ///
    /// Intel's cores multiply pairs of bf16 at half of the rate of f32: on a Xeon of the fifth generation (Emerald
    /// Rapids), two threads reach 201 GFLOP/s with `vdpbf16ps` and 398 with `vfmadd` in registers. AMD's since Zen 4
    /// multiply them at twice that rate.
    fn pays(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => BEST.load(Relaxed) == self as usize || !is_of_intel(),
            _ => true,
        }
    }

    /// Uses no better one than that of this name from now on.
    pub(super) fn limit(name: &str) -> Result<()> {
        let letters = |name: &str| name.replace('-', "").to_lowercase();
        let here = Isa::ALL.iter().filter(|level| level.is_of_processor());
        let Some(best) = here.clone().find(|level| letters(level.name()) == letters(name)) else {
            let here: Vec<&str> = here.map(|level| level.name()).collect();
            let message = format!("{name} is not one of this processor's: {}", here.join(", "));
            return Err(Error::value("instruction set", message));
        };
        BEST.store(*best as usize, Relaxed);
        SimdLevel::limit(match best {
            #[cfg(test)]
            Isa::PortablePairs => SimdLevel::Portable,
            Isa::Portable => SimdLevel::Portable,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => SimdLevel::Avx2,
            #[cfg(target_arch = "x86_64")]
            _ => SimdLevel::Avx512,
        });
        Ok(())
    }

    /// The name of the instruction set.
    pub(super) fn name(self) -> &'static str {
        match self {
            #[cfg(test)]
            Isa::PortablePairs => "portable pairs",
            Isa::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => "AVX2",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => "AVX-512",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => "AVX512-BF16",
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Isa::Amx => "AMX",
        }
    }

    /// The instruction set that f32 products use where this one is the best.
    pub(super) fn for_f32(self) -> Isa {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => Isa::Avx512,
            #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
            Isa::Amx => Isa::Avx512,
            other => other,
        }
    }

    /// Whether products of two bf16 matrices are computed in tile registers.
    pub(super) fn has_tiles(self) -> bool {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        return self == Isa::Amx;
        #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
        false
    }

    /// Whether fused kernels multiply bf16 blocks in tile registers and round with AVX512-BF16. Every processor with
    /// AMX has that, but perhaps not one that emulates AMX.
    pub(super) fn has_tiles_of_blocks(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return self.has_tiles() && Isa::Avx512Bf16.is_here();
        #[cfg(not(target_arch = "x86_64"))]
        false
    }
}

#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn pairs_of_bf16_are_the_best_of_no_processor_of_intel() {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap();
        let vendor = info.lines().find(|line| line.starts_with("vendor_id")).unwrap();
        assert_eq!(is_of_intel(), vendor.ends_with("GenuineIntel"), "{vendor}");
        assert!(!is_of_intel() || Isa::best() != Isa::Avx512Bf16);
    }
}
