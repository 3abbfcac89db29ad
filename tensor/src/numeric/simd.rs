//! Compiles one kernel source for several instruction sets and dispatches at run time.
//!
//! The default x86-64 target assumes SSE2 only. [`vectorized!`] compiles a function three times (for the target, for
//! AVX2 and for AVX-512) and calls the best one for the machine. The compiler vectorizes the loops. The variants
//! differ in speed, never in the order of operations.

use std::sync::atomic::{AtomicU8, Ordering};

/// Prepends the CPU features of [`SimdLevel::Avx2`] to a macro's arguments. This list and the next serve compilation
/// and detection, of these kernels and of matrix products.
#[cfg(target_arch = "x86_64")]
macro_rules! with_avx2 {
    ($then:ident! $($rest:tt)*) => {
        $crate::numeric::simd::$then! {
            ["avx2" "fma" "f16c" "bmi1" "bmi2" "lzcnt" "popcnt" "movbe"] $($rest)*
        }
    };
}

/// Like [`with_avx2!`] for [`SimdLevel::Avx512`].
#[cfg(target_arch = "x86_64")]
macro_rules! with_avx512 {
    ($then:ident! $($rest:tt)*) => {
        $crate::numeric::simd::$then! {
            ["avx512f" "avx512bw" "avx512cd" "avx512dq" "avx512vl"
             "avx2" "fma" "f16c" "bmi1" "bmi2" "lzcnt" "popcnt" "movbe"] $($rest)*
        }
    };
}

/// Like [`with_avx512!`] with AVX512-BF16, for kernels that multiply bf16 numbers.
#[cfg(target_arch = "x86_64")]
macro_rules! with_avx512_bf16 {
    ($then:ident! $($rest:tt)*) => {
        $crate::numeric::simd::$then! {
            ["avx512bf16" "avx512f" "avx512bw" "avx512cd" "avx512dq" "avx512vl"
             "avx2" "fma" "f16c" "bmi1" "bmi2" "lzcnt" "popcnt" "movbe"] $($rest)*
        }
    };
}

/// Like [`with_avx2!`] for [`SimdLevel::Portable`]: no features.
macro_rules! with_portable {
    ($then:ident! $($rest:tt)*) => { $($rest)* };
}

/// Tests whether the machine has all of the features.
#[cfg(target_arch = "x86_64")]
macro_rules! detected {
    ([$($feature:tt)*]) => { true $(&& is_x86_feature_detected!($feature))* };
}

/// Compiles a function with the features enabled.
#[cfg(target_arch = "x86_64")]
macro_rules! enabled {
    ([$($feature:tt)*] $($function:tt)*) => {
        #[target_feature($(enable = $feature),*)]
        $($function)*
    };
}
pub(crate) use with_portable;
#[cfg(target_arch = "x86_64")]
pub(crate) use {detected, enabled, with_avx2, with_avx512, with_avx512_bf16};

/// Instruction sets for which kernels are compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SimdLevel {
    /// The instructions that the compilation target guarantees.
    Portable,
    /// AVX2, FMA and F16C (x86-64-v3).
    Avx2,
    /// AVX-512 F, BW, CD, DQ and VL (x86-64-v4).
    Avx512,
}

/// The level to use plus one, once it is known: kernels ask for it in each call.
static DETECTED: AtomicU8 = AtomicU8::new(0);

impl SimdLevel {
    /// The best level of this machine.
    #[inline]
    pub fn detect() -> SimdLevel {
        match DETECTED.load(Ordering::Relaxed) {
            1 => SimdLevel::Portable,
            2 => SimdLevel::Avx2,
            3 => SimdLevel::Avx512,
            _ => SimdLevel::look(),
        }
    }

    /// Uses no better level from now on, which this machine must have.
    pub(crate) fn limit(level: SimdLevel) {
        DETECTED.store(level as u8 + 1, Ordering::Relaxed);
    }

    #[cold]
    fn look() -> SimdLevel {
        #[cfg(target_arch = "x86_64")]
        let level = match (with_avx512!(detected!), with_avx2!(detected!)) {
            (true, _) => SimdLevel::Avx512,
            (false, true) => SimdLevel::Avx2,
            (false, false) => SimdLevel::Portable,
        };
        #[cfg(not(target_arch = "x86_64"))]
        let level = SimdLevel::Portable;
        DETECTED.store(level as u8 + 1, Ordering::Relaxed);
        level
    }
}

/// Defines functions that are compiled for every [`SimdLevel`] and dispatched at run time.
macro_rules! vectorized {
    ($(
        $(#[$meta:meta])*
        $vis:vis fn $name:ident < $($generic:ident : $bound:path),* > ( $($arg:ident : $type:ty),* $(,)? ) $(-> $ret:ty)? $body:block
    )*) => { $(
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name<$($generic: $bound),*>($($arg: $type),*) $(-> $ret)? {
            #[inline(always)]
            fn body<$($generic: $bound),*>($($arg: $type),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                $crate::numeric::simd::with_avx2! { enabled!
                    fn avx2<$($generic: $bound),*>($($arg: $type),*) $(-> $ret)? { body::<$($generic),*>($($arg),*) }
                }
                $crate::numeric::simd::with_avx512! { enabled!
                    fn avx512<$($generic: $bound),*>($($arg: $type),*) $(-> $ret)? { body::<$($generic),*>($($arg),*) }
                }
                match $crate::numeric::simd::SimdLevel::detect() {
                    // SAFETY: the machine has these features.
                    $crate::numeric::simd::SimdLevel::Avx512 => return unsafe { avx512::<$($generic),*>($($arg),*) },
                    // SAFETY: as above.
                    $crate::numeric::simd::SimdLevel::Avx2 => return unsafe { avx2::<$($generic),*>($($arg),*) },
                    $crate::numeric::simd::SimdLevel::Portable => {}
                }
            }
            body::<$($generic),*>($($arg),*)
        }
    )* };
}
pub(crate) use vectorized;

#[cfg(test)]
mod tests {
    use super::SimdLevel;

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn a_level_is_chosen_only_where_all_its_features_are() {
        let (avx2, avx512) = (with_avx2!(detected!), with_avx512!(detected!));
        assert_eq!(SimdLevel::detect() >= SimdLevel::Avx2, avx2);
        assert_eq!(SimdLevel::detect() == SimdLevel::Avx512, avx512);
        // The AVX-512 list must contain the AVX2 features, since AVX-512 code uses them.
        assert!(avx2 || !avx512);
    }
}
