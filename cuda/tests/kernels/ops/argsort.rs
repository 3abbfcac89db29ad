use ferrotron_tensor::ops::argsort::{SortOrder, first};

use crate::simulator::Simulator;
use crate::support::*;

pub fn check(simulator: &Simulator) {
    for dtype in FLOATS {
        for (rows, width) in [(1, 1), (5, 8), (3, 300), (2, 0)] {
            let mut numbers = values(rows * width, 1);
            numbers.iter_mut().step_by(5).for_each(|x| *x = 0.5);
            numbers.iter_mut().skip(3).step_by(11).for_each(|x| *x = f64::NAN);
            let x = tensor(dtype, &[rows, width], &numbers);
            for order in [SortOrder::Ascending, SortOrder::Descending] {
                for k in [0, 1.min(width), width / 2, width] {
                    let (memory, mut indices) = (bytes(&x), vec![-1_i64; rows * k]);
                    let (grid, block) = elementwise(rows * width);
                    simulator
                        .kernel("first_in_order", element(dtype))
                        .input(&memory)
                        .output(&mut indices)
                        .value((rows * width) as u64)
                        .value(width as u64)
                        .value(k as u64)
                        .value((order == SortOrder::Descending) as i32)
                        .run(grid, block);
                    let want = first("argsort", &x, -1, order, k).unwrap();
                    assert_eq!(
                        indices,
                        want.to_vec::<i64>().unwrap(),
                        "{dtype} {width} {k} {order:?}"
                    );
                }
            }
        }
    }
}
