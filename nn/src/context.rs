//! The context of a forward pass: seed, step, mode, and the samples and positions of the global batch on this rank.
//! Random numbers are functions of these, so they do not depend on the sharding.

use ferrotron_autograd::CallCounts;
use ferrotron_tensor::ops::attention::KeyRanges;
use ferrotron_tensor::{Error, RandomKey, Result, ShardSpec};
use smallvec::{SmallVec, smallvec};
use std::ops::Range;

/// Whether dropout is active.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Training: dropout is active.
    Train,
    /// Evaluation and generation: dropout is the identity.
    Eval,
}

/// A shard of one global dim: (offset, length) ranges in local order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DimShard {
    /// Size of the whole dim.
    pub global: usize,
    /// The local (offset, length) ranges.
    pub pieces: SmallVec<[(usize, usize); 2]>,
}

impl DimShard {
    /// The unsharded dim.
    pub fn unsharded(size: usize) -> DimShard {
        DimShard::part(size, 0, size)
    }

    /// A shard of one range.
    pub fn part(global: usize, offset: usize, len: usize) -> DimShard {
        DimShard { global, pieces: smallvec![(offset, len)] }
    }

    /// Local length.
    #[expect(clippy::len_without_is_empty, reason = "an extent is not a collection")]
    pub fn len(&self) -> usize {
        self.pieces.iter().map(|&(_, len)| len).sum()
    }

    /// The global coordinates of the local elements, in local order.
    pub fn coordinates(&self) -> impl Iterator<Item = usize> + '_ {
        self.pieces.iter().flat_map(|&(offset, len)| offset..offset + len)
    }

    /// The sub-range `range` of this shard, in local coordinates.
    #[must_use]
    pub fn narrow(&self, range: Range<usize>) -> DimShard {
        let mut pieces = SmallVec::new();
        let mut before = 0;
        for &(offset, len) in &self.pieces {
            let start = range.start.clamp(before, before + len);
            let end = range.end.clamp(before, before + len);
            if start < end {
                pieces.push((offset + start - before, end - start));
            }
            before += len;
        }
        DimShard { global: self.global, pieces }
    }
}

/// The arguments of a forward pass that are the same for every layer.
///
/// ```
/// use ferrotron_nn::{Context, Mode};
/// // The second micro-batch of 4 samples in a global batch of 8, sequences of 128 tokens.
/// let ctx = Context::new(1234, 7, Mode::Train, 8, 128).micro_batch(4, 4);
/// assert_eq!(ctx.batch.pieces[0], (4, 4));
/// ```
#[derive(Debug, Clone)]
pub struct Context {
    /// Seed of the run.
    pub seed: u64,
    /// Training step, from 0.
    pub step: u64,
    /// Whether dropout is active.
    pub mode: Mode,
    /// The local samples of the global batch.
    pub batch: DimShard,
    /// The local positions of the sequence, as seen by attention.
    pub sequence: DimShard,
    /// The local positions on the residual stream, between the layers of a block. Fewer than in `sequence` only with
    /// sequence parallelism.
    pub residual: DimShard,
    /// The keys that the queries of each local sample may see, over all positions of the sequence: lengths of padded
    /// sequences, packed documents. Without them, a sample is one sequence.
    pub key_ranges: Option<KeyRanges>,
    /// The positions of the memory that the local queries of each local sample may see in
    /// [`CrossAttention`](crate::CrossAttention). Without them, all.
    pub memory_ranges: Option<KeyRanges>,
    /// The number of draws of each random layer in this pass. Clones of the context share it, and each micro-batch has
    /// its own.
    pub calls: CallCounts,
}

impl Context {
    /// The context of a pass over a whole global batch of sequences.
    pub fn new(
        seed: u64,
        step: u64,
        mode: Mode,
        global_batch: usize,
        seq_length: usize,
    ) -> Context {
        Context {
            seed,
            step,
            mode,
            batch: DimShard::unsharded(global_batch),
            sequence: DimShard::unsharded(seq_length),
            residual: DimShard::unsharded(seq_length),
            key_ranges: None,
            memory_ranges: None,
            calls: CallCounts::default(),
        }
    }

    /// The context of an evaluation of `batch` sequences of `seq_length` tokens: nothing is random, so that it needs
    /// neither seed nor step.
    ///
    /// ```
    /// use ferrotron_nn::{Context, Mode};
    /// let ctx = Context::eval(4, 128);
    /// assert_eq!((ctx.mode, ctx.batch.len(), ctx.sequence.len()), (Mode::Eval, 4, 128));
    /// ```
    pub fn eval(batch: usize, seq_length: usize) -> Context {
        Context::new(0, 0, Mode::Eval, batch, seq_length)
    }

    /// Restricts the pass to `len` samples of the global batch from `offset` on, and begins to count the calls of
    /// random layers.
    #[must_use]
    pub fn micro_batch(mut self, offset: usize, len: usize) -> Context {
        self.batch = DimShard::part(self.batch.global, offset, len);
        self.calls = CallCounts::default();
        self
    }

