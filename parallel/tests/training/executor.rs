//! The executor's order, live and freed memory, and overlap, beside its numbers.

use ferrotron_autograd::Var;
use ferrotron_nn::{Axis, Bias, Init, Linear, Module, ParamAndGradBuffer, Scope};
use ferrotron_parallel::mesh::Mesh;
use ferrotron_parallel::pipeline::{
    Instruction, PipelineConfig, PipelineModel, PipelineSchedule, ScheduleKind, execute,
    unsupported_reason, validate,
};
use ferrotron_tensor::{Category, DType, Device, Error, Result, Tensor};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use crate::harness::{Plan, assert_close, on_mesh, ranks, serial, train};
use crate::toy::Shape;

#[test]
fn the_order_and_the_peak_are_those_of_the_schedule() {
    for kind in ScheduleKind::FLUSHED {
        for (stages, microbatches, chunks) in
            [(2, 4, 1), (3, 7, 1), (4, 8, 1), (2, 4, 2), (4, 8, 2), (1, 3, 1)]
        {
            let config = PipelineConfig { kind, stages, microbatches, chunks };
            if unsupported_reason(&config).is_some() {
                continue;
            }
            let schedule = PipelineSchedule::new(&config).unwrap();
            let peaks = validate(&schedule).unwrap();
            let plan = Plan { stages, microbatches, kind, chunks, ..Plan::default() };
            let found = ranks(&plan, |mut rank| Ok(rank.step(0)?.execution));
            for (rank, execution) in found.iter().enumerate() {
                assert_eq!(execution.peak, peaks[rank].total, "{config:?}: rank {rank}");
                let order = execution.spans.iter().map(|span| &span.0);
                assert!(order.eq(schedule.instructions(rank)), "{config:?}: rank {rank}");
                let times = execution.spans.iter().flat_map(|span| [span.1, span.2]);
                assert!(times.is_sorted(), "{config:?}: rank {rank}");
            }
        }
    }
}

/// Most bytes that each rank keeps for backward in a step.
fn saved_bytes(plan: &Plan) -> Vec<usize> {
    ranks(plan, |mut rank| {
        rank.device.reset_memory_peaks();
        rank.step(0)?;
        Ok(rank.device.memory().peak_by_category[Category::Saved as usize])
    })
}

/// The executor keeps as many micro-batches as the checker says, each with the bytes of one alone.
#[test]
fn the_bytes_kept_for_backward_are_those_of_the_schedule() {
    for kind in ScheduleKind::FLUSHED {
        for (stages, microbatches, chunks) in [(2, 4, 1), (3, 7, 1), (4, 8, 1), (2, 4, 2)] {
            let config = PipelineConfig { kind, stages, microbatches, chunks };
            if unsupported_reason(&config).is_some() {
                continue;
            }
            let peaks = validate(&PipelineSchedule::new(&config).unwrap()).unwrap();
            // Each virtual stage on a rank of its own, with one micro-batch.
            let alone = saved_bytes(&Plan { stages: stages * chunks, ..Plan::default() });
            let found =
                saved_bytes(&Plan { stages, microbatches, kind, chunks, ..Plan::default() });
            for (rank, (found, peak)) in found.into_iter().zip(peaks).enumerate() {
                let at = format!("{config:?}: rank {rank}: {found} bytes, {peak:?}");
                // Of several chunks most are in flight while the last has one micro-batch.
                let last = alone[rank + (chunks - 1) * stages];
                let bytes = |count: usize| (count - 1) * alone[rank] + last;
                if peak.deferred == 0 {
                    assert_eq!(found, bytes(peak.activations), "{at}");
                } else {
                    // Of what waits for its weight gradients, only the layers' inputs are kept.
                    let (least, most) = (bytes(peak.activations), bytes(peak.total));
                    assert!((least..=most).contains(&found), "{at}, {least} to {most}");
                }
            }
        }
    }
}

#[test]
fn ranks_along_the_tensor_axis_scatter_and_gather_without_a_trace() {
    // 3 tokens x 5 features: no even parts.
    let shape = Shape { width: 5, ..Shape::default() };
    for (stages, data) in [(2, 1), (3, 1), (2, 2)] {
        for kind in [ScheduleKind::OneFOneB, ScheduleKind::ZbH1, ScheduleKind::GPipe] {
            let plan =
                Plan { shape, stages, data, tensor: 2, kind, microbatches: 3, ..Plan::default() };
            assert_close(&plan, &train(&plan), &serial(&plan).unwrap());
        }
    }
}

