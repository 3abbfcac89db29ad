//! Programs: the recorded work of a stage with the durations that a cluster gives it, by pipeline instruction.

use ferrotron_nn::{Axis, AxisSet};
use ferrotron_parallel::mesh::ParallelDims;
use ferrotron_parallel::pipeline::{Instruction, PipelineSchedule};
use ferrotron_tensor::{Error, Result};
use std::collections::HashMap;

use crate::cluster::Cluster;
use crate::cost::{self, KernelKind};
use crate::network::{self, Spread};
use crate::record::{Launch, Recording, Work};
use crate::steps::{Block, GroupFacts, MessageCost, Part, Step, Traffic, direction};

/// The work of one rank of a stage.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Program {
    /// Work before the first instruction.
    pub before: Block,
    /// Work behind the last instruction.
    pub behind: Block,
    /// Calls of the step before that are under way at the beginning: gathers of weights.
    pub carried: Vec<Step>,
    /// Messages forward and backward.
    pub messages: [MessageCost; 2],
    /// The groups.
    pub groups: Vec<GroupFacts>,
    /// The different launches.
    pub launches: Vec<Launch>,
    /// Their durations.
    pub durations: Vec<f64>,
    /// The share of the multiprocessors that a call takes.
    pub taken_by_calls: f64,
    computations: HashMap<Computation, Block>,
    /// The update of each step, where updates are instructions.
    updates: Vec<Block>,
    /// Micro-batches of a recorded step.
    microbatches: usize,
    /// Number of recorded steps.
    steps: usize,
}

/// The kernel that copies a tensor into another order of dims.
const COPY: &str = "copy";

/// Passes over the bytes of gradients that are copied into one tensor, divided and copied back: each reads and writes.
const GRADIENT_PASSES: f64 = 6.0;

/// Kind, micro-batch and chunk of a computation.
type Computation = (u8, usize, usize);

fn computation(instruction: &Instruction) -> Option<Computation> {
    let kind = match instruction {
        Instruction::Forward { .. } => 0,
        Instruction::Backward { .. } => 1,
        Instruction::BackwardInput { .. } => 2,
        Instruction::BackwardWeight { .. } => 3,
        _ => return None,
    };
    instruction.microbatch_and_chunk().map(|(microbatch, chunk)| (kind, microbatch, chunk))
}

/// The place of the rank that was recorded.
#[derive(Debug, Clone, Copy)]
pub struct Place<'a> {
    /// Sizes of the axes.
    pub layout: &'a ParallelDims,
    /// The rank.
    pub rank: usize,
    /// Whether tensor-parallel ranks hold the same activations, of which each sends a shard to the next stage.
    pub scattered: bool,
}

