//! The AMX microkernel: a list of microtiles of 32 x 32 sums, computed by one block of assembly.
//!
//! A microtile runs down `steps` steps of 32 elements of k. Each step loads two tiles of either operand and
//! multiplies every pair of them:
//!
//! ```text
//!  B0 A0 B1 A1 loaded, then sums 00 += A0 B0, 01 += A0 B1, 10 += A1 B0, 11 += A1 B1
//! ```
//!
//! In its first step the sums of the microtile before are stored one by one, each just before the
//! multiplication that reuses its register, so a store never waits for the multiplication that it follows. While
//! the other steps run, the vector units turn the sums of the microtile before into results, a row after each
//! multiplication. Elsewhere eight instructions that do nothing follow each tile instruction: where another thread
//! shares the core's units they make this one a quarter faster, where not, they cost nothing that can be measured
//! reliably (at most 3 %). No tile register holds anything from one block of assembly to another.

use crate::numeric::simd::with_avx512;
use std::arch::asm;

/// Bytes of a tile: 16 rows of 64.
pub(super) const TILE_BYTES: usize = 1024;
/// Rows, and columns, of a microtile.
pub(crate) const MICROTILE: usize = 32;
/// Bytes of either operand in one step: two tiles.
pub(crate) const STEP_BYTES: usize = 2 * TILE_BYTES;
/// Bytes of a microtile's sums: four tiles, 00, 01, 10 and 11.
pub(crate) const SUMS_BYTES: usize = 4 * TILE_BYTES;

/// A microtile to compute, and the conversion of an earlier one's sums, which runs meanwhile.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Microtile {
    /// Tiles of rows and of columns: a step is [`STEP_BYTES`], lanes 0 to 15 first.
    pub a: *const u8,
    pub b: *const u8,
    /// Number of steps, at least 1; 0 in the last of a list, which only stores and converts what is left.
    pub steps: usize,
    /// Partial sums to continue, or null.
    pub sums_in: *const u8,
    pub sums_out: *mut u8,
    pub conversion: Conversion,
    pub fetch: Fetch,
}

/// Lines that come to the L2 cache meanwhile: four at each step, which begin so many bytes apart. Any address may be
/// named.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Fetch {
    pub rows: *const u8,
    pub rows_step: usize,
    pub target: *const u8,
    pub target_step: usize,
}

/// to = round(held + alpha * sums + bias) for the 32 x 32 sums of the microtile before. Strides are in bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Conversion {
    pub kind: Kind,
    /// Four tiles.
    pub from: *const u8,
    /// Rows of f32; a row of zeros with stride 0 where nothing is held.
    pub held: *const u8,
    pub held_row: usize,
    pub to: *mut u8,
    pub to_row: usize,
    /// 32 floats; -0.0, which changes no value, where there is no bias.
    pub bias: *const f32,
}

/// The type that sums are converted to.
#[repr(usize)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Nothing = 0,
    F32 = 1,
    Bf16 = 2,
}

impl Fetch {
    pub(super) const NOTHING: Fetch =
        Fetch { rows: std::ptr::null(), rows_step: 0, target: std::ptr::null(), target_step: 0 };
}

impl Conversion {
    pub(super) const NOTHING: Conversion = Conversion {
        kind: Kind::Nothing,
        from: std::ptr::null(),
        held: std::ptr::null(),
        held_row: 0,
        to: std::ptr::null_mut(),
        to_row: 0,
        bias: std::ptr::null(),
    };
}

/// Numbers that conversions broadcast.
#[repr(C, align(64))]
struct Constants {
    /// The odd 16-bit words of two registers.
    upper_words: [u16; 32],
    alpha: f32,
    one: u32,
    /// Half of what rounding to bf16 cuts off, less one.
    half: u32,
    /// The bit that makes a NaN quiet.
    quiet: u32,
}

/// The tiles of a step.
macro_rules! load_step {
    () => {
        "tileloaddt1 tmm6, [rcx + rdx]
         prefetcht1 [rsi]
         prefetcht1 [rsi + 64]
         prefetcht1 [rsi + 128]
         prefetcht1 [rsi + 192]
         .rept 8
         nop
         .endr
         tileloadd tmm4, [rax + rdx]
         add rsi, [rdi + 104]
         .rept 8
         nop
         .endr
         tileloaddt1 tmm7, [rcx + rdx + 1024]
         prefetcht1 [r13]
         prefetcht1 [r13 + 64]
         prefetcht1 [r13 + 128]
         prefetcht1 [r13 + 192]
         .rept 8
         nop
         .endr
         tileloadd tmm5, [rax + rdx + 1024]
         add r13, [rdi + 120]
         .rept 8
         nop
         .endr"
    };
}

