//! Pipelines without a flush beside a serial reference that applies the staleness which the papers state.

use ferrotron_autograd::Var;
use ferrotron_nn::{
    Axis, Module, Optimizer, OptimizerConfig, Param, ParamAndGradBuffer, Sharding, StepConfig,
};
use ferrotron_parallel::data_parallel::DataParallelConfig;
use ferrotron_parallel::pipeline::{
    PipelineConfig, PipelineModel, PipelineSchedule, ScheduleKind, WeightVersions, execute,
    validate, weight_versions,
};
use ferrotron_tensor::ops::step::DeviceStepParams;
use ferrotron_tensor::{Category, DType, Device, Result, Tensor};
use std::collections::BTreeMap;

use crate::harness::{Named, Plan, Rank, ranks, scale};
use crate::toy::{Recompute, Shape, Stage, Tied, Toy, sample};

const LR: f64 = 0.05;

/// Steps of the first execution and of the second: the pipeline is empty in between.
const WINDOWS: [usize; 2] = [7, 3];

/// A rank's part of several steps without a flush.
struct Window<'a> {
    stage: Stage<'a>,
    rank: &'a Rank,
    versions: &'a mut WeightVersions,
    optimizer: &'a mut Optimizer,
    /// The factor of each step's loss.
    scales: Vec<f64>,
}

impl PipelineModel for Window<'_> {
    fn activation(&self, microbatch: usize) -> (Vec<usize>, DType, Device) {
        self.stage.activation(microbatch)
    }

    fn forward(&mut self, microbatch: usize, chunk: usize, input: Option<Var>) -> Result<Var> {
        let output = self.stage.forward(microbatch, chunk, input)?;
        match output.value().numel() {
            1 => output.mul_scalar(self.scales[microbatch / self.rank.plan.microbatches]),
            _ => Ok(output),
        }
    }

    fn end_backward(&mut self, _microbatch: usize, _chunk: usize) -> Result<()> {
        self.rank.parallel.end_backward()
    }

    fn use_weights(&mut self, version: usize) -> Result<()> {
        self.versions.select(self.rank.parallel.buffers(), version)
    }

    fn update(&mut self, step: usize) -> Result<()> {
        let (parallel, optimizer) = (&self.rank.parallel, &mut *self.optimizer);
        parallel.finish_step()?;
        self.versions.update(parallel.buffers(), || {
            let step = StepConfig { lr: LR, grad_scale: 1.0 };
            let numbers = optimizer.numbers(&step);
            parallel.update_with(optimizer, &DeviceStepParams::new(&self.rank.device, &numbers)?)
        })?;
        if step + 1 < self.scales.len() {
            parallel.begin_step(self.rank.plan.microbatches);
        }
        Ok(())
    }
}

