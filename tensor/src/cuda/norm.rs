//! Launches LayerNorm and RMSNorm.

use super::kernel;
use crate::ops::cast::cast;
use crate::ops::norm::kind::{GradSelection, Gradients, NormKind};
use crate::{Result, Tensor};

/// Threads of a warp, which have adjacent columns.
const WARP: usize = 32;

/// y, mean (empty for RMSNorm) and reciprocal standard deviation of each row of contiguous operands.
pub(crate) fn forward<N: NormKind>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, Tensor, Tensor)> {
    let (device, width, acc) = (x.device(), weight.numel(), x.dtype().accumulator());
    let outer = &x.dims()[..x.rank() - 1];
    let rows: usize = outer.iter().product();
    let mut y = Tensor::empty(device, x.dtype(), x.dims())?;
    let mut mean = Tensor::empty(device, acc, if N::CENTRED { outer } else { &[0] })?;
    let mut rstd = Tensor::empty(device, acc, outer)?;
    let is_wide = |parameter: &Tensor| parameter.dtype() != x.dtype();
    let (weight, bias) = match is_wide(weight) || bias.is_some_and(is_wide) {
        true => (cast(weight, acc)?, bias.map(|bias| cast(bias, acc)).transpose()?),
        false => (weight.clone(), bias.cloned()),
    };
    let name = match (N::CENTRED, is_wide(&weight)) {
        (true, false) => "layer_norm",
        (true, true) => "layer_norm_wide",
        (false, false) => "rms_norm",
        (false, true) => "rms_norm_wide",
    };
    let mut launch = kernel(device, "norm", x.dtype(), name)?.input(x).input(&weight);
    if N::CENTRED {
        launch = launch.optional(bias.as_ref()).output(&mut y).output(&mut mean);
    } else {
        launch = launch.output(&mut y);
    }
    launch
        .output(&mut rstd)
        .value(rows as u64)
        .value(width as u64)
        .value(eps)
        .run_held_rows(rows, width)?;
    Ok((y, mean, rstd))
}

/// The selected gradients, from contiguous operands; `before` is added to dx.
pub(crate) fn backward<N: NormKind>(
    dy: &Tensor,
    x: &Tensor,
    statistics: (Option<&Tensor>, &Tensor),
    weight: &Tensor,
    before: Option<&Tensor>,
    wanted: GradSelection,
) -> Result<Gradients> {
    let dx = backward_input::<N>(dy, x, statistics, weight, before)?;
    let weights = match wanted {
        GradSelection::Input => None,
        GradSelection::All => Some(backward_weights::<N>(dy, x, statistics, weight.numel())?),
    };
    Ok((dx, weights))
}

fn backward_input<N: NormKind>(
    dy: &Tensor,
    x: &Tensor,
    (mean, rstd): (Option<&Tensor>, &Tensor),
    weight: &Tensor,
    before: Option<&Tensor>,
) -> Result<Tensor> {
    let (rows, width) = (rstd.numel(), weight.numel());
    let mut dx = Tensor::empty(x.device(), x.dtype(), x.dims())?;
    let name = match (N::CENTRED, weight.dtype() != x.dtype()) {
        (true, false) => "layer_norm_backward_input",
        (true, true) => "layer_norm_wide_backward_input",
        (false, false) => "rms_norm_backward_input",
        (false, true) => "rms_norm_wide_backward_input",
    };
    let launch = kernel(x.device(), "norm", x.dtype(), name)?.input(dy).input(x);
    let launch = if N::CENTRED { launch.optional(mean) } else { launch };
    launch
        .input(rstd)
        .input(weight)
        .optional(before)
        .output(&mut dx)
        .value(rows as u64)
        .value(width as u64)
        .run_rows(rows, width)?;
    Ok(dx)
}

fn backward_weights<N: NormKind>(
    dy: &Tensor,
    x: &Tensor,
    (mean, rstd): (Option<&Tensor>, &Tensor),
    width: usize,
) -> Result<(Tensor, Tensor)> {
    let (device, rows, acc) = (x.device(), rstd.numel(), x.dtype().accumulator());
    // As on the CPU: at most 128 blocks, so partial sums stay small relative to the input.
    let block = rows.div_ceil(128).max(32);
    let blocks = rows.div_ceil(block);
    let mut partials = Tensor::empty(device, acc, &[blocks, 2, width])?;
    // Elements of 16 bytes, which a thread has where every row is a multiple of them.
    let columns = 16 / x.dtype().size();
    let columns = if width.is_multiple_of(columns) { columns } else { 1 };
    let name =
        if N::CENTRED { "layer_norm_backward_partials" } else { "rms_norm_backward_partials" };
    let launch = kernel(device, "norm", x.dtype(), name)?.input(dy).input(x);
    let launch = if N::CENTRED { launch.optional(mean) } else { launch };
    launch
        .input(rstd)
        .output(&mut partials)
        .value(rows as u64)
        .value(width as u64)
        .value(block as u64)
        .run([width.div_ceil(WARP * columns), blocks, 1], [WARP, 4, 1])?;
    let sum = || Tensor::empty(device, acc, &[width]);
    let (mut dweight, mut dbias) = (sum()?, sum()?);
    kernel(device, "norm", x.dtype(), "norm_backward_weights")?
        .input(&partials)
        .output(&mut dweight)
        .output(&mut dbias)
        .value(blocks as u64)
        .value(width as u64)
        .run([width.div_ceil(WARP), 1, 1], [WARP, 8, 1])?;
    Ok((dweight, dbias))
}
