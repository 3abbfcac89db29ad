use ferrotron_tensor::ops::attention::{AttentionConfig, AttentionMask};
use ferrotron_tensor::{DType, ShardSpec};

use super::attention::{Problem, compare};
use super::attention_merge::merges;
use crate::simulator::Simulator;
use crate::support::{hiding, tensor};

pub fn check(simulator: &Simulator) {
    for dtype in [DType::BF16, DType::F16] {
        merges(simulator, dtype);
        for sizes in [[2, 70, 90, 4, 2, 64], [1, 70, 90, 2, 1, 96], [2, 40, 131, 2, 1, 112]] {
            for problem in biased(dtype, sizes) {
                compare(simulator, &problem);
            }
        }
        compare(simulator, &lowest(dtype, [2, 40, 70, 2, 1, 64]));
    }
}

/// Finite biases whose product with log2 e is infinite in f32. Each query sees two keys, the least negative.
fn lowest(dtype: DType, sizes: [usize; 6]) -> Problem {
    let [_, queries, keys, .., width] = sizes;
    let values: Vec<f64> =
        (0..queries * keys).map(|i| if i % keys < 2 { -2.5e38 } else { -3e38 }).collect();
    let bias = Some(tensor(DType::F32, &[queries, keys], &values));
    let config = AttentionConfig { bias, ..AttentionConfig::causal(width) };
    Problem::with(dtype, sizes, config, None)
}

/// Problems with biases of several shapes, with either mask, without and with dropout.
pub fn biased(dtype: DType, sizes: [usize; 6]) -> impl Iterator<Item = Problem> {
    let [batch, queries, keys, heads, _, width] = sizes;
    [AttentionMask::None, AttentionMask::Causal].into_iter().flat_map(move |mask| {
        let problem = |dims: &[usize], softcap, window, drops: bool| {
            let bias = Some(hiding(dtype, dims));
            let plain = AttentionConfig { mask, ..AttentionConfig::causal(width) };
            let config = AttentionConfig { bias, softcap, window, ..plain };
            let place = drops.then(|| ShardSpec::unsharded(&[batch, heads, queries, keys]));
            Problem::with(dtype, sizes, config, place)
        };
        [
            problem(&[heads, queries, keys], None, None, false),
            problem(&[batch, 1, queries, keys], Some(0.75), Some(keys / 2), true),
            problem(&[heads, 1, keys], None, None, mask == AttentionMask::Causal),
        ]
    })
}
