//! Products of 32 x 32 sums for fused kernels that keep their operands in cache as packed tiles.
//!
//! An operand is a row of *panels* of 32 lanes (see [`super::pack`]): rows of the left factor as row tiles, columns of
//! the right one as column tiles. A step is 32 elements of the sum. Sums are four dense tiles of f32: rows 0 to 15 and
//! columns 0 to 15, then columns 16 to 31, then the same of rows 16 to 31.

use super::config;
use super::pack::{Panels, STEP, pack};
use crate::gemm::isa::avx512::F32x16;
use crate::gemm::isa::vector::Vector;
use crate::gemm::problem::Operand;
use crate::{DType, bf16};
use std::arch::asm;
use std::arch::x86_64::__m512;
use std::marker::PhantomData;

pub(crate) use super::microkernel::{MICROTILE as LANES, STEP_BYTES, SUMS_BYTES};
pub(crate) use super::pack::Tiles;

/// Elements, and bytes, of what a step adds to a panel; floats of a panel's step and of 32 x 32 sums.
pub(crate) const STEP_FLOATS: usize = STEP_BYTES / size_of::<f32>();
pub(crate) const SUMS_FLOATS: usize = SUMS_BYTES / size_of::<f32>();

/// Tile registers of this thread, in the shape of whole tiles until this is dropped.
pub(crate) struct TileRegisters(PhantomData<*const ()>);

impl TileRegisters {
    /// Configures the registers.
    ///
    /// # Safety
    /// The process may use tile registers, and this thread holds no other value of this type.
    pub(crate) unsafe fn configure() -> TileRegisters {
        // SAFETY: the caller's promise, passed on.
        unsafe { config::load() };
        TileRegisters(PhantomData)
    }

    /// sums \[+\]= a b for one panel of rows and one of columns, `steps` steps of each. The columns, which come from L2 as a
    /// rule, do not displace what the thread writes in L1. A store there waits for no other cache.
    ///
    /// # Safety
    /// `a` and `b` hold the steps, `sums` 32 x 32 sums, initialised where they are added to.
    #[inline(always)]
    pub(crate) unsafe fn product(
        &self,
        a: *const f32,
        b: *const f32,
        steps: usize,
        sums: *mut f32,
        adds: bool,
    ) {
        debug_assert!(steps > 0);
        // SAFETY: the caller's promise; the registers have the shape of whole tiles.
        unsafe {
            asm!(
                "test {adds:e}, {adds:e}",
                "jz 2f",
                "tileloadd tmm0, [{sums} + {row}]",
                "tileloadd tmm1, [{sums} + {row} + 1024]",
                "tileloadd tmm2, [{sums} + {row} + 2048]",
                "tileloadd tmm3, [{sums} + {row} + 3072]",
                "jmp 3f",
                "2:",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "3:",
                "tileloaddt1 tmm6, [{b} + {row}]",
                "tileloadd tmm4, [{a} + {row}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloaddt1 tmm7, [{b} + {row} + 1024]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{a} + {row} + 1024]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a}, 2048",
                "add {b}, 2048",
                "dec {steps}",
                "jnz 3b",
                "tilestored [{sums} + {row}], tmm0",
                "tilestored [{sums} + {row} + 1024], tmm1",
                "tilestored [{sums} + {row} + 2048], tmm2",
                "tilestored [{sums} + {row} + 3072], tmm3",
                adds = in(reg) u32::from(adds),
                a = inout(reg) a => _,
                b = inout(reg) b => _,
                steps = inout(reg) steps => _,
                sums = in(reg) sums,
                row = in(reg) 64_usize,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
                out("tmm6") _, out("tmm7") _,
                options(nostack)
            );
        }
    }
}

impl Drop for TileRegisters {
    fn drop(&mut self) {
        // SAFETY: they were configured.
        unsafe { config::release() };
    }
}

/// Steps of so many elements.
pub(crate) fn steps(elements: usize) -> usize {
    elements.div_ceil(STEP)
}

/// Packs `lanes` lanes of `elements` elements as panels of that many steps each, one after the other, padded with zeros.
///
/// # Safety
/// `from` holds the lanes, `lane_stride` elements apart, and their elements, `stride` apart; `to` has room; the processor
/// has AVX-512.
pub(crate) unsafe fn pack_panels(
    tiles: Tiles,
    from: *const bf16,
    [lane_stride, stride]: [usize; 2],
    [lanes, elements]: [usize; 2],
    to: *mut f32,
) {
    let operand = Operand {
        data: from.cast(),
        dtype: DType::BF16,
        lanes,
        lane_stride: lane_stride as isize,
        step_stride: stride as isize,
        elements,
        per_step: 1,
    };
    let panels = Panels {
        operand: &operand,
        tiles,
        lane: 0,
        lanes,
        element: 0,
        steps: steps(elements),
        to: to.cast(),
        panel_bytes: steps(elements) * STEP_BYTES,
    };
    // SAFETY: the caller's promise, passed on.
    unsafe { pack(&panels) };
}

/// Transposes 16 registers of 16 floats.
///
/// # Safety
/// The processor has AVX-512.
#[inline(always)]
pub(crate) unsafe fn transpose(tile: &mut [__m512; 16]) {
    // SAFETY: the caller's promise, passed on.
    unsafe {
        let mut square = tile.map(F32x16);
        F32x16::transpose(&mut square);
        *tile = square.map(|row| row.0);
    }
}
