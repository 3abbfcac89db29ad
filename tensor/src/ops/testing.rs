//! Test helpers for operations: inputs, strided variants, comparisons and finite differences.

use crate::{DType, Device, RandomKey, Real, Result, Tensor, dispatch_any, dispatch_float};

pub(crate) const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

/// `n` numbers in [-2, 2), multiples of 1/64, so that every dtype represents them.
pub(crate) fn values(n: usize, seed: u64) -> Vec<f64> {
    let key = RandomKey::new(seed, 0, "testing");
    (0..n as u64).map(|i| (key.uniform(i) * 256.0).floor() / 64.0 - 2.0).collect()
}

pub(crate) fn tensor(device: &Device, dtype: DType, dims: &[usize], values: &[f64]) -> Tensor {
    let make = || -> Result<Tensor> {
        dispatch_float!("testing", dtype, T => {
            use crate::Element;
            let values: Vec<T> = values.iter().map(|&x| T::from_acc(Real::from_f64(x))).collect();
            Tensor::from_slice(device, &values, dims)
        })
    };
    make().unwrap()
}

/// The same elements as a contiguous tensor, transposed in memory, and with a gap after each row.
pub(crate) fn variants(x: &Tensor) -> Vec<Tensor> {
    let make = || -> Result<Vec<Tensor>> {
        let mut all = vec![x.clone()];
        if x.rank() > 0 {
            let reversed: Vec<usize> = (0..x.rank()).rev().collect();
            all.push(x.permute(&reversed)?.contiguous()?.permute(&reversed)?);
            let mut wide = x.dims().to_vec();
            *wide.last_mut().unwrap() += 2;
            let mut out = Tensor::zeros(x.device(), x.dtype(), &wide)?;
            let width = x.dims()[x.rank() - 1];
            dispatch_any!(x.dtype(), T => {
                let x = x.contiguous()?;
                let rows = out.as_mut_slice::<T>()?.chunks_exact_mut(width + 2);
                for (row, x) in rows.zip(x.as_slice::<T>()?.chunks_exact(width.max(1))) {
                    row[1..=width].copy_from_slice(x);
                }
            });
            all.push(out.narrow(-1, 1, width)?);
        }
        Ok(all)
    };
    make().unwrap()
}

/// Asserts `|got - want| <= tolerance * max(1, |want|)` for every element.
pub(crate) fn assert_close(what: &str, got: &Tensor, want: &[f64], tolerance: f64) {
    let values = got.to_f64().unwrap();
    assert_eq!(values.len(), want.len(), "{what}: {got:?} has another number of elements");
    for (i, (g, w)) in values.iter().zip(want).enumerate() {
        let same = g == w || (g.is_nan() && w.is_nan());
        assert!(
            same || (g - w).abs() <= tolerance * w.abs().max(1.0),
            "{what}: {got:?} at {i}: got {g}, want {w}, tolerance {tolerance}"
        );
    }
}

/// The bytes of a tensor, for bitwise comparison.
pub(crate) fn bits(x: &Tensor) -> Vec<u8> {
    dispatch_any!(x.dtype(), T => bytemuck::cast_slice(&x.to_vec::<T>().unwrap()).to_vec())
}

/// Asserts that `f` gives the same bits on 1, 2 and 3 threads.
pub(crate) fn assert_same_bits(what: &str, f: impl Fn(&Device) -> Result<Vec<Tensor>>) {
    let run = |threads| -> Vec<Vec<u8>> {
        f(&Device::cpu(threads).unwrap()).unwrap().iter().map(bits).collect()
    };
    let one = run(1);
    for threads in [2, 3] {
        assert!(run(threads) == one, "{what}: {threads} threads give other bits than 1");
    }
}

/// Asserts that `got` is the gradient of `f` at `x`, by central differences with step 2^-17. Their error is
/// h^2 f''' / 6 + eps |f| / h, both near 1e-10 here.
pub(crate) fn assert_gradient(what: &str, x: &[f64], got: &Tensor, f: impl Fn(&[f64]) -> f64) {
    const STEP: f64 = 1.0 / 131_072.0;
    let want: Vec<f64> = (0..x.len())
        .map(|i| {
            let at = |x_i: f64| {
                let mut x = x.to_vec();
                x[i] = x_i;
                f(&x)
            };
            (at(x[i] + STEP) - at(x[i] - STEP)) / (2.0 * STEP)
        })
        .collect();
    assert_close(what, got, &want, 2e-8);
}

pub(crate) fn message<T>(result: Result<T>) -> String {
    result.err().expect("an error").to_string()
}
