use ferrotron_cuda::arguments::Step;
use ferrotron_cuda::kernels::ElementType;

use crate::simulator::Simulator;

pub fn check(simulator: &Simulator) {
    let want = Step { number: 5, update: 4, lr: 0.3, grad_scale: 0.2, found_inf: 1 };
    let mut got = [Step { number: 0, update: 0, lr: 0.0, grad_scale: 0.0, found_inf: 0 }];
    let kernel = simulator.kernel("set_step", ElementType::F64).output(&mut got).value(want);
    kernel.run([1; 3], [32, 1, 1]);
    assert_eq!(got, [want]);
    let kernel = simulator.kernel("scale_lr", ElementType::F64).output(&mut got);
    kernel.input(&[want]).value(0.5).run([1; 3], [32, 1, 1]);
    assert_eq!(got, [Step { lr: 0.15, ..want }]);
}
