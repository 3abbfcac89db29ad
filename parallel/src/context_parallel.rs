//! Context parallelism: each rank holds some positions of every sequence, and attention covers all of them.
//!
//! Ring attention (Liu et al., arXiv 2310.01889, section 3): blocks of keys and values rotate around a ring of ranks.
//! Each rank attends to its current block while the next one is in transit, and merges the results by their
//! log-sum-exp. Backward rotates the blocks again. The accumulated gradient of each block follows it one step behind
//! and ends at the block's owner.
//!
//! Rank r of n holds chunks r and 2n - 1 - r of 2n, which balances causal attention in every step. Megatron-LM's
//! `--context-parallel-size` shards the same way. In a rank's own block, queries attend below the diagonal. In an
//! earlier rank's block, all queries attend to the first chunk; in a later rank's, only the second chunk of queries
//! attends, to both chunks.
//!
//! With any other mask (all keys, a window, key lengths, documents), each query attends to the keys of the block that it
//! sees by its global position. Such keys are one range of the block, since chunks are in the order of positions.
//! Blocks without a key that a local query sees are only passed on.

mod step;

use ferrotron_autograd::{Backward, Cotangents, InputGrads, Saved, Var, forward_span};
use ferrotron_nn::{AttentionHeads, Context, DimShard, KvCache};
use ferrotron_tensor::ops::attention::{
    AttentionConfig, AttentionMask, attention, attention_backward, attention_backward_bias,
    merge_attention, split_packed,
};
use ferrotron_tensor::{At, Error, RandomKey, Result, Tensor};
use smallvec::smallvec;
use std::cmp::Ordering;

use crate::collective::{Group, Work};
use step::{RingStep, add};

/// The sharding of sequences along the context axis.
#[derive(Debug, Clone)]
pub struct ContextParallel {
    group: Group,
}

impl ContextParallel {
    /// Sequences sharded over `group`.
    pub fn new(group: Group) -> ContextParallel {
        ContextParallel { group }
    }

    /// Unsharded sequences.
    pub fn single() -> ContextParallel {
        ContextParallel::new(Group::single())
    }

    /// The ranks along the context axis.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// The local positions of sequences of `length`: two chunks, in this order.
    ///
    /// Errors unless `length` is a multiple of twice the number of ranks.
    ///
    /// ```
    /// use ferrotron_parallel::collective::{WorldConfig, run_threads};
    /// use ferrotron_parallel::context_parallel::ContextParallel;
    /// let held = run_threads(2, &WorldConfig::default(), |world| {
    ///     ContextParallel::new(world.group("cp", &[0, 1])?).sequence(8)
    /// });
    /// for (extent, want) in held.into_iter().zip([[0, 1, 6, 7], [2, 3, 4, 5]]) {
    ///     assert!(extent?.coordinates().eq(want));
    /// }
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn sequence(&self, length: usize) -> Result<DimShard> {
        let ranks = self.group.size();
        if ranks == 1 {
            return Ok(DimShard::unsharded(length));
        }
        if !length.is_multiple_of(2 * ranks) {
            let message = format!(
                "sequences of {length} cannot be cut for context-parallel-size {ranks}: seq-length must be a \
                 multiple of {}",
                2 * ranks
            );
            return Err(Error::config("context_parallel", message));
        }
        Ok(held_by(self.group.rank(), ranks, length))
    }

    /// [`AttentionHeads::forward`] of the positions `ctx.sequence`, which must be those of
    /// [`ContextParallel::sequence`]: (B, T/cp, (H + 2G) D) -> (B, T/cp, H D). A `bias` has dims that broadcast to (B, H,
    /// T or T/cp, S), where S counts all positions; it gets the gradient of the local queries. With a cache, this rank has
    /// all positions of its own sequences, and sends nothing.
    ///
    /// Errors if the positions differ.
    pub fn attend(
        &self,
        heads: &AttentionHeads,
        ctx: &Context,
        qkv: Var,
        bias: Option<&Var>,
        cache: Option<&mut KvCache>,
    ) -> Result<Var> {
        match self.group.size() > 1 && cache.is_none() {
            true => self.ring(heads, ctx, qkv, bias).at(heads.path()),
            false => heads.forward(ctx, qkv, bias, cache),
        }
    }

