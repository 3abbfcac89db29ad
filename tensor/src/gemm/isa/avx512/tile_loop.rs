//! The loops over k of microtiles of 8 rows by 3 or 2 vectors, which take four steps at a time.
//!
//! With 3 vectors a step is 24 multiply-adds and 11 loads of their operands. The compiler finds each row by an addition of
//! its own, which on Intel's processors may use an execution port of the multiply-adds. With fewer instructions the
//! processor also looks further ahead for lines that L1 lacks.

use crate::gemm::isa::vector::Steps;
use crate::numeric::simd::with_avx512;
use std::arch::asm;
use std::arch::x86_64::{__m512, __m512d};

/// The products of a factor of the left operand with vectors of columns, each added to a sum.
macro_rules! row {
    ([$broadcast:literal $multiply_add:literal], $address:expr, $($sum:literal $column:literal),*) => {
        concat!(
            $broadcast, " {f:z}, [", $address, "]\n",
            $($multiply_add, " {", $sum, ":z}, {f:z}, {", $column, ":z}\n",)*
        )
    };
}

/// A step of so many vectors: the address of its columns, and those of its eight rows.
macro_rules! step {
    (3, $code:tt, $b:literal, $a0:expr, $a1:expr, $a2:expr, $a3:expr, $a4:expr, $a5:expr, $a6:expr, $a7:expr) => {
        concat!(
            "vmovups {c0:z}, [", $b, "]\n",
            "vmovups {c1:z}, [", $b, " + 64]\n",
            "vmovups {c2:z}, [", $b, " + 128]\n",
            row!($code, $a0, "s0" "c0", "s1" "c1", "s2" "c2"),
            row!($code, $a1, "s3" "c0", "s4" "c1", "s5" "c2"),
            row!($code, $a2, "s6" "c0", "s7" "c1", "s8" "c2"),
            row!($code, $a3, "s9" "c0", "s10" "c1", "s11" "c2"),
            row!($code, $a4, "s12" "c0", "s13" "c1", "s14" "c2"),
            row!($code, $a5, "s15" "c0", "s16" "c1", "s17" "c2"),
            row!($code, $a6, "s18" "c0", "s19" "c1", "s20" "c2"),
            row!($code, $a7, "s21" "c0", "s22" "c1", "s23" "c2"),
        )
    };
    (2, $code:tt, $b:literal, $a0:expr, $a1:expr, $a2:expr, $a3:expr, $a4:expr, $a5:expr, $a6:expr, $a7:expr) => {
        concat!(
            "vmovups {c0:z}, [", $b, "]\n",
            "vmovups {c1:z}, [", $b, " + 64]\n",
            row!($code, $a0, "s0" "c0", "s1" "c1"),
            row!($code, $a1, "s2" "c0", "s3" "c1"),
            row!($code, $a2, "s4" "c0", "s5" "c1"),
            row!($code, $a3, "s6" "c0", "s7" "c1"),
            row!($code, $a4, "s8" "c0", "s9" "c1"),
            row!($code, $a5, "s10" "c0", "s11" "c1"),
            row!($code, $a6, "s12" "c0", "s13" "c1"),
            row!($code, $a7, "s14" "c0", "s15" "c1"),
        )
    };
}