#[test]
fn incomplete_schedules_are_refused() {
    let forward = Instruction::Forward { microbatch: 0, chunk: 0 };
    let backward = Instruction::Backward { microbatch: 0, chunk: 0 };
    let input = Instruction::BackwardInput { microbatch: 0, chunk: 0 };
    for (list, why) in [
        (vec![forward.clone()], "a forward that has no backward"),
        (vec![backward], "comes before what it needs"),
        (vec![forward, input], "weight gradients that are not computed"),
    ] {
        let schedule = PipelineSchedule::from_instructions(vec![list], 1, 1);
        let mut model = Wide::new(&Device::cpu(1).unwrap(), 0, 1).unwrap();
        let error = execute(&schedule, &mut model, &Mesh::single(), 1.0).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    let schedule = PipelineSchedule::from_instructions(vec![vec![], vec![]], 1, 1);
    let mut model = Wide::new(&Device::cpu(1).unwrap(), 0, 1).unwrap();
    let error = execute(&schedule, &mut model, &Mesh::single(), 1.0).unwrap_err().to_string();
    assert!(error.contains("2 stages, the mesh 1"), "{error}");
}

/// Features of an output: more bytes than a channel holds before anybody receives.
const WIDE: usize = 1 << 20;

/// Stages that keep nearly nothing for backward, but whose outputs are wide: from one number to many, and
/// back to their sum.
struct Wide {
    layer: Option<Linear>,
    buffers: Option<ParamAndGradBuffer>,
    device: Device,
    stage: usize,
    stages: usize,
    /// Bytes in use when the first backward of this stage was done.
    in_use: usize,
    baseline: usize,
    started: Option<std::sync::Arc<AtomicUsize>>,
}

impl Wide {
    fn new(device: &Device, stage: usize, stages: usize) -> Result<Wide> {
        let scope = Scope::new(device, DType::F64, 1).child(&stage.to_string());
        let layer =
            (stage == 0).then(|| Linear::new(&scope, 1, WIDE, Bias::No, Init::Ones)).transpose()?;
        let buffers =
            layer.as_ref().map(|layer| ParamAndGradBuffer::new(&layer.params())).transpose()?;
        let baseline = device.memory().current;
        let device = device.clone();
        Ok(Wide { layer, buffers, device, stage, stages, in_use: 0, baseline, started: None })
    }
}

impl PipelineModel for Wide {
    fn activation(&self, _microbatch: usize) -> (Vec<usize>, DType, Device) {
        (vec![1, WIDE], DType::F64, self.device.clone())
    }

    fn forward(&mut self, microbatch: usize, _chunk: usize, input: Option<Var>) -> Result<Var> {
        if let Some(started) = &self.started {
            if self.stage == 0 {
                started.store(microbatch + 1, SeqCst);
            }
            // The first forward here ends only when the stage before is two further.
            let start = Instant::now();
            while self.stage == 1 && microbatch == 0 && started.load(SeqCst) < 3 {
                if start.elapsed() > Duration::from_secs(40) {
                    return Err(Error::communication(
                        "overlap",
                        "the sender waits for its receiver",
                    ));
                }
                std::thread::yield_now();
            }
        }
        let output = match input {
            None => {
                let one = Tensor::full(&self.device, DType::F64, &[1, 1], 1.0)?;
                let layer = self.layer.as_ref().expect("the first stage has a layer");
                layer.forward(&Var::constant(one))?
            }
            Some(x) => x.mul_scalar(2.0)?,
        };
        if self.stage == self.stages - 1 { output.sum_all() } else { Ok(output) }
    }

    fn end_backward(&mut self, microbatch: usize, _chunk: usize) -> Result<()> {
        if microbatch == 0 {
            // What another thread is about to drop may take a moment.
            let start = Instant::now();
            let in_use = || self.device.memory().current - self.baseline;
            while self.stage == 0
                && in_use() > 8 * WIDE * 3 / 2
                && start.elapsed() < Duration::from_secs(30)
            {
                std::thread::yield_now();
            }
            self.in_use = in_use();
        }
        Ok(())
    }
}

fn run_wide(
    stages: usize,
    microbatches: usize,
    started: Option<std::sync::Arc<AtomicUsize>>,
) -> Vec<usize> {
    let config = PipelineConfig { kind: ScheduleKind::GPipe, stages, microbatches, chunks: 1 };
    on_mesh(stages, stages, |mesh| {
        let device = Device::cpu(1)?;
        let mut model = Wide::new(&device, mesh.axis(Axis::Pipeline).rank(), stages)?;
        model.started = started.clone();
        execute(&PipelineSchedule::new(&config)?, &mut model, &mesh, 1.0)?;
        if let Some(buffers) = &model.buffers {
            assert_eq!(buffers.sq_norm()?, {
                let one = (microbatches << (stages - 1)) as f64;
                one * one * WIDE as f64
            });
        }
        Ok(model.in_use)
    })
}

/// All outputs are sent when the gradient of the first of 8 micro-batches is back at the first stage. The last output
/// stays until there is another to send.
#[test]
fn outputs_are_freed_when_they_are_sent() {
    for stages in [2, 3] {
        let in_use = run_wide(stages, 8, None)[0];
        assert!(in_use <= 8 * WIDE * 3 / 2, "{stages} stages: {in_use} bytes");
    }
}

#[test]
fn sends_do_not_wait_for_their_receivers() {
    run_wide(2, 4, Some(Default::default()));
}
