//! The options of attention.

use super::ranges::KeyRanges;
use crate::{Error, RandomKey, Result, ShardSpec, Tensor};

/// Names in errors.
pub(super) const OP: &str = "attention";
pub(super) const OP_BACKWARD: &str = "attention_backward";

/// The keys visible to a query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionMask {
    /// All keys.
    None,
    /// Query i of T sees keys j <= i + S - T. The queries are the last T of S positions, so cached keys may precede
    /// them. A query that sees no key has out = 0 and lse = -infinity.
    Causal,
}

/// Options of attention. All of them combine: a query sees the keys that mask, window and ranges have in common.
#[derive(Debug, Clone)]
pub struct AttentionConfig {
    /// The keys visible to a query.
    pub mask: AttentionMask,
    /// Sliding window: query i of T sees keys j with |i + S - T - j| < window. With [`AttentionMask::Causal`] these are
    /// its own position and the window - 1 before it (Mistral, arXiv 2310.06825).
    pub window: Option<usize>,
    /// The range of keys that each query may see: key lengths, documents.
    pub ranges: Option<KeyRanges>,
    /// Factor of the scores, usually 1 / sqrt(D).
    pub scale: f64,
    /// Soft cap of the scores: c tanh(s / c), after the scale (Gemma 2, arXiv 2408.00118).
    pub softcap: Option<f64>,
    /// Bias, added to the scores after the scale and the soft cap: floating-point numbers of any dims that broadcast to
    /// (B, H, T, S). Relative positions (T5), slopes by distance (ALiBi), or a mask of zeros and minus infinity.
    pub bias: Option<Tensor>,
    /// Bias by the distance of query and key, in place of [`bias`](AttentionConfig::bias): (H, T + S - 1), of which query i
    /// and key j get element T - 1 - i + j. A constant.
    pub diagonals: Option<Tensor>,
    /// Dropout of the probabilities.
    pub dropout: Option<AttentionDropout>,
}

impl AttentionConfig {
    /// Causal attention over heads of `width` elements: scale 1 / sqrt(width), no dropout.
    pub fn causal(width: usize) -> AttentionConfig {
        let scale = 1.0 / (width.max(1) as f64).sqrt();
        AttentionConfig {
            mask: AttentionMask::Causal,
            window: None,
            ranges: None,
            scale,
            softcap: None,
            bias: None,
            diagonals: None,
            dropout: None,
        }
    }

    /// Attention to all keys over heads of `width` elements: scale 1 / sqrt(width), no dropout.
    pub fn bidirectional(width: usize) -> AttentionConfig {
        AttentionConfig { mask: AttentionMask::None, ..AttentionConfig::causal(width) }
    }
}

/// Dropout of attention probabilities: kept with probability 1 - p and then divided by 1 - p.
///
/// Element (sample, head, query position, key position) of the global probability tensor is kept if the uniform
/// number of its index is at least p. `place` is the shard of that tensor which is computed locally.
#[derive(Debug, Clone)]
pub struct AttentionDropout {
    pub(crate) p: f64,
    pub(crate) key: RandomKey,
    pub(crate) place: ShardSpec,
}

impl AttentionDropout {
    /// Creates the dropout. Errors unless 0 <= p < 1 and `place` has the four dims (B, H, T, S).
    pub fn new(p: f64, key: RandomKey, place: ShardSpec) -> Result<AttentionDropout> {
        if !(0.0..1.0).contains(&p) {
            return Err(Error::value(OP, format!("dropout must be in 0 <= p < 1, got {p}")));
        }
        if place.dims().len() != 4 {
            return Err(Error::shape(
                OP,
                format!("the dropout's place must be (B, H, T, S), got {:?}", place.dims()),
            ));
        }
        Ok(AttentionDropout { p, key, place })
    }
}