/// Weights after all windows, and bytes of weights in memory on each rank beside those of one version.
fn run(plan: &Plan) -> (Named, Vec<(usize, usize)>) {
    let found = ranks(plan, |rank| {
        let stage = rank.mesh.axis(Axis::Pipeline).rank();
        rank.device.reset_memory_peaks();
        let one = rank.device.memory().bytes(Category::Weights);
        let stored = plan.kind.stashed_versions(plan.stages, stage);
        let mut versions = WeightVersions::new(rank.parallel.buffers(), stored)?;
        let mut optimizer = Optimizer::new(plan.optimizer, rank.parallel.buffers())?;
        let mut first = 0;
        for steps in WINDOWS {
            let config = PipelineConfig {
                kind: plan.kind,
                stages: plan.stages,
                microbatches: plan.microbatches,
                chunks: 1,
            };
            let schedule = PipelineSchedule::over_steps(&config, steps)?;
            validate(&schedule)?;
            let all = first..first + steps;
            let microbatches =
                all.clone().map(|step| rank.samples(step)).collect::<Result<Vec<_>>>()?;
            let microbatches = microbatches.into_iter().flatten().collect();
            versions.restart(rank.parallel.buffers())?;
            rank.parallel.begin_step(plan.microbatches);
            let stage = Stage { parts: &rank.parts, data_parallel: None, microbatches, loss: 0.0 };
            let scales = all.map(|step| scale(plan, step)).collect::<Result<_>>()?;
            let mut window = Window {
                stage,
                rank: &rank,
                versions: &mut versions,
                optimizer: &mut optimizer,
                scales,
            };
            execute(&schedule, &mut window, &rank.mesh, 1.0)?;
            first += steps;
        }
        let now = rank.device.memory().peak_bytes(Category::Weights);
        assert_eq!(versions.bytes(), now - one);
        Ok((rank.weight_pieces(), (one, now)))
    });
    let mut weights: BTreeMap<String, BTreeMap<usize, f64>> = BTreeMap::new();
    for (name, start, values, _) in found.iter().flat_map(|(pieces, _)| pieces) {
        for (i, value) in values.iter().enumerate() {
            let held = weights.entry(name.clone()).or_default().entry(start + i).or_insert(*value);
            assert_eq!(
                held.to_bits(),
                value.to_bits(),
                "{plan:?}: element {} of {name}",
                start + i
            );
        }
    }
    let dense =
        |(name, values): (String, BTreeMap<usize, f64>)| (name, values.into_values().collect());
    (weights.into_iter().map(dense).collect(), found.into_iter().map(|(_, bytes)| bytes).collect())
}

/// w(t+1) = w(t) - update(gradient of step t at the weights that each stage has for it), on one rank. It knows the papers'
/// staleness, and nothing of schedules and versions.
fn serial(plan: &Plan) -> Result<Named> {
    let device = Device::cpu(1)?;
    let toy = Toy::part(&device, plan.shape, 0, 1)?;
    let buffers = ParamAndGradBuffer::new(&toy.params())?;
    let mut optimizer = Optimizer::new(plan.optimizer, &buffers)?;
    // The stage of each parameter.
    let mut stages: BTreeMap<String, usize> = BTreeMap::new();
    for stage in 0..plan.stages {
        let part = Toy::part(&device, plan.shape, stage, plan.stages)?;
        stages.extend(part.params().iter().map(|param| (param.name().to_string(), stage)));
    }
    let values = || -> Result<Vec<Tensor>> {
        buffers.params().map(|param| param.leaf().value()?.copy()).collect()
    };
    let set = |values: &[Tensor]| {
        buffers.params().zip(values).try_for_each(|(param, value)| param.leaf().set_value(value))
    };
    let delay = |stage: usize| match plan.kind {
        // arXiv 1806.03377: f(w_1(t-n+1), w_2(t-n+2), .., w_n(t)).
        ScheduleKind::PipeDream => plan.stages - 1 - stage,
        // The same with vertical sync: f(w_1(t-n+1), .., w_n(t-n+1)).
        ScheduleKind::PipeDreamVerticalSync => plan.stages - 1,
        // arXiv 2006.09503: f(w(t-1)).
        ScheduleKind::PipeDream2Bw => 1,
        _ => 0,
    };
    let mut first = 0;
    for steps in WINDOWS {
        let mut history = vec![values()?];
        for t in 0..steps {
            let stale = |(index, param): (usize, &Param)| {
                history[t.saturating_sub(delay(stages[param.name()]))][index].clone()
            };
            set(&buffers.params().enumerate().map(stale).collect::<Vec<_>>())?;
            buffers.zero_gradients();
            let scale = scale(plan, first + t)?;
            for index in 0..plan.microbatches * plan.data {
                let loss = toy.run(&sample(&device, plan.shape.vocab, first + t, index)?, None)?;
                loss.backward_scaled(scale)?;
            }
            set(&history[t])?;
            optimizer.step(&buffers, &StepConfig { lr: LR, grad_scale: 1.0 })?;
            history.push(values()?);
        }
        first += steps;
    }
    let named = |param: &Param| Ok((param.name().to_string(), param.leaf().value()?.to_vec()?));
    buffers.params().map(named).collect()
}

