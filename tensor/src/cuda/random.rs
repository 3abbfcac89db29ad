//! Launches random fills and dropout, with the same random numbers as the CPU.

use super::kernel;
use crate::{RandomKey, Result, ShardSpec, Tensor};

/// Fills `y` with the kernel `name`: "uniform" takes a lower bound and a width, "normal" a mean and a standard
/// deviation.
pub(crate) fn fill(
    name: &'static str,
    y: &mut Tensor,
    place: &ShardSpec,
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

/// `y = scale x` where the element's random bits exceed `last_dropped`, else 0; both contiguous.
pub(crate) fn dropout(
    x: &Tensor,
    y: &mut Tensor,
    key: &RandomKey,
    place: &ShardSpec,
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
