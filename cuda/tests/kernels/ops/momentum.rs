//! The update rules with one momentum: SGD and Lion.

use ferrotron_cuda::arguments::Step;
use ferrotron_tensor::ops::lion::{Lion, lion};
use ferrotron_tensor::ops::sgd::{Nesterov, Sgd, sgd};
use ferrotron_tensor::ops::step::{DeviceStepParams as HostStep, StepParams};
use ferrotron_tensor::{Element, Real, Result, Tensor, bf16, f16};

use crate::simulator::{Launch, Simulator};
use crate::support::*;

/// A rule with its constants.
#[derive(Clone, Copy)]
enum Rule {
    Sgd(Sgd),
    Lion(Lion),
}

pub fn check_sgd(simulator: &Simulator) {
    for (momentum, nesterov) in [(0.9, Nesterov::Off), (0.9, Nesterov::On), (0.0, Nesterov::Off)] {
        check(simulator, Rule::Sgd(Sgd { momentum, weight_decay: 0.1, nesterov }));
    }
}

pub fn check_lion(simulator: &Simulator) {
    check(simulator, Rule::Lion(Lion { beta1: 0.9, beta2: 0.99, weight_decay: 0.1 }));
}

fn check(simulator: &Simulator, rule: Rule) {
    check_type::<f64>(simulator, rule);
    check_type::<f32>(simulator, rule);
    check_type::<bf16>(simulator, rule);
    check_type::<f16>(simulator, rule);
}

fn check_type<T: Element>(simulator: &Simulator, rule: Rule) {
    for found_inf in [0, 1] {
        step::<T, T, T>(simulator, rule, "", found_inf);
        step::<T, T, T::Acc>(simulator, rule, "_wide", found_inf);
        step::<T, T::Acc, T>(simulator, rule, "_master", found_inf);
    }
}

impl Rule {
    fn name(&self) -> &'static str {
        match self {
            Rule::Sgd(_) => "sgd",
            Rule::Lion(_) => "lion",
        }
    }

    /// Whether there is a momentum.
    fn has_momentum(&self) -> bool {
        !matches!(self, Rule::Sgd(Sgd { momentum: 0.0, .. }))
    }

    /// Adds the constants to the arguments of the kernel.
    fn constants<'a>(&self, kernel: Launch<'a>) -> Launch<'a> {
        match *self {
            Rule::Sgd(Sgd { momentum, weight_decay, nesterov }) => {
                let kernel = kernel.value(momentum).value(weight_decay);
                kernel.value(u64::from(nesterov == Nesterov::On))
            }
            Rule::Lion(Lion { beta1, beta2, weight_decay }) => {
                kernel.value(beta1).value(beta2).value(weight_decay)
            }
        }
    }

    /// The same step on the CPU.
    fn step(&self, step: &HostStep, w: &mut Tensor, g: &Tensor, m: &mut Tensor) -> Result<()> {
        match self {
            Rule::Sgd(config) => sgd(config, step, w, g, m, None),
            Rule::Lion(config) => lion(config, step, w, g, m, None),
        }
    }
}

fn step<T: Element, W: Element<Acc = T::Acc>, G: Element<Acc = T::Acc>>(
    simulator: &Simulator,
    rule: Rule,
    variant: &str,
    found_inf: u64,
) {
    let n = 1030;
    let of = |seed| values(n, seed).into_iter().map(<T::Acc as Real>::from_f64);
    let weights: Vec<W> = of(1).map(W::from_acc).collect();
    let grads: Vec<G> = of(2).map(G::from_acc).collect();
    let moments: Vec<T::Acc> = of(3).collect();
    let (grid, block) = elementwise(n);
    let numbers = StepParams { update: 3, lr: 3e-2, grad_scale: 0.37 };
    let StepParams { update, lr, grad_scale } = numbers;
    let step = [Step { number: 5, update, lr, grad_scale, found_inf }];
    let name = format!("{}{variant}", rule.name());
    let (mut got, mut got_m) = (weights.clone(), moments.clone());
    let kernel = simulator.kernel(&name, element(T::DTYPE));
    let kernel = kernel.input(&step).in_out(&mut got).input(&grads);
    let kernel = if rule.has_momentum() { kernel.in_out(&mut got_m) } else { kernel.null() };
    rule.constants(kernel.value(n as u64)).run(grid, block);
    let (mut want, mut want_m) = (tensor_of(&weights), tensor_of(&moments));
    if found_inf == 0 {
        let step = HostStep::new(&device(), &numbers).unwrap();
        let mut none = tensor_of::<T::Acc>(&[]);
        let momentum = if rule.has_momentum() { &mut want_m } else { &mut none };
        rule.step(&step, &mut want, &tensor_of(&grads), momentum).unwrap();
    }
    // Three products and sums, fused or not.
    let eps = 4.0 * T::DTYPE.accumulator().epsilon();
    let stored = eps + rounding(T::DTYPE);
    assert_close(&name, &tensor_of(&got), &want, stored, eps);
    assert_close(&format!("{name}, momentum"), &tensor_of(&got_m), &want_m, eps, eps);
}