/// A step after the first, with vector work after each multiplication.
macro_rules! step {
    () => { step!(@ ".rept 8\nnop\n.endr\n") };
    (@ $row:expr) => {
        concat!(
            load_step!(),
            "\n tdpbf16ps tmm0, tmm4, tmm6\n", $row,
            "\n tdpbf16ps tmm1, tmm4, tmm7\n", $row,
            "\n tdpbf16ps tmm2, tmm5, tmm6\n", $row,
            "\n tdpbf16ps tmm3, tmm5, tmm7\n", $row,
            "\n add rax, 2048
             add rcx, 2048
             dec r10"
        )
    };
}

/// The first step: stores the sums before, and zeros or loads those to continue.
macro_rules! first_step {
    ($sums0:literal, $sums1:literal, $sums2:literal, $sums3:literal) => {
        concat!(
            load_step!(),
            "\n tilestored [r8 + rdx], tmm0\n",
            $sums0,
            "\n tdpbf16ps tmm0, tmm4, tmm6
             tilestored [r8 + rdx + 1024], tmm1\n",
            $sums1,
            "\n tdpbf16ps tmm1, tmm4, tmm7
             tilestored [r8 + rdx + 2048], tmm2\n",
            $sums2,
            "\n tdpbf16ps tmm2, tmm5, tmm6
             tilestored [r8 + rdx + 3072], tmm3\n",
            $sums3,
            "\n tdpbf16ps tmm3, tmm5, tmm7"
        )
    };
}

/// One row of sums, with what is held and the bias: in zmm0 and zmm1.
macro_rules! value {
    () => {
        "vmovups zmm0, [r11]
         vmovups zmm1, [r11 + 1024]
         vfmadd213ps zmm0, zmm31, [r12]
         vfmadd213ps zmm1, zmm31, [r12 + 64]
         add r11, 64
         add r12, [rdi + 64]
         vaddps zmm0, zmm0, zmm29
         vaddps zmm1, zmm1, zmm30"
    };
}

/// A row of f32 results; the next microtile's lines are fetched for writing.
macro_rules! row_f32 {
    () => {
        concat!(
            value!(),
            "\n prefetchw [r14 + 128]
             prefetchw [r14 + 192]
             vmovups [r14], zmm0
             vmovups [r14 + 64], zmm1
             add r14, [rdi + 80]"
        )
    };
}

/// A row of bf16 results, rounded to nearest even as [`crate::gemm::isa::avx512`] does.
macro_rules! row_bf16 {
    () => {
        concat!(
            value!(),
            "\n prefetchw [r14 + 64]
             vpsrld zmm2, zmm0, 16
             vpsrld zmm3, zmm1, 16
             vcmpunordps k1, zmm0, zmm0
             vcmpunordps k2, zmm1, zmm1
             vpandd zmm2, zmm2, zmm28
             vpandd zmm3, zmm3, zmm28
             vpaddd zmm2, zmm2, zmm27
             vpaddd zmm3, zmm3, zmm27
             vpaddd zmm2, zmm2, zmm0
             vpaddd zmm3, zmm3, zmm1
             vpord zmm2 {{k1}}, zmm0, zmm26
             vpord zmm3 {{k2}}, zmm1, zmm26
             vpermt2w zmm2, zmm25, zmm3
             vmovdqu64 [r14], zmm2
             add r14, [rdi + 80]"
        )
    };
}

/// Moves on after four rows: the rows below 16 lie two tiles on.
macro_rules! four_rows_done {
    ($label:literal) => {
        concat!(
            "dec r9
             cmp r9d, 4
             jne ",
            $label,
            "f
             add r11, 1024
             ",
            $label,
            ":"
        )
    };
}

/// Steps that convert four rows each until there are no rows or no steps left, then the rows that are left.
macro_rules! converting_steps {
    ($row:ident) => {
        concat!(
            "22:
             test r10, r10
             jz 25f\n",
            step!(@ $row!()),
            "\n", four_rows_done!("23"),
            "\n test r9, r9
             jnz 22b
             jmp 60f
             25:\n",
            $row!(), "\n", $row!(), "\n", $row!(), "\n", $row!(), "\n",
            four_rows_done!("26"),
            "\n test r9, r9
             jnz 25b
             jmp 60f"
        )
    };
}

