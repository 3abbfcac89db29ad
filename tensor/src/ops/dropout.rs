//! Dropout: y = x / (1 - p) if the element's uniform number is at least p, else 0.
//!
//! Gradient: dropout of dy with the same p, key and place. Nothing is saved: backward recomputes the mask, which is a
//! function of the key and the element's index in the global, unsharded tensor.

use super::random::{for_stretches, keep_some, last_dropped};
use super::rows::for_rows;
use crate::cuda;
use crate::kernel_span::kernel_span;
use crate::{Element, Error, RandomKey, Real, Result, ShardSpec, Tensor, dispatch_float};

/// Drops elements of `x` with probability `p` in [0, 1] and divides the others by 1 - p. `place` is the shard of the
/// global tensor that `x` holds. Applied to dy, it is its own gradient.
///
/// ```
/// use ferrotron_tensor::{DType, Device, ShardSpec, RandomKey, Tensor, ops::dropout::dropout};
/// let x = Tensor::full(&Device::cpu(1)?, DType::F32, &[1000], 1.0)?;
/// let key = RandomKey::new(1234, 0, "blocks.0.dropout");
/// let y = dropout(&x, 0.5, &key, &ShardSpec::unsharded(&[1000]))?.to_vec::<f32>()?;
/// assert!(y.iter().all(|&y| y == 0.0 || y == 2.0));
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn dropout(x: &Tensor, p: f64, key: &RandomKey, place: &ShardSpec) -> Result<Tensor> {
    if !(0.0..=1.0).contains(&p) {
        return Err(Error::value("dropout", format!("a probability is on [0, 1], got {p}")));
    }
    if x.dims() != place.dims() {
        let message = format!("x is {:?}, its place {:?}", x.dims(), place.dims());
        return Err(Error::shape("dropout", message));
    }
    if p == 0.0 {
        return Ok(x.clone());
    }
    if p == 1.0 {
        return Tensor::zeros(x.device(), x.dtype(), x.dims());
    }
    let x = x.contiguous()?;
    let mut y = Tensor::empty(x.device(), x.dtype(), x.dims())?;
    let width = x.dims().last().copied().unwrap_or(1);
    let last_dropped = last_dropped(p);
    if x.device().gpu().is_some() {
        cuda::random::dropout(&x, &mut y, key, place, (last_dropped, 1.0 / (1.0 - p)))?;
        return Ok(y);
    }
    let _span = kernel_span!("dropout", x.dtype(), 0, [&x] => [&y]);
    dispatch_float!("dropout", x.dtype(), T => {
        let elements = x.as_slice::<T>()?;
        let scale = <T as Element>::Acc::from_f64(1.0 / (1.0 - p));
        for_rows(x.device(), (y.as_mut_slice::<T>()?, width), elements.len(), |first, out| {
            let x = &elements[first * width..][..out.len()];
            for_stretches(place, first, out.len() / width, |global, range| {
                keep_some(key, global, &x[range.clone()], &mut out[range], last_dropped, scale);
            });
        });
    });
    Ok(y)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::*;
    use crate::{DType, Device};

    #[test]
    fn elements_are_kept_by_their_global_bits() {
        let device = Device::cpu(2).unwrap();
        let key = RandomKey::new(1, 2, "dropout");
        let place = ShardSpec::new(&[9, 50], &[&[(1, 7)], &[(2, 3), (10, 38)]]).unwrap();
        let x = values(7 * 41, 1);
        let global: Vec<u64> = (0..7)
            .flat_map(|row| place.runs(row).flat_map(|(i, n)| i..i + n as u64).collect::<Vec<_>>())
            .collect();
        let of = |i: u64, x: f64| if key.uniform(i) >= 0.25 { x / 0.75 } else { 0.0 };
        let want: Vec<f64> = global.iter().zip(&x).map(|(&i, &x)| of(i, x)).collect();
        for dtype in FLOATS {
            for x in variants(&tensor(&device, dtype, &[7, 41], &x)) {
                let y = dropout(&x, 0.25, &key, &place).unwrap();
                assert_close("dropout", &y, &want, dtype.epsilon());
            }
        }
    }

    #[test]
    fn a_part_has_the_bits_of_the_whole_on_any_number_of_threads() {
        let key = RandomKey::new(1, 2, "dropout");
        assert_same_bits("dropout", |device| {
            let x = tensor(device, DType::F32, &[200, 101], &values(20_200, 1));
            let whole = dropout(&x, 0.1, &key, &ShardSpec::unsharded(&[200, 101]))?;
            let place = ShardSpec::new(&[200, 101], &[&[(3, 190)], &[(7, 90)]])?;
            let part = x.narrow(0, 3, 190)?.narrow(1, 7, 90)?;
            let part = dropout(&part, 0.1, &key, &place)?;
            assert_eq!(bits(&part), bits(&whole.narrow(0, 3, 190)?.narrow(1, 7, 90)?));
            let kept = whole.to_f64()?.iter().filter(|&&y| y != 0.0).count() as f64;
            let nonzero = x.to_f64()?.iter().filter(|&&x| x != 0.0).count() as f64;
            // Five standard errors of a binomial proportion.
            assert!((kept / nonzero - 0.9).abs() < 5.0 * (0.09 / nonzero).sqrt());
            Ok(vec![whole, part])
        });
    }

    #[test]
    fn certain_probabilities_draw_nothing_and_others_are_refused() {
        let device = Device::cpu(1).unwrap();
        let x = tensor(&device, DType::F32, &[2], &[1.0, f64::INFINITY]);
        let (key, place) = (RandomKey::new(0, 0, ""), ShardSpec::unsharded(&[2]));
        assert_eq!(dropout(&x, 0.0, &key, &place).unwrap().buffer_id(), x.buffer_id());
        assert_eq!(dropout(&x, 1.0, &key, &place).unwrap().to_f64().unwrap(), [0.0, 0.0]);
        for p in [-0.1, 1.1, f64::NAN] {
            assert_eq!(
                message(dropout(&x, p, &key, &place)),
                format!("dropout: a probability is on [0, 1], got {p}")
            );
        }
        assert_eq!(
            message(dropout(&x, 0.5, &key, &ShardSpec::unsharded(&[3]))),
            "dropout: x is [2], its place [3]"
        );
    }
}
