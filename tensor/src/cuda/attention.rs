//! Launches attention: tensor cores for 16-bit types, one warp per row for f32 and f64.

mod kernels;

use ferrotron_cuda::arguments::Attention;
use ferrotron_cuda::attention::{Blocks, Pass};
use ferrotron_cuda::gpu::Gpu;

use self::kernels::AttentionKernels;
use super::kernel::{Kernel, MOST_BLOCKS, kernel};
use super::launched::Products;
use crate::ops::attention::config::{AttentionConfig, AttentionDropout, AttentionMask};
use crate::ops::attention::operands::{Operands, ScoreBias, Shape};
use crate::ops::random::last_dropped;
use crate::{DType, Error, Result, Tensor};

/// Threads of a block that computes row sums, one warp per row.
const SUMS: usize = 256;

/// A call, with its operands in the form the kernels take.
struct AttentionLaunch<'a> {
    kernels: AttentionKernels,
    shape: Shape,
    /// Queries, keys and values, with heads padded to `width`.
    operands: [Tensor; 3],
    /// Elements of a head, including the zero padding.
    width: usize,
    dropout: Option<&'a AttentionDropout>,
    /// Held until the launch; the arguments have its address.
    _ranges: Option<Tensor>,
    _bias: Option<ScoreBias>,
    a: Attention,
}

impl<'a> AttentionLaunch<'a> {
    fn new(
        op: &'static str,
        shape: Shape,
        operands: [&Tensor; 3],
        config: &'a AttentionConfig,
    ) -> Result<AttentionLaunch<'a>> {
        let Shape { queries, keys, heads, groups, width, .. } = shape;
        let warpgroups = operands[0].device().gpu().is_some_and(Gpu::uses_warpgroups);
        let kernels = AttentionKernels::new(op, operands[0].dtype(), width, warpgroups)?;
        let width = match kernels {
            AttentionKernels::Tiles { .. } => width.next_multiple_of(8),
            AttentionKernels::Rows => width,
        };
        let [q, k, v] = operands.map(|x| readable(kernels, x, width));
        let operands = [q?, k?, v?];
        let [q, k, v] = [0, 1, 2].map(|i: usize| strides(&operands[i]));
        let device = operands[0].device();
        let ranges = config.ranges.as_ref().map(|ranges| ranges.tensor(device)).transpose()?;
        let ranges_row = match &config.ranges {
            Some(ranges) if ranges.rows() > 1 => 2 * ranges.queries(),
            _ => 0,
        };
        let bias = ScoreBias::new(shape, operands[0].dtype().accumulator(), config)?;
        let window = config.window.filter(|&window| window < queries + keys).unwrap_or(0);
        let a = Attention {
            queries: queries as i64,
            keys: keys as i64,
            heads: heads as i64,
            groups: groups as i64,
            width: width as i64,
            causal: i64::from(config.mask == AttentionMask::Causal),
            window: window as i64,
            ranges: ranges.as_ref().map_or(0, Tensor::address),
            ranges_row: ranges_row as i64,
            scale: config.scale,
            softcap: config.softcap.unwrap_or(0.0),
            bias: bias.as_ref().map_or(0, bias_address),
            bias_step: bias.as_ref().map_or([0; 3], |bias| bias.steps),
            q,
            k,
            v,
            ..bytemuck::Zeroable::zeroed()
        };
        let dropout = config.dropout.as_ref().filter(|dropout| dropout.p > 0.0);
        let (_ranges, _bias) = (ranges, bias);
        Ok(AttentionLaunch { kernels, shape, operands, width, dropout, _ranges, _bias, a })
    }

    /// The kernel of a pass, with queries, keys and values as its first arguments.
    fn kernel(&self, pass: Pass) -> Result<Kernel<'_>> {
        let q = &self.operands[0];
        let name = self.kernels.name(pass, self.dropout);
        let kernel = kernel(q.device(), self.variant(pass).0, q.dtype(), name)?;
        let Shape { batch, queries, keys, heads, width, .. } = self.shape;
        let products = Products {
            count: pass.products(),
            batch: batch * heads,
            rows: queries,
            columns: keys,
            inner: width,
            causal: self.a.causal != 0,
        };
        Ok(self.operands.iter().fold(kernel.computes(products), Kernel::input))
    }

    /// The file and the blocks of a pass.
    fn variant(&self, pass: Pass) -> (&'static str, Blocks) {
        self.kernels.pass(pass, self.a.bias != 0, self.dropout.is_some())
    }

    /// The blocks of a pass.
    fn blocks(&self, pass: Pass) -> Blocks {
        self.variant(pass).1
    }

    /// Adds the arguments that follow the tensors, and launches `grid` blocks.
    fn run(
        &self,
        kernel: Kernel<'_>,
        a: Attention,
        blocks: Blocks,
        grid: [usize; 3],
    ) -> Result<()> {
        let mut kernel = kernel.value(a).shared(blocks.shared);
        if let Some(dropout) = self.dropout {
            kernel = kernel
                .draws(&dropout.key)
                .value(last_dropped(dropout.p))
                .value(1.0 / (1.0 - dropout.p))
                .place(&dropout.place);
        }
        kernel.run(grid, [blocks.threads, 1, 1])
    }

    /// An uninitialised tensor (B, `positions`, `heads`, D) with padded heads.
    fn room(&self, positions: usize, heads: usize) -> Result<Tensor> {
        let q = &self.operands[0];
        Tensor::empty(q.device(), q.dtype(), &[self.shape.batch, positions, heads, self.width])
    }

    /// The result without the padding of its heads.
    fn trimmed(&self, x: Tensor) -> Result<Tensor> {
        match self.width == self.shape.width {
            true => Ok(x),
            false => x.narrow(-1, 0, self.shape.width)?.contiguous(),
        }
    }
}

