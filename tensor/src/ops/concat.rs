//! Concatenation along one dim, and the adjoint of a narrow view.
//!
//! - concat: y = x_0, x_1, ... along `dim`. Gradient: the narrow views of dy; needs only the sizes.
//! - pad_narrow: the gradient of `narrow(dim, start, len)`: dx is dy at `start` and 0 elsewhere. Its own gradient is
//!   that narrow view.
//!
//! Copies only; every dtype.

use super::rows::{CHEAP, around, for_rows};
use crate::core::tensor::check_pair;
use crate::{Error, Result, Scalar, Tensor, dispatch_any};

/// Concatenates the tensors along `dim`; the other dims must be equal.
///
/// ```
/// use ferrotron_tensor::{Device, Tensor, ops::concat::concat};
/// let device = Device::cpu(1)?;
/// let a = Tensor::from_slice(&device, &[1_i64, 2], &[2, 1])?;
/// let b = Tensor::from_slice(&device, &[3_i64, 4, 5, 6], &[2, 2])?;
/// assert_eq!(concat(&[&a, &b], 1)?.to_vec::<i64>()?, [1, 3, 4, 2, 5, 6]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn concat(parts: &[&Tensor], dim: isize) -> Result<Tensor> {
    let [first, rest @ ..] = parts else {
        return Err(Error::shape("concat", "needs at least one tensor, got none"));
    };
    let resolved = first.resolve("concat", dim)?;
    for part in rest {
        check_pair("concat", first, part)?;
        let same = |d: usize| d == resolved || part.dims()[d] == first.dims()[d];
        if part.rank() != first.rank() || !(0..first.rank()).all(same) {
            let message =
                format!("{:?} does not continue {:?} along dim {dim}", part.dims(), first.dims());
            return Err(Error::shape("concat", message));
        }
    }
    let mut dims = first.dims().to_vec();
    dims[resolved] = parts.iter().map(|part| part.dims()[resolved]).sum();
    let mut y = Tensor::empty(first.device(), first.dtype(), &dims)?;
    let mut start = 0;
    for part in parts {
        copy_in(&mut y, resolved, start, part)?;
        start += part.dims()[resolved];
    }
    Ok(y)
}

/// Zeros of size `full` along `dim`, with `dy` written from `start` on.
///
/// Errors if `start` plus the size of `dy` exceeds `full`.
pub fn pad_narrow(dy: &Tensor, dim: isize, start: usize, full: usize) -> Result<Tensor> {
    let resolved = dy.resolve("pad_narrow", dim)?;
    let len = dy.dims()[resolved];
    if start.checked_add(len).is_none_or(|end| end > full) {
        let message = format!("{len} from {start} on do not fit into {full} along dim {dim}");
        return Err(Error::shape("pad_narrow", message));
    }
    let mut dims = dy.dims().to_vec();
    dims[resolved] = full;
    let mut dx = if len == full {
        Tensor::empty(dy.device(), dy.dtype(), &dims)?
    } else {
        Tensor::zeros(dy.device(), dy.dtype(), &dims)?
    };
    copy_in(&mut dx, resolved, start, dy)?;
    Ok(dx)
}

/// Overwrites the narrow view of the contiguous, unique `y` that begins at `start` along `dim`.
fn copy_in(y: &mut Tensor, dim: usize, start: usize, part: &Tensor) -> Result<()> {
    if y.device().gpu().is_some() {
        return y.narrow_mut(dim as isize, start, part.dims()[dim], |place| place.copy_from(part));
    }
    dispatch_any!(part.dtype(), T => copy_in_slice::<T>(y, dim, start, part))
}

fn copy_in_slice<T: Scalar>(y: &mut Tensor, dim: usize, start: usize, part: &Tensor) -> Result<()> {
    let part = part.contiguous()?;
    let (_, size, inner) = around(y.dims(), dim);
    let len = part.dims()[dim] * inner;
    if len == 0 {
        return Ok(());
    }
    let source = part.as_slice::<T>()?;
    let device = part.device();
    let work = source.len() / CHEAP;
    for_rows(device, (y.as_mut_slice::<T>()?, size * inner), work, |first, rows| {
        let source = source[first * len..].chunks_exact(len);
        for (row, source) in rows.chunks_exact_mut(size * inner).zip(source) {
            row[start * inner..start * inner + len].copy_from_slice(source);
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::*;
    use crate::{DType, Device};

    #[test]
    fn parts_are_found_again_by_narrow_and_padding_is_its_adjoint() {
        let device = Device::cpu(2).unwrap();
        for dims in [[3, 4, 5], [1, 0, 2], [90, 20, 70]] {
            for dim in 0..3 {
                for dtype in [DType::F64, DType::BF16] {
                    let part = |len, seed| {
                        let mut dims = dims;
                        dims[dim] = len;
                        tensor(&device, dtype, &dims, &values(dims.iter().product(), seed))
                    };
                    let dense = [part(2, 1), part(0, 2), part(3, 3)];
                    for variant in 0..3 {
                        let parts = dense.each_ref().map(|x| variants(x).swap_remove(variant));
                        let d = dim as isize;
                        let y = concat(&parts.each_ref(), d).unwrap();
                        let mut start = 0;
                        for part in &parts {
                            let len = part.dims()[dim];
                            let found = y.narrow(d, start, len).unwrap();
                            assert_eq!(bits(&found), bits(part));
                            let padded = pad_narrow(part, d, start, y.dims()[dim]).unwrap();
                            assert_eq!(bits(&padded.narrow(d, start, len).unwrap()), bits(part));
                            let sum = |x: &Tensor| -> f64 {
                                x.to_f64().unwrap().iter().map(|x| x.abs()).sum()
                            };
                            assert_eq!(sum(&padded), sum(part)); // zero elsewhere
                            start += len;
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn errors_name_the_dims() {
        let device = Device::cpu(1).unwrap();
        let zeros = |dtype, dims: &[usize]| Tensor::zeros(&device, dtype, dims).unwrap();
        let x = zeros(DType::F32, &[2, 3]);
        assert_eq!(message(concat(&[], 0)), "concat: needs at least one tensor, got none");
        assert_eq!(
            message(concat(&[&x, &zeros(DType::F32, &[3, 3])], 1)),
            "concat: [3, 3] does not continue [2, 3] along dim 1"
        );
        assert_eq!(
            message(concat(&[&x, &zeros(DType::U8, &[2, 3])], 1)),
            "concat: operands differ: lhs f32, rhs u8; cast one of them"
        );
        assert_eq!(
            message(pad_narrow(&x, 1, 2, 4)),
            "pad_narrow: 3 from 2 on do not fit into 4 along dim 1"
        );
    }
}
