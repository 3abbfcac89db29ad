//! Accumulator arithmetic: f32 and f64 behind one trait.
//!
//! The f32 exponential and hyperbolic tangent are branch-free polynomials, so that loops vectorize; the f64 ones are
//! the standard library's.

use super::fours::by_registers;
use super::simd::vectorized;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m128, __m128d, _mm_add_pd, _mm_add_ps, _mm_max_pd, _mm_max_ps};
use std::ops::{Add, AddAssign, Div, DivAssign, Mul, MulAssign, Neg, Sub, SubAssign};

/// Real arithmetic in f32 or f64.
pub trait Real:
    Copy
    + Send
    + Sync
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
    + DivAssign
    + std::iter::Sum
    + 'static
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// Minus infinity, the neutral element of a maximum.
    const NEG_INFINITY: Self;
    /// The nearest representable value.
    fn from_f64(value: f64) -> Self;
    /// Exact.
    fn from_u16(value: u16) -> Self;
    /// Widens; exact.
    fn f64(self) -> f64;
    /// e^self.
    fn exp(self) -> Self;
    /// e^self of a number of at most 88, or NaN: [`Real::exp`] without the bound above, beyond which f32 gives any number.
    #[inline(always)]
    fn exp_bounded(self) -> Self {
        self.exp()
    }
    /// 2^self. In f32 at least 2^-126; infinity from 128 on, and any number for NaN.
    fn exp2(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// Hyperbolic tangent.
    fn tanh(self) -> Self;
    /// The error function.
    fn erf(self) -> Self;
    /// self^exponent.
    fn powf(self, exponent: Self) -> Self;
    /// Sine.
    fn sin(self) -> Self;
    /// Cosine.
    fn cos(self) -> Self;
    /// ln(1 + self), exact near 0.
    fn ln_1p(self) -> Self;
    /// e^self - 1, exact near 0.
    fn exp_m1(self) -> Self;
    /// Magnitude.
    fn abs(self) -> Self;
    /// The larger of two; `other` if `self` is NaN.
    fn max(self, other: Self) -> Self;
    /// The smaller of two; `other` if `self` is NaN.
    fn min(self, other: Self) -> Self;
    /// self * factor + addend, rounded once. Without an instruction for it the library computes it, slowly.
    fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// Returns whether the value is neither infinite nor NaN.
    fn is_finite(self) -> bool;
    /// The sums of four pairs.
    #[inline(always)]
    fn add_fours(a: [Self; 4], b: [Self; 4]) -> [Self; 4] {
        std::array::from_fn(|i| a[i] + b[i])
    }
    /// [`Real::max`] of four pairs.
    #[inline(always)]
    fn max_fours(a: [Self; 4], b: [Self; 4]) -> [Self; 4] {
        std::array::from_fn(|i| a[i].max(b[i]))
    }
    /// 1 / (1 + e^-self).
    #[inline(always)]
    fn sigmoid(self) -> Self {
        Self::ONE / (Self::ONE + (-self).exp())
    }
}

macro_rules! common {
    ($type:ident) => {
        const ZERO: Self = 0.0;
        const ONE: Self = 1.0;
        const NEG_INFINITY: Self = $type::NEG_INFINITY;
        #[inline(always)]
        fn from_f64(value: f64) -> Self {
            value as $type
        }
        #[inline(always)]
        fn from_u16(value: u16) -> Self {
            value.into()
        }
        #[inline(always)]
        fn f64(self) -> f64 {
            self as f64
        }
        #[inline(always)]
        fn ln(self) -> Self {
            $type::ln(self)
        }
        #[inline(always)]
        fn sqrt(self) -> Self {
            $type::sqrt(self)
        }
        #[inline(always)]
        fn powf(self, exponent: Self) -> Self {
            $type::powf(self, exponent)
        }
        #[inline(always)]
        fn sin(self) -> Self {
            $type::sin(self)
        }
        #[inline(always)]
        fn cos(self) -> Self {
            $type::cos(self)
        }
        #[inline(always)]
        fn ln_1p(self) -> Self {
            $type::ln_1p(self)
        }
        #[inline(always)]
        fn exp_m1(self) -> Self {
            $type::exp_m1(self)
        }
        #[inline(always)]
        fn abs(self) -> Self {
            $type::abs(self)
        }
        #[inline(always)]
        fn max(self, other: Self) -> Self {
            if self > other { self } else { other }
        }
        #[inline(always)]
        fn min(self, other: Self) -> Self {
            if self < other { self } else { other }
        }
        #[inline(always)]
        fn mul_add(self, factor: Self, addend: Self) -> Self {
            $type::mul_add(self, factor, addend)
        }
        #[inline(always)]
        fn is_finite(self) -> bool {
            $type::is_finite(self)
        }
    };
}