/// out (B, T, H, D) and lse (B, H, T).
pub(crate) fn forward(
    shape: Shape,
    operands: [&Tensor; 3],
    config: &AttentionConfig,
) -> Result<(Tensor, Tensor)> {
    let call = AttentionLaunch::new("attention", shape, operands, config)?;
    let Shape { batch, queries, heads, .. } = shape;
    let q = operands[0];
    let mut out = call.room(queries, heads)?;
    let acc = q.dtype().accumulator();
    let mut lse = Tensor::empty(q.device(), acc, &[batch, heads, queries])?;
    let a = Attention { out: strides(&out), ..call.a };
    let kernel = call.kernel(Pass::Forward)?.output(&mut out).output(&mut lse);
    let blocks = call.blocks(Pass::Forward);
    call.run(kernel, a, blocks, [queries.div_ceil(blocks.rows), heads, batch])?;
    Ok((call.trimmed(out)?, lse))
}

/// dq, dk and dv, contiguous.
pub(crate) fn backward(
    shape: Shape,
    operands: &Operands,
    config: &AttentionConfig,
) -> Result<(Tensor, Tensor, Tensor)> {
    let Operands { q, k, v, .. } = operands;
    let call = AttentionLaunch::new("attention_backward", shape, [q, k, v], config)?;
    let Shape { queries, keys, heads, groups, .. } = shape;
    let mut dq = call.room(queries, heads)?;
    let (mut dk, mut dv) = (call.room(keys, groups)?, call.room(keys, groups)?);
    let a = Attention { dq: strides(&dq), dk: strides(&dk), dv: strides(&dv), ..call.a };
    gradients(&call, a, operands, |kernel, pass| match pass {
        Pass::Keys => kernel.output(&mut dk).output(&mut dv),
        _ => kernel.output(&mut dq),
    })?;
    Ok((call.trimmed(dq)?, call.trimmed(dk)?, call.trimmed(dv)?))
}

