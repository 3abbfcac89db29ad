use ferrotron_cuda::attention::Blocks;
use ferrotron_tensor::DType;
use ferrotron_tensor::ops::attention::AttentionMask;

use super::attention::{Problem, compare_passes, tile};
use super::attention_merge::merges;
use super::attention_problems::{problems, restricted, scaled};
use super::far;
use crate::simulator::Simulator;

pub fn check(simulator: &Simulator) {
    let sizes = [
        [1, 1, 1, 1, 1, 64],
        [2, 64, 64, 2, 2, 64],
        [1, 150, 150, 2, 1, 64],
        [1, 40, 131, 2, 2, 128],
        [1, 131, 70, 1, 1, 128], // queries that see no key, where the mask is causal
        [1, 65, 65, 2, 2, 40],
        [1, 33, 97, 1, 1, 72],
        [1, 24, 2048, 1, 1, 96], // the last queries of a long sequence
    ];
    // What the most mutants fail at comes first.
    let both = [DType::BF16, DType::F16];
    for (dtype, width) in [(DType::BF16, 128), (DType::F16, 96)] {
        merges(simulator, dtype);
        compare(
            simulator,
            &Problem::separate(dtype, [1, 150, 300, 2, 1, width], AttentionMask::Causal),
        );
    }
    far::attentions(simulator, |pass| Blocks::of_warpgroups(pass, 64).unwrap());
    for problem in scaled(DType::BF16, [1, 40, 300, 1, 1, 64]) {
        compare(simulator, &problem);
    }
    for problem in restricted(DType::BF16, [2, 150, 150, 2, 1, 64], [2, 40, 70, 2, 2, 96]) {
        compare(simulator, &problem);
    }
    for problem in problems(both, &sizes) {
        compare(simulator, &problem);
    }
}

/// Compares each pass with the CPU.
fn compare(simulator: &Simulator, problem: &Problem) {
    let width = tile(problem.a.width as usize);
    compare_passes(simulator, problem, |pass| Blocks::of_warpgroups(pass, width).unwrap());
}
