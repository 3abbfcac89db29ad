//! Attention between its two projections: rotary positions, scores, and the weighted sum. Heads are independent, so a
//! rank that holds some of the heads needs no communication.

use ferrotron_autograd::Var;
use ferrotron_autograd::ops::attention::{packed_attention, packed_attention_with_bias};
use ferrotron_autograd::ops::concat::concat;
use ferrotron_tensor::ops::attention::{
    AttentionConfig as Scores, AttentionDropout, AttentionMask, KeyRanges,
};
use ferrotron_tensor::{At, Error, RandomKey, Result, ShardSpec, Tensor};
use std::ops::Range;

use crate::layers::attention_bias::{local_bias, shared_by_ranks};
use crate::layers::rotary_tables::{Angles, RotaryTables};
use crate::{
    AttentionBias, AttentionConfig, Context, DimShard, KvCache, Mode, Module, PositionBias,
    RandomSite, RmsNorm, Scope,
};

/// A shard of the query heads of an attention layer, with the key and value heads that they share.
#[derive(Debug, Clone, Module)]
pub struct AttentionHeads {
    path: String,
    /// `None` without dropout.
    #[module(skip)]
    dropout_site: Option<RandomSite>,
    config: AttentionConfig,
    local_heads: Range<usize>,
    q_norm: Option<RmsNorm>,
    k_norm: Option<RmsNorm>,
    position_bias: Option<AttentionBias>,
    #[module(skip)]
    tables: RotaryTables,
}