/// The gradients as one tensor (B, T, H + 2G, D).
pub(crate) fn backward_packed(
    shape: Shape,
    operands: &Operands,
    config: &AttentionConfig,
) -> Result<Tensor> {
    let Operands { q, k, v, .. } = operands;
    let call = AttentionLaunch::new("attention_backward", shape, [q, k, v], config)?;
    let Shape { queries, heads, groups, .. } = shape;
    let mut packed = call.room(queries, heads + 2 * groups)?;
    let steps = strides(&packed);
    let a = Attention { dq: steps, dk: steps, dv: steps, ..call.a };
    let at = |head: usize| head * call.width;
    gradients(&call, a, operands, |kernel, pass| match pass {
        Pass::Keys => {
            kernel.output_from(&mut packed, at(heads)).output_from(&mut packed, at(heads + groups))
        }
        _ => kernel.output(&mut packed),
    })?;
    call.trimmed(packed)
}

/// dout as kernels read it, delta_i = dout_i . out_i (B, H, T), and the arguments with their strides.
fn products(
    call: &AttentionLaunch<'_>,
    a: Attention,
    Operands { dout, out, lse, .. }: &Operands,
) -> Result<(Attention, Tensor, Tensor)> {
    let Shape { batch, queries, heads, .. } = call.shape;
    let dout = readable(call.kernels, dout, call.width)?;
    let (device, warps) = (out.device(), batch * heads * queries.div_ceil(32));
    let mut delta = Tensor::empty(device, lse.dtype(), &[batch, heads, queries])?;
    // The padding is zero in dout, so the sum needs only the unpadded elements.
    let width = call.shape.width as i64;
    let a = Attention { dout: strides(&dout), out: strides(out), ..a };
    kernel(device, call.kernels.file(), out.dtype(), "attention_delta")?
        .input(&dout)
        .input(out)
        .output(&mut delta)
        .value(batch as u64)
        .value(Attention { width, ..a })
        .run([warps.div_ceil(SUMS / 32), 1, 1], [SUMS, 1, 1])?;
    Ok((a, dout, delta))
}

/// Launches the gradient kernels; `to` adds their outputs.
fn gradients(
    call: &AttentionLaunch<'_>,
    a: Attention,
    operands: &Operands,
    mut to: impl for<'k> FnMut(Kernel<'k>, Pass) -> Kernel<'k>,
) -> Result<()> {
    let Shape { batch, queries, keys, heads, groups, .. } = call.shape;
    let (a, dout, delta) = products(call, a, operands)?;
    let lse = &operands.lse;
    let with = |pass| -> Result<_> { Ok(call.kernel(pass)?.input(&dout).input(lse).input(&delta)) };
    for (pass, rows, heads) in [(Pass::Queries, queries, heads), (Pass::Keys, keys, groups)] {
        let (kernel, blocks) = (to(with(pass)?, pass), call.blocks(pass));
        call.run(kernel, a, blocks, [rows.div_ceil(blocks.rows), heads, batch])?;
    }
    Ok(())
}

/// Adds the gradient of the bias to `dbias` (samples, H, T, S), zeros in Acc, where samples are B, or 1 for the sum over
/// the batch.
pub(crate) fn backward_bias(
    shape: Shape,
    operands: &Operands,
    config: &AttentionConfig,
    dbias: &mut Tensor,
) -> Result<()> {
    let Operands { q, k, v, lse, .. } = operands;
    let call = AttentionLaunch::new("attention_backward", shape, [q, k, v], config)?;
    let Shape { batch, queries, keys, heads, .. } = shape;
    let samples = dbias.dims()[0];
    let (a, dout, delta) = products(&call, call.a, operands)?;
    let blocks = call.blocks(Pass::Bias);
    let tiles = queries.div_ceil(blocks.rows)
        * match call.kernels {
            AttentionKernels::Tiles { .. } => keys.div_ceil(blocks.rows),
            AttentionKernels::Rows => 1,
        };
    let kernel = call.kernel(Pass::Bias)?.input(&dout).input(lse).input(&delta).output(dbias);
    call.run(
        kernel.value(samples as i64).value(batch as i64),
        a,
        blocks,
        grid(tiles, heads, samples),
    )
}

