//! Biases of attention scores as variables: the table of a position bias, which layers may share, and any other bias that
//! the caller computes.

use ferrotron_autograd::Var;
use ferrotron_tensor::ops::attention::AttentionMask;
use ferrotron_tensor::{At, DType, Device, Error, Result, Tensor};
use std::ops::Range;

use crate::layers::position_bias::{alibi_slopes, bucket};
use crate::{
    AttentionConfig, Axis, Context, DimShard, Module, Param, PositionBias, Scope, WeightDecay,
};

/// A [`PositionBias`] with its table, for [`Attention::forward_with_bias`](crate::Attention::forward_with_bias). Layers
/// that share one have one table, as in T5, and the bias is computed and kept once in a pass.
///
/// ```
/// use ferrotron_autograd::Var;
/// use ferrotron_nn::{Attention, AttentionBias, AttentionConfig, Context, PositionBias, Scope};
/// use ferrotron_tensor::{DType, Device, Tensor};
/// let device = Device::cpu(1)?;
/// let scope = Scope::new(&device, DType::F32, 1234);
/// let config = AttentionConfig::new(32, 4);
/// let relative = PositionBias::Relative { buckets: 32, max_distance: 128 };
/// let with_table = AttentionConfig { position_bias: Some(relative), ..config };
/// let shared = AttentionBias::new(&scope.child("attn"), &with_table, 0..4)?; // "attn.relative_bias"
/// let first = Attention::new(&scope.child("blocks.0.attn"), &config)?;
/// let second = Attention::new(&scope.child("blocks.1.attn"), &config)?;
///
/// let ctx = Context::eval(2, 10);
/// let bias = shared.forward(&ctx)?; // (H, T, S)
/// let x = Var::constant(Tensor::zeros(&device, DType::F32, &[2, 10, 32])?);
/// let x = first.forward_with_bias(&ctx, &x, &bias, None)?;
/// let x = second.forward_with_bias(&ctx, &x, &bias, None)?;
/// assert_eq!((bias.dims(), x.dims()), (&[4, 10, 10][..], &[2, 10, 32][..]));
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone, Module)]
pub struct AttentionBias {
    path: String,
    kind: PositionBias,
    causal: bool,
    heads: usize,
    local_heads: Range<usize>,
    /// Relative positions: a number for each bucket and query head of the layer.
    relative: Option<Param>,
    #[module(skip)]
    device: Device,
    dtype: DType,
}

impl AttentionBias {
    /// The [`position_bias`](AttentionConfig::position_bias) of `config` for the query heads `held`: all, or those of one
    /// rank of tensor parallelism.
    ///
    /// Errors if `config` has no such bias, if the buckets do not fit its mask, or if `held` are not heads of the layer.
    pub fn new(
        scope: &Scope,
        config: &AttentionConfig,
        held: Range<usize>,
    ) -> Result<AttentionBias> {
        let AttentionConfig { heads, init, .. } = *config;
        let causal = config.mask == AttentionMask::Causal;
        let refuse = |message: String| Err(Error::config("attention", message).at(scope.path()));
        let Some(kind) = config.position_bias else {
            return refuse("a bias of its own needs `position_bias: Some(..)`, got None".into());
        };
        kind.check(causal).at(scope.path())?;
        if held.is_empty() || held.end > heads {
            return refuse(format!("heads {held:?} are not of {heads} heads"));
        }
        let relative = match kind {
            PositionBias::Relative { buckets, .. } => {
                let scope = shared_by_ranks(scope, heads, &held);
                let weight =
                    scope.param("relative_bias", &[buckets, heads], init, WeightDecay::Off);
                Some(weight.as_embedding())
            }
            PositionBias::Alibi => None,
        };
        Ok(AttentionBias {
            path: scope.path().to_string(),
            kind,
            causal,
            heads,
            local_heads: held,
            relative,
            device: scope.device().clone(),
            dtype: scope.dtype(),
        })
    }

    /// The bias of the local queries with all keys: (H, T, S).
    pub fn forward(&self, ctx: &Context) -> Result<Var> {
        let own: Vec<usize> = ctx.sequence.coordinates().collect();
        let all: Vec<usize> = (0..ctx.sequence.global).collect();
        self.at_positions(&own, &all)
    }

    /// Like [`forward`](AttentionBias::forward), of queries at these positions with keys at those.
    pub fn at_positions(&self, queries: &[usize], keys: &[usize]) -> Result<Var> {
        match (&self.relative, self.kind) {
            (Some(table), PositionBias::Relative { buckets, max_distance }) => {
                self.relative(table, (buckets, max_distance), queries, keys).at(&self.path)
            }
            _ => self.alibi(queries, keys).at(&self.path),
        }
    }

