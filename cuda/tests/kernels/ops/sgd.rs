use ferrotron_cuda::arguments::Step;
use ferrotron_tensor::ops::sgd::{Sgd, sgd};
use ferrotron_tensor::{Element, Real, bf16, f16};

use crate::simulator::Simulator;
use crate::support::*;

pub fn check(simulator: &Simulator) {
    step::<f64, f64>(simulator, "sgd");
    step::<f64, f64>(simulator, "sgd_wide");
    step::<f32, f32>(simulator, "sgd");
    step::<f32, f32>(simulator, "sgd_wide");
    step::<bf16, bf16>(simulator, "sgd");
    step::<bf16, f32>(simulator, "sgd_wide");
    step::<f16, f16>(simulator, "sgd");
    step::<f16, f32>(simulator, "sgd_wide");
}

fn step<T: Element, G: Element<Acc = T::Acc>>(simulator: &Simulator, name: &str) {
    let n = 1030;
    let of = |seed| values(n, seed).into_iter().map(<T::Acc as Real>::of);
    let weights: Vec<T> = of(1).map(T::from_acc).collect();
    let grads: Vec<G> = of(2).map(G::from_acc).collect();
    let moments: Vec<T::Acc> = of(3).collect();
    let (grid, block) = elementwise(n);
    for (momentum, found_inf) in [(0.9, 0), (0.0, 0), (0.9, 1)] {
        let config = Sgd { lr: 3e-2, momentum, weight_decay: 0.1, grad_scale: 0.37 };
        let step = [Step {
            number: 5,
            update: 3,
            lr: config.lr,
            grad_scale: config.grad_scale,
            found_inf,
        }];
        let (mut got, mut got_m) = (weights.clone(), moments.clone());
        let kernel =
            simulator.kernel(name, element(T::DTYPE)).input(&step).in_out(&mut got).input(&grads);
        let kernel = if momentum == 0.0 { kernel.null() } else { kernel.in_out(&mut got_m) };
        kernel.value(n as u64).value(momentum).value(config.weight_decay).run(grid, block);
        let (mut want, mut want_m) = (weights.clone(), moments.clone());
        if found_inf == 0 {
            let buffer: &mut [T::Acc] = if momentum == 0.0 { &mut [] } else { &mut want_m };
            sgd(&device(), &config, &mut want, &grads, buffer).unwrap();
        }
        // Three products and sums, fused or not.
        let eps = 4.0 * T::DTYPE.accumulator().epsilon();
        let stored = eps + rounding(T::DTYPE);
        assert_close(name, &tensor_of(&got), &tensor_of(&want), stored, eps);
        assert_close(
            &format!("{name}, momentum"),
            &tensor_of(&got_m),
            &tensor_of(&want_m),
            eps,
            eps,
        );
    }
}
