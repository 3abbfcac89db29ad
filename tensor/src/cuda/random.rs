//! Random tensors and dropout: the numbers that the CPU draws.

use super::kernel;
use crate::{Place, RandomKey, Result, Tensor};

/// Fills `y` by the kernel `name`: "uniform" from a low end and a width, "normal" from a mean and a deviation.
pub(crate) fn fill(
    name: &'static str,
    y: &mut Tensor,
    place: &Place,
    key: &RandomKey,
    [first, second]: [f64; 2],
) -> Result<()> {
    let (device, dtype, n) = (y.device().clone(), y.dtype(), y.numel());
    kernel(&device, "random", dtype, name)?
        .output(y)
        .value(n as u64)
        .draws(key)
        .value(first)
        .value(second)
        .place(place)
        .run_elements(n)
}

/// `y = scale x` where the element's random bits are larger than `last_dropped`, else 0; both contiguous.
pub(crate) fn dropout(
    x: &Tensor,
    y: &mut Tensor,
    key: &RandomKey,
    place: &Place,
    (last_dropped, scale): (u32, f64),
) -> Result<()> {
    let n = x.numel();
    kernel(x.device(), "dropout", x.dtype(), "dropout")?
        .input(x)
        .output(y)
        .value(n as u64)
        .draws(key)
        .value(last_dropped)
        .value(scale)
        .place(place)
        .run_elements(n)
}
