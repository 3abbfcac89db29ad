//! Rounds numbers up or down at random.
//!
//! - bf16 is the upper half of f32: 16 random bits are added to the half that is discarded, and a carry leads to the next
//!   number.
//! - f16: 32 random bits, as a number on [0, 1), are compared with the fraction of the distance to the other neighbour.

use crate::numeric::simd::vectorized;
use crate::ops::random::{for_halves, for_numbers};
use crate::{DType, Element, RandomKey, Real, bf16};

/// Rounds at random, from global element `first` on.
pub(super) fn at_random<T: Element, S: Element<Acc = T::Acc>>(
    key: &RandomKey,
    first: u64,
    target: &mut [T],
    source: &[S],
) {
    match T::DTYPE {
        DType::BF16 => by_halves(key, first, bytemuck::cast_slice_mut(target), source),
        _ => by_shares(key, first, target, source),
    }
}

vectorized! {
    fn by_halves<S: Element>(key: &RandomKey, first: u64, target: &mut [bf16], source: &[S]) {
        for_halves(key, first, source.len(), |at, numbers| {
            for ((target, x), &bits) in target[at..].iter_mut().zip(&source[at..]).zip(numbers) {
                *target = carried(x.acc().f64() as f32, bits);
            }
        });
    }

    fn by_shares<T: Element, S: Element<Acc = T::Acc>>(key: &RandomKey, first: u64, target: &mut [T], source: &[S]) {
        for_numbers(key, first, source.len(), |at, numbers| {
            for ((target, x), &bits) in target[at..].iter_mut().zip(&source[at..]).zip(numbers) {
                *target = up_or_down(x.acc(), bits);
            }
        });
    }
}

/// The neighbour of `x` towards zero, or the other one if the 16 bits that are discarded and `random` add up to a carry: as
/// many of all random bits do as the discarded bits say.
#[inline(always)]
pub(super) fn carried(x: f32, random: u16) -> bf16 {
    const LARGEST: u32 = 0x7F7F_0000; // of bf16
    let bits = x.to_bits();
    let has_neighbours = bits & 0x7FFF_FFFF < LARGEST;
    // From the largest on, half of the unit rounds to nearest. A NaN keeps its upper half and becomes quiet.
    let sum = bits.wrapping_add(if has_neighbours { random.into() } else { 0x8000 });
    let rounded = if x.is_nan() { bits >> 16 | 0x40 } else { sum >> 16 };
    bf16::from_bits(rounded as u16)
}

/// The nearest number, or its neighbour on the other side of `x`. The neighbour is taken if the uniform number bits /
/// 2^32 is below the fraction of the distance to it.
#[inline(always)]
fn up_or_down<T: Element>(x: T::Acc, bits: u32) -> T {
    let nearest = T::from_acc(x);
    let error = x - nearest.acc();
    let neighbour = neighbour(nearest, error > T::Acc::ZERO);
    let share = error / (neighbour.acc() - nearest.acc());
    // bits < 2^32 share, without numbers wider than the accumulator type: the difference to the upper half of the bits
    // is exact wherever it lies within the range of the lower half. Comparison with NaN, from x or from an infinite
    // distance, is false.
    let (high, low) = (T::Acc::from_u16((bits >> 16) as u16), T::Acc::from_u16(bits as u16));
    let scaled = share * T::Acc::from_f64(4_294_967_296.0);
    if low < high.mul_add(T::Acc::from_f64(-65_536.0), scaled) { neighbour } else { nearest }
}

/// The next representable number above or below: numbers of one sign are ordered by their bits.
#[inline(always)]
pub(super) fn neighbour<T: Element>(x: T, above: bool) -> T {
    macro_rules! next {
        ($Bits:ty) => {{
            let mut bytes = [0; size_of::<$Bits>()];
            bytes[..size_of::<T>()].copy_from_slice(bytemuck::bytes_of(&x));
            let bits = <$Bits>::from_le_bytes(bytes);
            let sign: $Bits = 1 << (8 * size_of::<T>() - 1);
            let step: $Bits = if (bits & sign != 0) == above { <$Bits>::MAX } else { 1 };
            // Beside zero is the smallest number of the sign.
            let least = (<$Bits>::from(!above) * sign) | 1;
            let next = if bits & !sign == 0 { least } else { bits.wrapping_add(step) };
            bytemuck::pod_read_unaligned(&next.to_le_bytes()[..size_of::<T>()])
        }};
    }
    match size_of::<T>() {
        8 => next!(u64),
        _ => next!(u32),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::f16;

    #[test]
    fn as_many_random_bits_carry_as_the_discarded_bits_say() {
        for bits in [0x3F80_0000, 0xBF80_0001, 0x4049_0FDB, 0x0000_1234, 0x8000_FFFF, 0x7F7E_8000] {
            let towards_zero = bf16::from_bits((bits >> 16) as u16);
            let away = bf16::from_bits((bits >> 16) as u16 + 1);
            let all = (0..=u16::MAX).map(|random| carried(f32::from_bits(bits), random));
            let (mut up, mut down) = (0, 0);
            all.for_each(|y| *if y == away { &mut up } else { &mut down } += 1);
            assert_eq!((up, down), (bits & 0xFFFF, 0x1_0000 - (bits & 0xFFFF)), "{bits:x}");
            assert_eq!(carried(f32::from_bits(bits), 0), towards_zero, "{bits:x}");
        }
    }

    #[test]
    fn the_neighbour_is_taken_where_the_uniform_number_is_below_the_share() {
        let mut state = 1_u64;
        for i in 0..300_000_u64 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let x = f32::from_bits((state >> 32) as u32);
            let nearest = f16::from_acc(x);
            let neighbour = neighbour(nearest, x > nearest.acc());
            let share = (x - nearest.acc()) / (neighbour.acc() - nearest.acc());
            // Any bits, few bits, and those beside the share.
            let beside = (f64::from(share) * 4_294_967_296.0) as i64 + (i % 3) as i64 - 1;
            let any = (state >> 7) as u32;
            for bits in [any, any >> (i % 32), beside as u32] {
                let below = f64::from(bits) / 4_294_967_296.0 < f64::from(share);
                let want = if below { neighbour } else { nearest };
                let got = up_or_down::<f16>(x, bits);
                let same = bytemuck::bytes_of(&got) == bytemuck::bytes_of(&want);
                assert!(same, "{x:e} with {bits}: {got}, want {want}");
            }
        }
    }
}
