use ferrotron_tensor::ops::sq_norm::sq_norm;
use ferrotron_tensor::{DType, dispatch_float};

use crate::simulator::Simulator;
use crate::support::*;

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
        }
    }
    let large = [3e38, -3e38, 1e-30];
    assert_eq!(total(simulator, DType::F32, &large), cpu(DType::F32, &large));
}

fn cpu(dtype: DType, x: &[f64]) -> f64 {
    let x = tensor(dtype, &[x.len()], x);
    let norm = || -> ferrotron_tensor::Result<f64> {
        Ok(dispatch_float!("sq_norm", dtype, T => sq_norm(&device(), &x.to_vec::<T>()?)))
    };
    norm().unwrap()
}

fn total(simulator: &Simulator, dtype: DType, x: &[f64]) -> f64 {
    let memory = bytes(&tensor(dtype, &[x.len()], x));
    let (mut partials, mut total) = ([0.0; 3], [0.0]);
    let kernel =
        simulator.kernel("sq_norm_partials", element(dtype)).input(&memory).output(&mut partials);
    kernel.value(x.len() as u64).run([3, 1, 1], [256, 1, 1]);
    let kernel =
        simulator.kernel("sq_norm_finish", element(dtype)).input(&partials).output(&mut total);
    kernel.value(3_u64).run([1; 3], [256, 1, 1]);
    total[0]
}
