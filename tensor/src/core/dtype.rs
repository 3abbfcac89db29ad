//! Element types: the run-time [`DType`], the compile-time [`Element`], and the macros that dispatch between them.
//!
//! Arithmetic never happens in 16 bits: an [`Element`] is stored in its own type and computed in [`Element::Acc`]
//! (16-bit and f32 -> f32, f64 -> f64).

use bytemuck::Pod;
use ferrotron_cuda::kernels::ElementType;
use half::{bf16, f16};
use std::fmt;

use crate::numeric::real::Real;

/// The type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE 754 binary64.
    F64,
    /// IEEE 754 binary32.
    F32,
    /// bfloat16: the upper half of a binary32.
    BF16,
    /// IEEE 754 binary16.
    F16,
    /// Unsigned bytes: masks, comparisons.
    U8,
    /// Token ids and indices.
    U32,
    /// Signed indices, as in files of other systems; negative values mean "ignore".
    I64,
}

impl DType {
    /// Every dtype, in declaration order.
    pub const ALL: [DType; 7] =
        [DType::F64, DType::F32, DType::BF16, DType::F16, DType::U8, DType::U32, DType::I64];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::U32 => 4,
            DType::BF16 | DType::F16 => 2,
            DType::U8 => 1,
        }
    }

    /// Returns whether this is a floating-point type. Only these carry gradients.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F64 | DType::F32 | DType::BF16 | DType::F16)
    }

    /// The type in which values of this type are computed and accumulated: [`Element::Acc`]. Integers are their own.
    pub const fn accumulator(self) -> DType {
        match self {
            DType::BF16 | DType::F16 => DType::F32,
            same => same,
        }
    }

    /// Distance from 1 to the next larger number; 0 for integers. Test tolerances are multiples of it.
    pub const fn epsilon(self) -> f64 {
        match self {
            DType::F64 => f64::EPSILON,
            DType::F32 => f32::EPSILON as f64,
            DType::BF16 => 0.0078125,   // 2^-7
            DType::F16 => 0.0009765625, // 2^-10
            _ => 0.0,
        }
    }
}

impl From<DType> for ElementType {
    /// The element type for which GPU kernels are compiled.
    fn from(dtype: DType) -> ElementType {
        match dtype {
            DType::F64 => ElementType::F64,
            DType::F32 => ElementType::F32,
            DType::BF16 => ElementType::BF16,
            DType::F16 => ElementType::F16,
            DType::U8 => ElementType::U8,
            DType::U32 => ElementType::U32,
            DType::I64 => ElementType::I64,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::BF16 => "bf16",
            DType::F16 => "f16",
            DType::U8 => "u8",
            DType::U32 => "u32",
            DType::I64 => "i64",
        })
    }
}

impl std::str::FromStr for DType {
    type Err = crate::Error;

    fn from_str(name: &str) -> crate::Result<DType> {
        DType::ALL.into_iter().find(|dtype| dtype.to_string() == name).ok_or_else(|| {
            crate::Error::config(
                "dtype",
                format!("unknown dtype '{name}': use f64, f32, bf16, f16, u8, u32 or i64"),
            )
        })
    }
}

/// A type that tensors can hold.
pub trait Scalar: Pod + Send + Sync + PartialEq + PartialOrd + fmt::Debug + fmt::Display {
    /// The run-time name of this type.
    const DTYPE: DType;
}

/// A floating-point storage type with its accumulator type.
pub trait Element: Scalar {
    /// The type for reductions and arithmetic.
    type Acc: Real + Element<Acc = Self::Acc>;
    /// Widens to the accumulator type; exact.
    fn acc(self) -> Self::Acc;
    /// Rounds to nearest even for storage.
    fn from_acc(value: Self::Acc) -> Self;
}

/// An integer type that can index: token ids, targets, gather indices.
pub trait Index: Scalar {
    /// The index, or `None` if it is negative.
    fn index(self) -> Option<usize>;
}

macro_rules! scalar {
    ($($type:ty => $dtype:ident),*) => { $(impl Scalar for $type { const DTYPE: DType = DType::$dtype; })* };
}
scalar!(f64 => F64, f32 => F32, bf16 => BF16, f16 => F16, u8 => U8, u32 => U32, i64 => I64);

macro_rules! element {
    ($($type:ty, $acc:ty, $to:expr, $from:expr;)*) => { $(
        impl Element for $type {
            type Acc = $acc;
            #[inline(always)]
            fn acc(self) -> $acc { $to(self) }
            #[inline(always)]
            fn from_acc(value: $acc) -> Self { $from(value) }
        }
    )* };
}
element! {
    f64, f64, |x| x, |x| x;
    f32, f32, |x| x, |x| x;
    bf16, f32, bf16_to_f32, bf16_from_f32;
    f16, f32, f16_to_f32, f16_from_f32;
}

/// Exact. It omits the signalling-NaN branch of `bf16::to_f32`, which would prevent vectorization.
#[inline(always)]
fn bf16_to_f32(value: bf16) -> f32 {
    f32::from_bits(u32::from(value.to_bits()) << 16)
}

