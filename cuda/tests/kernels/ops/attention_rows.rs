use ferrotron_tensor::DType;

use super::attention::{Problem, problems};
use crate::simulator::Simulator;

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
}

fn compare(simulator: &Simulator, problem: &Problem) {
    let a = problem.a;
    let [queries, keys, heads, groups, width] =
        [a.queries, a.keys, a.heads, a.groups, a.width].map(|n| n as usize);
    let (batch, block) = (problem.batch(), [128, 1, 1]);
    // Scores are sums of `width` products up to 1, results sums over keys or, for each query head, over queries.
    let terms =
        width as f64 * a.scale.max(1.0) + keys as f64 + (queries * heads / groups) as f64 + 16.0;
    let eps = problem.dtype().accumulator().epsilon() * terms;
    let large = eps * (width as f64).sqrt();

    let (mut out, mut lse) = (problem.room(0), problem.room(1));
    let kernel = problem.forward(simulator, "attention_rows").output(&mut out).output(&mut lse);
    kernel.value(a).run([queries.div_ceil(4), heads, batch], block);
    problem.assert_close(0, &out, eps, eps);
    problem.assert_close(1, &lse, eps, eps);

    let statistics = problem.statistics(simulator);
    let mut dq = problem.room(2);
    let kernel = problem.backward(simulator, "attention_rows_backward_queries", &statistics);
    kernel.output(&mut dq).value(a).run([queries.div_ceil(4), heads, batch], block);
    problem.assert_close(2, &dq, eps, large);

    let (mut dk, mut dv) = (problem.room(3), problem.room(4));
    let kernel = problem.backward(simulator, "attention_rows_backward_keys", &statistics);
    kernel.output(&mut dk).output(&mut dv).value(a).run([keys.div_ceil(4), groups, batch], block);
    problem.assert_close(3, &dk, eps, large);
    problem.assert_close(4, &dv, eps, large);
}