    fn alibi(&self, queries: &[usize], keys: &[usize]) -> Result<Var> {
        let of_query = |&query: &usize| keys.iter().map(move |&key| query.abs_diff(key));
        let values = self.of_distances(queries.iter().flat_map(of_query));
        let dims = [self.local_heads.len(), queries.len(), keys.len()];
        let bias = Tensor::constant(&self.device, &values, &dims)?;
        bias.cast(self.dtype.accumulator()).map(Var::constant)
    }

    /// ALiBi of runs (start, length) of queries and keys, (H, T + S - 1), as
    /// [`diagonals`](ferrotron_tensor::ops::attention::AttentionConfig::diagonals) of the scores; `None` for a bias with a
    /// table. A matrix (H, T, S) would be large. A row that differs from it by a constant of each query loses digits: at a
    /// distance of 32,768 and a slope of 1/2, f32 has steps of 2^-10.
    pub(crate) fn diagonals(
        &self,
        (query, queries): (usize, usize),
        (key, keys): (usize, usize),
    ) -> Result<Option<Tensor>> {
        if self.kind != PositionBias::Alibi {
            return Ok(None);
        }
        // Element T - 1 - i + j: the last query with key m, or query 0 with the key m - (T - 1).
        let (len, last) = ((queries + keys).saturating_sub(1), (query + queries).saturating_sub(1));
        let values = self.of_distances((0..len).map(|m| last.abs_diff(key + m)));
        let dims = [self.local_heads.len(), len];
        Tensor::constant(&self.device, &values, &dims)?.cast(self.dtype.accumulator()).map(Some)
    }

    /// ALiBi of these distances for each local head.
    fn of_distances(&self, distances: impl Iterator<Item = usize> + Clone) -> Vec<f64> {
        let slopes = alibi_slopes(self.heads);
        let slopes = slopes[self.local_heads.clone()].iter();
        let of = |&slope: &f64| distances.clone().map(move |distance| -slope * distance as f64);
        slopes.flat_map(of).collect()
    }

    fn relative(
        &self,
        table: &Param,
        (buckets, max_distance): (usize, usize),
        queries: &[usize],
        keys: &[usize],
    ) -> Result<Var> {
        let causal = self.causal;
        let farthest = queries.iter().chain(keys).max().copied().unwrap_or(0);
        let bucket_of: Vec<u32> = (0..=farthest)
            .map(|distance| bucket(distance, buckets, max_distance, causal))
            .collect();
        // Later keys, of which causal attention sees none, have the other half of the buckets.
        let later = if causal { 0 } else { buckets as u32 / 2 };
        let of = |query: usize, key: usize| match key.checked_sub(query) {
            None | Some(0) => bucket_of[query - key],
            Some(_) if causal => 0,
            Some(distance) => later + bucket_of[distance],
        };
        let pairs = queries.iter().flat_map(|&query| keys.iter().map(move |&key| (query, key)));
        let ids: Vec<u32> = pairs.map(|(query, key)| of(query, key)).collect();
        let ids = Tensor::constant(&self.device, &ids, &[ids.len()])?;
        let held = &self.local_heads;
        let numbers = table.var()?.narrow(1, held.start, held.len())?.index_select(0, &ids)?;
        numbers.reshape(&[queries.len(), keys.len(), held.len()])?.permute(&[2, 0, 1])
    }
}

/// The scope of a parameter that all heads share, for the heads `held` of a layer: each rank's gradient comes from its own.
pub(crate) fn shared_by_ranks(scope: &Scope, heads: usize, held: &Range<usize>) -> Scope {
    match held.len() < heads {
        true => scope.clone().replicated_along(Axis::Tensor).with_partial_gradients(Axis::Tensor),
        false => scope.clone(),
    }
}

/// A bias of the caller as the scores (B, H, T, S) of the local heads and queries add it: of dims that broadcast to them,
/// where T may also be all positions of a sharded sequence.
pub(crate) fn local_bias(given: &Var, queries: &DimShard, scores: [usize; 4]) -> Result<Var> {
    let mut bias = given.clone();
    let rows = bias.dims().len().checked_sub(2);
    if let Some(rows) = rows.filter(|&rows| bias.dims()[rows] == queries.global)
        && queries.len() < queries.global
    {
        let pieces =
            queries.pieces.iter().map(|&(start, len)| bias.narrow(rows as isize, start, len));
        let pieces = pieces.collect::<Result<Vec<_>>>()?;
        bias = Var::concat(&pieces.iter().collect::<Vec<_>>(), rows as isize)?;
    }
    let spare = 4_usize.checked_sub(bias.dims().len());
    let fits = spare.is_some_and(|spare| {
        bias.dims().iter().zip(&scores[spare..]).all(|(&size, &all)| size == 1 || size == all)
    });
    if !fits {
        let message = format!(
            "a bias must broadcast to (B, H, T, S) = {scores:?} of the local samples, heads and queries, got {:?}; \
             `TensorParallel::local_bias` cuts one of all heads",
            given.dims()
        );
        return Err(Error::shape("attention", message));
    }
    Ok(bias)
}
