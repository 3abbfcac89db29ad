//! The configuration of the tile registers: shapes, given to a thread and taken back.
//!
//! Rules and layout: Intel, "Architecture Instruction Set Extensions Programming Reference", chapter 3.

use std::arch::asm;

/// Rows of a tile register, and words of a row.
pub(super) const SIDE: usize = 16;

/// Shapes of the eight tile registers, as `ldtilecfg` reads them.
#[repr(C, align(64))]
pub(super) struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Shapes {
    /// Rows and words of a row of each register; a register without rows must not be used.
    pub(super) const fn new(shapes: [(usize, usize); 8]) -> Shapes {
        let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
        let mut i = 0;
        while i < shapes.len() {
            if shapes[i].0 > 0 && shapes[i].1 > 0 {
                rows[i] = shapes[i].0 as u8;
                row_bytes[i] = (4 * shapes[i].1) as u16;
            }
            i += 1;
        }
        Shapes { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
    }
}

/// Whole tiles in all registers.
static WHOLE: Shapes = Shapes::new([(SIDE, SIDE); 8]);

/// Gives all registers of this thread the shape of a whole tile.
///
/// # Safety
/// The process may use tile registers.
pub(super) unsafe fn load() {
    // SAFETY: the 64 bytes are there; the registers' contents are lost, but no block of assembly leaves any there.
    unsafe {
        asm!(
            "ldtilecfg [{}]", in(reg) &WHOLE,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
            out("tmm6") _, out("tmm7") _,
            options(nostack, readonly, preserves_flags)
        )
    }
    #[cfg(test)]
    // SAFETY: shapes are 64 initialised bytes.
    super::emulator::configured(unsafe { &*(&raw const WHOLE).cast() });
}

/// Takes the shapes from this thread, which lets the processor save energy and the system less state.
///
/// # Safety
/// The conditions of [`load`].
pub(super) unsafe fn release() {
    // SAFETY: as above.
    unsafe {
        asm!(
            "tilerelease",
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
            out("tmm6") _, out("tmm7") _,
            options(nostack, nomem, preserves_flags)
        )
    }
}

/// Multiplies tile registers `times` times into each of four others, and returns the floating-point operations done.
///
/// # Safety
/// The conditions of [`load`].
pub(in crate::gemm) unsafe fn multiply_registers(times: usize) -> usize {
    const SUMS: usize = 4;
    // SAFETY: the caller's promise; all registers that are read are zeroed first, and all that change are named.
    unsafe {
        load();
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "tilezero tmm4",
            "tilezero tmm5",
            "2:",
            "tdpbf16ps tmm0, tmm4, tmm5",
            "tdpbf16ps tmm1, tmm4, tmm5",
            "tdpbf16ps tmm2, tmm4, tmm5",
            "tdpbf16ps tmm3, tmm4, tmm5",
            "dec {times}",
            "jnz 2b",
            times = inout(reg) times.max(1) => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
            out("tmm6") _, out("tmm7") _,
            options(nostack, nomem)
        );
        release();
    }
    // A row of 16 sums takes two products and two sums for each of 16 words, in each of 16 rows.
    4 * SIDE * SIDE * SIDE * SUMS * times.max(1)
}
