//! Trains a toy in a layout and by itself, and compares.

use ferrotron_nn::{
    Axis, Module, Optimizer, OptimizerConfig, Param, ParamAndGradBucket, ParamAndGradBuffer,
    StepConfig, clip_coefficient,
};
use ferrotron_parallel::collective::{World, WorldConfig, run_threads};
use ferrotron_parallel::data_parallel::{
    DataParallel, DataParallelConfig, ExpectedTraffic, ReplicaCheck,
};
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::pipeline::{
    ExecutionTrace, PipelineConfig, PipelineSchedule, ScheduleKind, execute,
};
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{Device, FlatBuffer, Result, ShardSpec};
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use crate::toy::{Microbatch, Shape, Stage, Toy, sample};

/// Much longer than any step here takes.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The training of a toy.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    pub shape: Shape,
    pub stages: usize,
    pub data: usize,
    pub tensor: usize,
    pub kind: ScheduleKind,
    pub chunks: usize,
    /// Micro-batches of each step, on each rank along the data axis.
    pub microbatches: usize,
    pub config: DataParallelConfig,
    pub optimizer: OptimizerConfig,
    /// Gradients are clipped to this norm; 0 for not at all.
    pub max_norm: f64,
    pub steps: usize,
}

impl Default for Plan {
    fn default() -> Plan {
        Plan {
            shape: Shape::default(),
            stages: 1,
            data: 1,
            tensor: 1,
            kind: ScheduleKind::OneFOneB,
            chunks: 1,
            microbatches: 1,
            config: DataParallelConfig::default(),
            optimizer: OptimizerConfig::ADAMW,
            max_norm: 0.5,
            steps: 3,
        }
    }
}

pub type Named = BTreeMap<String, Vec<f64>>;

/// The results of a run: for each step loss and norm, raw gradients of the first, weights after the last.
#[derive(Debug, Clone)]
pub struct Outcome {
    pub losses: Vec<f64>,
    pub norms: Vec<f64>,
    pub gradients: Named,
    pub weights: Named,
}

/// A part of a parameter's elements: name, first element, values, and whether this rank answers for it.
pub type Piece = (String, usize, Vec<f64>, bool);

/// One rank of a run, between steps.
pub struct Rank {
    pub plan: Plan,
    pub device: Device,
    pub mesh: Mesh,
    pub parts: Vec<Toy>,
    pub parallel: DataParallel,
    pub optimizer: Optimizer,
}

/// The results of a rank's step.
pub struct Step {
    /// This rank's share.
    pub loss: f64,
    pub norm: f64,
    pub execution: ExecutionTrace,
}

impl Rank {
    pub fn new(world: &World, plan: &Plan) -> Result<Rank> {
        let layout = ParallelDims::new(world.size(), plan.tensor, 1, plan.stages)?;
        Self::on_mesh(Mesh::new(world, layout, SequenceParallel::Off)?, plan)
    }

    pub fn on_mesh(mesh: Mesh, plan: &Plan) -> Result<Rank> {
        let device = Device::cpu(1)?;
        let stage = mesh.axis(Axis::Pipeline).rank();
        let part = |chunk: usize| {
            let (at, stages) = (chunk * plan.stages + stage, plan.chunks * plan.stages);
            Toy::part(&device, plan.shape, at, stages)
        };
        let parts = (0..plan.chunks).map(part).collect::<Result<Vec<_>>>()?;
        let modules: Vec<&dyn Module> = parts.iter().map(|part| part as &dyn Module).collect();
        let recomputed = parts.iter().flat_map(Toy::recomputed).map(Module::params);
        let parallel = DataParallel::new(&modules, &mesh, &plan.config)?.recomputing(recomputed);
        let optimizer = Optimizer::new(plan.optimizer, parallel.buffers())?;
        Ok(Rank { plan: *plan, device, mesh, parts, parallel, optimizer })
    }

    /// This rank's samples of a step.
    pub fn samples(&self, step: usize) -> Result<Vec<Microbatch>> {
        let data = self.mesh.axis(Axis::Data);
        let one =
            |i| sample(&self.device, self.plan.shape.vocab, step, i * data.size() + data.rank());
        (0..self.plan.microbatches).map(one).collect()
    }

