//! The devices of the tests, and comparisons of what they give.

use ferrotron_tensor::{DType, Device, RandomKey, Result, Tensor, dispatch_any};

pub const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

/// A GPU, unless `test` must be skipped.
pub fn gpu(test: &str) -> Result<Option<Device>> {
    ferrotron_cuda_sim::gpu(test).map(|config| Device::cuda(&config)).transpose()
}

/// The stand-in, unless `test` must be skipped.
pub fn stand_in(test: &str) -> Result<Option<Device>> {
    ferrotron_cuda_sim::stand_in(test).map(|config| Device::cuda(&config)).transpose()
}

/// Multiples of 1/64 on [-2, 2), as a tensor: every dtype of floats represents them.
pub fn random(device: &Device, dtype: DType, dims: &[usize], seed: u64) -> Result<Tensor> {
    let (key, n) = (RandomKey::new(seed, 0, "cuda"), dims.iter().product::<usize>() as u64);
    let values: Vec<f64> = (0..n).map(|i| (key.uniform(i) * 256.0).floor() / 64.0 - 2.0).collect();
    Tensor::from_slice(device, &values, dims)?.cast(dtype)
}

/// Indices below `size` in a scattered order, with repetitions.
pub fn ids(device: &Device, dtype: DType, dims: &[usize], size: usize) -> Result<Tensor> {
    let n: usize = dims.iter().product();
    let ids: Vec<u32> = (0..n).map(|i| ((i * i * 7 + i) % size) as u32).collect();
    Tensor::from_slice(device, &ids, dims)?.cast(dtype)
}

/// The elements of any dtype in f64, computed by the CPU.
pub fn numbers(x: &Tensor) -> Result<Vec<f64>> {
    let cpu = Device::cpu(1)?;
    let here =
        dispatch_any!(x.dtype(), T => Tensor::from_slice(&cpu, &x.to_vec::<T>()?, x.dims())?);
    here.cast(DType::F64)?.to_vec()
}

/// Asserts that `gpu` gives what the CPU gives, up to `tolerance` times the largest number that comes out.
pub fn assert_like_cpu(
    what: &str,
    gpu: &Device,
    tolerance: f64,
    f: impl Fn(&Device) -> Result<Tensor>,
) -> Result<()> {
    let (got, want) = (f(gpu)?, f(&Device::cpu(1)?)?);
    assert_eq!((got.dtype(), got.dims()), (want.dtype(), want.dims()), "{what}");
    let (dtype, dims) = (got.dtype(), got.dims());
    let (got, want) = (numbers(&got)?, numbers(&want)?);
    let largest = want.iter().filter(|x| x.is_finite()).fold(0.0, |most: f64, x| most.max(x.abs()));
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        let same = got == want || (got.is_nan() && want.is_nan());
        assert!(
            same || (got - want).abs() <= tolerance * largest,
            "{what} {dtype} {dims:?} at {i}: got {got}, want {want} +- {tolerance:e} x {largest}"
        );
    }
    Ok(())
}
