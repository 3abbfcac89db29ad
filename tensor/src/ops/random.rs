//! Random tensors without generator state: an element is a function of the key and its index in the global, unsharded
//! tensor. Every sharding and every number of threads draws the same numbers.
//!
//! - uniform: low + (high - low) u, u = bits / 2^32.
//! - normal: mean + std z, two z from two numbers by Box and Muller.
//!
//! Computed in f64, then rounded to the dtype. Constants: they have no gradient.

use super::rows::for_rows;
use crate::cuda;
use crate::numeric::philox::box_muller;
use crate::numeric::simd::vectorized;
use crate::{
    DType, Device, Element, Error, RandomKey, Real, Result, ShardSpec, Tensor, dispatch_float,
};
use std::ops::Range;

/// Philox blocks that are drawn together, one per lane.
const LANES: usize = 16;
/// Numbers per group of blocks.
const GROUP: usize = 4 * LANES;

/// The numbers of `LANES` consecutive blocks, drawn in a loop that vectorizes.
#[inline(always)]
fn draw(key: &RandomKey, first_block: u64) -> [u32; GROUP] {
    let mut pairs = [0; GROUP / 2];
    for lane in 0..LANES {
        let [first, second] = key.pairs(first_block.wrapping_add(lane as u64));
        (pairs[2 * lane], pairs[2 * lane + 1]) = (first, second);
    }
    #[cfg(target_endian = "big")]
    compile_error!("the halves of a pair lie in memory in their order");
    bytemuck::cast(pairs)
}

/// Calls `f(offset in out, numbers)` for the elements from global index `first` on; `make` converts the bits of a
/// group to numbers, in order.
#[inline(always)]
fn for_groups<N: Copy, const COUNT: usize>(
    key: &RandomKey,
    first: u64,
    len: usize,
    make: impl Fn([u32; GROUP]) -> [N; COUNT],
    mut f: impl FnMut(usize, &[N]),
) {
    let of_block = COUNT / LANES;
    let mut done = 0;
    let mut skip = (first % of_block as u64) as usize;
    let mut block = first / of_block as u64;
    while done < len {
        let numbers = make(draw(key, block));
        let take = (COUNT - skip).min(len - done);
        f(done, &numbers[skip..skip + take]);
        done += take;
        skip = 0;
        block += LANES as u64;
    }
}

/// Calls `f(offset in out, bits)` for the elements from global index `first` on.
#[inline(always)]
pub(crate) fn for_numbers(key: &RandomKey, first: u64, len: usize, f: impl FnMut(usize, &[u32])) {
    for_groups(key, first, len, |bits| bits, f);
}

/// Like [`for_numbers`] for 16 bits an element, those of [`RandomKey::half`].
#[inline(always)]
pub(crate) fn for_halves(key: &RandomKey, first: u64, len: usize, f: impl FnMut(usize, &[u16])) {
    for_groups::<u16, { 2 * GROUP }>(key, first, len, bytemuck::cast, f);
}

#[inline(always)]
fn uniforms(bits: [u32; GROUP]) -> [f64; GROUP] {
    bits.map(|bits| f64::from(bits) * (1.0 / 4_294_967_296.0))
}

#[inline(always)]
fn normals(bits: [u32; GROUP]) -> [f64; GROUP] {
    let mut out = [0.0; GROUP];
    for i in 0..GROUP / 2 {
        (out[2 * i], out[2 * i + 1]) = box_muller(bits[2 * i], bits[2 * i + 1]);
    }
    out
}

/// The largest bits that dropout with probability `p` > 0 drops. An element is kept if its uniform number, bits / 2^32,
/// is at least `p`. Exact, since multiplication by a power of 2 is.
pub(crate) fn last_dropped(p: f64) -> u32 {
    ((p * 4_294_967_296.0).ceil() - 1.0) as u32
}

vectorized! {
    fn fill_uniform<T: Element>(key: &RandomKey, first: u64, out: &mut [T], low: f64, width: f64) {
        for_groups(key, first, out.len(), uniforms, |at, numbers| {
            for (out, u) in out[at..].iter_mut().zip(numbers) {
                *out = T::from_acc(Real::from_f64(low + width * u));
            }
        });
    }

    fn fill_normal<T: Element>(key: &RandomKey, first: u64, out: &mut [T], mean: f64, std: f64) {
        for_groups(key, first, out.len(), normals, |at, numbers| {
            for (out, z) in out[at..].iter_mut().zip(numbers) {
                *out = T::from_acc(Real::from_f64(mean + std * z));
            }
        });
    }

    /// y = x * scale if the element's bits exceed `last_dropped`, else 0.
    pub(crate) fn keep_some<T: Element>(key: &RandomKey, first: u64, x: &[T], y: &mut [T], last_dropped: u32, scale: T::Acc) {
        for_numbers(key, first, x.len(), |at, numbers| {
            for ((y, x), bits) in y[at..].iter_mut().zip(&x[at..]).zip(numbers) {
                let kept = if *bits > last_dropped { x.acc() * scale } else { T::Acc::ZERO };
                *y = T::from_acc(kept);
            }
        });
    }
}