impl Program {
    /// The program of a rank whose step over `schedule` was recorded.
    ///
    /// Errors if the recording is not of that schedule, or if the cluster has no peak for a dtype of it.
    pub fn new(
        recording: &Recording,
        schedule: &PipelineSchedule,
        place: Place<'_>,
        cluster: &Cluster,
    ) -> Result<Program> {
        let stage = place.layout.coordinate(place.rank, Axis::Pipeline);
        let instructions = schedule.instructions(stage);
        if instructions.len() != recording.instructions.len() {
            let (wanted, found) = (instructions.len(), recording.instructions.len());
            let message = format!("the schedule has {wanted} instructions, the recording {found}");
            return Err(Error::graph("simulate", message));
        }
        // With sequence parallelism, copies are those around collectives.
        let without_copies = cluster.software.sequence_first && !place.scattered;
        let seconds = |launch: &Launch| match without_copies && launch.kernel == COPY {
            true => Ok(0.0),
            false => cost::seconds(launch, cluster),
        };
        let durations = recording.launches.iter().map(seconds).collect::<Result<Vec<f64>>>()?;
        let spreads: Vec<Spread> =
            recording.groups.iter().map(|name| spread(name, place, cluster)).collect();
        let groups = recording.groups.iter().zip(&spreads).map(|(name, spread)| GroupFacts {
            name: name.clone(),
            traffic: Traffic::of(name),
            leaves_node: spread.leaves_node(),
            stages: match name.as_str() {
                "world" | "pp" => place.layout.size(Axis::Pipeline),
                "pp-ends" => 2,
                _ => 1,
            },
        });
        let groups: Vec<GroupFacts> = groups.collect();
        let mut compiler = Compiler {
            recording,
            cluster,
            durations: &durations,
            spreads: &spreads,
            groups: &groups,
            calls: first_calls(recording),
            copies: match place.scattered && !cluster.software.scatter_gather {
                true => place.layout.size(Axis::Tensor) as u64,
                false => 1,
            },
        };
        let before = compiler.block(&recording.before, false);
        let (mut computations, mut updates) = (HashMap::new(), Vec::new());
        let mut messages = Messages::default();
        for (instruction, work) in instructions.iter().zip(&recording.instructions) {
            match (computation(instruction), instruction) {
                (Some(key), _) => {
                    computations.insert(key, compiler.block(work, true));
                }
                (None, Instruction::Update { .. }) => updates.push(compiler.block(work, false)),
                (None, _) => messages.count(&compiler, instruction, work),
            }
        }
        let mut behind = compiler.block(&recording.behind, false);
        let carried = behind.take_carried(&groups);
        let (messages, launches) = (messages.costs(), recording.launches.clone());
        Ok(Program {
            before,
            behind,
            carried,
            messages,
            groups,
            launches,
            durations,
            taken_by_calls: cluster.gpu.collective_multiprocessors as f64
                / cluster.gpu.multiprocessors as f64,
            computations,
            updates,
            microbatches: schedule.microbatches() / schedule.steps(),
            steps: schedule.steps(),
        })
    }

    /// A program with one duration for each kind of computation, and no messages' cost: forward, backward, and the two
    /// parts of one that is split.
    pub fn uniform(schedule: &PipelineSchedule, stage: usize, seconds: [f64; 4]) -> Program {
        let keys = schedule.instructions(stage).iter().filter_map(computation);
        let block = |(kind, ..): Computation| Block {
            steps: vec![Step::Receive, Step::Compute(seconds[usize::from(kind)], Part::Products)],
            launches: Vec::new(),
        };
        Program {
            computations: keys.map(|key| (key, block(key))).collect(),
            updates: vec![Block::default(); schedule.steps()],
            microbatches: schedule.microbatches() / schedule.steps(),
            steps: schedule.steps(),
            ..Program::default()
        }
    }

    /// The block of a computation or an update of `schedule`. The first and the last micro-batch of a step are those of the
    /// recording, since gradients are overwritten by the first and reduced after the last; the others are alike. So are
    /// steps: in the first and the last one of several, the pipeline is not full.
    ///
    /// Errors if there is none.
    pub fn block(&self, instruction: &Instruction, schedule: &PipelineSchedule) -> Result<&Block> {
        let steps = schedule.steps();
        let microbatches = schedule.microbatches() / steps;
        let block = match (computation(instruction), instruction) {
            (Some((kind, microbatch, chunk)), _) => {
                let step = recorded(microbatch / microbatches, steps, self.steps);
                let within = recorded(microbatch % microbatches, microbatches, self.microbatches);
                self.computations.get(&(kind, step * self.microbatches + within, chunk))
            }
            (None, Instruction::Update { step }) => {
                self.updates.get(recorded(*step, steps, self.updates.len()))
            }
            _ => None,
        };
        block.ok_or_else(|| Error::graph("simulate", format!("{instruction} was not recorded")))
    }

    /// The blocks of all computations, in their order.
    pub(crate) fn blocks_mut(&mut self) -> impl Iterator<Item = &mut Block> {
        let mut blocks: Vec<_> = self.computations.iter_mut().collect();
        blocks.sort_unstable_by_key(|(key, _)| **key);
        blocks.into_iter().map(|(_, block)| block)
    }