impl Real for f64 {
    common!(f64);
    by_registers!([__m128d; 2], _mm_add_pd, _mm_max_pd);
    #[inline(always)]
    fn exp(self) -> Self {
        f64::exp(self)
    }
    #[inline(always)]
    fn exp2(self) -> Self {
        f64::exp2(self)
    }
    #[inline(always)]
    fn tanh(self) -> Self {
        f64::tanh(self)
    }
    #[inline(always)]
    fn erf(self) -> Self {
        libm::erf(self)
    }
}

/// Adding and subtracting 1.5 * 2^23 rounds to an integer without a branch.
const ROUND: f32 = 12_582_912.0;

/// The least exponent of e with a normal result.
const LEAST_EXPONENT: f32 = -87.336_54;

/// e^r and n + [`ROUND`] with x = n ln 2 + r.
///
/// n = round(x / ln 2), |r| <= ln(2)/2, and the polynomial of degree 6 for e^r with p(0) = p'(0) = 1 whose largest relative
/// error, 3e-9, is least. Fused multiply-adds and pairs of terms (Estrin's scheme) keep the chain of dependent instructions
/// short: a loop over long chains fills the processor's queues, and its units wait.
#[inline(always)]
fn reduced_exp(x: f32) -> (f32, f32) {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const C2: f32 = 0.499_999_94;
    const C3: f32 = 0.166_665_2;
    const C4: f32 = 0.041_668_393;
    const C5: f32 = 0.008_368_781;
    const C6: f32 = 0.001_381_446_7;
    let shifted = f32::mul_add(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = f32::mul_add(n, -LN2_LOW, f32::mul_add(n, -LN2_HIGH, x));
    let square = r * r;
    let highest = f32::mul_add(C6, square, f32::mul_add(r, C5, C4));
    let high = f32::mul_add(highest, square, f32::mul_add(r, C3, C2));
    (f32::mul_add(high, square, r + 1.0), shifted)
}

impl Real for f32 {
    common!(f32);
    by_registers!([__m128; 1], _mm_add_ps, _mm_max_ps);

    /// Exponential within 1.3 ulp on [-87.3, 88.7]; 0 below and infinity above.
    #[inline(always)]
    fn exp(self) -> Self {
        let (e, shifted) = reduced_exp(self);
        // The low bits of the shifted value are n, and the others are shifted out: this adds n to the exponent. Between
        // the bounds, where the result is normal, that is exact; outside, the bits are arbitrary and not used.
        let y = f32::from_bits(e.to_bits().wrapping_add(shifted.to_bits() << 23));
        let y = if self < LEAST_EXPONENT { 0.0 } else { y };
        // Infinity above, and NaN for NaN.
        if self <= 88.722_83 { y } else { self * f32::INFINITY }
    }

    /// The bits of [`Real::exp`] up to 88, with two instructions less.
    #[inline(always)]
    fn exp_bounded(self) -> Self {
        let (e, shifted) = reduced_exp(self);
        // The product with 2^n keeps NaN, whose payload an addition to the bits could carry into the exponent.
        let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0_f32.to_bits()));
        if self < LEAST_EXPONENT { 0.0 } else { e * power }
    }

    /// Within 1.3 ulp on [-126, 128).
    ///
    /// 2^x = 2^n 2^r with n = round(x), |r| <= 1/2, r exact, and the polynomial of degree 6 for 2^r with p(0) = 1 whose
    /// largest relative error, 1.5e-8, is least. At the bounds r is 0, so that 2^128 becomes infinity without a branch.
    #[inline(always)]
    fn exp2(self) -> Self {
        const C1: f32 = std::f32::consts::LN_2;
        const C2: f32 = 0.240_226_5;
        const C3: f32 = 0.055_503_71;
        const C4: f32 = 0.009_619_343;
        const C5: f32 = 0.001_338_337_9;
        const C6: f32 = 0.000_149_916_14;
        let x = Real::max(-126.0, Real::min(128.0, self));
        let shifted = x + ROUND;
        let r = x - (shifted - ROUND);
        let square = r * r;
        let highest = f32::mul_add(C6, square, f32::mul_add(r, C5, C4));
        let high = f32::mul_add(highest, square, f32::mul_add(r, C3, C2));
        let e = f32::mul_add(high, square, f32::mul_add(r, C1, 1.0));
        f32::from_bits(e.to_bits().wrapping_add(shifted.to_bits() << 23))
    }

    /// Hyperbolic tangent within 2 ulp: an odd polynomial below 0.625 (coefficients: Cephes `tanhf`), else computed from
    /// the exponential.
    #[inline(always)]
    fn tanh(self) -> Self {
        let z = self * self;
        let mut p = -5.704_988_7e-3_f32;
        p = p * z + 2.063_909e-2;
        p = p * z - 5.373_971_4e-2;
        p = p * z + 1.333_144_2e-1;
        p = p * z - 3.333_328e-1;
        let small = p * z * self + self;
        let e = Real::exp(2.0 * f32::abs(self));
        let large = (1.0 - 2.0 / (e + 1.0)).copysign(self);
        if f32::abs(self) < 0.625 { small } else { large }
    }

    #[inline(always)]
    fn erf(self) -> Self {
        libm::erff(self)
    }
}