/// A step of rows that are `{row}` bytes apart. Its elements lie `$step` bytes after those of the first step.
macro_rules! rows_apart {
    ($vectors:tt, $code:tt, $b:literal, $step:expr) => {
        step!(
            $vectors,
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
    ($vectors:tt, $code:tt, $b:literal, $a:literal, $bytes:literal) => {
        step!(
            $vectors,
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
/// the left operand. A third vector takes `$more` registers: sums 16 to 23 and its columns.
macro_rules! run {
    (2, $($rest:tt)*) => {
        run!([], $($rest)*)
    };
    (3, $sums:ident, $($rest:tt)*) => {{
        let _c2: __m512;
        run!(
            [
                s16 = inout(zmm_reg) *$sums.add(16), s17 = inout(zmm_reg) *$sums.add(17), s18 = inout(zmm_reg) *$sums.add(18),
                s19 = inout(zmm_reg) *$sums.add(19), s20 = inout(zmm_reg) *$sums.add(20), s21 = inout(zmm_reg) *$sums.add(21),
                s22 = inout(zmm_reg) *$sums.add(22), s23 = inout(zmm_reg) *$sums.add(23),
                c2 = out(zmm_reg) _c2,
            ],
            $sums,
            $($rest)*
        )
    }};
    ([$($more:tt)*], $sums:ident, [$depth:expr, $b:expr, $b_step:expr], $single:expr, $next:expr, $four:expr, $next4:expr, $($operand:tt)*) => {{
        // Named, because the compiler has no 512-bit register for a nameless one.
        let (_c0, _c1, _f): (__m512, __m512, __m512);
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
            s0 = inout(zmm_reg) *$sums, s1 = inout(zmm_reg) *$sums.add(1), s2 = inout(zmm_reg) *$sums.add(2),
            s3 = inout(zmm_reg) *$sums.add(3), s4 = inout(zmm_reg) *$sums.add(4), s5 = inout(zmm_reg) *$sums.add(5),
            s6 = inout(zmm_reg) *$sums.add(6), s7 = inout(zmm_reg) *$sums.add(7), s8 = inout(zmm_reg) *$sums.add(8),
            s9 = inout(zmm_reg) *$sums.add(9), s10 = inout(zmm_reg) *$sums.add(10), s11 = inout(zmm_reg) *$sums.add(11),
            s12 = inout(zmm_reg) *$sums.add(12), s13 = inout(zmm_reg) *$sums.add(13), s14 = inout(zmm_reg) *$sums.add(14),
            s15 = inout(zmm_reg) *$sums.add(15),
            $($more)*
            c0 = out(zmm_reg) _c0,
            c1 = out(zmm_reg) _c1,
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

/// Defines the loop for a number of vectors and a type of numbers: its register and bytes, and the instructions that
/// broadcast and multiply.
macro_rules! tile_loop {
    ($name:ident, $vectors:tt, $register:ty, $scalar:ty, $bytes:literal, $code:tt) => {
        with_avx512! { enabled!
            /// Adds the products of all steps to 8 rows of sums, which follow one another.
            ///
            /// # Safety
            /// The operands hold the steps, these are dense ([`Steps::are_dense`]), and the sums are there.
            #[inline]
            pub(super) unsafe fn $name(steps: &Steps<$scalar>, sums: *mut $register) {
                let Steps { depth, a, a_row, a_step, b, b_step } = *steps;
                let [row, a_step, b_step] = [a_row, a_step, b_step].map(|stride| $bytes * stride);
                // SAFETY: the caller vouches for the operands, which are read, and for the sums; only what is named changes.
                unsafe {
                    if a_row == 1 {
                        run!(
                            $vectors,
                            sums,
                            [depth, b, b_step],
                            rows_together!($vectors, $code, "{b}", "{a}", $bytes),
                            "add {a}, {a_step}",
                            concat!(
                                rows_together!($vectors, $code, "{b}", "{a}", $bytes),
                                rows_together!($vectors, $code, "{b} + {b_step}", "{a} + {a_step}", $bytes),
                                rows_together!($vectors, $code, "{b} + 2 * {b_step}", "{a} + 2 * {a_step}", $bytes),
                                rows_together!($vectors, $code, "{b} + {b_step3}", "{a} + {a_step3}", $bytes),
                            ),
                            "lea {a}, [{a} + 4 * {a_step}]",
                            a = inout(reg) a => _,
                            a_step = in(reg) a_step,
                            a_step3 = in(reg) 3 * a_step,
                        );
                    } else {
                        debug_assert_eq!(a_step, $bytes);
                        run!(
                            $vectors,
                            sums,
                            [depth, b, b_step],
                            rows_apart!($vectors, $code, "{b}", "0"),
                            concat!("add {a}, ", $bytes, "\nadd {a4}, ", $bytes),
                            concat!(
                                rows_apart!($vectors, $code, "{b}", "0"),
                                rows_apart!($vectors, $code, "{b} + {b_step}", $bytes),
                                rows_apart!($vectors, $code, "{b} + 2 * {b_step}", concat!("2 * ", $bytes)),
                                rows_apart!($vectors, $code, "{b} + {b_step3}", concat!("3 * ", $bytes)),
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
tile_loop!(f32_by_3, 3, __m512, f32, 4, ["vbroadcastss" "vfmadd231ps"]);
tile_loop!(f32_by_2, 2, __m512, f32, 4, ["vbroadcastss" "vfmadd231ps"]);
tile_loop!(f64_by_3, 3, __m512d, f64, 8, ["vbroadcastsd" "vfmadd231pd"]);
tile_loop!(f64_by_2, 2, __m512d, f64, 8, ["vbroadcastsd" "vfmadd231pd"]);
