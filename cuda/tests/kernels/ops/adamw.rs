use ferrotron_cuda::arguments::Step;
use ferrotron_tensor::ops::adamw::{AdamW, adamw};
use ferrotron_tensor::ops::rounded::Rounded;
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
    for n in [1, 4, 1030] {
        for update in [1, 1000] {
            // Weights of the element type, and master weights; gradients of the element type, and wider.
            step::<T, T, T>(simulator, "adamw", n, update);
            step::<T, T, T::Acc>(simulator, "adamw_wide", n, update);
            step::<T, T::Acc, T>(simulator, "adamw_master", n, update);
            step::<T, T::Acc, T::Acc>(simulator, "adamw_master_wide", n, update);
        }
    }
}

fn step<T: Element, W: Element<Acc = T::Acc>, G: Element<Acc = T::Acc>>(
    simulator: &Simulator,
    name: &str,
    n: usize,
    update: u64,
) {
    let config = AdamW { weight_decay: 0.1, ..AdamW::default() };
    let numbers = StepParams { update, lr: 3e-2, grad_scale: 0.37 };
    let StepParams { lr, grad_scale, .. } = numbers;
    let of = |seed, scale: f64| {
        values(n, seed).into_iter().map(move |x| <T::Acc as Real>::from_f64(x * scale))
    };
    let weights: Vec<W> = of(1, 1.0).map(W::from_acc).collect();
    let grads: Vec<G> = of(2, 1.0).map(G::from_acc).collect();
    let m: Vec<T::Acc> = of(3, 0.1).collect();
    let v: Vec<T::Acc> = of(4, 0.1).map(|x| x * x).collect();
    let coefficients = 9 * size_of::<T::Acc>();
    let (grid, block) = elementwise(n);
    let copies = name.contains("master");
    for found_inf in [0, 1] {
        let step = [Step { number: 5, update, lr, grad_scale, found_inf }];
        let mut c = vec![0_u8; coefficients];
        let kernel =
            simulator.kernel("adamw_coefficients", element(T::DTYPE)).output(&mut c).input(&step);
        let kernel = kernel.value(config.beta1).value(config.beta2).value(config.eps);
        kernel.value(config.weight_decay).run([1; 3], [32, 1, 1]);

        let (mut got, mut got_m, mut got_v) = (weights.clone(), m.clone(), v.clone());
        let mut copy = vec![T::from_acc(Real::from_f64(7.0)); n];
        let kernel = simulator.kernel(name, element(T::DTYPE)).input(&c).input(&step);
        let kernel = kernel.in_out(&mut got).input(&grads).in_out(&mut got_m).in_out(&mut got_v);
        let kernel = if copies { kernel.in_out(&mut copy) } else { kernel };
        kernel.value(n as u64).run(grid, block);

        let (mut want, mut want_m, mut want_v) =
            (tensor_of(&weights), tensor_of(&m), tensor_of(&v));
        let mut want_copy = tensor_of(&vec![T::from_acc(Real::from_f64(7.0)); n]);
        if found_inf == 0 {
            let (step, copy) = (
                HostStep::new(&device(), &numbers),
                copies.then(|| Rounded::nearest(&mut want_copy)),
            );
            let (step, grads) = (step.unwrap(), tensor_of(&grads));
            adamw(&config, &step, &mut want, &grads, &mut want_m, &mut want_v, copy).unwrap();
        }
        // The powers of the betas may differ in their last bit, by platform; what is stored is rounded from there.
        let eps = 8.0 * T::DTYPE.accumulator().epsilon();
        let stored = |dtype: ferrotron_tensor::DType| eps + rounding(dtype);
        let (w, a, t) = (W::DTYPE, T::DTYPE.accumulator(), T::DTYPE);
        assert_close(&format!("{name} of {n}"), &tensor_of(&got), &want, stored(w), eps);
        assert_close(&format!("{name}, m"), &tensor_of(&got_m), &want_m, stored(a), eps * 0.01);
        assert_close(&format!("{name}, v"), &tensor_of(&got_v), &want_v, stored(a), 0.0);
        assert_close(&format!("{name}, copy"), &tensor_of(&copy), &want_copy, stored(t), eps);
    }
}
