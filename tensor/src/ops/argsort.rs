//! Indices of elements in order, of all or of the first k along one dim.
//!
//! The order is total and stable: NaN counts as largest, and of equal elements the first comes first. Every element thus
//! has one place, and the result depends neither on the algorithm nor on the number of threads. Indices have no gradient;
//! that of the sorted elements is the gradient of the gather that reads them.

pub(crate) mod order;

pub use self::order::SortOrder;
use super::rows::for_rows;
use crate::cuda;
use crate::{DType, Error, Result, Tensor, bf16, dispatch_any, f16};

/// The indices (i64) along `dim` of the first `k` elements in order.
///
/// Errors, as one of `op`, if `k` exceeds the dim.
pub fn first(
    op: &'static str,
    x: &Tensor,
    dim: isize,
    order: SortOrder,
    k: usize,
) -> Result<Tensor> {
    let resolved = x.resolve(op, dim)?;
    let width = x.dims()[resolved];
    if k > width {
        let message = format!("k is {k}, and dim {dim} of {:?} has {width} elements", x.dims());
        return Err(Error::value(op, message));
    }
    let rows = x.transpose(resolved as isize, -1)?.contiguous()?;
    if x.device().gpu().is_some() {
        return cuda::argsort::first(&rows, order, k)?.transpose(resolved as isize, -1);
    }
    let mut dims = rows.dims().to_vec();
    dims[x.rank() - 1] = k;
    let mut indices = Tensor::empty(x.device(), DType::I64, &dims)?;
    dispatch_any!(x.dtype(), T => {
        let elements = rows.as_slice::<T>()?;
        // A comparison takes about a nanosecond.
        let work = elements.len().saturating_mul(width.max(2).ilog2() as usize);
        for_rows(x.device(), (indices.as_mut_slice::<i64>()?, k), work, |start, out| {
            let mut keys: Vec<(u64, usize)> = Vec::with_capacity(width);
            for (i, out) in out.chunks_exact_mut(k).enumerate() {
                let row = &elements[(start + i) * width..][..width];
                keys.clear();
                keys.extend(row.iter().enumerate().map(|(place, x)| (key(*x, order), place)));
                first_places(&mut keys, out);
            }
        });
    });
    indices.transpose(resolved as isize, -1)
}

/// Writes the places of the smallest keys, in their order. Keys, and not elements, are sorted, so that this is compiled
/// for one type.
fn first_places(keys: &mut Vec<(u64, usize)>, out: &mut [i64]) {
    if out.len() < keys.len() {
        keys.select_nth_unstable(out.len());
        keys.truncate(out.len());
    }
    keys.sort_unstable();
    out.iter_mut().zip(keys).for_each(|(out, (_, place))| *out = *place as i64);
}

/// A number that is smaller for an element that comes earlier, and equal for equal ones; NaN counts as largest.
fn key<T: Sortable>(x: T, order: SortOrder) -> u64 {
    match order {
        SortOrder::Ascending => x.rank(),
        SortOrder::Descending => !x.rank(),
    }
}

/// A type whose order is one of unsigned integers.
trait Sortable: Copy {
    fn rank(self) -> u64;
}

macro_rules! sortable {
    ($($type:ty as $wide:ty: $rank:ident),*) => {
        $(impl Sortable for $type {
            fn rank(self) -> u64 {
                $rank(<$wide>::from(self))
            }
        })*
    };
}
sortable!(u8 as i64: of_integer, u32 as i64: of_integer, i64 as i64: of_integer,
    bf16 as f64: of_float, f16 as f64: of_float, f32 as f64: of_float, f64 as f64: of_float);

fn of_integer(x: i64) -> u64 {
    x as u64 ^ 1 << 63
}

/// The bits of a positive number grow with it, those of a negative one with its magnitude. The sum makes -0 the 0 that
/// it equals.
fn of_float(x: f64) -> u64 {
    let bits = (x + 0.0).to_bits();
    match x.is_nan() {
        true => u64::MAX,
        false if bits >> 63 == 1 => !bits,
        false => bits | 1 << 63,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;
    use crate::ops::testing::*;
    use std::cmp::Ordering;

    /// Compares two elements; NaN counts as largest.
    fn in_order(order: SortOrder, a: f64, b: f64) -> Ordering {
        let ascending = a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()));
        match order {
            SortOrder::Ascending => ascending,
            SortOrder::Descending => ascending.reverse(),
        }
    }

    #[test]
    fn the_first_k_are_those_of_a_stable_sort() {
        let device = Device::cpu(2).unwrap();
        let dims = [3, 17, 5];
        let mut x = values(3 * 17 * 5, 1); // 256 values: some are equal
        x.iter_mut().step_by(7).for_each(|x| *x = 0.5);
        (x[9], x[40]) = (f64::NAN, f64::NAN);
        (x[11], x[12], x[13], x[14]) = (-0.0, f64::INFINITY, f64::NEG_INFINITY, 0.0);
        for dtype in FLOATS {
            for x in variants(&tensor(&device, dtype, &dims, &x)) {
                for (dim, &width) in dims.iter().enumerate() {
                    for order in [SortOrder::Ascending, SortOrder::Descending] {
                        let moved = x.transpose(dim as isize, -1).unwrap();
                        let rows = moved.to_f64().unwrap();
                        for k in [0, 1, 2, width] {
                            let got = first("topk", &x, dim as isize, order, k).unwrap();
                            let got = got.transpose(dim as isize, -1).unwrap();
                            let want: Vec<i64> = rows
                                .chunks(width)
                                .flat_map(|row| {
                                    let mut places: Vec<usize> = (0..width).collect();
                                    places.sort_by(|&a, &b| in_order(order, row[a], row[b]));
                                    places.into_iter().take(k).map(|i| i as i64).collect::<Vec<_>>()
                                })
                                .collect();
                            assert_eq!(got.to_vec::<i64>().unwrap(), want, "{dim} {k} {order:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn integers_are_sorted_without_rounding() {
        let device = Device::cpu(2).unwrap();
        // Neighbours beyond 2^53, which no f64 tells apart.
        let x = [i64::MAX, 1 << 53, (1 << 53) + 1, -3, i64::MAX - 1];
        let x = Tensor::from_slice(&device, &x, &[5]).unwrap();
        let (sorted, places) = x.sort(0, SortOrder::Descending).unwrap();
        assert_eq!(places.to_vec::<i64>().unwrap(), [0, 4, 2, 1, 3]);
        assert_eq!(sorted.to_vec::<i64>().unwrap()[4], -3);
        let x = Tensor::from_slice(&device, &[3_u8, 200, 0, 3], &[4]).unwrap();
        assert_eq!(x.topk(3, 0).unwrap().1.to_vec::<i64>().unwrap(), [1, 0, 3]);
    }

    #[test]
    fn errors_name_k_and_the_dim() {
        let x = Tensor::zeros(&Device::cpu(1).unwrap(), DType::F32, &[2, 3]).unwrap();
        assert_eq!(message(x.topk(4, -1)), "topk: k is 4, and dim -1 of [2, 3] has 3 elements");
        assert_eq!(message(x.topk(1, 2)), "topk: there is no dim 2 in [2, 3]");
    }
}