vectorized! {
    /// x\[i\] += y\[i\].
    pub(crate) fn add<A: Real>(x: &mut [A], y: &[A]) {
        for (x, &y) in x.iter_mut().zip(y) {
            *x += y;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Real;

    fn ulps(got: f32, want: f64) -> f64 {
        let ulp = f64::from(f32::EPSILON) * want.abs().max(f64::from(f32::MIN_POSITIVE));
        (f64::from(got) - want).abs() / ulp
    }

    #[test]
    fn the_f32_exponential_is_within_1_3_ulp_and_saturates() {
        for i in -870_000..880_000 {
            let x = i as f32 / 10_000.0;
            let want = f64::from(x).exp();
            // The ulp of numbers between powers of two; all are normal here.
            let ulp = want.log2().floor().exp2() * f64::from(f32::EPSILON);
            let error = (f64::from(Real::exp(x)) - want).abs();
            assert!(error < 1.3 * ulp, "exp({x}): got {}, want {want}", Real::exp(x));
        }
        assert_eq!(Real::exp(0.0_f32), 1.0);
        assert_eq!(Real::exp(-200.0_f32), 0.0);
        assert_eq!(Real::exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(Real::exp(100.0_f32), f32::INFINITY);
        assert!(Real::exp(f32::NAN).is_nan());
    }

    #[test]
    fn the_bounded_exponential_has_the_bits_of_the_exponential() {
        for i in -900_000..=880_000 {
            let x = i as f32 / 10_000.0;
            let (got, want) = (Real::exp_bounded(x), Real::exp(x));
            assert_eq!(got.to_bits(), want.to_bits(), "exp({x}): got {got}, want {want}");
        }
        assert_eq!(Real::exp_bounded(f32::NEG_INFINITY), 0.0);
        for bits in [0x7FC0_0000, 0xFFC0_0000, 0x7FC0_0001, 0xFFFF_FFFF_u32] {
            assert!(Real::exp_bounded(f32::from_bits(bits)).is_nan(), "{bits:x}");
        }
        assert_eq!(Real::exp_bounded(-3.0_f64), (-3.0_f64).exp());
    }

    #[test]
    fn the_f32_power_of_two_is_within_1_3_ulp_and_saturates() {
        for i in -1_260_000..1_280_000 {
            let x = i as f32 / 10_000.0;
            let want = f64::from(x).exp2();
            let ulp = f64::from(x).floor().exp2() * f64::from(f32::EPSILON);
            let error = (f64::from(Real::exp2(x)) - want).abs();
            assert!(error < 1.3 * ulp, "2^{x}: got {}, want {want}", Real::exp2(x));
        }
        for n in -126_i32..128 {
            assert_eq!(Real::exp2(n as f32), 2.0_f32.powi(n));
        }
        for (x, want) in [(-1e9, f32::MIN_POSITIVE), (f32::NEG_INFINITY, f32::MIN_POSITIVE)] {
            assert_eq!(Real::exp2(x), want);
        }
        for x in [128.0, 1e9, f32::INFINITY] {
            assert_eq!(Real::exp2(x), f32::INFINITY);
        }
    }

    #[test]
    fn the_f32_tangent_is_within_two_ulp() {
        for i in -12_000..12_000 {
            let x = i as f32 / 1000.0;
            let want = f64::from(x).tanh();
            assert!(
                ulps(Real::tanh(x), want) < 2.5,
                "tanh({x}): got {}, want {want}",
                Real::tanh(x)
            );
        }
        assert_eq!(Real::tanh(f32::INFINITY), 1.0);
        assert!(Real::tanh(f32::NAN).is_nan());
    }
}
