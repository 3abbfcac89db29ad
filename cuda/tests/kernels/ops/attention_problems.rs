//! Sets of problems for the kernels of attention.

use ferrotron_tensor::DType;
use ferrotron_tensor::ops::attention::{AttentionConfig, AttentionMask, KeyRanges};

use super::attention::Problem;

/// Problems with windows, ranges of keys and soft caps, alone and together.
pub fn restricted(
    dtype: DType,
    square: [usize; 6],
    cached: [usize; 6],
) -> impl Iterator<Item = Problem> {
    let n = square[1];
    let documents =
        KeyRanges::from_documents(&[vec![0, 1, n / 2, n - 3], vec![0, n / 3, n]], n).unwrap();
    let lengths = KeyRanges::from_lengths(&[n / 2 + 1, n], n).unwrap();
    let both = documents.intersect(&lengths).unwrap();
    let of = |mask| AttentionConfig { mask, ..AttentionConfig::causal(square[5]) };
    let configs = [AttentionMask::None, AttentionMask::Causal].map(of).into_iter();
    configs.flat_map(move |plain| {
        let window = Some(n / 3);
        let ranges = |ranges: &KeyRanges| Some(ranges.clone());
        let square = [
            AttentionConfig { window, ..plain.clone() },
            AttentionConfig { ranges: ranges(&lengths), ..plain.clone() },
            AttentionConfig { softcap: Some(0.75), ..plain.clone() },
            AttentionConfig { window, ranges: ranges(&both), softcap: Some(0.75), ..plain.clone() },
        ]
        .map(|config| Problem::with(dtype, square, config, None));
        let narrow = AttentionConfig { window: Some(cached[2] / 5), ..plain };
        square.into_iter().chain([Problem::with(dtype, cached, narrow, None)])
    })
}

/// Problems whose largest score grows from tile to tile of keys, by more than sums of exponentials let it, and with scores
/// of other signs.
pub fn scaled(dtype: DType, sizes: [usize; 6]) -> impl Iterator<Item = Problem> {
    let usual = AttentionConfig::causal(sizes[5]);
    [32.0, -2.0, 0.0].into_iter().map(move |factor| {
        let config = AttentionConfig { scale: factor * usual.scale, ..usual.clone() };
        Problem::with(dtype, sizes, config, None)
    })
}

/// Problems of each size (batch, queries, keys, heads, key-value heads, width) in each dtype with either mask, and
/// a packed one.
pub fn problems(dtypes: [DType; 2], sizes: &[[usize; 6]]) -> impl Iterator<Item = Problem> {
    dtypes.into_iter().flat_map(move |dtype| {
        let masks = [AttentionMask::None, AttentionMask::Causal];
        let separate = sizes
            .iter()
            .flat_map(move |&sizes| masks.map(|mask| Problem::separate(dtype, sizes, mask)));
        separate.chain([Problem::packed(dtype)])
    })
}

/// Problems of two sizes with dropout, of a part of a global tensor.
pub fn dropouts(dtypes: [DType; 2], sizes: [[usize; 6]; 2]) -> impl Iterator<Item = Problem> {
    let masks = [AttentionMask::None, AttentionMask::Causal];
    dtypes
        .into_iter()
        .flat_map(move |dtype| [0, 1].map(move |i| Problem::dropping(dtype, sizes[i], masks[i])))
}