/// Rounds to nearest even without a branch: adds half of the discarded unit, minus one if the kept bits are even.
/// A NaN keeps its upper half and becomes quiet.
#[inline(always)]
fn bf16_from_f32(value: f32) -> bf16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    bf16::from_bits(if value.is_nan() { quiet } else { rounded } as u16)
}

/// Widens without a branch, so that loops vectorize; `f16::to_f32` queries CPU features for every element.
/// Scaling by 2^112 moves the exponent bias from 15 to 127, also for subnormals.
#[inline(always)]
fn f16_to_f32(value: f16) -> f32 {
    let bits = u32::from(value.to_bits());
    let magnitude = (bits & 0x7FFF) << 13;
    let scaled = f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23);
    let special = f32::from_bits(magnitude | 0x7F80_0000); // infinity or NaN
    let finite = (bits & 0x7C00) != 0x7C00;
    let magnitude = if finite { scaled.to_bits() } else { special.to_bits() };
    f32::from_bits(magnitude | (bits & 0x8000) << 16)
}

/// Rounds to nearest even without a branch.
#[inline(always)]
fn f16_from_f32(value: f32) -> f16 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7FFF_FFFF;
    // Normal results: rebias the exponent, then round away the low 13 bits to even by an addition.
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xFFF + odd) >> 13;
    // Results below 2^-14: adding 0.5 leaves them, rounded to even, in the sum's low bits.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
    let rounded = if magnitude < (113 << 23) { subnormal } else { normal };
    // 65520 and more round to infinity; NaN stays NaN.
    let rounded = if magnitude >= 0x477F_F000 { 0x7C00 } else { rounded };
    let rounded = if magnitude > 0x7F80_0000 { 0x7E00 } else { rounded };
    f16::from_bits((rounded | (bits >> 16 & 0x8000)) as u16)
}

macro_rules! index {
    ($($type:ty),*) => { $(impl Index for $type {
        #[inline(always)]
        fn index(self) -> Option<usize> { usize::try_from(self).ok() }
    })* };
}
index!(u8, u32, i64);

/// Runs a generic body with `$T` bound to the [`Element`] of a run-time float dtype; other dtypes return an error of
/// `$op`.
#[macro_export]
macro_rules! dispatch_float {
    ($op:expr, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F64 => {
                type $T = f64;
                $body
            }
            $crate::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::DType::BF16 => {
                type $T = $crate::bf16;
                $body
            }
            $crate::DType::F16 => {
                type $T = $crate::f16;
                $body
            }
            other => {
                return Err($crate::Error::dtype(
                    $op,
                    format!("takes floating-point tensors, got {other}"),
                ))
            }
        }
    };
}

/// Runs a generic body with `$T` bound to the [`Index`] type of a run-time integer dtype.
#[macro_export]
macro_rules! dispatch_index {
    ($op:expr, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::DType::U8 => {
                type $T = u8;
                $body
            }
            $crate::DType::U32 => {
                type $T = u32;
                $body
            }
            $crate::DType::I64 => {
                type $T = i64;
                $body
            }
            other => {
                return Err($crate::Error::dtype($op, format!("takes integer indices, got {other}")))
            }
        }
    };
}

/// Runs a generic body with `$T` bound to the [`Scalar`] of any dtype.
#[macro_export]
macro_rules! dispatch_any {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            $crate::DType::F64 => {
                type $T = f64;
                $body
            }
            $crate::DType::F32 => {
                type $T = f32;
                $body
            }
            $crate::DType::BF16 => {
                type $T = $crate::bf16;
                $body
            }
            $crate::DType::F16 => {
                type $T = $crate::f16;
                $body
            }
            $crate::DType::U8 => {
                type $T = u8;
                $body
            }
            $crate::DType::U32 => {
                type $T = u32;
                $body
            }
            $crate::DType::I64 => {
                type $T = i64;
                $body
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_conversions_equal_those_of_the_half_crate() {
        for high in 0..=u16::MAX {
            let x = bf16::from_bits(high);
            assert!(x.is_nan() || bf16_to_f32(x).to_bits() == x.to_f32_const().to_bits());
            for low in [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                let (got, want) = (bf16_from_f32(x), bf16::from_f32_const(x));
                assert_eq!(got.to_bits(), want.to_bits(), "{x:e}");
            }
        }
    }

    #[test]
    fn f16_conversions_equal_those_of_the_half_crate() {
        for bits in 0..=u16::MAX {
            let value = f16::from_bits(bits);
            let (got, want) = (f16_to_f32(value), value.to_f32_const());
            assert!(
                got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()),
                "{bits:#x}"
            );
            // The value itself, its neighbours in f32, and the midpoint to the next f16.
            for half in [0, 0x1000] {
                for step in [-1_i32, 0, 1] {
                    let near = f32::from_bits(want.to_bits().wrapping_add_signed(half + step));
                    let (got, want) = (f16_from_f32(near), f16::from_f32_const(near));
                    let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
                    assert!(same, "{near:e}: got {got}, want {want}");
                }
            }
        }
        for i in 0..=u16::MAX {
            let value = f32::from_bits(u32::from(i) << 16 | 0x9ABC);
            let (got, want) = (f16_from_f32(value), f16::from_f32_const(value));
            assert!(
                got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()),
                "{value:e}"
            );
        }
    }
}
