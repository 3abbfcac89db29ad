//! A micro-batch on the device: the arrays of a batch at this rank's positions.

use ferrotron_nn::{Context, DimShard};
use ferrotron_parallel::mesh::Mesh;
use ferrotron_tensor::{DType, Device, Error, Result, Tensor};

use crate::io::data::{ArrayValues, Batch, BatchArray};

/// The samples of one forward pass, at this rank's positions, and their place in the global batch.
#[derive(Debug)]
pub struct Microbatch {
    ctx: Context,
    samples: usize,
    arrays: Vec<(String, Tensor)>,
}

impl Microbatch {
    /// Uploads `batch`; `ctx` identifies its samples in the global batch, and gets the key lengths of a padded one.
    pub fn new(device: &Device, mesh: &Mesh, batch: &Batch, ctx: Context) -> Result<Microbatch> {
        let ctx = context(mesh, batch, ctx)?;
        let upload = |array: &BatchArray| {
            let (values, dims) = local(array, &ctx.sequence);
            let tensor = match &values {
                ArrayValues::U32(values) => Tensor::from_slice(device, values, &dims),
                ArrayValues::I64(values) => Tensor::from_slice(device, values, &dims),
                ArrayValues::F32(values) => Tensor::from_slice(device, values, &dims),
            };
            Ok((array.name.clone(), tensor?))
        };
        let arrays = batch.arrays().iter().map(upload).collect::<Result<_>>()?;
        Ok(Microbatch { ctx, samples: batch.micro_batch, arrays })
    }

    /// Overwrites the arrays in place with those of another batch of the same names and dims.
    pub(crate) fn set(&mut self, mesh: &Mesh, batch: &Batch, ctx: Context) -> Result<()> {
        self.ctx = context(mesh, batch, ctx)?;
        for ((_, tensor), array) in self.arrays.iter_mut().zip(batch.arrays()) {
            match local(array, &self.ctx.sequence).0 {
                ArrayValues::U32(values) => tensor.write_slice(&values)?,
                ArrayValues::I64(values) => tensor.write_slice(&values)?,
                ArrayValues::F32(values) => tensor.write_slice(&values)?,
            }
        }
        Ok(())
    }

    /// The context of the pass: mode, random keys, samples and positions.
    pub fn ctx(&self) -> &Context {
        &self.ctx
    }

    /// Number of samples.
    pub fn samples(&self) -> usize {
        self.samples
    }

    /// An array of the batch, at this rank's positions.
    ///
    /// # Errors
    /// An array that the batch does not have.
    pub fn get(&self, name: &str) -> Result<&Tensor> {
        self.find(name).ok_or_else(|| {
            let names: Vec<&str> = self.arrays.iter().map(|(name, _)| name.as_str()).collect();
            let message = format!("the batch has no '{name}', but {}", names.join(", "));
            Error::value("model", message)
        })
    }

    /// An array of the batch, at this rank's positions, if the batch has it.
    pub fn find(&self, name: &str) -> Option<&Tensor> {
        self.arrays.iter().find(|(own, _)| own == name).map(|(_, tensor)| tensor)
    }

    /// Returns the tensor of [`Microbatch::get`], cast to `dtype`.
    pub fn get_as(&self, name: &str, dtype: DType) -> Result<Tensor> {
        self.get(name)?.cast(dtype)
    }
}

/// The pass over `batch` on this rank, in which attention leaves out padding and other documents.
fn context(mesh: &Mesh, batch: &Batch, ctx: Context) -> Result<Context> {
    let ctx = mesh.context(ctx)?.with_rows_per_sample(batch.rows_per_sample());
    let ctx = match batch.key_lengths() {
        Some(lengths) => ctx.with_key_lengths(lengths)?,
        None => ctx,
    };
    match batch.documents() {
        Some(boundaries) => ctx.with_documents(boundaries),
        None => Ok(ctx),
    }
}

/// This rank's positions of an array, and their dims.
fn local(array: &BatchArray, sequence: &DimShard) -> (ArrayValues, Vec<usize>) {
    if !array.has_positions {
        return (array.values.clone(), array.dims.clone());
    }
    let mut dims = array.dims.clone();
    dims[1] = sequence.len();
    let (length, inner) = (array.dims[1], array.dims[2..].iter().product());
    let values = match &array.values {
        ArrayValues::U32(values) => ArrayValues::U32(positions(values, length, inner, sequence)),
        ArrayValues::I64(values) => ArrayValues::I64(positions(values, length, inner, sequence)),
        ArrayValues::F32(values) => ArrayValues::F32(positions(values, length, inner, sequence)),
    };
    (values, dims)
}

/// This rank's positions of rows of `length` positions of `inner` elements.
fn positions<T: Copy>(rows: &[T], length: usize, inner: usize, sequence: &DimShard) -> Vec<T> {
    let pieces = |row: &[T]| {
        let piece = |&(offset, len): &(usize, usize)| &row[offset * inner..(offset + len) * inner];
        sequence.pieces.iter().map(piece).collect::<Vec<_>>().concat()
    };
    match length * inner {
        0 => Vec::new(),
        row => rows.chunks_exact(row).flat_map(pieces).collect(),
    }
}
