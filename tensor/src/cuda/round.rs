//! Rounding into 16 bits, and widening.

use ferrotron_cuda::arguments;

use super::{kernel, step};
use crate::ops::round::Stochastic;
use crate::{DType, Error, Result, Tensor};

/// `target = source`, to nearest or at random.
pub(crate) fn round(
    target: &mut Tensor,
    source: &Tensor,
    stochastic: Option<Stochastic>,
) -> Result<()> {
    let Some(Stochastic { key, place }) = stochastic else { return convert(source, target) };
    if source.dtype() == target.dtype() {
        return convert(source, target); // all numbers are storable
    }
    let (device, n) = (source.device(), source.numel());
    let (words, number) = key.words();
    let step = step::number(device, number)?;
    let pieces: Vec<_> = (0..place.dims().len()).map(|d| place.pieces(d)).collect();
    let place = arguments::Place::new(place.global_dims(), &pieces).map_err(Error::of_gpu)?;
    kernel(device, "round", target.dtype(), "round_stochastic")?
        .input(source)
        .output(target)
        .value(n as u64)
        .value(words)
        .input(&step)
        .value(place)
        .run_elements(n)
}

/// `to = from`, rounded to nearest.
pub(crate) fn convert(from: &Tensor, to: &mut Tensor) -> Result<()> {
    let name = match to.dtype() {
        dtype if dtype == from.dtype() => return to.write(from),
        DType::F64 => "cast_to_f64",
        DType::BF16 => "cast_to_bf16",
        DType::F16 => "cast_to_f16",
        _ => "cast_to_f32",
    };
    let n = from.numel();
    kernel(from.device(), "cast", from.dtype(), name)?
        .input(from)
        .output(to)
        .value(n as u64)
        .run_elements(n)
}