    fn ring(
        &self,
        heads: &AttentionHeads,
        ctx: &Context,
        qkv: Var,
        bias: Option<&Var>,
    ) -> Result<Var> {
        let held = &ctx.sequence;
        if *held != self.sequence(held.global)? || qkv.value().dim(1)? != held.len() {
            let (rank, ranks) = (self.group.rank(), self.group.size());
            let message = format!(
                "rank {rank} of context-parallel-size {ranks} has other positions than {:?} of {}, or other than \
                 {:?}",
                held.pieces,
                held.global,
                qkv.dims()
            );
            return Err(Error::shape("ring_attention", message));
        }
        let qkv = heads.prepare(qkv, held)?;
        // For the local queries and the keys of all ranks, in the order of positions.
        let (own, all): (Vec<usize>, Vec<usize>) =
            (held.coordinates().collect(), (0..held.global).collect());
        let bias = heads.bias(ctx, bias, &own, &all)?;
        // Slopes by distance are an option of attention where queries and keys are one run of positions each.
        let by_chunk = heads.has_slopes() && bias.is_none();
        let (dropout_key, ctx) = (heads.dropout_key(ctx), ctx.clone());
        let (group, heads) = (self.group.clone(), heads.clone());
        let ring = Ring { group, heads, ctx, dropout_key, by_chunk };
        let _span = forward_span("ring_attention");
        let (out, lse) = ring.forward(qkv.value(), bias.as_ref().map(Var::value))?;
        let &[batch, positions, heads, width] = out.dims() else {
            unreachable!("attention gives four dims")
        };
        let inputs: Vec<&Var> = [&qkv].into_iter().chain(&bias).collect();
        Var::record(&inputs, out.reshape(&[batch, positions, heads * width])?, || {
            let (out, lse) = (Saved::tensor(&out), Saved::statistic(&lse));
            let bias = bias.as_ref().map(Var::save);
            RingBackward { ring, qkv: qkv.save(), bias, out, lse }
        })
    }
}

/// The two chunks of rank `rank`.
fn held_by(rank: usize, ranks: usize, length: usize) -> DimShard {
    let chunk = length / (2 * ranks);
    let piece = |at: usize| (at * chunk, chunk);
    DimShard { global: length, pieces: smallvec![piece(rank), piece(2 * ranks - 1 - rank)] }
}

/// Ring attention on one rank.
struct Ring {
    group: Group,
    heads: AttentionHeads,
    ctx: Context,
    /// The random stream of dropout, the same in every step of the ring and in backward.
    dropout_key: Option<RandomKey>,
    /// Whether each chunk of queries attends to each chunk of keys by itself.
    by_chunk: bool,
}

impl Ring {
    /// The computations of ring step `step`, on the block of the rank that is `step` positions before this one.
    fn steps(&self, step: usize) -> Result<Vec<RingStep>> {
        let (rank, ranks) = (self.group.rank(), self.group.size());
        let other = (rank + ranks - step) % ranks;
        let mut steps = if self.by_chunk { self.chunks(other)? } else { vec![self.whole(other)?] };
        steps.retain(RingStep::sees_keys);
        Ok(steps)
    }

    /// The computations of each chunk of queries on each chunk of the keys of rank `other`.
    fn chunks(&self, other: usize) -> Result<Vec<RingStep>> {
        let (own, key, len) = (&self.ctx.sequence, self.dropout_key, self.ctx.sequence.len() / 2);
        let block = held_by(other, self.group.size(), own.global);
        let mut steps = Vec::new();
        for (first, first_key) in [(0, 0), (0, len), (len, 0), (len, len)] {
            let queries = own.narrow(first..first + len);
            let columns = block.narrow(first_key..first_key + len);
            let mut config = self.heads.attention_config(&self.ctx, key, &queries, &columns)?;
            if self.heads.is_plainly_causal(&self.ctx) {
                config.mask = match columns.pieces[0].0.cmp(&queries.pieces[0].0) {
                    Ordering::Less => AttentionMask::None,
                    Ordering::Equal => AttentionMask::Causal,
                    Ordering::Greater => continue,
                };
            }
            steps.push(RingStep { first, queries: len, first_key, keys: len, columns, config });
        }
        Ok(steps)
    }

