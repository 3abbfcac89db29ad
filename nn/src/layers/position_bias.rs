//! Biases of attention scores: by the distance of query and key (the slopes of ALiBi, the trained buckets of T5), and
//! any other that the caller computes.

use ferrotron_autograd::Var;
use ferrotron_tensor::ops::attention::AttentionMask;
use ferrotron_tensor::{At, DType, Device, Error, Result, Tensor};
use std::ops::Range;

use crate::{AttentionConfig, Axis, Context, DimShard, Module, Param, Scope, WeightDecay};

/// Bias of the scores by the distance of query and key, in place of positions of the inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PositionBias {
    /// ALiBi (Press et al., arXiv 2108.12409): minus the distance times a slope of the head, which is not trained. The
    /// slopes of 8 heads are 1/2, 1/4, ..., 1/256. Causal heads use a bias of one row, which differs from the distance by
    /// a constant of each query.
    Alibi,
    /// T5 (Raffel et al., arXiv 1910.10683, section 2.1): a trained number for each head and bucket of distances. Half of
    /// the buckets have one distance each, the others grow with the logarithm of the distance, and the last one has all
    /// from `max_distance` on. Where queries see later keys, these have half of all buckets.
    Relative {
        /// Number of buckets: 32 in T5.
        buckets: usize,
        /// The distance from which on all are in one bucket: 128 in T5.
        max_distance: usize,
    },
}

impl PositionBias {
    /// Errors unless the buckets have a distance each and the last one is farther.
    fn check(self, causal: bool) -> Result<()> {
        let PositionBias::Relative { buckets, max_distance } = self else { return Ok(()) };
        let exact = if causal { buckets / 2 } else { buckets / 4 };
        if exact == 0 || max_distance <= exact || !causal && !buckets.is_multiple_of(2) {
            let least = if causal { "2 or more" } else { "an even number of 4 or more" };
            let message = format!(
                "relative positions need {least} buckets and a max_distance above {exact}, got {buckets} buckets and \
                 {max_distance}"
            );
            return Err(Error::config("attention", message));
        }
        Ok(())
    }
}

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

    /// The bias of the local queries with all keys: (H, T, S), or (H, 1, S) if it does not depend on the query.
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
        let slopes = &alibi_slopes(self.heads)[self.local_heads.clone()];
        let last = keys.iter().max().copied().unwrap_or(0);
        let rows: &[usize] = if self.causal { &[last] } else { queries };
        let mut values = Vec::with_capacity(slopes.len() * rows.len() * keys.len());
        for slope in slopes {
            for &row in rows {
                values.extend(keys.iter().map(|&key| -slope * row.abs_diff(key) as f64));
            }
        }
        let bias =
            Tensor::constant(&self.device, &values, &[slopes.len(), rows.len(), keys.len()])?;
        bias.cast(self.dtype.accumulator()).map(Var::constant)
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

/// The slope of each head: 2^(-8 i / n) for i from 1 to n, the largest power of two up to `heads`; further heads have
/// every other slope of 2 n heads, as in the published code.
fn alibi_slopes(heads: usize) -> Vec<f64> {
    let base = if heads == 0 { 1 } else { 1 << heads.ilog2() };
    let of = |n: usize| (1..=n).map(move |i| 2_f64.powf(-8.0 * i as f64 / n as f64));
    of(base).chain(of(2 * base).step_by(2)).take(heads).collect()
}

/// The bucket of a distance in one direction, counted from 0.
fn bucket(distance: usize, buckets: usize, max_distance: usize, causal: bool) -> u32 {
    let own = if causal { buckets } else { buckets / 2 };
    let exact = own / 2;
    if distance < exact {
        return distance as u32;
    }
    let ratio = (distance as f64 / exact as f64).ln() / (max_distance as f64 / exact as f64).ln();
    (exact + (ratio * (own - exact) as f64) as usize).min(own - 1) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_those_of_the_paper() {
        assert_eq!(alibi_slopes(8), (1..=8).map(|i| 0.5_f64.powi(i)).collect::<Vec<_>>());
        assert_eq!(alibi_slopes(1), [1.0 / 256.0]);
        // Four slopes of 4 heads, then the first and the third of 8.
        let want = [1, 2, 3, 4].map(|i| 0.25_f64.powi(i));
        assert_eq!(alibi_slopes(6), [&want[..], &[0.5, 0.125]].concat());
    }

    #[test]
    fn buckets_are_those_of_t5() {
        // 32 buckets up to a distance of 128, as `T5Attention._relative_position_bucket` of transformers gives them.
        let causal = |distance| bucket(distance, 32, 128, true);
        let got = [0, 1, 15, 16, 17, 19, 20, 31, 32, 64, 112, 127, 128, 1000].map(causal);
        assert_eq!(got, [0, 1, 15, 16, 16, 17, 17, 21, 21, 26, 30, 31, 31, 31]);
        let both = |distance| bucket(distance, 32, 128, false);
        let got = [0, 7, 8, 11, 12, 16, 23, 64, 127, 128, 1000].map(both);
        assert_eq!(got, [0, 7, 8, 8, 9, 10, 11, 14, 15, 15, 15]);
    }
}
