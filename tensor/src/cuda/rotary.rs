//! Launches rotary position embedding.

use super::kernel;
use crate::ops::rotary::table::{Direction, RotaryTable};
use crate::{Result, Tensor};

/// `y` = `x` (B, T, H, D) with the first `heads` heads rotated and the others copied. The last dim of `x` is dense;
/// `y` is contiguous.
pub(crate) fn rotary(
    x: &Tensor,
    table: &RotaryTable,
    heads: usize,
    direction: Direction,
    y: &mut Tensor,
) -> Result<()> {
    let [cos, sin] = table.tensors().map(Tensor::contiguous);
    let (cos, sin) = (cos?, sin?);
    let dims = x.dims();
    let sizes = [dims[0], dims[1], dims[2], heads, dims[3], table.dim() / 2];
    let sign = match direction {
        Direction::Forward => 1_i32,
        Direction::Backward => -1,
    };
    let launch = kernel(x.device(), "rotary", x.dtype(), "rotary")?
        .input(x)
        .input(&cos)
        .input(&sin)
        .output(y);
    let launch = sizes.iter().fold(launch, |launch, &size| launch.value(size as u64));
    let strides = &x.layout().strides()[..3];
    let launch = strides.iter().fold(launch, |launch, &stride| launch.value(stride as i64));
    launch.value(sign).run_elements(x.numel())
}
