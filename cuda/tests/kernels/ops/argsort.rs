use ferrotron_tensor::ops::argsort::{SortOrder, first};
use ferrotron_tensor::{DType, Tensor};

use crate::simulator::Simulator;
use crate::support::*;

pub fn check(simulator: &Simulator) {
    // Runs of 256: one, a pair, a run without a partner, and merges of unequal runs.
    for (rows, width) in [(1, 1), (5, 8), (3, 300), (2, 512), (1, 700), (2, 1100), (2, 0)] {
        let mut numbers = values(rows * width, 1);
        numbers.iter_mut().step_by(5).for_each(|x| *x = 0.5);
        numbers.iter_mut().skip(3).step_by(11).for_each(|x| *x = f64::NAN);
        for dtype in FLOATS {
            compare(simulator, &tensor(dtype, &[rows, width], &numbers));
        }
        let whole: Vec<f64> = numbers.iter().map(|x| (x.max(-2.0) * 8.0 + 16.0).floor()).collect();
        for dtype in [DType::U8, DType::U32, DType::I64] {
            compare(simulator, &tensor(dtype, &[rows, width], &whole));
        }
    }
}

fn compare(simulator: &Simulator, x: &Tensor) {
    let (dtype, &[rows, width]) = (element(x.dtype()), x.dims()) else { unreachable!() };
    let memory = bytes(x);
    for order in [SortOrder::Ascending, SortOrder::Descending] {
        let descending = (order == SortOrder::Descending) as i32;
        let mut places = vec![-1_i64; rows * width];
        let runs = width.div_ceil(256);
        simulator
            .kernel("sort_runs", dtype)
            .input(&memory)
            .output(&mut places)
            .value(width as u64)
            .value(runs as u64)
            .value(descending)
            .run([rows * runs, 1, 1], [256, 1, 1]);
        let mut run = 256;
        while run < width {
            let mut merged = vec![-1_i64; rows * width];
            let (grid, block) = elementwise(rows * width);
            simulator
                .kernel("merge_runs", dtype)
                .input(&memory)
                .input(&places)
                .output(&mut merged)
                .value((rows * width) as u64)
                .value(width as u64)
                .value(run as u64)
                .value(descending)
                .run(grid, block);
            (places, run) = (merged, 2 * run);
        }
        let want = first("argsort", x, -1, order, width).unwrap();
        assert_eq!(places, want.to_vec::<i64>().unwrap(), "{x:?} {order:?}");
    }
}
