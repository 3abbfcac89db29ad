//! Lossless compression of vectors with many zeros: a bitmap, and the nonzero elements.
//!
//! For d nonzero of n elements of w bytes, it takes n / 8 + d w bytes (rounded up to whole words and cache lines)
//! instead of n w. Gist (Jain et al., ISCA 2018, section 4.1) stores such activations as compressed rows with a
//! one-byte column index per nonzero element. A bitmap is smaller if more than an eighth of the elements is nonzero.
//!
//! Only elements with all bits zero count as zero: -0 and NaN are stored, so that decompression restores the same
//! bits.

pub(crate) mod format;

use crate::cuda;
use crate::numeric::disjoint::Disjoint;
use crate::{DType, Device, Error, Result, Scalar, Tensor, dispatch_any};
pub(crate) use format::{CHUNK, mask_bytes};

/// Compresses `x`, a contiguous tensor; `None` if the result would not be smaller.
///
/// Synchronizes with a GPU, since the size depends on the elements.
///
/// Errors if `x` is not contiguous or memory cannot be allocated.
///
/// ```
/// use ferrotron_tensor::{DType, Device, Tensor, ops::zero_bitmap::{compress, expand}};
/// let mut values = vec![0.0_f32; 4096];
/// values[7] = 3.0;
/// let x = Tensor::from_slice(&Device::cpu(1)?, &values, &[4096])?;
/// let bytes = compress(&x)?.unwrap();
/// assert_eq!(bytes.numel(), 4096 / 8 + 4);
/// assert_eq!(expand(&bytes, DType::F32, 4096)?.to_vec::<f32>()?, values);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn compress(x: &Tensor) -> Result<Option<Tensor>> {
    if x.device().gpu().is_some() {
        return cuda::zero_bitmap::compress(x);
    }
    dispatch_any!(x.dtype(), T => compress_slice(x.device(), x.as_slice::<T>()?))
}

fn compress_slice<T: Scalar>(device: &Device, x: &[T]) -> Result<Option<Tensor>> {
    let mut mask = vec![0_u64; mask_bytes(x.len()) / 8];
    let work = x.len() / 2;
    let words = Disjoint::new(&mut mask);
    device.for_each(x.len().div_ceil(CHUNK), work, &|task| {
        let chunk = &x[task * CHUNK..x.len().min((task + 1) * CHUNK)];
        // SAFETY: tasks take consecutive ranges of words.
        let words = unsafe { words.part(task * (CHUNK / 64), chunk.len().div_ceil(64)) };
        for (word, elements) in words.iter_mut().zip(chunk.chunks(64)) {
            let bit = |(i, x): (usize, &T)| u64::from(!is_zero(x)) << i;
            *word = elements.iter().enumerate().map(bit).sum();
        }
    });
    let starts = starts(&mask, x.len());
    let kept = starts[starts.len() - 1];
    let bytes = mask_bytes(x.len()) + kept * size_of::<T>();
    if bytes >= size_of_val(x) {
        return Ok(None);
    }
    let mut out = Tensor::empty(device, DType::U8, &[bytes])?;
    let (head, tail) = out.as_mut_slice::<u8>()?.split_at_mut(mask_bytes(x.len()));
    head.copy_from_slice(bytemuck::cast_slice(&mask));
    let values = Disjoint::new(bytemuck::cast_slice_mut::<u8, T>(tail));
    device.for_each(starts.len() - 1, work, &|task| {
        // SAFETY: tasks take consecutive ranges of values.
        let values = unsafe { values.part(starts[task], starts[task + 1] - starts[task]) };
        let chunk = &x[task * CHUNK..x.len().min((task + 1) * CHUNK)];
        let others = chunk.iter().filter(|x| !is_zero(*x));
        values.iter_mut().zip(others).for_each(|(value, x)| *value = *x);
    });
    Ok(Some(out))
}

/// Decompresses `bytes`, a result of [`compress`], to a vector of `numel` elements of `dtype`.
///
/// Errors if the length of `bytes` does not match, or memory cannot be allocated. A GPU rejects only lengths that no
/// vector of `numel` elements has.
pub fn expand(bytes: &Tensor, dtype: DType, numel: usize) -> Result<Tensor> {
    let mut out = Tensor::empty(bytes.device(), dtype, &[numel])?;
    if bytes.device().gpu().is_some() {
        cuda::zero_bitmap::expand(bytes, &mut out)?;
        return Ok(out);
    }
    let packed = bytes.as_slice::<u8>()?;
    let device = bytes.device();
    dispatch_any!(dtype, T => expand_slice(device, packed, out.as_mut_slice::<T>()?)?);
    Ok(out)
}

