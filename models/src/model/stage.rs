//! Runs a rank's model chunks on the micro-batches of a step.

use ferrotron_autograd::Var;
use ferrotron_nn::{Axis, Context, DimShard};
use ferrotron_parallel::data_parallel::DataParallel;
use ferrotron_parallel::mesh::Mesh;
use ferrotron_parallel::pipeline::PipelineModel;
use ferrotron_tensor::ops::pointwise::add_assign;
use ferrotron_tensor::{DType, Device, Result, Tensor};

use crate::io::data::Batch;
use crate::model::gpt::Gpt;

/// The chunks of a rank, and their micro-batches.
pub(crate) struct StageModel<'a> {
    parts: &'a [Gpt],
    data_parallel: Option<&'a DataParallel>,
    microbatches: &'a [Microbatch],
    /// Whether this rank counts the loss, which is equal on all ranks along the tensor axis.
    counts: bool,
    /// The summed loss of the micro-batches on this rank, in f64.
    sum: Tensor,
}

/// A micro-batch: context, inputs and targets of this rank's positions.
pub(crate) struct Microbatch {
    ctx: Context,
    inputs: Tensor,
    targets: Tensor,
}

impl Microbatch {
    /// Uploads a micro-batch; `ctx` identifies its samples in the global batch.
    pub fn new(device: &Device, mesh: &Mesh, batch: &Batch, ctx: Context) -> Result<Microbatch> {
        let ctx = mesh.context(ctx)?;
        let dims = [batch.micro_batch, ctx.sequence.len()];
        let (inputs, targets) = held_tokens(batch, &ctx.sequence);
        let inputs = Tensor::from_slice(device, &inputs, &dims)?;
        Ok(Microbatch { inputs, targets: Tensor::from_slice(device, &targets, &dims)?, ctx })
    }

    /// Overwrites the micro-batch in place with another one of the same dims.
    pub fn set(&mut self, mesh: &Mesh, batch: &Batch, ctx: Context) -> Result<()> {
        self.ctx = mesh.context(ctx)?;
        let (inputs, targets) = held_tokens(batch, &self.ctx.sequence);
        self.inputs.write_slice(&inputs)?;
        self.targets.write_slice(&targets)
    }
}

impl<'a> StageModel<'a> {
    /// The chunks `parts`, to run `microbatches`.
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
            // Written by the host, since a fake device computes nothing.
            sum: Tensor::full(device, DType::F64, &[], 0.0)?,
        })
    }

    /// Sets `data_parallel` to reduce gradients.
    pub fn reduced_by(mut self, data_parallel: &'a DataParallel) -> StageModel<'a> {
        self.data_parallel = Some(data_parallel);
        self
    }

    /// Adds the losses to `sum`, which [`StageModel::into_loss`] of other micro-batches returned.
    pub fn adding_to(mut self, sum: Tensor) -> StageModel<'a> {
        self.sum = sum;
        self
    }

    /// The summed loss on this rank, an f64 scalar; its sum over the world is that of the global batch.
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

/// Inputs and targets of this rank's positions.
fn held_tokens(batch: &Batch, sequence: &DimShard) -> (Vec<u32>, Vec<i64>) {
    let length = batch.seq_length;
    (local_tokens(&batch.inputs, length, sequence), local_tokens(&batch.targets, length, sequence))
}

/// This rank's positions of rows of `length`.
fn local_tokens<T: Copy>(rows: &[T], length: usize, sequence: &DimShard) -> Vec<T> {
    let pieces = |row: &[T]| {
        let piece = |&(offset, len): &(usize, usize)| &row[offset..offset + len];
        sequence.pieces.iter().map(piece).collect::<Vec<_>>().concat()
    };
    rows.chunks_exact(length).flat_map(pieces).collect()
}
