//! Operands on both devices, as the same views, and comparisons of what comes out.

use std::sync::OnceLock;

use ferrotron_tensor::ops::concat::concat;
use ferrotron_tensor::{DType, Device, Result, Tensor, dispatch_any};

use crate::support::{numbers, random};

/// The device that is compared with: the same at every call.
pub fn cpu() -> Result<Device> {
    static CPU: OnceLock<Device> = OnceLock::new();
    match CPU.get() {
        Some(device) => Ok(device.clone()),
        None => Device::cpu(1).map(|device| CPU.get_or_init(|| device).clone()),
    }
}

/// The same view of a copy of the buffer on another device.
pub fn there(device: &Device, x: &Tensor) -> Result<Tensor> {
    let buffer = x.whole_buffer();
    let copy = dispatch_any!(x.dtype(), T => {
        Tensor::from_slice(device, &buffer.to_vec::<T>()?, buffer.dims())?
    });
    copy.as_strided(x.layout())
}

/// The same elements dense, transposed in memory, and with a gap after each row and an element before the first.
pub fn views(x: &Tensor) -> Result<Vec<Tensor>> {
    let reversed: Vec<usize> = (0..x.rank()).rev().collect();
    let transposed = x.permute(&reversed)?.contiguous()?.permute(&reversed)?;
    let gap = x.narrow(-1, 0, 1)?;
    let wide = concat(&[&gap, x, &gap], -1)?;
    Ok(vec![x.clone(), transposed, wide.narrow(-1, 1, x.dim(-1)?)?])
}

/// Random numbers on [-1, 1).
pub fn small(device: &Device, dtype: DType, dims: &[usize], seed: u64) -> Result<Tensor> {
    random(device, dtype, dims, seed)?.mul_scalar(0.5)
}

/// Half a step between numbers of a dtype of 16 bits, none for those that are computed in.
pub fn rounding(dtype: DType) -> f64 {
    if dtype == dtype.accumulator() { 0.0 } else { dtype.epsilon() }
}

/// Asserts `|got - want| <= relative |want| + absolute` for every element.
pub fn assert_close(
    what: &str,
    got: &Tensor,
    want: &Tensor,
    relative: f64,
    absolute: f64,
) -> Result<()> {
    assert_eq!((got.dtype(), got.dims()), (want.dtype(), want.dims()), "{what}");
    let (dtype, dims) = (got.dtype(), got.dims());
    for (i, (got, want)) in numbers(got)?.iter().zip(&numbers(want)?).enumerate() {
        let tolerance = relative * want.abs() + absolute;
        let same = got == want || (got.is_nan() && want.is_nan());
        assert!(
            same || (got - want).abs() <= tolerance,
            "{what} {dtype} {dims:?} at {i}: got {got}, want {want}, tolerance {tolerance:e}"
        );
    }
    Ok(())
}