/// A grid of `blocks` for each head of each sample that has a bias of its own. Along z a grid has at most 65,535 blocks; y
/// has the heads of several samples where there are more. Other passes refuse such batches: more arithmetic for the place
/// of a block costs their kernels registers.
fn grid(blocks: usize, heads: usize, samples: usize) -> [usize; 3] {
    let along_y = samples.div_ceil(MOST_BLOCKS).max(1);
    [blocks, heads * along_y, samples.div_ceil(along_y)]
}

/// Merges a block of keys into `out` (B, T, H, D) and `lse` (B, H, T), for the block's queries, which start at
/// `first`.
pub(crate) fn merge(
    out: &mut Tensor,
    lse: &mut Tensor,
    first: usize,
    block_out: &Tensor,
    block_lse: &Tensor,
) -> Result<()> {
    let acc = block_out.dtype().accumulator();
    for tensor in [&*out, &*lse, block_lse] {
        if tensor.dtype() != acc {
            let message = format!("a block in {} needs {acc}, got {tensor:?}", block_out.dtype());
            return Err(Error::dtype("merge_attention", message));
        }
    }
    out.expect_contiguous("merge_attention")?;
    lse.expect_contiguous("merge_attention")?;
    let queries = out.dims()[1];
    let &[batch, rows, heads, width] = block_out.dims() else { return Ok(()) };
    let file = match block_out.dtype() {
        DType::BF16 | DType::F16 => "attention",
        _ => "attention_rows",
    };
    let kernel = kernel(block_out.device(), file, block_out.dtype(), "attention_merge")?
        .output(out)
        .output(lse)
        .input(block_out)
        .input(block_lse);
    let sizes = [batch, queries, rows, heads, width, first];
    sizes
        .iter()
        .fold(kernel, |kernel, &size| kernel.value(size as u64))
        .run([(batch * rows * heads).div_ceil(SUMS / 32), 1, 1], [SUMS, 1, 1])
}

/// `x` (B, T, H, D), whose last dim is dense, in a form that kernels can load in units of 16 bytes.
/// Heads narrower than `width` are copied with zero padding. Heads that do not start at multiples of 16 bytes are
/// copied densely.
fn readable(kernels: AttentionKernels, x: &Tensor, width: usize) -> Result<Tensor> {
    if matches!(kernels, AttentionKernels::Rows) {
        return Ok(x.clone());
    }
    let dims = x.dims();
    if dims[3] < width {
        let mut wide = Tensor::zeros(x.device(), x.dtype(), &[dims[0], dims[1], dims[2], width])?;
        wide.narrow_mut(-1, 0, dims[3], |part| part.copy_from(x))?;
        return Ok(wide);
    }
    let steps = dims[..3].iter().zip(x.layout().strides());
    let aligned = x.address().is_multiple_of(16)
        && steps.into_iter().all(|(&size, stride)| size == 1 || stride.is_multiple_of(8));
    if aligned { Ok(x.clone()) } else { dense(x) }
}

/// A contiguous copy in a buffer of its own, which is aligned to 16 bytes.
fn dense(x: &Tensor) -> Result<Tensor> {
    let mut out = Tensor::empty(x.device(), x.dtype(), x.dims())?;
    out.copy_from(x)?;
    Ok(out)
}

/// The address of a bias's first element.
fn bias_address(bias: &ScoreBias) -> u64 {
    let ScoreBias { numbers, first, .. } = bias;
    numbers.address() + (first * numbers.dtype().size()) as u64
}

/// Strides of batch, position and head.
fn strides(x: &Tensor) -> [i64; 3] {
    std::array::from_fn(|dim| x.layout().strides()[dim] as i64)
}
