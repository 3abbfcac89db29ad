//! Joins the lanes of a sum or a maximum into one number.
//!
//! They are joined by fours: one or two registers of 128 bits, which every x86-64 processor has. The compiler makes pairs of
//! lanes from loops over single ones, with five times as many instructions.

use super::real::Real;

/// `f` of all lanes, a power of two: of the first half with the second, until one is left.
#[inline(always)]
pub(crate) fn fold_lanes<L: Copy>(lanes: &mut [L], f: impl Fn(L, L) -> L) -> L {
    debug_assert!(lanes.len().is_power_of_two());
    let mut half = lanes.len() / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] = f(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    lanes[0]
}

/// The sum of all lanes, in the order of [`fold_lanes`]. Their number is a power of two, at least four.
#[inline(always)]
pub(crate) fn sum_lanes<A: Real, const N: usize>(lanes: [A; N]) -> A {
    join(lanes, A::add_fours)
}

/// The largest of all lanes. Their number is a power of two, at least four. NaN may be lost.
#[inline(always)]
pub(crate) fn max_lanes<A: Real, const N: usize>(lanes: [A; N]) -> A {
    join(lanes, A::max_fours)
}

#[inline(always)]
fn join<A: Real, const N: usize>(mut lanes: [A; N], f: impl Fn([A; 4], [A; 4]) -> [A; 4]) -> A {
    const { assert!(N.is_power_of_two() && N >= 4) };
    let (fours, _) = lanes.as_chunks_mut();
    let [a, b, c, d] = fold_lanes(fours, &f);
    let [even, odd, ..] = f([a, b, c, d], [c, d, c, d]);
    f([even; 4], [odd; 4])[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lanes whose sums depend on the order, because each is rounded.
    fn lanes<A: Real, const N: usize>() -> [A; N] {
        std::array::from_fn(|i| A::from_f64((i as f64 * 0.618_033_988_749).fract() - 0.3))
    }

    fn assert_same<A: Real>(got: A, want: A) {
        assert_eq!(got.f64().to_bits(), want.f64().to_bits());
    }

    fn check<A: Real, const N: usize>() {
        let add = |a: A, b: A| a + b;
        assert_same(sum_lanes(lanes::<A, N>()), fold_lanes(&mut lanes::<A, N>(), add));
        assert_same(sum_lanes([-A::ZERO; N]), -A::ZERO);
        for special in [7.0, f64::NAN, 0.0, -0.0, f64::INFINITY] {
            for place in 0..N {
                for mut lanes in [lanes::<A, N>(), [A::ZERO; N], [-A::ZERO; N]] {
                    lanes[place] = A::from_f64(special);
                    assert_same(max_lanes(lanes), fold_lanes(&mut lanes.clone(), Real::max));
                }
            }
        }
    }

    #[test]
    fn lanes_are_joined_in_halves() {
        check::<f32, 4>();
        check::<f32, 8>();
        check::<f32, 64>();
        check::<f64, 4>();
        check::<f64, 32>();
        assert_eq!(sum_lanes([1e8_f32, 1.0, -1e8, 1.0]), 2.0);
    }

    #[test]
    fn fours_treat_nan_and_signed_zeros_like_single_lanes() {
        let special = [0.0, -0.0, f64::NAN, 1.0, f64::NEG_INFINITY, f64::INFINITY];
        let same = |a: f64, b: f64| assert_eq!(a.to_bits(), b.to_bits());
        for a in special {
            for b in special {
                same(f64::max_fours([a; 4], [b; 4])[3], Real::max(a, b));
                let (a, b) = (a as f32, b as f32);
                same(f32::max_fours([a; 4], [b; 4])[3].into(), Real::max(a, b).into());
            }
        }
    }
}
