//! Attention whose keys and values of earlier positions are cached, for generation.
//!
//! Every sequence attends by itself: sequences of a batch may have different lengths, and the bits of one do not depend on
//! the others.

use ferrotron_autograd::Var;
use ferrotron_tensor::ops::attention::{
    AttentionConfig as Scores, AttentionMask, attention, split_packed,
};
use ferrotron_tensor::ops::concat::concat;
use ferrotron_tensor::{Error, Result, Tensor};

use crate::layers::attention_heads::AttentionHeads;
use crate::layers::kv_cache::{CachedSequence, KvCache};
use crate::{Context, DimShard};

impl AttentionHeads {
    /// (B, T, (H + 2G) D) -> (B, T, H D), where the positions of each sequence follow those in its cache.
    ///
    /// Errors if the cache has another number of sequences, or no room.
    pub(super) fn attend_cached(
        &self,
        ctx: &Context,
        qkv: Var,
        bias: Option<&Var>,
        cache: &mut KvCache,
        scores: Scores,
    ) -> Result<Var> {
        let option = match (&ctx.key_ranges, scores.mask) {
            (Some(_), _) => Some("key lengths or documents"),
            (None, AttentionMask::None) => Some("attention that is not causal"),
            _ => None,
        };
        if let Some(option) = option {
            let message = format!("{option} and a cache of keys and values do not go together");
            return Err(Error::config("attention", message));
        }
        let (sequences, batch) = (cache.sequences_mut(), qkv.value().dim(0)?);
        if sequences.len() != batch {
            let message = format!(
                "{batch} sequences and a cache of {}: make the cache for {batch}",
                sequences.len()
            );
            return Err(Error::shape("attention", message));
        }
        if let [sequence] = sequences {
            return Ok(Var::constant(self.attend_sequence(ctx, qkv, bias, sequence, scores)?));
        }
        let mut outputs = Vec::new();
        for (row, sequence) in sequences.iter_mut().enumerate() {
            let own = Var::constant(qkv.value().narrow(0, row, 1)?);
            let bias = bias.map(|bias| of_sample(bias, row, batch)).transpose()?;
            outputs.push(self.attend_sequence(
                ctx,
                own,
                bias.as_ref(),
                sequence,
                scores.clone(),
            )?);
        }
        Ok(Var::constant(concat(&outputs.iter().collect::<Vec<_>>(), 0)?))
    }

    /// (1, T, (H + 2G) D) -> (1, T, H D)
    fn attend_sequence(
        &self,
        ctx: &Context,
        qkv: Var,
        bias: Option<&Var>,
        cache: &mut CachedSequence,
        scores: Scores,
    ) -> Result<Tensor> {
        let (heads, groups) = (self.heads(), self.groups());
        let (cached, positions) = (cache.len(), qkv.value().dim(1)?);
        let keys: Vec<usize> = (0..cached + positions).collect();
        let bias = self.bias(ctx, bias, &keys[cached..], &keys)?;
        let diagonals = match &bias {
            None => self.diagonals((cached, positions), (0, keys.len()))?,
            Some(_) => None,
        };
        let scores = Scores { bias: bias.map(Var::into_value), diagonals, ..scores };
        let qkv = self.prepare(qkv, &DimShard::part(cache.capacity(), cached, positions))?;
        // (1, T, H, D), (1, T, G, D) twice
        let (q, k, v) = split_packed(qkv.value(), heads, groups)?;
        let (k, v) = cache.append(&k, &v)?; // (1, S, G, D)
        let (y, _) = attention(&q, &k, &v, &scores)?; // (1, T, H, D)
        let width = y.dims()[2] * y.dims()[3];
        y.reshape(&[1, positions, width])
    }
}

/// The part of a bias, which broadcasts to (B, H, T, S), that belongs to one sample of `batch`. A bias of another number of
/// samples is refused where it is added.
fn of_sample(bias: &Var, sample: usize, batch: usize) -> Result<Var> {
    match bias.dims() {
        [samples, _, _, _] if *samples == batch => bias.narrow(0, sample, 1),
        _ => Ok(bias.clone()),
    }
}