fn plan(kind: ScheduleKind, stages: usize, microbatches: usize) -> Plan {
    let shape = Shape { tied: Tied::No, ..Shape::default() };
    Plan { shape, stages, microbatches, kind, optimizer: OptimizerConfig::SGD, ..Plan::default() }
}

fn assert_equal(plan: &Plan) {
    let ((found, bytes), want) = (run(plan), serial(plan).unwrap());
    assert!(found.keys().eq(want.keys()));
    for (name, values) in &want {
        for (i, (found, want)) in found[name].iter().zip(values).enumerate() {
            let error = (found - want).abs();
            assert!(error <= 1e-12, "{plan:?}: element {i} of {name}: {found} instead of {want}");
        }
    }
    for (rank, (one, all)) in bytes.into_iter().enumerate() {
        let stage = rank / (plan.data * plan.tensor);
        let versions = match plan.kind {
            ScheduleKind::PipeDream => plan.stages - stage,
            ScheduleKind::PipeDreamVerticalSync => plan.stages,
            _ => 2,
        };
        assert_eq!(all, versions * one, "{plan:?}: rank {rank}");
    }
}

/// The kinds with numbers of micro-batches that they accept for so many stages.
fn cases(stages: usize) -> Vec<(ScheduleKind, usize)> {
    let [stashing, synchronous, double] = ScheduleKind::UNFLUSHED;
    vec![(stashing, 1), (synchronous, 1), (double, stages - 1), (double, stages), (double, 5)]
}

#[test]
fn weights_are_those_of_the_stated_staleness() {
    for stages in [2, 3, 4] {
        for (kind, microbatches) in cases(stages) {
            assert_equal(&plan(kind, stages, microbatches));
        }
    }
}

#[test]
fn other_optimizers_layouts_and_recomputation_have_the_same_staleness() {
    for (kind, microbatches) in cases(2) {
        let plan = plan(kind, 2, microbatches);
        let shape = Shape { recompute: Recompute::Blocks, ..plan.shape };
        assert_equal(&Plan { optimizer: OptimizerConfig::ADAMW, shape, ..plan });
        assert_equal(&Plan { data: 2, ..plan });
        assert_equal(&Plan { tensor: 2, ..plan });
        let config = DataParallelConfig { sharding: Sharding::Optimizer, ..plan.config };
        assert_equal(&Plan { data: 2, config, optimizer: OptimizerConfig::ADAMW, ..plan });
    }
}

/// The reference would notice: without staleness the weights are others.
#[test]
fn staleness_changes_the_weights() {
    for (kind, microbatches) in cases(3) {
        let stale = serial(&plan(kind, 3, microbatches)).unwrap();
        let fresh = serial(&plan(ScheduleKind::OneFOneB, 3, microbatches)).unwrap();
        let differs = |(name, values): (&String, &Vec<f64>)| {
            values.iter().zip(&fresh[name]).any(|(a, b)| (a - b).abs() > 1e-6)
        };
        assert!(stale.iter().all(differs), "{kind}");
    }
}

/// What the memory test of `assert_equal` counts is what the checker proves to suffice.
#[test]
fn the_checker_counts_the_versions_that_are_stored() {
    for stages in 2..=6 {
        for (kind, microbatches) in cases(stages) {
            let config = PipelineConfig { kind, stages, microbatches, chunks: 1 };
            let schedule = PipelineSchedule::over_steps(&config, 2 * stages).unwrap();
            let stored = (0..stages).map(|stage| kind.stashed_versions(stages, stage) + 1);
            let found = weight_versions(&schedule).unwrap();
            assert_eq!(found, stored.collect::<Vec<_>>(), "{config:?}");
        }
    }
}
