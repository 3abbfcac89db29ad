//! What a rank's part of the model does with the micro-batches of a step.

use ferrotron_autograd::Var;
use ferrotron_nn::{Axis, Context, Extent};
use ferrotron_parallel::data_parallel::DataParallel;
use ferrotron_parallel::mesh::Mesh;
use ferrotron_parallel::pipeline::PipelineModel;
use ferrotron_tensor::ops::pointwise::add_assign;
use ferrotron_tensor::{DType, Device, Result, Tensor};

use crate::data::Batch;
use crate::gpt::Gpt;

/// The chunks of a rank, and the batches that they run.
pub(crate) struct StageModel<'a> {
    parts: &'a [Gpt],
    data_parallel: Option<&'a DataParallel>,
    microbatches: &'a [Microbatch],
    /// Whether this rank's losses count: one of those along the tensor axis, which all have the same.
    counts: bool,
    /// The summed loss of the micro-batches that ended here, in f64.
    sum: Tensor,
}

/// A micro-batch: what the pass needs to know, and inputs and targets of this rank's positions.
pub(crate) struct Microbatch {
    ctx: Context,
    inputs: Tensor,
    targets: Tensor,
}

impl Microbatch {
    /// `ctx` says which samples of the global batch it holds.
    pub fn new(device: &Device, mesh: &Mesh, batch: &Batch, ctx: Context) -> Result<Microbatch> {
        let ctx = mesh.context(ctx)?;
        let dims = [batch.micro_batch, ctx.sequence.len()];
        let (inputs, targets) = held_tokens(batch, &ctx.sequence);
        let inputs = Tensor::from_slice(device, &inputs, &dims)?;
        Ok(Microbatch { inputs, targets: Tensor::from_slice(device, &targets, &dims)?, ctx })
    }

    /// Puts another one of the same dims into the same memory.
    pub fn set(&mut self, mesh: &Mesh, batch: &Batch, ctx: Context) -> Result<()> {
        self.ctx = mesh.context(ctx)?;
        let (inputs, targets) = held_tokens(batch, &self.ctx.sequence);
        self.inputs.write_slice(&inputs)?;
        self.targets.write_slice(&targets)
    }
}

impl<'a> StageModel<'a> {
    /// The chunks `parts` run `microbatches`.
    pub fn new(
        parts: &'a [Gpt],
        mesh: &Mesh,
        microbatches: &'a [Microbatch],
    ) -> Result<StageModel<'a>> {
        let device = parts[0].scope().device();
        Ok(StageModel {
            parts,
            data_parallel: None,
            microbatches,
            counts: mesh.axis(Axis::Tensor).rank() == 0,
            // Written by the host: a dry device adds nothing.
            sum: Tensor::full(device, DType::F64, &[], 0.0)?,
        })
    }

    /// The same, with gradients that `data_parallel` reduces.
    pub fn reduced_by(mut self, data_parallel: &'a DataParallel) -> StageModel<'a> {
        self.data_parallel = Some(data_parallel);
        self
    }

    /// The same, whose losses are added to `sum`, which [`StageModel::into_loss`] of other micro-batches returned.
    pub fn adding_to(mut self, sum: Tensor) -> StageModel<'a> {
        self.sum = sum;
        self
    }

    /// The summed loss of what ran here, one number of f64; the world's sum of it is that of the global batch.
    pub fn into_loss(self) -> Result<Tensor> {
        match self.counts {
            true => Ok(self.sum),
            false => Tensor::full(self.sum.device(), DType::F64, &[], 0.0),
        }
    }
}

impl PipelineModel for StageModel<'_> {
    fn activation(&self, microbatch: usize) -> (Vec<usize>, DType, Device) {
        let Microbatch { ctx, inputs, .. } = &self.microbatches[microbatch];
        let dims = vec![inputs.dims()[0], ctx.residual.len(), self.parts[0].config().hidden_size];
        (dims, self.parts[0].scope().dtype(), inputs.device().clone())
    }

    fn forward(&mut self, microbatch: usize, chunk: usize, input: Option<Var>) -> Result<Var> {
        let Microbatch { ctx, inputs, targets } = &self.microbatches[microbatch];
        let gpt = &self.parts[chunk];
        let x = input.map_or_else(|| gpt.embed(ctx, inputs), Ok)?;
        let x = gpt.run_blocks(ctx, x)?;
        if !gpt.held().last {
            return Ok(x);
        }
        let sum = gpt.head_loss(&x, targets)?.sum;
        add_assign(&mut self.sum, &sum.value().cast(DType::F64)?)?;
        Ok(sum)
    }

    fn end_backward(&mut self, _microbatch: usize, _chunk: usize) -> Result<()> {
        self.data_parallel.map_or(Ok(()), DataParallel::end_backward)
    }
}

/// Inputs and targets of the positions that are here.
fn held_tokens(batch: &Batch, sequence: &Extent) -> (Vec<u32>, Vec<i64>) {
    let length = batch.seq_length;
    (held(&batch.inputs, length, sequence), held(&batch.targets, length, sequence))
}

/// The positions that are here of rows of `length`.
fn held<T: Copy>(rows: &[T], length: usize, sequence: &Extent) -> Vec<T> {
    let pieces = |row: &[T]| {
        let piece = |&(offset, len): &(usize, usize)| &row[offset..offset + len];
        sequence.pieces.iter().map(piece).collect::<Vec<_>>().concat()
    };
    rows.chunks_exact(length).flat_map(pieces).collect()
}
