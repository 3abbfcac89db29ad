//! Attention between its two projections: rotary positions, scores, and the weighted sum. Heads are independent, so a
//! rank that holds some of the heads needs no communication.

use ferrotron_autograd::Var;
use ferrotron_autograd::ops::attention::packed_attention;
use ferrotron_tensor::ops::attention::{
    AttentionConfig as Scores, AttentionDropout, attention, split_packed,
};
use ferrotron_tensor::ops::rotary::RotaryTable;
use ferrotron_tensor::{At, Error, RandomKey, Result, ShardSpec};
use std::ops::Range;

use crate::{AttentionConfig, Context, DimShard, KvCache, Mode, Module, Scope};

/// A shard of the query heads of an attention layer, with the key and value heads that they share.
#[derive(Debug, Clone, Module)]
pub struct AttentionHeads {
    path: String,
    config: AttentionConfig,
    local_heads: Range<usize>,
}

impl AttentionHeads {
    /// The query heads `held` of the layer at `scope`.
    ///
    /// Errors unless the groups divide the heads, `held` consists of whole groups, no size is 0 and, with rotary
    /// positions, the head dim is even.
    pub fn new(
        scope: &Scope,
        config: &AttentionConfig,
        held: Range<usize>,
    ) -> Result<AttentionHeads> {
        let AttentionConfig { heads, groups, head_dim, .. } = *config;
        let refuse = |message: String| Err(Error::config("attention", message).at(scope.path()));
        if heads == 0 || groups == 0 || head_dim == 0 || heads % groups != 0 {
            return refuse(format!(
                "{groups} key/value groups must divide {heads} heads (of width {head_dim})"
            ));
        }
        if config.rotary_base.is_some() && head_dim % 2 != 0 {
            return refuse(format!("rotary positions need an even head width, got {head_dim}"));
        }
        let shared = heads / groups;
        if held.is_empty() || held.end > heads || held.start % shared + held.end % shared > 0 {
            return refuse(format!("heads {held:?} of {heads} are not whole groups of {shared}"));
        }
        Ok(AttentionHeads { path: scope.path().to_string(), config: *config, local_heads: held })
    }

    /// Number of local query heads.
    pub fn heads(&self) -> usize {
        self.local_heads.len()
    }

    /// Number of local key and value heads.
    pub fn groups(&self) -> usize {
        self.local_heads.len() * self.config.groups / self.config.heads
    }

    /// The layer's global path.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The packed projection (B, T, (H + 2G) D) of these heads -> (B, T, H D). With a cache, positions continue after
    /// the cached ones, the new keys and values are appended, and no gradient flows back.
    ///
    /// Errors if `qkv` has other dims, or the cache has no capacity for T more positions.
    pub fn forward(&self, ctx: &Context, qkv: Var, cache: Option<&mut KvCache>) -> Result<Var> {
        self.attend(ctx, qkv, cache).at(&self.path)
    }

    fn attend(&self, ctx: &Context, qkv: Var, cache: Option<&mut KvCache>) -> Result<Var> {
        let key = self.dropout_key(ctx);
        let scores = self.attention_config(ctx, key, &ctx.sequence, &ctx.sequence)?;
        let (heads, groups) = (self.heads(), self.groups());
        let Some(cache) = cache else {
            let qkv = self.apply_rotary(qkv, ctx.sequence.coordinates())?;
            return packed_attention(&qkv, heads, groups, &scores); // (B, T, H D)
        };
        let positions = qkv.value().dim(1)?;
        let qkv = self.apply_rotary(qkv, cache.len()..cache.len() + positions)?;
        // (B, T, H, D), (B, T, G, D) twice
        let (q, k, v) = split_packed(qkv.value(), heads, groups)?;
        let (k, v) = cache.append(&k, &v)?; // (B, S, G, D)
        let (y, _) = attention(&q, &k, &v, &scores)?; // (B, T, H, D)
        let joined = [y.dims()[0], positions, heads * self.config.head_dim];
        Ok(Var::constant(y.reshape(&joined)?))
    }

    /// Applies rotary embeddings of `positions` to the queries and keys of a packed projection. Returns it unchanged
    /// if the layer has none.
    pub fn apply_rotary(
        &self,
        qkv: Var,
        positions: impl IntoIterator<Item = usize>,
    ) -> Result<Var> {
        let AttentionConfig { head_dim, rotary_base, .. } = self.config;
        let Some(base) = rotary_base else { return Ok(qkv) };
        let (heads, groups) = (self.heads(), self.groups());
        let packed = qkv.dims().to_vec();
        let &[batch, length, _] = &packed[..] else {
            let message = format!("needs (B, T, (H + 2G) D), got {packed:?}");
            return Err(Error::shape("attention", message));
        };
        let table = RotaryTable::new(qkv.device(), qkv.dtype(), positions, head_dim, base)?;
        let by_head = qkv.reshape(&[batch, length, heads + 2 * groups, head_dim])?;
        by_head.rotary(&table, heads + groups)?.reshape(&packed)
    }

    /// The random stream of dropout in the next call of this layer; `None` without dropout.
    pub fn dropout_key(&self, ctx: &Context) -> Option<RandomKey> {
        let drops = ctx.mode == Mode::Train && self.config.dropout > 0.0;
        drops.then(|| ctx.next_key(&format!("{}.dropout", self.path)))
    }

    /// The attention options for these queries and keys, with dropout by the [key](AttentionHeads::dropout_key) of the
    /// call that they belong to.
    pub fn attention_config(
        &self,
        ctx: &Context,
        dropout_key: Option<RandomKey>,
        queries: &DimShard,
        keys: &DimShard,
    ) -> Result<Scores> {
        let AttentionConfig { heads, head_dim, dropout, .. } = self.config;
        let mut scores = Scores::causal(head_dim);
        if let Some(key) = dropout_key {
            // The global tensor of weights is (samples, heads, positions, positions).
            let place = ShardSpec::new(
                &[ctx.batch.global, heads, queries.global, keys.global],
                &[
                    &ctx.batch.pieces,
                    &[(self.local_heads.start, self.local_heads.len())],
                    &queries.pieces,
                    &keys.pieces,
                ],
            )?;
            scores.dropout = Some(AttentionDropout::new(dropout, key, place)?);
        }
        Ok(scores)
    }
}
