//! The loop over k of a microtile of 8 rows by 3 vectors, which takes four steps at a time.
//!
//! A step is 24 multiply-adds and 11 loads of their operands. The compiler finds each row by an addition of its own, which
//! on Intel's processors may use an execution port of the multiply-adds. With fewer instructions the processor also
//! looks further ahead for lines that L1 lacks.

use crate::gemm::isa::vector::Steps;
use crate::numeric::simd::with_avx512;
use std::arch::asm;
use std::arch::x86_64::{__m512, __m512d};

/// The products of a factor of the left operand with the three vectors of columns.
macro_rules! row {
    ([$broadcast:literal $multiply_add:literal], $address:expr, $s0:literal $s1:literal $s2:literal) => {
        concat!(
            $broadcast,
            " {f:z}, [",
            $address,
            "]\n",
            $multiply_add,
            " {",
            $s0,
            ":z}, {f:z}, {c0:z}\n",
            $multiply_add,
            " {",
            $s1,
            ":z}, {f:z}, {c1:z}\n",
            $multiply_add,
            " {",
            $s2,
            ":z}, {f:z}, {c2:z}\n",
        )
    };
}

/// A step: the address of its columns, and those of its eight rows.
macro_rules! step {
    ($code:tt, $b:literal, $a0:expr, $a1:expr, $a2:expr, $a3:expr, $a4:expr, $a5:expr, $a6:expr, $a7:expr) => {
        concat!(
            "vmovups {c0:z}, [", $b, "]\n",
            "vmovups {c1:z}, [", $b, " + 64]\n",
            "vmovups {c2:z}, [", $b, " + 128]\n",
            row!($code, $a0, "s0" "s1" "s2"),
            row!($code, $a1, "s3" "s4" "s5"),
            row!($code, $a2, "s6" "s7" "s8"),
            row!($code, $a3, "s9" "s10" "s11"),
            row!($code, $a4, "s12" "s13" "s14"),
            row!($code, $a5, "s15" "s16" "s17"),
            row!($code, $a6, "s18" "s19" "s20"),
            row!($code, $a7, "s21" "s22" "s23"),
        )
    };
}

/// A step of rows that are `{row}` bytes apart. Its elements lie `$step` bytes after those of the first step.
macro_rules! rows_apart {
    ($code:tt, $b:literal, $step:expr) => {
        step!(
            $code,
            $b,
            concat!("{a} + ", $step),
            concat!("{a} + {row} + ", $step),
            concat!("{a} + 2 * {row} + ", $step),
            concat!("{a} + {row3} + ", $step),
            concat!("{a4} + ", $step),
            concat!("{a4} + {row} + ", $step),
            concat!("{a4} + 2 * {row} + ", $step),
            concat!("{a4} + {row3} + ", $step)
        )
    };
}

/// A step of rows of `$bytes` that lie together from `$a` on.
macro_rules! rows_together {
    ($code:tt, $b:literal, $a:literal, $bytes:literal) => {
        step!(
            $code,
            $b,
            $a,
            concat!($a, " + ", $bytes),
            concat!($a, " + 2 * ", $bytes),
            concat!($a, " + 3 * ", $bytes),
            concat!($a, " + 4 * ", $bytes),
            concat!($a, " + 5 * ", $bytes),
            concat!($a, " + 6 * ", $bytes),
            concat!($a, " + 7 * ", $bytes)
        )
    };
}

