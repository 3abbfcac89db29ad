use ferrotron_tensor::DType;
use ferrotron_tensor::ops::sq_norm::add_sq_norm;

use crate::simulator::Simulator;
use crate::support::*;

/// The total before the kernel adds to it.
const BEFORE: f64 = 0.25;

pub fn check(simulator: &Simulator) {
    for dtype in FLOATS {
        for n in [0, 1, 33, 5000] {
            // Squares are multiples of 2^-12, and their sum is exact.
            assert_eq!(
                total(simulator, dtype, &values(n, 1)),
                cpu(dtype, &values(n, 1)),
                "{dtype} {n}"
            );
        }
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let mut x = values(3000, 2);
            x[2999] = bad;
            assert!(!total(simulator, dtype, &x).is_finite(), "{dtype} {bad}");
            assert!(!is_finite(simulator, dtype, &x), "{dtype} {bad}");
            x[2999] = 0.5;
            assert!(is_finite(simulator, dtype, &x), "{dtype}");
        }
    }
    let large = [3e38, -3e38, 1e-30];
    assert_eq!(total(simulator, DType::F32, &large), cpu(DType::F32, &large));
}

fn cpu(dtype: DType, x: &[f64]) -> f64 {
    let mut total = tensor_of(&[BEFORE]);
    add_sq_norm(&mut total, &tensor(dtype, &[x.len()], x)).unwrap();
    total.item().unwrap()
}

fn total(simulator: &Simulator, dtype: DType, x: &[f64]) -> f64 {
    let memory = bytes(&tensor(dtype, &[x.len()], x));
    let (mut partials, mut total) = ([0.0; 3], [BEFORE]);
    let kernel =
        simulator.kernel("sq_norm_partials", element(dtype)).input(&memory).output(&mut partials);
    kernel.value(x.len() as u64).run([3, 1, 1], [256, 1, 1]);
    let kernel =
        simulator.kernel("sq_norm_finish", element(dtype)).input(&partials).in_out(&mut total);
    kernel.value(3_u64).run([1; 3], [256, 1, 1]);
    total[0]
}

fn is_finite(simulator: &Simulator, dtype: DType, x: &[f64]) -> bool {
    let memory = bytes(&tensor(dtype, &[x.len()], x));
    let mut found = [0_u64];
    let kernel = simulator.kernel("find_not_finite", element(dtype)).input(&memory);
    let (grid, block) = elementwise(x.len());
    kernel.in_out(&mut found).value(x.len() as u64).run(grid, block);
    found == [0]
}
