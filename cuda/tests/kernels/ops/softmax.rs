use ferrotron_tensor::ops::softmax::{
    log_softmax, log_softmax_backward, softmax, softmax_backward,
};
use ferrotron_tensor::{DType, Tensor};

use crate::simulator::Simulator;
use crate::support::*;

pub fn check(simulator: &Simulator) {
    for dtype in FLOATS {
        for (rows, width) in [(1, 1), (5, 7), (3, 33), (6, 128), (2, 1031), (2, 2048), (0, 5)] {
            let x = random(dtype, &[rows, width], 1);
            check_rows(simulator, &x.mul_scalar(3.0).unwrap());
        }
        // Masked elements, and rows that hold nothing else or infinity.
        let inf = f64::INFINITY;
        let rows = [-inf, 1.0, -inf, 2.0, -inf, -inf, -inf, -inf, 0.0, inf, 1.0, 2.0];
        check_rows(simulator, &tensor(dtype, &[3, 4], &rows));
    }
}

/// Sums of n exponentials in different orders are n / 32 + 32 roundings apart at most.
fn tolerance(dtype: DType, width: usize) -> f64 {
    rounding(dtype) + dtype.accumulator().epsilon() * (width as f64 / 32.0 + 40.0)
}

fn check_rows(simulator: &Simulator, x: &Tensor) {
    let (dtype, dims) = (x.dtype(), x.dims().to_vec());
    let (rows, width) = (dims[0], dims[1]);
    let (grid, block) = rowwise(rows, width);
    let close = |what: &str, memory: &[u8], want: &Tensor, scale: f64| {
        let eps = tolerance(dtype, width);
        assert_close(what, &read(dtype, &dims, memory), want, eps, eps * scale);
    };
    let source = bytes(x);
    let dy = random(dtype, &dims, 2);
    for log in [false, true] {
        let (name, backward) = if log {
            ("log_softmax", "log_softmax_backward")
        } else {
            ("softmax", "softmax_backward")
        };
        let mut memory = room(dtype, x.numel());
        let kernel = simulator.kernel(name, element(dtype)).input(&source).output(&mut memory);
        kernel.value(rows as u64).value(width as u64).run(grid, block);
        let want = if log { log_softmax(x, -1) } else { softmax(x, -1) }.unwrap();
        // Logarithms are differences of numbers as large as the logits, 6 here.
        close(name, &memory, &want, if log { 6.0 } else { 0.0 });
        let (y, mut memory) = (bytes(&want), bytes(&dy));
        let kernel = simulator.kernel(backward, element(dtype)).input(&y).in_out(&mut memory);
        kernel.value(rows as u64).value(width as u64).run(grid, block);
        let dx = if log {
            log_softmax_backward(&want, dy.clone(), -1)
        } else {
            softmax_backward(&want, dy.clone(), -1)
        };
        // A sum of n numbers up to 2 is subtracted.
        close(
            backward,
            &memory,
            &dx.unwrap(),
            2.0 * width as f64 * if log { 1.0 } else { 1.0 / width.max(1) as f64 },
        );
    }
}
