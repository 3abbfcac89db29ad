//! Options of attention for the table of operations.

use ferrotron_autograd::Var;
use ferrotron_tensor::ops::attention::{
    AttentionConfig, AttentionDropout, AttentionMask, KeyRanges,
};
use ferrotron_tensor::{RandomKey, Result, ShardSpec};

/// A mask, with dropout of a whole tensor of probabilities `place`.
pub fn scores(
    mask: AttentionMask,
    p: f64,
    place: &[usize],
    width: usize,
) -> Result<AttentionConfig> {
    let mut config = AttentionConfig { mask, ..AttentionConfig::causal(width) };
    if p > 0.0 {
        let key = RandomKey::new(11, 0, "attention");
        config.dropout = Some(AttentionDropout::new(p, key, ShardSpec::unsharded(place))?);
    }
    Ok(config)
}

/// A window, documents with key lengths, and a soft cap, as `options` say, for q, k and v; with all of them also dropout.
pub fn restricted(
    x: &[Var],
    mask: AttentionMask,
    [window, ranges, softcap]: [bool; 3],
) -> Result<AttentionConfig> {
    let ([b, t, h], s) = ([x[0].dims()[0], x[0].dims()[1], x[0].dims()[2]], x[1].dims()[1]);
    let dropout = if window && ranges && softcap { 0.3 } else { 0.0 };
    let documents = KeyRanges::from_documents(&vec![vec![0, t / 2, t]; b], t)?;
    let lengths: Vec<usize> = (0..b).map(|sample| (sample + s / 2).min(s)).collect();
    let both = documents.intersect(&KeyRanges::from_lengths(&lengths, t)?)?;
    Ok(AttentionConfig {
        window: window.then_some(2),
        ranges: ranges.then_some(both),
        softcap: softcap.then_some(0.7),
        ..scores(mask, dropout, &[b, h, t, s], 2)?
    })
}
