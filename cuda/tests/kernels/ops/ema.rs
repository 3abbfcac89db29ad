use ferrotron_cuda::arguments::Step;
use ferrotron_tensor::ops::ema::ema;
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
    let n = 1030;
    let of = |seed| values(n, seed).into_iter().map(<T::Acc as Real>::from_f64);
    let weights: Vec<T> = of(1).map(T::from_acc).collect();
    let averages: Vec<T::Acc> = of(2).collect();
    let (grid, block) = elementwise(n);
    for (update, found_inf) in [(1, 0), (2, 0), (2, 1)] {
        let (lr, grad_scale, decay) = (0.1, 1.0, 0.9);
        let step = [Step { number: 5, update, lr, grad_scale, found_inf }];
        let mut got = averages.clone();
        let kernel = simulator.kernel("ema", element(T::DTYPE)).input(&step).in_out(&mut got);
        kernel.input(&weights).value(n as u64).value(decay).run(grid, block);
        let mut want = tensor_of(&averages);
        if found_inf == 0 {
            let numbers = StepParams { update, lr, grad_scale };
            let step = HostStep::new(&device(), &numbers).unwrap();
            ema(decay, &step, &mut want, &tensor_of(&weights)).unwrap();
        }
        let eps = 4.0 * T::DTYPE.accumulator().epsilon();
        assert_close("ema", &tensor_of(&got), &want, eps, eps);
    }
}