fn expand_slice<T: Scalar>(device: &Device, packed: &[u8], out: &mut [T]) -> Result<()> {
    let (numel, head) = (out.len(), mask_bytes(out.len()));
    let fits = packed.split_at_checked(head).and_then(|(mask, values)| {
        let mask = bytemuck::try_cast_slice::<u8, u64>(mask).ok()?;
        let values = bytemuck::try_cast_slice::<u8, T>(values).ok()?;
        let starts = starts(mask, numel);
        (starts[starts.len() - 1] == values.len()).then_some((mask, values, starts))
    });
    let Some((mask, values, starts)) = fits else {
        let message = format!("{} bytes are not {numel} elements", packed.len());
        return Err(Error::shape("zero_bitmap", message));
    };
    let elements = Disjoint::new(out);
    device.for_each(starts.len() - 1, numel / 2, &|task| {
        let first = task * CHUNK;
        // SAFETY: tasks take consecutive ranges of elements.
        let chunk = unsafe { elements.part(first, CHUNK.min(numel - first)) };
        let mut values = values[starts[task]..starts[task + 1]].iter();
        for (elements, word) in chunk.chunks_mut(64).zip(&mask[first / 64..]) {
            for (i, element) in elements.iter_mut().enumerate() {
                let kept = if word >> i & 1 == 1 { values.next() } else { None };
                *element = kept.copied().unwrap_or_else(bytemuck::Zeroable::zeroed);
            }
        }
    });
    Ok(())
}

/// Prefix sums of the nonzero elements per chunk, with their total at the end.
fn starts(mask: &[u64], numel: usize) -> Vec<usize> {
    let words = &mask[..numel.div_ceil(64)];
    let counts = words.chunks(CHUNK / 64).map(|chunk| chunk.iter().map(|word| word.count_ones()));
    let mut starts = vec![0];
    for count in counts {
        starts.push(starts[starts.len() - 1] + count.sum::<u32>() as usize);
    }
    starts
}

fn is_zero<T: Scalar>(x: &T) -> bool {
    bytemuck::bytes_of(x).iter().all(|&byte| byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::*;

    #[test]
    fn the_same_bits_come_back_in_the_bytes_of_the_formula() {
        for threads in [1, 3] {
            let device = Device::cpu(threads).unwrap();
            for dtype in FLOATS {
                for numel in [0, 1, 63, 64, 65, CHUNK, CHUNK + 1, 9 * CHUNK + 777] {
                    for zeros_in_ten in [0, 3, 9, 10] {
                        let value =
                            |i: usize| if i * 7 % 10 < zeros_in_ten { 0 } else { 1 + i % 100 };
                        let values: Vec<f64> = (0..numel).map(|i| value(i) as f64).collect();
                        let x = tensor(&device, dtype, &[numel], &values);
                        let kept = values.iter().filter(|x| **x != 0.0).count();
                        let bytes = numel.div_ceil(8).next_multiple_of(64) + kept * dtype.size();
                        let what = format!("{dtype}, {numel} elements, {kept} not zero");
                        match compress(&x).unwrap() {
                            None => assert!(bytes >= numel * dtype.size(), "{what}"),
                            Some(packed) => {
                                assert_eq!(packed.numel(), bytes, "{what}");
                                let back = expand(&packed, dtype, numel).unwrap();
                                assert_close(&what, &back.cast(DType::F64).unwrap(), &values, 0.0);
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn negative_zeros_and_nans_come_back() {
        let device = Device::cpu(1).unwrap();
        let mut values = vec![0.0_f32; 1000];
        (values[3], values[500], values[999]) = (-0.0, f32::NAN, f32::MIN_POSITIVE);
        let x = Tensor::from_slice(&device, &values, &[1000]).unwrap();
        let packed = compress(&x).unwrap().unwrap();
        let back = expand(&packed, DType::F32, 1000).unwrap().to_vec::<f32>().unwrap();
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&back), bits(&values));
        let message = message(expand(&packed, DType::F32, 500));
        assert!(message.starts_with("zero_bitmap: "), "{message}");
    }
}