    /// Forward, backward and reductions of a step.
    pub fn gradients(&mut self, step: usize, scale: f64) -> Result<Step> {
        let (loss, execution) = self.backward(step, scale)?;
        self.parallel.finish_step()?;
        Ok(Step { loss, norm: self.parallel.grad_norm()?, execution })
    }

    fn schedule(&self) -> Result<PipelineSchedule> {
        let Plan { kind, stages, microbatches, chunks, .. } = self.plan;
        PipelineSchedule::new(&PipelineConfig { kind, stages, microbatches, chunks })
    }

    /// The bytes that this rank sends in so many steps.
    pub fn expected_traffic(&self, steps: usize) -> Result<ExpectedTraffic> {
        let (schedule, stage) = (self.schedule()?, self.mesh.axis(Axis::Pipeline).rank());
        let own = schedule.instructions(stage);
        Ok(self.parallel.expected_pipeline_traffic(own, self.plan.microbatches, steps))
    }

    /// Forward and backward of a step. Returns this rank's share of the loss.
    pub fn backward(&mut self, step: usize, scale: f64) -> Result<(f64, ExecutionTrace)> {
        let schedule = self.schedule()?;
        self.parallel.begin_step(self.plan.microbatches);
        let microbatches = self.samples(step)?;
        let mut stage = Stage {
            parts: &self.parts,
            data_parallel: Some(&self.parallel),
            microbatches,
            loss: 0.0,
        };
        let execution = execute(&schedule, &mut stage, &self.mesh, scale)?;
        Ok((stage.loss * scale, execution))
    }

    pub fn update(&mut self, norm: f64) -> Result<()> {
        let grad_scale = clip_coefficient(norm, self.plan.max_norm);
        self.parallel.update(&mut self.optimizer, &StepConfig { lr: 0.02, grad_scale })
    }

    pub fn step(&mut self, step: usize) -> Result<Step> {
        let found = self.gradients(step, scale(&self.plan, step)?)?;
        self.update(found.norm)?;
        Ok(found)
    }

    /// Returns a function that says of each bucket, in their order, whether this rank answers for its shard.
    fn owns(&self) -> impl FnMut(&ParamAndGradBucket) -> bool {
        let mut written = self.parallel.written_states();
        move |group| written(group.replicated, &ShardSpec::unsharded(&[group.owned.len()]))
    }

    pub fn gradient_pieces(&self) -> Vec<Piece> {
        let groups = self.parallel.buffers().groups().iter();
        let mut owns = self.owns();
        groups
            .flat_map(|group| {
                let values = elements(&group.reduced_grads().lock().unwrap());
                let owned = match &group.gradient_shard {
                    Some(_) => &values[..],
                    None => &values[group.owned.clone()],
                };
                cut(&group.params, group.owned.clone(), owned, owns(group))
            })
            .collect()
    }

    pub fn weight_pieces(&self) -> Vec<Piece> {
        let groups = self.parallel.buffers().groups().iter();
        let mut owns = self.owns();
        groups
            .flat_map(|group| {
                let own = owns(group);
                if let Some(shard) = &group.weight_shard {
                    let values = elements(&shard.lock().unwrap());
                    return cut(&group.params, group.owned.clone(), &values, own);
                }
                let values = elements(&group.weights.lock().unwrap());
                let owned = group.owned.clone();
                let mut pieces = cut(&group.params, owned.clone(), &values[owned], own);
                // What others own has to be here too.
                let all = 0..group.numel();
                pieces.extend(cut(&group.params, all.clone(), &values[all], false));
                pieces
            })
            .collect()
    }
}

/// All of a flat. The toy is in f64.
fn elements(flat: &FlatBuffer) -> Vec<f64> {
    flat.slice(..).and_then(|all| all.to_vec()).expect("the host reads a flat of f64")
}

