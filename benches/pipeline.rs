//! Compares pipelines in practice and in theory. The executor runs stages whose forward and backward take a known time,
//! beside the simulator and the papers' formulas.
//!
//! The stages sleep, so that more of them than cores take the time that they would take on a machine each.
//! `cargo bench --bench pipeline` prints, for every schedule, the iteration time and the bubble of both.

use ferrotron::autograd::{Leaf, Var};
use ferrotron::parallel::collective::{WorldConfig, run_threads};
use ferrotron::parallel::mesh::{Mesh, ParallelDims};
use ferrotron::parallel::pipeline::{
    PipelineConfig, PipelineModel, PipelineSchedule, ScheduleKind, StageTimes, execute, simulate,
};
use ferrotron::parallel::tensor_parallel::SequenceParallel;
use ferrotron::tensor::{DType, Device, Result, Tensor};
use std::thread::sleep;
use std::time::{Duration, Instant};

const STAGES: usize = 4;
const MICROBATCHES: usize = 8;
/// Micro-batches between two drains, without a flush.
const UNFLUSHED: usize = 24;
/// The time of a forward, and of each half of a backward, of a whole stage.
const UNIT: Duration = Duration::from_millis(20);

fn main() -> Result<()> {
    println!(
        "{STAGES} stages, {MICROBATCHES} micro-batches, {UNFLUSHED} without a flush, tf = tb = tw = {UNIT:?}"
    );
    println!(
        "schedule                    measured   simulated  ratio   bubble measured / simulated"
    );
    for kind in ScheduleKind::FLUSHED.into_iter().chain(ScheduleKind::UNFLUSHED) {
        let chunks = if kind == ScheduleKind::Interleaved { 2 } else { 1 };
        let (microbatches, steps) = match kind {
            ScheduleKind::PipeDream | ScheduleKind::PipeDreamVerticalSync => (1, UNFLUSHED),
            ScheduleKind::PipeDream2Bw => (STAGES, UNFLUSHED / STAGES),
            _ => (MICROBATCHES, 1),
        };
        let config = PipelineConfig { kind, stages: STAGES, microbatches, chunks };
        let schedule = PipelineSchedule::over_steps(&config, steps)?;
        let timeline = simulate(&schedule, &StageTimes::default())?;
        let simulated = timeline.total() * UNIT.as_secs_f64();
        let measured = measure(&schedule)?;
        let ideal = simulated - timeline.bubble() * UNIT.as_secs_f64();
        println!(
            "{:25} {measured:8.3} s  {simulated:8.3} s  {:.3}   {:.3} / {:.3}",
            kind.to_string(),
            measured / simulated,
            measured / ideal - 1.0,
            simulated / ideal - 1.0,
        );
    }
    Ok(())
}

/// Seconds of the slowest rank.
fn measure(schedule: &PipelineSchedule) -> Result<f64> {
    let times = run_threads(STAGES, &WorldConfig::default(), |world| {
        let mesh =
            Mesh::new(&world, ParallelDims::new(STAGES, 1, 1, STAGES)?, SequenceParallel::Off)?;
        let device = Device::cpu(1)?;
        let weight = Leaf::new("w", Tensor::full(&device, DType::F32, &[1, 1], 1.0)?);
        let chunks = schedule.chunks() as u32;
        let mut model = Sleeper { unit: UNIT / chunks, weight, device };
        mesh.world().barrier().wait()?;
        let started = Instant::now();
        execute(schedule, &mut model, &mesh, 1.0)?;
        mesh.world().barrier().wait()?;
        Ok(started.elapsed().as_secs_f64())
    });
    times.into_iter().try_fold(0.0, |slowest: f64, time| Ok(slowest.max(time?)))
}

/// A stage of one number, whose linear layer takes its time in both directions.
struct Sleeper {
    unit: Duration,
    weight: Leaf,
    device: Device,
}

impl PipelineModel for Sleeper {
    fn activation(&self, _microbatch: usize) -> (Vec<usize>, DType, Device) {
        (vec![1, 1], DType::F32, self.device.clone())
    }

    fn forward(&mut self, _microbatch: usize, _chunk: usize, input: Option<Var>) -> Result<Var> {
        sleep(self.unit);
        let x = match input {
            Some(x) => x,
            None => Var::constant(Tensor::full(&self.device, DType::F32, &[1, 1], 1.0)?),
        };
        // The gradient of the input now, that of the weight when it is asked for.
        let (unit, weight) = (self.unit, self.weight.var()?);
        let (value, saved) = (x.value().clone(), x.save());
        Var::record(&[&x, &weight], value, || {
            move |dy: Tensor, dx: &mut ferrotron::autograd::InputGrads| {
                sleep(unit);
                dx.accumulate(0, dy.clone())?;
                dx.accumulate_or_defer(1, move |out, _| {
                    sleep(unit);
                    out.copy_from(&dy.mul(&saved.value()?)?)
                })
            }
        })
    }

    fn end_backward(&mut self, _microbatch: usize, _chunk: usize) -> Result<()> {
        Ok(())
    }

    fn use_weights(&mut self, _version: usize) -> Result<()> {
        Ok(())
    }

    fn update(&mut self, _step: usize) -> Result<()> {
        Ok(())
    }
}
