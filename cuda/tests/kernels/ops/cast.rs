use ferrotron_tensor::DType;

use crate::simulator::Simulator;
use crate::support::*;

pub fn check(simulator: &Simulator) {
    let mut numbers = values(1003, 1);
    numbers.extend([
        0.0,
        -0.0,
        1e-8,
        255.5,
        256.0,
        -1.0,
        65519.0,
        65520.0,
        4294967295.0,
        4294967296.0,
        -9.3e18,
        9.3e18,
    ]);
    numbers.extend([
        1e300,
        -1e300,
        5e-324,
        f64::INFINITY,
        f64::NEG_INFINITY,
        f64::NAN,
        1.0 + 3.0 / 256.0,
        3e38,
        6e-8,
    ]);
    numbers.extend((0..60).map(|i| 1.7 * 2.0_f64.powi(i)));
    for from in DType::ALL {
        let x = tensor(from, &[numbers.len()], &numbers);
        let (memory, n) = (bytes(&x), numbers.len());
        let (grid, block) = elementwise(n);
        for to in DType::ALL {
            let mut out = room(to, n);
            let kernel = simulator.kernel(&format!("cast_to_{to}"), element(from));
            kernel.input(&memory).output(&mut out).value(n as u64).run(grid, block);
            let want = x.cast(to).unwrap();
            let got = read(to, &[n], &out);
            if to.is_float() {
                assert_same(&format!("cast from {from}"), &got, &want);
            } else {
                // Beyond 2^53 integers are not what f64 shows.
                assert_eq!(out, bytes(&want), "cast from {from} to {to}");
            }
        }
    }
}