/// The values of a range of a group's elements, by parameter.
fn cut(params: &[Param], range: Range<usize>, values: &[f64], own: bool) -> Vec<Piece> {
    assert_eq!(values.len(), range.len());
    let mut start = 0;
    let mut pieces = Vec::new();
    for param in params {
        let end = start + param.leaf().numel();
        let (from, to) = (range.start.clamp(start, end), range.end.clamp(start, end));
        if from < to {
            let part = &values[from - range.start..to - range.start];
            pieces.push((param.name().to_string(), from - start, part.to_vec(), own));
        }
        start = end;
    }
    pieces
}

/// One over the valid tokens of a step's global batch.
pub fn scale(plan: &Plan, step: usize) -> Result<f64> {
    let device = Device::cpu(1)?;
    let mut counted = 0;
    for index in 0..plan.microbatches * plan.data {
        counted += sample(&device, plan.shape.vocab, step, index)?.counted;
    }
    Ok(1.0 / counted as f64)
}

/// Runs `f` on `size` ranks, in `stages` along the pipeline axis and the rest along the data axis.
pub fn on_mesh<T: Send>(
    size: usize,
    stages: usize,
    f: impl Fn(Mesh) -> Result<T> + Sync,
) -> Vec<T> {
    let results = run_threads(size, &WorldConfig { timeout: TIMEOUT }, |world| {
        let layout = ParallelDims::new(size, 1, 1, stages)?;
        f(Mesh::new(&world, layout, SequenceParallel::Off)?)
    });
    results.into_iter().map(|result| result.unwrap()).collect()
}

/// Runs `f` on every rank of a plan.
pub fn ranks<T: Send>(plan: &Plan, f: impl Fn(Rank) -> Result<T> + Sync) -> Vec<T> {
    let size = plan.stages * plan.data * plan.tensor;
    let results =
        run_threads(size, &WorldConfig { timeout: TIMEOUT }, |world| f(Rank::new(&world, plan)?));
    let results = results.into_iter().enumerate();
    results.map(|(rank, r)| r.unwrap_or_else(|e| panic!("{plan:?}: rank {rank}: {e}"))).collect()
}

/// Trains in the layout of the plan.
pub fn train(plan: &Plan) -> Outcome {
    let replica_check = ReplicaCheck::EveryStep;
    let plan = &Plan { config: DataParallelConfig { replica_check, ..plan.config }, ..*plan };
    let found = ranks(plan, |mut rank| {
        let (mut losses, mut norms, mut gradients) = (Vec::new(), Vec::new(), Vec::new());
        for step in 0..plan.steps {
            let found = rank.gradients(step, scale(plan, step)?)?;
            if step == 0 {
                gradients = rank.gradient_pieces();
            }
            rank.update(found.norm)?;
            losses.push(found.loss);
            norms.push(found.norm);
        }
        Ok((losses, norms, gradients, rank.weight_pieces()))
    });
    let norms = found[0].1.clone();
    for (rank, other) in found.iter().enumerate() {
        assert_eq!(other.1, norms, "{plan:?}: norms of rank {rank} and rank 0");
    }
    // Ranks along the tensor axis see the same samples.
    let losses = (0..plan.steps)
        .map(|step| found.iter().map(|rank| rank.0[step]).sum::<f64>() / plan.tensor as f64)
        .collect();
    Outcome {
        losses,
        norms,
        gradients: merge(plan, found.iter().flat_map(|rank| rank.2.clone())),
        weights: merge(plan, found.iter().flat_map(|rank| rank.3.clone())),
    }
}

