use ferrotron_cuda::arguments::Step;
use ferrotron_tensor::ops::sgd::{Nesterov, Sgd, sgd};
use ferrotron_tensor::ops::step::{DeviceStepParams as HostStep, StepParams};
use ferrotron_tensor::{Element, Real, bf16, f16};

use crate::simulator::Simulator;
use crate::support::*;

pub fn check(simulator: &Simulator) {
    check_type::<f64>(simulator);
    check_type::<f32>(simulator);
    check_type::<bf16>(simulator);
    check_type::<f16>(simulator);
}

fn check_type<T: Element>(simulator: &Simulator) {
    step::<T, T, T>(simulator, "sgd");
    step::<T, T, T::Acc>(simulator, "sgd_wide");
    step::<T, T::Acc, T>(simulator, "sgd_master");
}

fn step<T: Element, W: Element<Acc = T::Acc>, G: Element<Acc = T::Acc>>(
    simulator: &Simulator,
    name: &str,
) {
    let n = 1030;
    let of = |seed| values(n, seed).into_iter().map(<T::Acc as Real>::from_f64);
    let weights: Vec<W> = of(1).map(W::from_acc).collect();
    let grads: Vec<G> = of(2).map(G::from_acc).collect();
    let moments: Vec<T::Acc> = of(3).collect();
    let (grid, block) = elementwise(n);
    let (off, on) = (Nesterov::Off, Nesterov::On);
    for (momentum, nesterov, found_inf) in
        [(0.9, off, 0), (0.9, on, 0), (0.0, off, 0), (0.9, off, 1)]
    {
        let config = Sgd { momentum, weight_decay: 0.1, nesterov };
        let numbers = StepParams { update: 3, lr: 3e-2, grad_scale: 0.37 };
        let StepParams { update, lr, grad_scale } = numbers;
        let step = [Step { number: 5, update, lr, grad_scale, found_inf }];
        let (mut got, mut got_m) = (weights.clone(), moments.clone());
        let kernel =
            simulator.kernel(name, element(T::DTYPE)).input(&step).in_out(&mut got).input(&grads);
        let kernel = if momentum == 0.0 { kernel.null() } else { kernel.in_out(&mut got_m) };
        let kernel = kernel.value(n as u64).value(momentum).value(config.weight_decay);
        kernel.value(u64::from(nesterov == on)).run(grid, block);
        let (mut want, mut want_m) = (tensor_of(&weights), tensor_of(&moments));
        if found_inf == 0 {
            let step = HostStep::new(&device(), &numbers).unwrap();
            let mut none = tensor_of::<T::Acc>(&[]);
            let buffer = if momentum == 0.0 { &mut none } else { &mut want_m };
            sgd(&config, &step, &mut want, &tensor_of(&grads), buffer).unwrap();
        }
        // Three products and sums, fused or not.
        let eps = 4.0 * T::DTYPE.accumulator().epsilon();
        let stored = eps + rounding(T::DTYPE);
        assert_close(name, &tensor_of(&got), &want, stored, eps);
        assert_close(&format!("{name}, momentum"), &tensor_of(&got_m), &want_m, eps, eps);
    }
}
