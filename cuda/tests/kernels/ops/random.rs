//! Random numbers.

use ferrotron_tensor::RandomKey;
use ferrotron_tensor::ops::random::{normal, uniform};

use crate::simulator::Simulator;
use crate::support::*;

pub fn check(simulator: &Simulator) {
    let key = RandomKey::new(7, 3, "blocks.0.weight");
    let (words, step) = draws(&key);
    for place in places() {
        let n: usize = place.dims().iter().product();
        let (grid, block) = elementwise(n);
        for dtype in FLOATS {
            for (name, first, second) in [("uniform", -3.0, 1.5), ("normal", 0.5, 0.02)] {
                let mut out = room(dtype, n);
                let kernel =
                    simulator.kernel(name, element(dtype)).output(&mut out).value(n as u64);
                let kernel = kernel.value(words).input(std::slice::from_ref(&step)).value(first);
                // From a low end and a width, or a mean and a deviation.
                let width = if name == "uniform" { second - first } else { second };
                kernel.value(width).value(device_place(&place)).run(grid, block);
                let make = if name == "uniform" { uniform } else { normal };
                let want = make(&device(), dtype, &place, &key, first, second).unwrap();
                assert_same(
                    &format!("{name} of {place:?}"),
                    &read(dtype, place.dims(), &out),
                    &want,
                );
            }
        }
    }
}