with_avx512! { enabled!
    /// Computes a list of microtiles; the last one has 0 steps.
    ///
    /// # Safety
    /// The thread's tile registers have the shapes of [`super::config`]; the list's pointers hold what its
    /// documentation says, with room for whole microtiles; `unused` has room for the sums of one microtile, which nothing reads
    /// before it is written again; the processor has AMX.
    pub(super) unsafe fn run(list: &[Microtile], alpha: f32, unused: *mut u8) {
        debug_assert!(list.split_last().is_some_and(|(last, rest)| {
            last.steps == 0 && rest.iter().all(|microtile| microtile.steps > 0)
        }));
        let constants = Constants {
            upper_words: std::array::from_fn(|i| 2 * i as u16 + 1),
            alpha,
            one: 1,
            half: 0x7fff,
            quiet: 0x0040_0000,
        };
        // SAFETY: the caller's promise; everything that is changed is named.
        unsafe {
            asm!(
                "vmovdqu64 zmm25, [r15]",
                "vbroadcastss zmm31, [r15 + 64]",
                "vpbroadcastd zmm28, [r15 + 68]",
                "vpbroadcastd zmm27, [r15 + 72]",
                "vpbroadcastd zmm26, [r15 + 76]",
                // Loop over the list: rdi the microtile, rax and rcx its steps, r10 how many are left, r8 where the
                // registers' sums belong (before the first microtile they are nobody's), rsi and r13 what is fetched.
                "2:",
                "mov rax, [rdi]",
                "mov rcx, [rdi + 8]",
                "mov r10, [rdi + 16]",
                "mov r9, [rdi + 24]",
                "mov rsi, [rdi + 96]",
                "mov r13, [rdi + 112]",
                "test r10, r10",
                "jz 4f",
                "test r9, r9",
                "jz 3f",
                first_step!(
                    "tileloadd tmm0, [r9 + rdx]",
                    "tileloadd tmm1, [r9 + rdx + 1024]",
                    "tileloadd tmm2, [r9 + rdx + 2048]",
                    "tileloadd tmm3, [r9 + rdx + 3072]"
                ),
                "jmp 5f",
                "3:",
                first_step!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3"),
                "jmp 5f",
                "4:",
                "tilestored [r8 + rdx], tmm0",
                "tilestored [r8 + rdx + 1024], tmm1",
                "tilestored [r8 + rdx + 2048], tmm2",
                "tilestored [r8 + rdx + 3072], tmm3",
                "jmp 6f",
                "5:",
                "add rax, 2048",
                "add rcx, 2048",
                "mov r8, [rdi + 32]",
                "dec r10",
                // The conversion: r11 the sums, r12 what is held, r14 where it goes, r9 four rows each.
                "6:",
                "cmp qword ptr [rdi + 40], 1",
                "jb 60f",
                "mov r14, [rdi + 88]",
                "vmovups zmm29, [r14]",
                "vmovups zmm30, [r14 + 64]",
                "mov r11, [rdi + 48]",
                "mov r12, [rdi + 56]",
                "mov r14, [rdi + 72]",
                "mov r9d, 8",
                "ja 40f",
                converting_steps!(row_f32),
                "40:",
                converting_steps!(row_bf16),
                // Steps without a conversion.
                "60:",
                "test r10, r10",
                "jz 65f",
                step!(),
                "jmp 60b",
                "65:",
                "mov r9, [rdi + 16]",
                "add rdi, 128",
                "test r9, r9",
                "jnz 2b",
                inout("rdi") list.as_ptr() => _,
                in("rdx") 64_usize,
                inout("r8") unused => _,
                in("r15") &constants,
                out("rsi") _, out("rax") _, out("rcx") _, out("r9") _, out("r10") _, out("r11") _, out("r12") _, out("r13") _,
                out("r14") _,
                out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _,
                out("zmm25") _, out("zmm26") _, out("zmm27") _, out("zmm28") _, out("zmm29") _, out("zmm30") _,
                out("zmm31") _, out("k1") _, out("k2") _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
                out("tmm6") _, out("tmm7") _,
                options(nostack)
            );
        }
    }
}