/// Every element from the one rank that owns it; all others that have it must have the same bits.
fn merge(plan: &Plan, pieces: impl Iterator<Item = Piece>) -> Named {
    let (own, others): (Vec<Piece>, Vec<Piece>) = pieces.partition(|piece| piece.3);
    let mut found: BTreeMap<String, BTreeMap<usize, f64>> = BTreeMap::new();
    for (name, start, values, _) in own {
        for (i, value) in values.into_iter().enumerate() {
            let old = found.entry(name.clone()).or_default().insert(start + i, value);
            assert!(old.is_none(), "{plan:?}: element {} of {name} has two owners", start + i);
        }
    }
    for (name, start, values, _) in others {
        for (i, value) in values.into_iter().enumerate() {
            let owned = found[&name][&(start + i)];
            let at = start + i;
            assert_eq!(value.to_bits(), owned.to_bits(), "{plan:?}: element {at} of {name}");
        }
    }
    let dense = |(name, values): (String, BTreeMap<usize, f64>)| {
        assert!(values.keys().copied().eq(0..values.len()), "{plan:?}: {name} has gaps");
        (name, values.into_values().collect())
    };
    found.into_iter().map(dense).collect()
}

/// Trains on one rank, with nothing of this crate.
pub fn serial(plan: &Plan) -> Result<Outcome> {
    let device = Device::cpu(1)?;
    let toy = Toy::part(&device, plan.shape, 0, 1)?;
    let buffers = ParamAndGradBuffer::new(&toy.params())?;
    let mut optimizer = Optimizer::new(plan.optimizer, &buffers)?;
    let (mut losses, mut norms, mut gradients) = (Vec::new(), Vec::new(), Named::new());
    for step in 0..plan.steps {
        buffers.zero_gradients();
        let scale = scale(plan, step)?;
        let mut sum = 0.0;
        for index in 0..plan.microbatches * plan.data {
            let loss = toy.run(&sample(&device, plan.shape.vocab, step, index)?, None)?;
            sum += loss.value().item()?;
            loss.backward_scaled(scale)?;
        }
        let norm = buffers.sq_norm()?.sqrt();
        if step == 0 {
            for param in buffers.params() {
                let gradient = param.leaf().gradient()?.expect("a gradient").to_vec()?;
                gradients.insert(param.name().to_string(), gradient);
            }
        }
        let grad_scale = clip_coefficient(norm, plan.max_norm);
        optimizer.step(&buffers, &StepConfig { lr: 0.02, grad_scale })?;
        losses.push(sum * scale);
        norms.push(norm);
    }
    let weights = buffers
        .params()
        .map(|param| Ok((param.name().to_string(), param.leaf().value()?.to_vec()?)))
        .collect::<Result<_>>()?;
    Ok(Outcome { losses, norms, gradients, weights })
}

/// 1e-10 relative, and relative to the largest element of a tensor.
pub fn assert_close(plan: &Plan, got: &Outcome, want: &Outcome) {
    for (what, got, want) in
        [("loss", &got.losses, &want.losses), ("gradient norm", &got.norms, &want.norms)]
    {
        for (step, (got, want)) in got.iter().zip(want).enumerate() {
            let off = (got - want).abs();
            assert!(
                off <= 1e-10 * want.abs(),
                "{plan:?}: {what} of step {step}: {got}, want {want}"
            );
        }
    }
    for (what, got, want) in
        [("gradient", &got.gradients, &want.gradients), ("weight", &got.weights, &want.weights)]
    {
        assert!(got.keys().eq(want.keys()), "{plan:?}: {:?}, {:?}", got.keys(), want.keys());
        for (name, want) in want {
            let got = &got[name];
            assert_eq!(got.len(), want.len(), "{plan:?}: {what} {name}");
            let largest = want.iter().fold(0.0_f64, |max, x| max.max(x.abs()));
            for (i, (got, want)) in got.iter().zip(want).enumerate() {
                let off = (got - want).abs();
                assert!(off <= 1e-10 * largest, "{plan:?}: {what} {name}[{i}]: {got}, want {want}");
            }
        }
    }
}

/// The same bits in every tensor but those named.
pub fn assert_bitwise(plan: &Plan, what: &str, got: &Named, want: &Named, but: &[&str]) {
    for (name, want) in want.iter().filter(|(name, _)| !but.contains(&name.as_str())) {
        for (i, (got, want)) in got[name].iter().zip(want).enumerate() {
            assert_eq!(
                got.to_bits(),
                want.to_bits(),
                "{plan:?}: {what} {name}[{i}]: {got}, want {want}"
            );
        }
    }
}