    /// The program of several such steps with these updates. What comes before a step's instructions joins its first forward.
    pub(crate) fn over_steps(mut self, updates: Vec<Block>) -> Program {
        if let Some(first) = self.computations.get_mut(&(0, 0, 0)) {
            first.steps.splice(0..0, std::mem::take(&mut self.before.steps));
            first.launches.append(&mut self.before.launches);
        }
        Program { updates, ..self }
    }

    /// Whether a backward is split into two computations.
    pub(crate) fn splits_backward(&self) -> bool {
        self.computations.keys().any(|key| key.0 > 1)
    }

    /// The blocks of all computations of a recorded micro-batch.
    pub(crate) fn blocks_of(&self, microbatch: usize) -> impl Iterator<Item = &Block> {
        self.blocks_where(move |key| key.1 == microbatch)
    }

    /// The blocks of its forwards.
    pub(crate) fn forwards_of(&self, microbatch: usize) -> impl Iterator<Item = &Block> {
        self.blocks_where(move |key| key.1 == microbatch && key.0 == 0)
    }

    fn blocks_where(&self, of: impl Fn(&Computation) -> bool) -> impl Iterator<Item = &Block> {
        let of = |key: &&Computation| of(key);
        let mut keys: Vec<&Computation> = self.computations.keys().filter(of).collect();
        keys.sort_unstable();
        keys.into_iter().map(|key| &self.computations[key])
    }
}

/// The index among `known` recorded ones that stands for `index` of `count`.
fn recorded(index: usize, count: usize, known: usize) -> usize {
    match index {
        _ if count == known => index,
        0 => 0,
        _ if index + 1 == count => known - 1,
        _ => 1.min(known - 1),
    }
}

/// The ranks of a group of the mesh, by its name.
fn spread(name: &str, Place { layout, rank, .. }: Place<'_>, cluster: &Cluster) -> Spread {
    let along = |axes: AxisSet| layout.ranks(rank, axes);
    let ranks = match name {
        "tp" => along(AxisSet::from([Axis::Tensor])),
        "cp" => along(AxisSet::from([Axis::Context])),
        "dp" => along(AxisSet::from([Axis::Data])),
        "dp-cp" => along(AxisSet::from([Axis::Context, Axis::Data])),
        "pp" => along(AxisSet::from([Axis::Pipeline])),
        "world" => (0..layout.world()).collect(),
        _ => {
            let column = along(AxisSet::from([Axis::Pipeline]));
            let stage =
                |text: &str| text.parse::<usize>().ok().and_then(|at| column.get(at).copied());
            let ends = name.split_once(' ').and_then(|(_, stages)| stages.split_once('-'));
            let found = ends.and_then(|(from, to)| Some(vec![stage(from)?, stage(to)?]));
            found.unwrap_or_else(|| vec![column[0], column[column.len() - 1]])
        }
    };
    Spread::new(&ranks, cluster.gpus_per_node)
}

/// The number of each group's first call in the step: others may come before the step.
fn first_calls(recording: &Recording) -> Vec<u64> {
    let mut first = vec![None; recording.groups.len()];
    let instructions = recording.instructions.iter().flatten();
    for work in recording.before.iter().chain(instructions).chain(&recording.behind) {
        if let Work::Call { group, number, .. } = work {
            first[*group].get_or_insert(*number);
        }
    }
    first.into_iter().map(Option::unwrap_or_default).collect()
}

struct Compiler<'a> {
    recording: &'a Recording,
    cluster: &'a Cluster,
    durations: &'a [f64],
    spreads: &'a [Spread],
    groups: &'a [GroupFacts],
    /// Calls of each group so far.
    calls: Vec<u64>,
    /// Shards that a rank sends to the next stage.
    copies: u64,
}

