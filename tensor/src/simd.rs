//! One kernel text, compiled for several instruction sets and chosen at run time.
//!
//! The default x86-64 target knows SSE2 only. [`vectorized!`] compiles a function three times (as it
//! is, for AVX2 and for AVX-512) and calls the best the machine has; the compiler vectorises the loops.
//! The three differ in speed, never in the order of operations.

/// Instruction sets that kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SimdLevel {
    /// What the target guarantees.
    Portable,
    /// AVX2, FMA and F16C (x86-64-v3).
    Avx2,
    /// AVX-512 F, BW, CD, DQ and VL (x86-64-v4).
    Avx512,
}

impl SimdLevel {
    /// The best level of this machine; the standard library caches the answer.
    #[inline]
    pub fn detect() -> SimdLevel {
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512cd")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
            {
                return SimdLevel::Avx512;
            }
            if is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
            {
                return SimdLevel::Avx2;
            }
        }
        SimdLevel::Portable
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
                #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt,movbe")]
                fn avx2<$($generic: $bound),*>($($arg: $type),*) $(-> $ret)? { body::<$($generic),*>($($arg),*) }
                #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,fma,f16c,bmi1,bmi2,lzcnt,popcnt,movbe")]
                fn avx512<$($generic: $bound),*>($($arg: $type),*) $(-> $ret)? { body::<$($generic),*>($($arg),*) }
                match $crate::simd::SimdLevel::detect() {
                    // SAFETY: the machine has just been found to have these features.
                    $crate::simd::SimdLevel::Avx512 => return unsafe { avx512::<$($generic),*>($($arg),*) },
                    // SAFETY: as above.
                    $crate::simd::SimdLevel::Avx2 => return unsafe { avx2::<$($generic),*>($($arg),*) },
                    $crate::simd::SimdLevel::Portable => {}
                }
            }
            body::<$($generic),*>($($arg),*)
        }
    )* };
}
pub(crate) use vectorized;
