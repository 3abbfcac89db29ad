//! Helpers of the tests of fused operations: seeded inputs, naive f64 arithmetic and comparisons.
#![allow(dead_code)] // each test program uses its part

pub mod head;
pub mod shards;

use ferrotron_tensor::{DType, Device, RandomKey, Result, Tensor, bf16, f16};

pub const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

/// Standard normals of `site`, rounded to `dtype`.
pub fn normal(device: &Device, dtype: DType, dims: &[usize], site: &str) -> Result<Tensor> {
    let key = RandomKey::new(7, 0, site);
    let values: Vec<f64> =
        (0..dims.iter().product::<usize>() as u64).map(|i| key.normal(i)).collect();
    of(device, dtype, dims, &values)
}

/// The given values, rounded to `dtype`.
pub fn of(device: &Device, dtype: DType, dims: &[usize], values: &[f64]) -> Result<Tensor> {
    match dtype {
        DType::F64 => Tensor::from_slice(device, values, dims),
        DType::F32 => {
            Tensor::from_slice(device, &values.iter().map(|&x| x as f32).collect::<Vec<_>>(), dims)
        }
        DType::BF16 => {
            let values: Vec<_> = values.iter().map(|&x| bf16::from_f64(x)).collect();
            Tensor::from_slice(device, &values, dims)
        }
        _ => {
            let values: Vec<_> = values.iter().map(|&x| f16::from_f64(x)).collect();
            Tensor::from_slice(device, &values, dims)
        }
    }
}

/// Panics unless |got - want| <= tolerance * (1 + |want|) everywhere.
pub fn assert_close(what: &str, got: &Tensor, want: &[f64], tolerance: f64) {
    let values = got.to_f64().unwrap();
    assert_eq!(values.len(), want.len(), "{what}: number of elements of {got:?}");
    for (i, (&got_i, &want_i)) in values.iter().zip(want).enumerate() {
        let equal = got_i == want_i; // infinities
        assert!(
            equal || (got_i - want_i).abs() <= tolerance * (1.0 + want_i.abs()),
            "{what}: {got:?} element {i}: got {got_i:e}, want {want_i:e}, tolerance {tolerance:e}"
        );
    }
}

/// Panics unless both hold the same bits.
pub fn assert_same_bits(what: &str, a: &Tensor, b: &Tensor) {
    let bits = |x: &Tensor| x.to_f64().unwrap().iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(a.dims(), b.dims(), "{what}");
    assert!(bits(a) == bits(b), "{what}: {a:?} differs");
}

/// Panics unless `analytic` is the gradient of `f` at `x`, by central differences of every element.
pub fn assert_gradient(
    what: &str,
    x: &Tensor,
    analytic: &Tensor,
    f: impl Fn(&Tensor) -> Result<f64>,
) -> Result<()> {
    assert_eq!(x.dims(), analytic.dims(), "{what}");
    let values = x.to_f64()?;
    // The cube root of epsilon balances truncation and rounding of a central difference.
    let step = f64::EPSILON.cbrt();
    let numeric = (0..values.len())
        .map(|i| {
            let at = |delta: f64| {
                let mut moved = values.clone();
                moved[i] += delta;
                f(&of(x.device(), DType::F64, x.dims(), &moved)?)
            };
            Ok((at(step)? - at(-step)?) / (2.0 * step))
        })
        .collect::<Result<Vec<f64>>>()?;
    // Rounding of f costs eps / step, truncation step^2; both about 4e-11, times the size of f.
    assert_close(what, analytic, &numeric, 1e4 * step * step);
    Ok(())
}

/// The sum of the products of two tensors' elements.
pub fn dot(a: &Tensor, b: &Tensor) -> Result<f64> {
    Ok(a.to_f64()?.iter().zip(b.to_f64()?).map(|(a, b)| a * b).sum())
}