impl Compiler<'_> {
    fn block(&mut self, work: &[Work], receives: bool) -> Block {
        let first = self.calls.clone();
        let relative = |group: usize, number: u64| number as i64 - first[group] as i64;
        let mut counts: HashMap<usize, u64> = HashMap::new();
        let mut steps = Vec::new();
        // Depth of open spans, and that of the optimizer's.
        let (mut depth, mut optimizer) = (0_usize, None);
        for item in work {
            match item {
                Work::Launch(launch) => {
                    *counts.entry(*launch).or_default() += 1;
                    let part = match KernelKind::from_launch(&self.recording.launches[*launch]) {
                        _ if optimizer.is_some() => Part::Optimizer,
                        KernelKind::Product => Part::Products,
                        KernelKind::Attention => Part::Attention,
                        KernelKind::Memory => Part::Memory,
                    };
                    let seconds = self.durations[*launch];
                    match steps.last_mut() {
                        Some(Step::Compute(sum, last)) if *last == part => *sum += seconds,
                        _ => steps.push(Step::Compute(seconds, part)),
                    }
                }
                Work::Call { group, number, operation, bytes } => {
                    self.calls[*group] = number + 1;
                    if direction(&self.groups[*group].name).is_none() {
                        let (group, number) = (*group, relative(*group, *number));
                        let seconds = self.seconds(group, operation, *bytes);
                        steps.push(Step::Start {
                            group,
                            number,
                            seconds,
                            operation,
                            bytes: *bytes,
                        });
                    }
                }
                Work::Await { group, number } => {
                    steps.push(match direction(&self.groups[*group].name) {
                        None => Step::Wait { group: *group, number: relative(*group, *number) },
                        Some(_) if receives => Step::Receive,
                        Some(direction) => Step::Sent(direction),
                    });
                }
                Work::Open(category, name) => {
                    depth += 1;
                    if *category == "optimizer" {
                        optimizer = Some(depth);
                    }
                    steps.push(Step::Open(category, name.clone()));
                }
                Work::Close => {
                    optimizer = optimizer.filter(|open| *open != depth);
                    depth = depth.saturating_sub(1);
                    steps.push(Step::Close);
                }
            }
        }
        let mut launches: Vec<(usize, u64)> = counts.into_iter().collect();
        launches.sort_unstable();
        Block { steps, launches }
    }

    fn seconds(&self, group: usize, operation: &str, bytes: u64) -> f64 {
        let Cluster { gpu, software, .. } = self.cluster;
        let copies = software.copies_gradients
            && !software.overlap_grad_reduce
            && (self.groups[group].traffic, operation) == (Traffic::Data, "all_reduce");
        let passes =
            if copies { GRADIENT_PASSES / (gpu.bandwidth * gpu.memory_efficiency) } else { 0.0 };
        passes * bytes as f64
            + network::seconds(operation, bytes as f64, self.spreads[group], self.cluster)
    }
}

/// The costs of recorded messages, by direction.
#[derive(Default)]
struct Messages {
    found: [MessageCost; 2],
    copies: f64,
    sends: u64,
}

impl Messages {
    fn count(&mut self, compiler: &Compiler<'_>, instruction: &Instruction, work: &[Work]) {
        self.sends += instruction.sends().len() as u64;
        for item in work {
            match item {
                Work::Launch(launch) => self.copies += compiler.durations[*launch],
                Work::Call { group, operation: "send", bytes, .. } => {
                    let facts = &compiler.groups[*group];
                    let Some(direction) = direction(&facts.name) else { continue };
                    let bytes = compiler.copies * bytes;
                    self.found[direction as usize] = MessageCost {
                        seconds: compiler.seconds(*group, "send", bytes),
                        copy: 0.0,
                        bytes,
                        leaves_node: facts.leaves_node,
                    };
                }
                _ => {}
            }
        }
    }

    /// All messages take the same kernels.
    fn costs(self) -> [MessageCost; 2] {
        let copy = if self.sends == 0 { 0.0 } else { self.copies / self.sends as f64 };
        self.found.map(|cost| MessageCost { copy, ..cost })
    }
}