impl AttentionHeads {
    /// The query heads `held` of the layer at `scope`.
    ///
    /// Errors unless the groups divide the heads, `held` consists of whole groups, no size is 0 and, with rotary
    /// positions, the head dim is even. Errors if another layer with dropout has this path.
    pub fn new(
        scope: &Scope,
        config: &AttentionConfig,
        held: Range<usize>,
    ) -> Result<AttentionHeads> {
        let AttentionConfig { hidden, heads, groups, head_dim, dropout, .. } = *config;
        let refuse = |message: String| Err(Error::config("attention", message).at(scope.path()));
        if heads > 0 && head_dim == 0 {
            return refuse(format!(
                "the head width is 0: {heads} heads do not divide the width {hidden}, unless `head_dim` is given"
            ));
        }
        if !(0.0..1.0).contains(&dropout) {
            return refuse(format!("dropout must be in 0 <= p < 1, got {dropout}"));
        }
        if heads == 0 || groups == 0 || head_dim == 0 || heads % groups != 0 {
            return refuse(format!(
                "{groups} key/value groups must divide {heads} heads (of width {head_dim})"
            ));
        }
        if let (None, Some(dim)) = (config.rotary_base, config.rotary_dim) {
            return refuse(format!("rotary_dim {dim} needs rotary positions: give `rotary_base`"));
        }
        if config.rotary_base.is_some() {
            match config.rotary_dim {
                None if head_dim % 2 != 0 => {
                    return refuse(format!(
                        "rotary positions need an even head width, got {head_dim}"
                    ));
                }
                Some(dim) if dim == 0 || dim % 2 != 0 || dim > head_dim => {
                    return refuse(format!(
                        "the rotary dim must be even and at most the head width {head_dim}, got {dim}"
                    ));
                }
                _ => {}
            }
        }
        if let Some(scaling) = &config.rope_scaling {
            scaling.check(config.rotary_base.is_some()).at(scope.path())?;
        }
        if config.window == Some(0) {
            return refuse("a window must be at least 1, got 0: a query sees itself".to_string());
        }
        if let Some(scale) =
            config.softmax_scale.filter(|&scale| !(scale > 0.0 && scale.is_finite()))
        {
            return refuse(format!("softmax_scale must be positive, got {scale}; omit it instead"));
        }
        if let Some(cap) = config.softcap.filter(|&cap| !(cap > 0.0 && cap.is_finite())) {
            return refuse(format!("softcap must be positive, got {cap}; omit it instead"));
        }
        let drops = dropout > 0.0;
        let dropout_site = drops.then(|| scope.child("dropout").random_site()).transpose()?;
        let shared = heads / groups;
        if held.is_empty() || held.end > heads || held.start % shared + held.end % shared > 0 {
            return refuse(format!("heads {held:?} of {heads} are not whole groups of {shared}"));
        }
        let position_bias = match config.position_bias {
            Some(_) => Some(AttentionBias::new(scope, config, held.clone())?),
            None => None,
        };
        let shared_by_ranks = shared_by_ranks(scope, heads, &held);
        let norm = |name| {
            let (scope, gain) = (shared_by_ranks.child(name), config.qk_norm_gain);
            config.qk_norm.map(|eps| RmsNorm::with_gain(&scope, head_dim, eps, gain))
        };
        Ok(AttentionHeads {
            path: scope.path().to_string(),
            dropout_site,
            config: *config,
            local_heads: held,
            q_norm: norm("q_norm"),
            k_norm: norm("k_norm"),
            position_bias,
            tables: scope.rotary_tables().clone(),
        })
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
    /// `bias` is added to the scores, besides the layer's own: see [`bias`](AttentionHeads::bias).
    ///
    /// Errors if `qkv` has other dims, if the context has a part of the sequence only, or if the cache has no capacity for
    /// T more positions.
    pub fn forward(
        &self,
        ctx: &Context,
        qkv: Var,
        bias: Option<&Var>,
        cache: Option<&mut KvCache>,
    ) -> Result<Var> {
        self.attend(ctx, qkv, bias, cache).at(&self.path)
    }

    fn attend(
        &self,
        ctx: &Context,
        qkv: Var,
        bias: Option<&Var>,
        cache: Option<&mut KvCache>,
    ) -> Result<Var> {
        let key = self.dropout_key(ctx);
        let scores = self.attention_config(ctx, key, &ctx.sequence, &ctx.sequence)?;
        if let Some(cache) = cache {
            return self.attend_cached(ctx, qkv, bias, cache, scores);
        }
        let (heads, groups) = (self.heads(), self.groups());
        check_positions(&qkv, &ctx.sequence)?;
        let qkv = self.prepare(qkv, &ctx.sequence)?;
        let positions: Vec<usize> = ctx.sequence.coordinates().collect();
        match self.bias(ctx, bias, &positions, &positions)? {
            Some(bias) => {
                let scores = Scores { diagonals: None, ..scores };
                packed_attention_with_bias(&qkv, &bias, heads, groups, &scores)
            }
            None if self.has_slopes() && scores.diagonals.is_none() => {
                let message = "slopes by distance need one run of positions: shard sequences by `ContextParallel`";
                Err(Error::shape("attention", message))
            }
            None => packed_attention(&qkv, heads, groups, &scores),
        } // (B, T, H D)
    }

    /// Normalizes the queries and keys of a packed projection and rotates them by their `positions`. Returns it unchanged
    /// if the layer does neither. All layers of a model share the table of angles, which is computed once.
    pub fn prepare(&self, qkv: Var, positions: &DimShard) -> Result<Var> {
        let AttentionConfig { head_dim, rotary_base, .. } = self.config;
        if rotary_base.is_none() && self.q_norm.is_none() {
            return Ok(qkv);
        }
        let (heads, groups) = (self.heads(), self.groups());
        let packed = qkv.dims().to_vec();
        let &[batch, length, _] = &packed[..] else {
            let message = format!("needs (B, T, (H + 2G) D), got {packed:?}");
            return Err(Error::shape("attention", message));
        };
        let mut by_head = qkv.reshape(&[batch, length, heads + 2 * groups, head_dim])?;
        if let (Some(q_norm), Some(k_norm)) = (&self.q_norm, &self.k_norm) {
            let q = q_norm.forward(&by_head.narrow(2, 0, heads)?)?;
            let k = k_norm.forward(&by_head.narrow(2, heads, groups)?)?;
            let v = by_head.narrow(2, heads + groups, groups)?;
            by_head = concat(&[&q, &k, &v], 2)?;
        }
        if let Some(base) = rotary_base {
            let (device, dtype) = (qkv.device().clone(), qkv.dtype());
            let (dim, runs) = (self.config.rotary_dim(), positions.pieces.to_vec());
            let scaling = self.config.rope_scaling;
            let angles = Angles { device, dtype, dim, base, scaling, positions: runs };
            let table = self.tables.get(&angles, positions.global)?;
            by_head = by_head.rotary(&table, heads + groups)?;
        }
        by_head.reshape(&packed)
    }

    /// The bias of the scores (B, H, T, S) of the local heads, of queries at these positions with keys at those: the
    /// layer's own by distance, plus `given`; `None` without one, and for ALiBi alone, which is among the options of
    /// [`attention_config`](AttentionHeads::attention_config).
    ///
    /// `given` has dims that broadcast to (B, H, T, S), where T may also be all positions of a sharded sequence. Its
    /// gradient is that of the local samples, heads and queries.
    pub fn bias(
        &self,
        ctx: &Context,
        given: Option<&Var>,
        queries: &[usize],
        keys: &[usize],
    ) -> Result<Option<Var>> {
        let scores = [ctx.batch.len(), self.heads(), queries.len(), keys.len()];
        let given = given.map(|bias| local_bias(bias, &ctx.sequence, scores)).transpose()?;
        let alone = given.is_none() && self.has_slopes();
        let own = self.position_bias.as_ref().filter(|_| !alone);
        let own = own.map(|bias| bias.at_positions(queries, keys)).transpose()?;
        match (own, given) {
            (Some(own), Some(given)) => own.add(&given.cast(own.dtype())?).map(Some),
            (own, given) => Ok(own.or(given)),
        }
    }

    /// Whether the layer's own bias is ALiBi.
    pub fn has_slopes(&self) -> bool {
        self.config.position_bias == Some(PositionBias::Alibi)
    }

    /// ALiBi of runs (start, length) of queries and keys.
    pub(crate) fn diagonals(
        &self,
        queries: (usize, usize),
        keys: (usize, usize),
    ) -> Result<Option<Tensor>> {
        let bias = self.position_bias.as_ref();
        Ok(bias.map(|bias| bias.diagonals(queries, keys)).transpose()?.flatten())
    }

    /// The random stream of dropout in the next call of this layer; `None` without dropout.
    pub fn dropout_key(&self, ctx: &Context) -> Option<RandomKey> {
        let site = self.dropout_site.as_ref().filter(|_| ctx.mode == Mode::Train)?;
        Some(ctx.next_key(site.path()))
    }

    /// Whether the layer's attention is causal and nothing else restricts what a query sees.
    pub fn is_plainly_causal(&self, ctx: &Context) -> bool {
        self.config.mask == AttentionMask::Causal
            && self.config.window.is_none()
            && ctx.key_ranges.is_none()
    }

    /// The keys of the shard `keys` that each query of `queries` sees, by their global positions.
    fn local_ranges(
        &self,
        ctx: &Context,
        queries: &DimShard,
        keys: &DimShard,
    ) -> Result<KeyRanges> {
        let AttentionConfig { mask, window, .. } = self.config;
        let fits = |ranges: &&KeyRanges| {
            ranges.queries() == queries.global
                && (ranges.rows() == 1 || ranges.rows() == ctx.batch.len())
        };
        if let Some(ranges) = ctx.key_ranges.as_ref().filter(|ranges| !fits(ranges)) {
            let message = format!(
                "key ranges are for {} samples of {} positions, the context has {} of {}",
                ranges.rows(),
                ranges.queries(),
                ctx.batch.len(),
                queries.global
            );
            return Err(Error::shape("attention", message));
        }
        let keys: Vec<usize> = keys.coordinates().collect();
        let rows = ctx.key_ranges.as_ref().map_or(1, KeyRanges::rows);
        let places = (0..rows).flat_map(|row| queries.coordinates().map(move |query| (row, query)));
        let local = places.map(|(row, query)| {
            let (mut start, mut end) = (0, queries.global);
            if mask == AttentionMask::Causal {
                end = query + 1;
            }
            if let Some(window) = window {
                start = (query + 1).saturating_sub(window);
                end = end.min(query.saturating_add(window));
            }
            if let Some(ranges) = &ctx.key_ranges {
                let [first, last] = ranges.range(row, query).map(|key| key as usize);
                (start, end) = (start.max(first), end.min(last));
            }
            let before = |position| keys.partition_point(|&key| key < position) as u32;
            [before(start.min(end)), before(end)]
        });
        KeyRanges::new(rows, queries.len(), local.collect())
    }

    /// The attention options for these queries and keys: the mask by global positions, and dropout. A plain causal mask
    /// goes by the order within the shards; dropout takes the [key](AttentionHeads::dropout_key) of the call. ALiBi is among
    /// them if queries and keys are one run of positions each.
    pub fn attention_config(
        &self,
        ctx: &Context,
        dropout_key: Option<RandomKey>,
        queries: &DimShard,
        keys: &DimShard,
    ) -> Result<Scores> {
        let AttentionConfig { heads, head_dim, dropout, .. } = self.config;
        let AttentionConfig { mask, window, softcap, .. } = self.config;
        let plain = Scores { mask, window, softcap, ..Scores::causal(head_dim) };
        let plain = Scores { scale: self.config.softmax_scale.unwrap_or(plain.scale), ..plain };
        let whole = queries.len() == queries.global || ctx.key_ranges.is_none();
        let sees_all = mask == AttentionMask::None && window.is_none() && ctx.key_ranges.is_none();
        let mut scores = if sees_all || self.is_plainly_causal(ctx) {
            plain
        } else if queries == keys && queries.pieces.len() == 1 && whole {
            Scores { ranges: ctx.key_ranges.clone(), ..plain }
        } else {
            let ranges = Some(self.local_ranges(ctx, queries, keys)?);
            Scores { mask: AttentionMask::None, window: None, ranges, ..plain }
        };
        if let (&[queries], &[keys]) = (&queries.pieces[..], &keys.pieces[..]) {
            scores.diagonals = self.diagonals(queries, keys)?;
        }
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

/// Errors unless `qkv` has all positions of the sequence. Queries would see the keys of this rank alone.
fn check_positions(qkv: &Var, sequence: &DimShard) -> Result<()> {
    let (own, all) = (sequence.len(), sequence.global);
    if own < all {
        let message = format!(
            "the context has {own} of {all} positions, and queries would see the keys of these alone: use \
             `ParallelAttention`, whose ranks along the context axis pass keys and values on"
        );
        return Err(Error::shape("attention", message));
    }
    match qkv.dims() {
        [_, positions, _] if *positions != own => {
            let message = format!(
                "got {:?}, {positions} positions where the context has {own}; with sequence parallelism, gather them first",
                qkv.dims()
            );
            Err(Error::shape("attention", message))
        }
        _ => Ok(()),
    }
}
