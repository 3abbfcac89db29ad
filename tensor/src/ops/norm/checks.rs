//! Checks of the operands of a norm.

use super::NormKind;
use crate::core::tensor::{check_device, check_pair};
use crate::{Error, Result, Tensor};

/// The row width and the outer dims of `x`. Errors if `weight` does not match.
pub(super) fn check_weight<'a, N: NormKind>(
    op: &'static str,
    x: &'a Tensor,
    weight: &Tensor,
) -> Result<(usize, &'a [usize])> {
    let Some((&width, outer)) = x.dims().split_last() else {
        return Err(Error::shape(op, "x is a scalar, needs at least one dim"));
    };
    check_parameter(op, x, weight)?;
    if weight.dims() != [width] {
        return Err(Error::shape(
            op,
            format!("x {:?} needs a weight [{width}], got {:?}", x.dims(), weight.dims()),
        ));
    }
    Ok((width, outer))
}

/// Errors unless a weight or bias is on the device of `x` and has its dtype or accumulator dtype.
pub(super) fn check_parameter(op: &'static str, x: &Tensor, parameter: &Tensor) -> Result<()> {
    match parameter.dtype() == x.dtype().accumulator() {
        true => check_device(op, x, parameter),
        false => check_pair(op, x, parameter),
    }
}
