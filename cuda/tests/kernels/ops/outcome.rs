//! Compares the kernels that apply or skip a step with the CPU's.

use ferrotron_cuda::arguments;
use ferrotron_cuda::kernels::ElementType;
use ferrotron_tensor::RandomKey;
use ferrotron_tensor::ops::loss_scale::{DeviceLossScale, LossScaleRule, LossScaleState};
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
    let rule = |window, hysteresis, minimum| LossScaleRule { window, hysteresis, minimum };
    for sums in [
        &[fine, (5.0, 1e9, None), (3.0, nan, None), fine, (2.0, inf, Some(1.0)), fine][..],
        &[fine, (inf, 0.2, None), fine],
        &[(nan, nan, None), fine],
        &[fine, (1.0, 0.1, Some(inf)), fine, (nan, 0.1, None)],
        &[(1.0, 0.1, Some(nan)), fine],
    ] {
        for max_norm in [0.0, 0.01, 1.0, 1e6] {
            for overflow in [OverflowPolicy::SkipStep(rule(2, 1, 1.0)), OverflowPolicy::Stop] {
                let config = CheckStepConfig { tokens: 3.0, max_norm, overflow };
                steps(simulator, &config, sums);
            }
        }
    }
    // Overflows in any order, with every rule: the loss scale is halved, kept and doubled.
    let key = RandomKey::new(7, 0, "overflows");
    for (index, rule) in [rule(1, 1, 0.3), rule(2, 2, 1.0), rule(3, 1, 0.01), rule(4, 3, 1.7)]
        .into_iter()
        .enumerate()
    {
        let overflows = |step: u64| key.uniform(100 * index as u64 + step) < 0.4;
        let sums: Vec<_> =
            (0..40).map(|step| (1.0, if overflows(step) { inf } else { 0.5 }, None)).collect();
        let overflow = OverflowPolicy::SkipStep(rule);
        steps(simulator, &CheckStepConfig { tokens: 3.0, max_norm: 1.0, overflow }, &sums);
    }
}

/// Takes steps with these sums of losses, of squares, and those of other replicas, to the last bit as the CPU does.
fn steps(simulator: &Simulator, config: &CheckStepConfig, sums: &[(f64, f64, Option<f64>)]) {
    let CheckStepConfig { tokens, max_norm, overflow } = *config;
    let rule = match overflow {
        OverflowPolicy::SkipStep(rule) => Some(rule),
        OverflowPolicy::Stop => None,
    };
    let skips = u64::from(rule.is_some());
    let of = rule.unwrap_or(LossScaleRule { window: 1, hysteresis: 1, minimum: 1e9 });
    let LossScaleRule { window, hysteresis, minimum } = of;
    let rows = ROWS as u64;
    let device_config =
        arguments::Outcome { tokens, max_norm, skips, window, hysteresis, minimum, rows };
    let numbers = StepParams { update: 4, lr: 0.1, grad_scale: 9.0 };
    let mut host = StepMetricsLog::new(&device(), ROWS).unwrap();
    let mut found = [0.0; 2 + 3 * ROWS];
    let mut scale = LossScaleState { scale: 1.7, steady: 0, patience: hysteresis };
    let mut host_scale = DeviceLossScale::new(&device(), &scale, 1).unwrap();
    let mut updates = 3;
    let stored = |state: LossScaleState, updates| {
        let LossScaleState { scale, steady, patience } = state;
        arguments::LossScale { scale, steady, patience, updates }
    };
    let mut memory_of_scale = [stored(scale, updates)];
    for (i, &(loss, sq_norm, others)) in sums.iter().enumerate() {
        let before =
            arguments::Step { number: 5, update: 4, lr: 0.1, grad_scale: 9.0, found_inf: 7 };
        let mut step = [before];
        let launch = simulator.kernel("outcome", ElementType::F64).in_out(&mut step);
        let memory = [[loss], [sq_norm], [others.unwrap_or(0.0)]];
        let launch = launch.in_out(&mut memory_of_scale).in_out(&mut found);
        let launch = launch.input(&memory[0]).input(&memory[1]);
        let launch = if others.is_some() { launch.input(&memory[2]) } else { launch.null() };
        launch.value(device_config).run([1; 3], [32, 1, 1]);

        let tensors = memory.each_ref().map(|number| tensor_of(number));
        let others = others.map(|_| &tensors[2]);
        let sums = StepSums { loss: &tensors[0], sq_norm: &tensors[1], others };
        let mut host_step = DeviceStepParams::new(&device(), &numbers).unwrap();
        check_step(&mut host_step, &mut host_scale, &mut host, config, &sums).unwrap();
        let (want, stopped) = host.read(ROWS.min(i + 1)).unwrap();
        let what = format!("step {i} of {config:?}");
        let first = i + 1 - want.len();
        for (k, want) in want.iter().enumerate() {
            let row = &found[2 + (first + k) % ROWS * 3..][..3];
            assert_bits(&what, row, &[want.loss, want.grad_norm, want.loss_scale]);
        }
        assert_eq!(found[0], (i + 1) as f64, "{what}");
        // A step that is no more among the latest is told as the first of them.
        let got = found[1].max(if found[1] > 0.0 { (first + 1) as f64 } else { 0.0 });
        assert_eq!(got, stopped.map_or(0.0, |k| (first + k + 1) as f64), "{what}");
        let norm = want[want.len() - 1].grad_norm;
        let found_inf = !norm.is_finite() || stopped.is_some();
        // The factor of a skipped step is not read.
        if norm.is_finite() {
            let grad_scale = clip_coefficient(norm, max_norm) / scale.scale;
            assert_bits(&what, &[step[0].grad_scale], &[grad_scale]);
        }
        let rest = arguments::Step {
            grad_scale: step[0].grad_scale,
            found_inf: step[0].found_inf,
            ..before
        };
        assert_eq!((step[0], step[0].found_inf != 0), (rest, found_inf), "{what}");
        if stopped.is_none() {
            updates += u64::from(norm.is_finite());
            scale = rule.map_or(scale, |rule| rule.next(scale, !norm.is_finite()));
        }
        assert_eq!(memory_of_scale, [stored(scale, updates)], "{what}");
        let host_scale = host_scale.gradient(&device(), 1.0).unwrap().item().unwrap();
        assert_eq!(host_scale, scale.scale, "{what}");
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