/// Splits `rows` rows of a contiguous local tensor, from `first_row` on, into maximal ranges of consecutive global
/// indices. Calls `f(global index, local range)` for each.
pub(crate) fn for_stretches(
    place: &ShardSpec,
    first_row: usize,
    rows: usize,
    mut f: impl FnMut(u64, Range<usize>),
) {
    let (mut start, mut range) = (0, 0..0);
    for row in first_row..first_row + rows {
        for (global, len) in place.runs(row) {
            if start + range.len() as u64 == global {
                range.end += len;
                continue;
            }
            if !range.is_empty() {
                f(start, range.clone());
            }
            (start, range) = (global, range.end..range.end + len);
        }
    }
    if !range.is_empty() {
        f(start, range);
    }
}

/// [`for_stretches`] for a range of elements, which may begin and end within rows. Local ranges begin at the range's start.
pub(crate) fn for_stretches_of(
    place: &ShardSpec,
    elements: Range<usize>,
    mut f: impl FnMut(u64, Range<usize>),
) {
    let width = place.dims().last().copied().unwrap_or(1);
    if elements.is_empty() || width == 0 {
        return;
    }
    let first = elements.start / width;
    for_stretches(place, first, elements.end.div_ceil(width) - first, |global, local| {
        let (begin, end) = (first * width + local.start, first * width + local.end);
        let (from, to) = (begin.max(elements.start), end.min(elements.end));
        if from < to {
            f(global + (from - begin) as u64, from - elements.start..to - elements.start);
        }
    });
}

/// Uniform numbers on \[low, high): the shard `place` of the tensor identified by `key`. Rounding to a narrow dtype
/// may reach `high`.
///
/// ```
/// use ferrotron_tensor::{DType, Device, ShardSpec, RandomKey, ops::random::uniform};
/// let device = Device::cpu(1)?;
/// let key = RandomKey::new(1234, 0, "embedding.weight");
/// let whole = uniform(&device, DType::F32, &ShardSpec::unsharded(&[8, 4]), &key, -1.0, 1.0)?;
/// let rows = ShardSpec::new(&[8, 4], &[&[(2, 3)], &[(0, 4)]])?;
/// let part = uniform(&device, DType::F32, &rows, &key, -1.0, 1.0)?;
/// assert_eq!(part.to_vec::<f32>()?, whole.narrow(0, 2, 3)?.to_vec::<f32>()?);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn uniform(
    device: &Device,
    dtype: DType,
    place: &ShardSpec,
    key: &RandomKey,
    low: f64,
    high: f64,
) -> Result<Tensor> {
    if !(low <= high && (high - low).is_finite()) {
        return Err(Error::value("uniform", format!("{low}..{high} is no range")));
    }
    if device.gpu().is_some() {
        let mut out = Tensor::empty(device, dtype, place.dims())?;
        cuda::random::fill("uniform", &mut out, place, key, [low, high - low])?;
        return Ok(out);
    }
    dispatch_float!("uniform", dtype, T => generate::<T>(device, place, |first, out| {
        fill_uniform(key, first, out, low, high - low);
    }))
}

/// Normal numbers: the shard `place` of the tensor identified by `key`.
pub fn normal(
    device: &Device,
    dtype: DType,
    place: &ShardSpec,
    key: &RandomKey,
    mean: f64,
    std: f64,
) -> Result<Tensor> {
    if !(std >= 0.0 && std.is_finite() && mean.is_finite()) {
        return Err(Error::value(
            "normal",
            format!("no distribution has mean {mean} and std {std}"),
        ));
    }
    if device.gpu().is_some() {
        let mut out = Tensor::empty(device, dtype, place.dims())?;
        cuda::random::fill("normal", &mut out, place, key, [mean, std])?;
        return Ok(out);
    }
    dispatch_float!("normal", dtype, T => generate::<T>(device, place, |first, out| {
        fill_normal(key, first, out, mean, std);
    }))
}

