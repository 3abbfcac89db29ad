use ferrotron_tensor::RandomKey;
use ferrotron_tensor::ops::dropout::dropout;

use crate::simulator::Simulator;
use crate::support::*;

pub fn check(simulator: &Simulator) {
    for place in places() {
        for p in [0.1, 0.5] {
            let key = RandomKey::new(7, 12, "blocks.0.dropout");
            let (words, step) = draws(&key);
            // As on the CPU: an element is kept where its uniform number, bits / 2^32, is at least p.
            let last_dropped = ((p * 4_294_967_296.0_f64).ceil() - 1.0) as u32;
            for dtype in FLOATS {
                let x = random(dtype, place.dims(), 1);
                let (memory, n) = (bytes(&x), x.numel());
                let mut out = room(dtype, n);
                let (grid, block) = elementwise(n);
                let kernel =
                    simulator.kernel("dropout", element(dtype)).input(&memory).output(&mut out);
                let kernel = kernel.value(n as u64).value(words).input(std::slice::from_ref(&step));
                let kernel = kernel.value(last_dropped).value(1.0 / (1.0 - p));
                kernel.value(device_place(&place)).run(grid, block);
                let want = dropout(&x, p, &key, &place).unwrap();
                assert_same(
                    &format!("dropout {p} of {place:?}"),
                    &read(dtype, x.dims(), &out),
                    &want,
                );
            }
        }
    }
}
