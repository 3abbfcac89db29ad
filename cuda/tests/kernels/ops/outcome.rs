//! Compares the kernels that apply or skip a step with the CPU's.

use ferrotron_cuda::arguments;
use ferrotron_cuda::kernels::ElementType;
use ferrotron_tensor::ops::outcome::{
    CheckStepConfig, OverflowPolicy, StepMetricsLog, StepSums, check_step, clip_coefficient,
};
use ferrotron_tensor::ops::step::{DeviceStepParams, StepParams};

use crate::simulator::Simulator;
use crate::support::*;

/// Outcomes that are kept.
const ROWS: usize = 3;

pub fn check(simulator: &Simulator) {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let fine = (7.0, 0.3, None);
    for sums in [
        &[fine, (5.0, 1e9, None), (3.0, nan, None), fine, (2.0, inf, Some(1.0)), fine][..],
        &[fine, (inf, 0.2, None), fine],
        &[(nan, nan, None), fine],
        &[fine, (1.0, 0.1, Some(inf)), fine, (nan, 0.1, None)],
        &[(1.0, 0.1, Some(nan)), fine],
    ] {
        for max_norm in [0.0, 0.01, 1.0, 1e6] {
            for overflow in [OverflowPolicy::SkipStep, OverflowPolicy::Stop] {
                let config = CheckStepConfig { tokens: 3.0, loss_scale: 1.7, max_norm, overflow };
                steps(simulator, &config, sums);
            }
        }
    }
}

/// Takes steps with these sums of losses, of squares, and those of other replicas, to the last bit as the CPU does.
fn steps(simulator: &Simulator, config: &CheckStepConfig, sums: &[(f64, f64, Option<f64>)]) {
    let CheckStepConfig { tokens, loss_scale, max_norm, overflow } = *config;
    let skips = u64::from(overflow == OverflowPolicy::SkipStep);
    let rows = ROWS as u64;
    let device_config = arguments::Outcome { tokens, loss_scale, max_norm, skips, rows };
    let numbers = StepParams { update: 4, lr: 0.1, grad_scale: 9.0 };
    let mut host = StepMetricsLog::new(&device(), ROWS).unwrap();
    let mut found = [0.0; 2 + 2 * ROWS];
    for (i, &(loss, sq_norm, others)) in sums.iter().enumerate() {
        let before =
            arguments::Step { number: 5, update: 4, lr: 0.1, grad_scale: 9.0, found_inf: 7 };
        let mut step = [before];
        let launch = simulator.kernel("outcome", ElementType::F64).in_out(&mut step);
        let memory = [[loss], [sq_norm], [others.unwrap_or(0.0)]];
        let launch = launch.in_out(&mut found).input(&memory[0]).input(&memory[1]);
        let launch = if others.is_some() { launch.input(&memory[2]) } else { launch.null() };
        launch.value(device_config).run([1; 3], [32, 1, 1]);

        let tensors = memory.each_ref().map(|number| tensor_of(number));
        let others = others.map(|_| &tensors[2]);
        let sums = StepSums { loss: &tensors[0], sq_norm: &tensors[1], others };
        let mut host_step = DeviceStepParams::new(&device(), &numbers).unwrap();
        check_step(&mut host_step, &mut host, config, &sums).unwrap();
        let (want, stopped) = host.read(ROWS.min(i + 1)).unwrap();
        let what = format!("step {i} of {config:?}");
        let first = i + 1 - want.len();
        for (k, want) in want.iter().enumerate() {
            let row = &found[2 + (first + k) % ROWS * 2..][..2];
            assert_bits(&what, row, &[want.loss, want.grad_norm]);
        }
        assert_eq!(found[0], (i + 1) as f64, "{what}");
        // A step that is no more among the latest is told as the first of them.
        let got = found[1].max(if found[1] > 0.0 { (first + 1) as f64 } else { 0.0 });
        assert_eq!(got, stopped.map_or(0.0, |k| (first + k + 1) as f64), "{what}");
        let norm = want[want.len() - 1].grad_norm;
        let found_inf = !norm.is_finite() || stopped.is_some();
        // The factor of a skipped step is not read.
        if norm.is_finite() {
            let grad_scale = clip_coefficient(norm, max_norm) / loss_scale;
            assert_bits(&what, &[step[0].grad_scale], &[grad_scale]);
        }
        let rest = arguments::Step {
            grad_scale: step[0].grad_scale,
            found_inf: step[0].found_inf,
            ..before
        };
        assert_eq!((step[0], step[0].found_inf != 0), (rest, found_inf), "{what}");
    }
}

/// Any NaN is as good as any other.
fn assert_bits(what: &str, got: &[f64], want: &[f64]) {
    let same = got
        .iter()
        .zip(want)
        .all(|(got, want)| got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()));
    assert!(same, "{what}: got {got:?}, want {want:?}");
}