/// Single steps until the rest is a multiple of four, then four at a time. After each, `$next` or `$next4` advances
/// the left operand.
macro_rules! run {
    ([$depth:expr, $b:expr, $b_step:expr], $sums:ident, $single:expr, $next:expr, $four:expr, $next4:expr, $($operand:tt)*) => {{
        let [row0, row1, row2, row3, row4, row5, row6, row7] = $sums else { unreachable!() };
        let ([s0, s1, s2], [s3, s4, s5], [s6, s7, s8]) = (row0, row1, row2);
        let ([s9, s10, s11], [s12, s13, s14], [s15, s16, s17]) = (row3, row4, row5);
        let ([s18, s19, s20], [s21, s22, s23]) = (row6, row7);
        // Named, because the compiler has no 512-bit register for a nameless one.
        let (_c0, _c1, _c2, _f): (__m512, __m512, __m512, __m512);
        asm!(
            "2:",
            "test {depth}, 3",
            "jz 3f",
            $single,
            $next,
            "add {b}, {b_step}",
            "dec {depth}",
            "jmp 2b",
            "3:",
            "sub {depth}, 4",
            "jb 5f",
            "4:",
            $four,
            $next4,
            "lea {b}, [{b} + 4 * {b_step}]",
            "sub {depth}, 4",
            "jae 4b",
            "5:",
            s0 = inout(zmm_reg) *s0, s1 = inout(zmm_reg) *s1, s2 = inout(zmm_reg) *s2,
            s3 = inout(zmm_reg) *s3, s4 = inout(zmm_reg) *s4, s5 = inout(zmm_reg) *s5,
            s6 = inout(zmm_reg) *s6, s7 = inout(zmm_reg) *s7, s8 = inout(zmm_reg) *s8,
            s9 = inout(zmm_reg) *s9, s10 = inout(zmm_reg) *s10, s11 = inout(zmm_reg) *s11,
            s12 = inout(zmm_reg) *s12, s13 = inout(zmm_reg) *s13, s14 = inout(zmm_reg) *s14,
            s15 = inout(zmm_reg) *s15, s16 = inout(zmm_reg) *s16, s17 = inout(zmm_reg) *s17,
            s18 = inout(zmm_reg) *s18, s19 = inout(zmm_reg) *s19, s20 = inout(zmm_reg) *s20,
            s21 = inout(zmm_reg) *s21, s22 = inout(zmm_reg) *s22, s23 = inout(zmm_reg) *s23,
            c0 = out(zmm_reg) _c0,
            c1 = out(zmm_reg) _c1,
            c2 = out(zmm_reg) _c2,
            f = out(zmm_reg) _f,
            depth = inout(reg) $depth => _,
            b = inout(reg) $b => _,
            b_step = in(reg) $b_step,
            b_step3 = in(reg) 3 * $b_step,
            $($operand)*
            options(nostack, readonly)
        );
    }};
}

/// Defines the loop for a type of numbers: its register and bytes, and the instructions that broadcast and multiply.
macro_rules! full_tile {
    ($name:ident, $register:ty, $scalar:ty, $bytes:literal, $code:tt) => {
        with_avx512! { enabled!
            /// Adds the products of all steps to 8 rows of sums.
            ///
            /// # Safety
            /// The operands hold the steps, and these are dense ([`Steps::are_dense`]).
            #[inline]
            pub(super) unsafe fn $name(steps: &Steps<$scalar>, sums: &mut [[$register; 3]]) {
                let Steps { depth, a, a_row, a_step, b, b_step } = *steps;
                let [row, a_step, b_step] = [a_row, a_step, b_step].map(|stride| $bytes * stride);
                // SAFETY: reads the operands, as the caller vouches, and changes what is named.
                unsafe {
                    if a_row == 1 {
                        run!(
                            [depth, b, b_step],
                            sums,
                            rows_together!($code, "{b}", "{a}", $bytes),
                            "add {a}, {a_step}",
                            concat!(
                                rows_together!($code, "{b}", "{a}", $bytes),
                                rows_together!($code, "{b} + {b_step}", "{a} + {a_step}", $bytes),
                                rows_together!($code, "{b} + 2 * {b_step}", "{a} + 2 * {a_step}", $bytes),
                                rows_together!($code, "{b} + {b_step3}", "{a} + {a_step3}", $bytes),
                            ),
                            "lea {a}, [{a} + 4 * {a_step}]",
                            a = inout(reg) a => _,
                            a_step = in(reg) a_step,
                            a_step3 = in(reg) 3 * a_step,
                        );
                    } else {
                        debug_assert_eq!(a_step, $bytes);
                        run!(
                            [depth, b, b_step],
                            sums,
                            rows_apart!($code, "{b}", "0"),
                            concat!("add {a}, ", $bytes, "\nadd {a4}, ", $bytes),
                            concat!(
                                rows_apart!($code, "{b}", "0"),
                                rows_apart!($code, "{b} + {b_step}", $bytes),
                                rows_apart!($code, "{b} + 2 * {b_step}", concat!("2 * ", $bytes)),
                                rows_apart!($code, "{b} + {b_step3}", concat!("3 * ", $bytes)),
                            ),
                            concat!("add {a}, 4 * ", $bytes, "\nadd {a4}, 4 * ", $bytes),
                            a = inout(reg) a => _,
                            a4 = inout(reg) a.wrapping_offset(4 * a_row) => _,
                            row = in(reg) row,
                            row3 = in(reg) 3 * row,
                        );
                    }
                }
            }
        }
    };
}
full_tile!(f32, __m512, f32, 4, ["vbroadcastss" "vfmadd231ps"]);
full_tile!(f64, __m512d, f64, 8, ["vbroadcastsd" "vfmadd231pd"]);