    /// Makes each sample `rows` sequences, one after another: the batch of this pass counts these.
    ///
    /// ```
    /// use ferrotron_nn::{Context, Mode};
    /// let ctx = Context::new(1234, 7, Mode::Train, 8, 128).micro_batch(2, 3).with_rows_per_sample(4);
    /// assert_eq!((ctx.batch.global, ctx.batch.pieces[0]), (32, (8, 12)));
    /// ```
    #[must_use]
    pub fn with_rows_per_sample(mut self, rows: usize) -> Context {
        self.batch.global *= rows;
        for (offset, len) in &mut self.batch.pieces {
            (*offset, *len) = (*offset * rows, *len * rows);
        }
        self
    }

    /// Tells attention that the samples of this micro-batch are padded: sample b has `lengths[b]` positions, and no query
    /// sees a key beyond them. Results at padded positions mean nothing.
    ///
    /// Errors unless there is a length for each local sample, of at most the sequence length.
    ///
    /// ```
    /// use ferrotron_nn::Context;
    /// let ctx = Context::eval(2, 10).with_key_lengths(&[10, 7])?;
    /// let error = ctx.with_key_lengths(&[11, 7]).unwrap_err().to_string();
    /// assert_eq!(error, "context: key lengths [11, 7] are not of 2 samples of at most 10 positions");
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn with_key_lengths(self, lengths: &[usize]) -> Result<Context> {
        let (samples, positions) = (self.batch.len(), self.sequence.global);
        if lengths.len() != samples || lengths.iter().any(|&length| length > positions) {
            let message = format!(
                "key lengths {lengths:?} are not of {samples} samples of at most {positions} positions"
            );
            return Err(Error::shape("context", message));
        }
        let ranges = KeyRanges::from_lengths(lengths, positions)?;
        self.with_key_ranges(ranges)
    }

    /// Tells attention that the samples of this micro-batch are packed documents. `boundaries[b]` (`cu_seqlens`) begins
    /// with 0 and holds the end of each document of sample b. Queries see the keys of their own document only.
    ///
    /// Errors unless there are boundaries for each local sample, ascending and within the sequence length.
    pub fn with_documents(self, boundaries: &[Vec<usize>]) -> Result<Context> {
        let (samples, positions) = (self.batch.len(), self.sequence.global);
        if boundaries.len() != samples {
            let message =
                format!("document boundaries of {} samples, not {samples}", boundaries.len());
            return Err(Error::shape("context", message));
        }
        let ranges = KeyRanges::from_documents(boundaries, positions)?;
        self.with_key_ranges(ranges)
    }

    /// Tells cross-attention that the memory of this micro-batch is padded: that of sample b has `lengths[b]` positions.
    ///
    /// Errors unless there is a length for each local sample. Cross-attention errors if one exceeds the memory.
    ///
    /// ```
    /// use ferrotron_nn::Context;
    /// let ctx = Context::eval(2, 10).with_memory_lengths(&[7, 4])?;
    /// assert_eq!(ctx.memory_ranges.unwrap().range(1, 0), [0, 4]);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn with_memory_lengths(self, lengths: &[usize]) -> Result<Context> {
        let samples = self.batch.len();
        if lengths.len() != samples {
            let message = format!("memory lengths {lengths:?} are not of {samples} samples");
            return Err(Error::shape("context", message));
        }
        let ranges = KeyRanges::from_lengths(lengths, self.sequence.len())?;
        Ok(Context { memory_ranges: Some(ranges), ..self })
    }

    /// Restricts the keys that queries see to `ranges` too.
    fn with_key_ranges(self, ranges: KeyRanges) -> Result<Context> {
        let ranges = match &self.key_ranges {
            Some(own) => own.intersect(&ranges)?,
            None => ranges,
        };
        Ok(Context { key_ranges: Some(ranges), ..self })
    }

    /// The random stream of the next call of `site`, the path of a [`RandomSite`](crate::RandomSite). Each call within a
    /// pass has a stream of its own, so that a layer that is used twice draws different numbers. They are the same in
    /// every layout, and in a recomputed region again.
    pub fn next_key(&self, site: &str) -> RandomKey {
        match self.calls.next(site) {
            0 => RandomKey::new(self.seed, self.step, site),
            call => RandomKey::new(self.seed, self.step, &format!("{site}#{call}")),
        }
    }

    /// The shard that a local (batch, sequence, features..) activation of the residual stream holds.
    pub fn shard_spec(&self, features: &[usize]) -> Result<ShardSpec> {
        let mut global = vec![self.batch.global, self.residual.global];
        global.extend(features);
        let whole: Vec<[(usize, usize); 1]> = features.iter().map(|&size| [(0, size)]).collect();
        let mut pieces: Vec<&[(usize, usize)]> = vec![&self.batch.pieces, &self.residual.pieces];
        pieces.extend(whole.iter().map(|piece| piece.as_slice()));
        ShardSpec::new(&global, &pieces)
    }
}
