//! Checks the kernels that begin a step behind others that the device may have skipped.

use bytemuck::{Pod, Zeroable};
use ferrotron_cuda::arguments::{LossScale, NextStep, Step};
use ferrotron_cuda::kernels::ElementType;

use crate::simulator::Simulator;

/// Learning rates that are kept.
const ROWS: usize = 5;

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
struct Memory {
    scale: LossScale,
    lrs: [f64; ROWS],
}

pub fn check(simulator: &Simulator) {
    let known = LossScale { scale: 3.0, steady: 5, patience: 1, updates: 6 };
    let mut memory: [Memory; 1] = Zeroable::zeroed();
    let number = |update| Step { number: update, update, lr: 0.1, grad_scale: 1.0, found_inf: 0 };
    let mut step = [Step { found_inf: 7, ..number(0) }];
    // Of the steps after the first, the device skips the second and the third.
    for (ahead, skipped) in [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2)] {
        let given = Step { lr: 0.5 + ahead as f64, ..number(7 + ahead) };
        let is_known = u64::from(ahead == 0);
        let next = NextStep { step: given, known, is_known, rows: ROWS as u64 };
        let kernel = simulator.kernel("next_step", ElementType::F64).in_out(&mut step);
        kernel.in_out(&mut memory).value(next).run([1; 3], [32, 1, 1]);
        let updates = 6 + ahead - skipped;
        let lr = 0.5 + (ahead - skipped) as f64;
        assert_eq!(step, [Step { lr, ..number(updates + 1) }], "{ahead} ahead");
        assert_eq!(memory[0].scale, LossScale { updates, ..known });
        // As `outcome` counts it.
        memory[0].scale.updates += u64::from(ahead == 0 || ahead == 3);
    }
    assert_eq!(memory[0].lrs, [3.5, 4.5, 0.5, 1.5, 2.5]);
    let mut gradient = [0.0];
    let kernel = simulator.kernel("loss_gradient", ElementType::F64).output(&mut gradient);
    kernel.input(&[known]).value(0.3).run([1; 3], [32, 1, 1]);
    assert_eq!(gradient, [0.3 * 3.0]);
}