    /// The computation of all queries that see keys of rank `other`.
    fn whole(&self, other: usize) -> Result<RingStep> {
        let (rank, ranks) = (self.group.rank(), self.group.size());
        let (own, positions) = (&self.ctx.sequence, self.ctx.sequence.len());
        if !self.heads.is_plainly_causal(&self.ctx) {
            let block = held_by(other, ranks, own.global);
            let config = self.heads.attention_config(&self.ctx, self.dropout_key, own, &block)?;
            let (queries, keys, columns) = (positions, positions, block);
            return Ok(RingStep { first: 0, queries, first_key: 0, keys, columns, config });
        }
        let (first, keys, mask) = match other.cmp(&rank) {
            Ordering::Equal => (0, positions, AttentionMask::Causal),
            Ordering::Less => (0, positions / 2, AttentionMask::None),
            Ordering::Greater => (positions / 2, positions, AttentionMask::None),
        };
        let queries = own.narrow(first..positions);
        let block = held_by(other, ranks, own.global).narrow(0..keys);
        let key = self.dropout_key;
        let config = self.heads.attention_config(&self.ctx, key, &queries, &block)?;
        let config = AttentionConfig { mask, ..config };
        let queries = positions - first;
        Ok(RingStep { first, queries, first_key: 0, keys, columns: block, config })
    }

    /// Starts sending `block` to the next rank and receiving the previous rank's block.
    fn pass(&self, block: Tensor) -> Result<Work<Tensor>> {
        let (rank, ranks) = (self.group.rank(), self.group.size());
        self.group.send_recv(block, (rank + 1) % ranks, (rank + ranks - 1) % ranks)
    }

    /// Queries (B, S, H, D), and keys and values (B, S, 2G, D), of a packed projection.
    fn split(&self, packed: &Tensor) -> Result<(Tensor, Tensor)> {
        let (heads, groups) = (self.heads.heads(), self.heads.groups());
        let (q, k, _) = split_packed(packed, heads, groups)?;
        let &[batch, positions, _, width] = k.dims() else { unreachable!("keys have four dims") };
        let kv = packed.narrow(2, heads * width, 2 * groups * width)?;
        Ok((q, kv.reshape(&[batch, positions, 2 * groups, width])?))
    }

    fn forward(&self, packed: &Tensor, bias: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
        let (q, mut block) = self.split(packed)?;
        let &[batch, positions, heads, _] = q.dims() else {
            unreachable!("queries have four dims")
        };
        let (device, acc) = (q.device(), q.dtype().accumulator());
        // A query that sees nothing has 0.
        let mut out = match self.ctx.key_ranges {
            Some(_) => Tensor::zeros(device, acc, q.dims())?,
            None => Tensor::empty(device, acc, q.dims())?,
        };
        let mut lse = Tensor::full(device, acc, &[batch, heads, positions], f64::NEG_INFINITY)?;
        for step in 0..self.group.size() {
            let more = step + 1 < self.group.size();
            let next = more.then(|| self.pass(block.clone())).transpose()?;
            for turn in self.steps(step)? {
                let (k, v) = turn.keys_and_values(&block)?;
                let config = turn.options(bias)?;
                let (part, part_lse) = attention(&turn.rows(&q, 1)?, &k, &v, &config)?;
                merge_attention((&mut out, &mut lse), turn.first, (&part, &part_lse))?;
            }
            if let Some(next) = next {
                block = next.wait()?;
            }
        }
        Ok((out.cast(q.dtype())?, lse))
    }

