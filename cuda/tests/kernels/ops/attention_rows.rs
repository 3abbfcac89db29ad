use ferrotron_cuda::attention::Blocks;
use ferrotron_tensor::DType;

use super::attention::Problem;
use super::attention_bias::biased;
use super::attention_merge::merges;
use super::attention_problems::{dropouts, problems, restricted};
use crate::simulator::Simulator;

/// Blocks of four warps with a row each.
const WARPS: Blocks = Blocks { rows: 4, threads: 128, shared: 0 };

pub fn check(simulator: &Simulator) {
    let sizes = [
        [1, 1, 1, 1, 1, 1],
        [2, 33, 33, 2, 2, 8],
        [1, 50, 50, 4, 2, 20],
        [1, 20, 70, 1, 1, 96],
        [1, 70, 33, 1, 1, 33], // queries that see no key, where the mask is causal
        [1, 5, 5, 1, 1, 256],
    ];
    for problem in problems([DType::F64, DType::F32], &sizes) {
        compare(simulator, &problem);
    }
    for problem in
        dropouts([DType::F64, DType::F32], [[2, 40, 50, 4, 2, 20], [1, 33, 70, 2, 1, 96]])
    {
        compare(simulator, &problem);
    }
    for problem in restricted(DType::F64, [2, 70, 70, 2, 1, 20], [2, 20, 50, 1, 1, 8]) {
        compare(simulator, &problem);
    }
    for dtype in [DType::F64, DType::F32] {
        for problem in biased(dtype, [2, 20, 50, 2, 1, 8]) {
            compare(simulator, &problem);
        }
        merges(simulator, dtype);
    }
}

fn compare(simulator: &Simulator, problem: &Problem) {
    let a = problem.a;
    let [queries, keys, heads, groups, width] =
        [a.queries, a.keys, a.heads, a.groups, a.width].map(|n| n as usize);
    let batch = problem.batch();
    // Scores are sums of `width` products up to 1, results sums over keys or, for each query head, over queries.
    let terms =
        width as f64 * a.scale.max(1.0) + keys as f64 + (queries * heads / groups) as f64 + 16.0;
    let eps = problem.dtype().accumulator().epsilon() * terms;
    let large = eps * (width as f64).sqrt() * problem.kept();

    let (mut out, mut lse) = (problem.room(0), problem.room(1));
    let kernel = problem.forward(simulator, "attention_rows", "").output(&mut out).output(&mut lse);
    problem.run(kernel, WARPS, [queries.div_ceil(4), heads, batch]);
    problem.assert_close(0, &out, eps, eps * problem.kept());
    problem.assert_close(1, &lse, eps, eps);

    let statistics = problem.statistics(simulator);
    let mut dq = problem.room(2);
    let kernel = problem.backward(simulator, ("attention_rows_backward_queries", ""), &statistics);
    problem.run(kernel.output(&mut dq), WARPS, [queries.div_ceil(4), heads, batch]);
    problem.assert_close(2, &dq, eps, large);

    let (mut dk, mut dv) = (problem.room(3), problem.room(4));
    let kernel = problem.backward(simulator, ("attention_rows_backward_keys", ""), &statistics);
    let kernel = kernel.output(&mut dk).output(&mut dv);
    problem.run(kernel, WARPS, [keys.div_ceil(4), groups, batch]);
    problem.assert_close(3, &dk, eps, large);
    problem.assert_close(4, &dv, eps, large);

    let name = ("attention_rows_backward_bias", "");
    problem.compare_bias(simulator, name, &statistics, WARPS, large * batch as f64);
}