fn generate<T: Element>(
    device: &Device,
    place: &ShardSpec,
    f: impl Fn(u64, &mut [T]) + Send + Sync,
) -> Result<Tensor> {
    let mut out = Tensor::empty(device, T::DTYPE, place.dims())?;
    let (width, work) = (place.dims().last().copied().unwrap_or(1), out.numel());
    for_rows(device, (out.as_mut_slice::<T>()?, width), work, |first_row, out| {
        for_stretches(place, first_row, out.len() / width, |global, range| {
            f(global, &mut out[range]);
        });
    });
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::*;

    const PLACES: &[&[&[(usize, usize)]]] = &[
        &[&[(0, 6)], &[(0, 5)], &[(0, 33)]],
        &[&[(1, 3)], &[(0, 5)], &[(0, 33)]],
        &[&[(0, 6)], &[(2, 1), (4, 1)], &[(3, 9), (20, 13)]],
        &[&[(5, 1)], &[(4, 1)], &[(32, 1)]],
        &[&[(0, 6)], &[], &[(0, 33)]],
    ];

    #[test]
    fn dropout_keeps_exactly_the_uniform_numbers_that_reach_p() {
        let step = 1.0 / 4_294_967_296.0;
        for p in [1e-300, 0.1 * step, step, 1.1 * step, 0.1, 0.5, 1.0 - step, 1.0 - 0.5 * step, 1.0]
        {
            let last = last_dropped(p);
            assert!(f64::from(last) * step < p, "{p} drops {last}");
            assert!((f64::from(last) + 1.0) * step >= p, "{p} keeps {last} + 1");
        }
    }

    #[test]
    fn elements_are_those_of_the_key_in_every_part() {
        let device = Device::cpu(2).unwrap();
        let key = RandomKey::new(7, 3, "weight");
        for pieces in PLACES {
            let place = ShardSpec::new(&[6, 5, 33], pieces).unwrap();
            let rows = place.dims()[0] * place.dims()[1];
            let global: Vec<u64> = (0..rows)
                .flat_map(|row| {
                    place.runs(row).flat_map(|(i, n)| i..i + n as u64).collect::<Vec<_>>()
                })
                .collect();
            for dtype in FLOATS {
                let eps = dtype.epsilon();
                let got = uniform(&device, dtype, &place, &key, -3.0, 1.0).unwrap();
                let want: Vec<f64> = global.iter().map(|&i| -3.0 + 4.0 * key.uniform(i)).collect();
                assert_close("uniform", &got, &want, eps);
                let got = normal(&device, dtype, &place, &key, 0.5, 2.0).unwrap();
                let want: Vec<f64> = global.iter().map(|&i| 0.5 + 2.0 * key.normal(i)).collect();
                let exact = dtype == DType::F64;
                assert_close("normal", &got, &want, if exact { 0.0 } else { eps });
            }
        }
        let scalar =
            normal(&device, DType::F64, &ShardSpec::unsharded(&[]), &key, 0.0, 1.0).unwrap();
        assert_eq!(scalar.item().unwrap(), key.normal(0));
    }

    #[test]
    fn a_part_has_the_bits_of_the_whole_on_any_number_of_threads() {
        let key = RandomKey::new(7, 3, "weight");
        assert_same_bits("normal", |device| {
            let whole =
                normal(device, DType::F32, &ShardSpec::unsharded(&[300, 77]), &key, 0.0, 0.02)?;
            let place = ShardSpec::new(&[300, 77], &[&[(10, 280)], &[(5, 3), (9, 60)]])?;
            let part = normal(device, DType::F32, &place, &key, 0.0, 0.02)?;
            let rows = whole.narrow(0, 10, 280)?;
            assert_eq!(bits(&part.narrow(1, 0, 3)?), bits(&rows.narrow(1, 5, 3)?));
            assert_eq!(bits(&part.narrow(1, 3, 60)?), bits(&rows.narrow(1, 9, 60)?));
            Ok(vec![whole, part])
        });
    }

    #[test]
    fn ranges_of_elements_have_the_indices_of_their_rows() {
        for pieces in PLACES {
            let place = ShardSpec::new(&[6, 5, 33], pieces).unwrap();
            let (numel, width): (usize, usize) = (place.dims().iter().product(), place.dims()[2]);
            let mut all = Vec::new();
            for_stretches(&place, 0, numel / width, |global, range| {
                all.extend(global..global + range.len() as u64);
            });
            for start in (0..=numel).step_by(7) {
                for end in (start..=numel).step_by(11) {
                    let (mut got, mut next) = (Vec::new(), 0);
                    for_stretches_of(&place, start..end, |global, range| {
                        assert_eq!(range.start, next);
                        next = range.end;
                        got.extend(global..global + range.len() as u64);
                    });
                    assert_eq!(got, all[start..end], "{start}..{end} of {pieces:?}");
                }
            }
        }
    }

    #[test]
    fn errors_name_the_values() {
        let device = Device::cpu(1).unwrap();
        let (place, key) = (ShardSpec::unsharded(&[2]), RandomKey::new(0, 0, ""));
        let got = uniform(&device, DType::F32, &place, &key, 1.0, 0.0);
        assert_eq!(message(got), "uniform: 1..0 is no range");
        let got = normal(&device, DType::F32, &place, &key, 0.0, -1.0);
        assert_eq!(message(got), "normal: no distribution has mean 0 and std -1");
        let got = normal(&device, DType::U8, &place, &key, 0.0, 1.0);
        assert_eq!(message(got), "normal: takes floating-point tensors, got u8");
    }
}