    /// The gradient of the packed projection; that of the bias is added to `dbias`, if there is one.
    fn backward(
        &self,
        dout: &Tensor,
        (packed, bias): (&Tensor, Option<&Tensor>),
        (out, lse): (&Tensor, &Tensor),
        mut dbias: Option<&mut Tensor>,
    ) -> Result<Tensor> {
        let (q, mut block) = self.split(packed)?;
        let acc = q.dtype().accumulator();
        let dout = dout.reshape(out.dims())?;
        let mut dq_sum = Tensor::zeros(q.device(), acc, q.dims())?;
        let mut travelling: Option<Work<Tensor>> = None;
        for step in 0..self.group.size() {
            let more = step + 1 < self.group.size();
            let next = more.then(|| self.pass(block.clone())).transpose()?;
            // The accumulated gradient of this block arrives one step behind it.
            let mut sum = match travelling.take() {
                Some(travelling) => travelling.wait()?,
                None => Tensor::zeros(q.device(), acc, block.dims())?,
            };
            for turn in self.steps(step)? {
                let (k, v) = turn.keys_and_values(&block)?;
                let config = turn.options(bias)?;
                let (dout, q) = (turn.rows(&dout, 1)?, turn.rows(&q, 1)?);
                let (out, lse) = (turn.rows(out, 1)?, turn.rows(lse, 2)?);
                let (operands, saved) = ((&q, &k, &v), (&out, &lse));
                let (dq, dk, dv) = attention_backward(&dout, operands, saved, &config)?;
                if let Some(sum) = dbias.as_deref_mut() {
                    let part = attention_backward_bias(&dout, operands, saved, &config)?;
                    turn.add_bias(sum, &part)?;
                }
                dq_sum.narrow_mut(1, turn.first, turn.queries, |sum| add(sum, &dq))?;
                let groups = dk.dims()[2];
                sum.narrow_mut(1, turn.first_key, turn.keys, |sum| {
                    sum.narrow_mut(2, 0, groups, |sum| add(sum, &dk))?;
                    sum.narrow_mut(2, groups, groups, |sum| add(sum, &dv))
                })?;
            }
            travelling = Some(self.pass(sum)?);
            if let Some(next) = next {
                block = next.wait()?;
            }
        }
        let home = travelling.expect("a ring has ranks").wait()?;
        let (heads, blocks) = (q.dims()[2], block.dims()[2]);
        let dims = [&q.dims()[..2], &[heads + blocks, q.dims()[3]]].concat();
        let mut gradient = Tensor::empty(q.device(), q.dtype(), &dims)?;
        gradient.narrow_mut(2, 0, heads, |place| place.copy_from(&dq_sum.cast(q.dtype())?))?;
        gradient.narrow_mut(2, heads, blocks, |place| place.copy_from(&home.cast(q.dtype())?))?;
        gradient.reshape(packed.dims())
    }
}

struct RingBackward {
    ring: Ring,
    qkv: Saved,
    bias: Option<Saved>,
    out: Saved,
    lse: Saved,
}

impl Backward for RingBackward {
    fn name(&self) -> &'static str {
        "ring_attention"
    }

    fn saved(&self) -> Vec<Tensor> {
        let kept = [&self.qkv, &self.out, &self.lse].into_iter().chain(&self.bias);
        kept.filter_map(Saved::resident_tensor).collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let RingBackward { ring, qkv, bias, out, lse } = *self;
        let (kept, bias) = ((&out.value()?, &lse.value()?), bias.map(|x| x.value()).transpose()?);
        let trained = bias.as_ref().filter(|_| dx.needs_input_grad(1));
        let zeros = |x: &Tensor| Tensor::zeros(x.device(), x.dtype().accumulator(), x.dims());
        let mut dbias = trained.map(zeros).transpose()?;
        let operands = (&qkv.value()?, bias.as_ref());
        dx.accumulate(0, ring.backward(&dy.single()?, operands, kept, dbias.as_mut())?)?;
        dbias.map_or(Ok(()), |dbias| dx.accumulate(1, dbias))
    }
}
