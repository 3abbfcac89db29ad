//! Searches the fastest layouts that fit into memory, by branch and bound.
//!
//! Layouts are tried in the order of their least time, until that exceeds the time of the last one to be returned. A
//! layout is left out before its replay if the bytes of a recorded stage are too many, or if its second bound is too
//! slow. Bounds never exceed a simulated number, so the result is that of simulating every layout that is compared.
//!
//! In a space of at most [`EXHAUSTIVE`] layouts all are compared. In a larger one those that keep something in host memory
//! are not compared if as many as are wanted fit without, though one of them may be faster: the search would take dry steps
//! of many more. If fewer fit there, a layout with host memory is compared if it does not fit with less in host memory.

use ferrotron_models::memory::{MemoryEstimator, PlannedDevice, RankMemory};
use ferrotron_models::trainer::Model;
use ferrotron_parallel::pipeline::ScheduleKind;
use ferrotron_tensor::{Error, Result};
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

use crate::bound::BlockCost;
use crate::cluster::Cluster;
use crate::predict::{Prediction, RecordedRun, differing_stages};
use crate::space::{Layout, Offload, Recomputation, Space};

/// The most layouts of a space of which none is left out uncompared.
pub const EXHAUSTIVE: usize = 2000;

/// A layout with its predicted step.
#[derive(Debug, Clone)]
pub struct Planned {
    /// The layout.
    pub layout: Layout,
    /// The step. Stages that are alike have one memory.
    pub prediction: Prediction,
}

/// The result of a search.
#[derive(Debug, Default)]
pub struct Plan {
    /// The fastest layouts that fit, the best first.
    pub best: Vec<Planned>,
    /// Number of layouts that a training would take.
    pub layouts: usize,
    /// The largest tensor-parallel size of these.
    pub widest: usize,
    /// Number of those that were replayed.
    pub simulated: usize,
    /// Number of those with something in host memory that were not compared: enough layouts fit without, or the same one
    /// was not found to be too large with less there. 0 in a space of at most [`EXHAUSTIVE`] layouts.
    pub not_compared: usize,
    /// Number of those that take too much memory, as far as the search came. What waits in host memory counts as another
    /// layout.
    pub too_large: usize,
    /// Number of those whose dry step failed, as far as the search came: they are not compared.
    pub failed: usize,
    /// The first of these with its error.
    pub failure: Option<(Layout, Error)>,
    /// The layout with the fewest bytes that was found, and these bytes, if none fits.
    pub smallest: Option<(Layout, u64)>,
}

/// Searches `space` for the `most` fastest layouts on `cluster` whose ranks take at most `limit` bytes. With more than
/// [`EXHAUSTIVE`] layouts those with something in host memory are among them only if fewer than `most` fit without.
///
/// `run` makes the run of a layout, or errors as a training would; `progress` hears how many layouts of all are decided.
///
/// Errors if no layout divides, and with the first error of `run` or of a dry step if there is no layout without one.
pub fn search<M: Model>(
    space: &Space,
    cluster: &Cluster,
    (limit, most): (u64, usize),
    run: impl Fn(&Layout) -> Result<MemoryEstimator<M>>,
    mut progress: impl FnMut(usize, usize),
) -> Result<Plan> {
    let mut search = Search { space, cluster, run, blocks: HashMap::new() };
    let (mut layouts, mut refused) = (Vec::new(), None);
    for layout in space.layouts()? {
        match (search.run)(&layout) {
            Ok(run) => layouts.push(search.bounded(layout, &run)),
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    let is_exhaustive = layouts.len() <= EXHAUSTIVE;
    let in_host_memory =
        |bounded: &Bounded| !is_exhaustive && bounded.layout.offload != Offload::None;
    layouts.sort_by(|a, b| {
        let slower = a.seconds.total_cmp(&b.seconds).then(a.layout.cmp(&b.layout));
        in_host_memory(a).cmp(&in_host_memory(b)).then(slower)
    });
    let total = layouts.len();
    let widest = layouts.iter().map(|bounded| bounded.layout.tensor).max().unwrap_or(0);
    let mut plan = Plan { layouts: total, widest, ..Plan::default() };
    // Layouts that differ in the micro-batch only: the smallest that is too large. Those with twice as many samples take no
    // less: a stage has at most p of S / b micro-batches of b samples in flight, which are min(p b, S) samples, and the
    // kernels of a larger micro-batch need no smaller workspace.
    let mut too_large: HashMap<Layout, usize> = HashMap::new();
    let mut failed = HashSet::new();
    let mut unfit: HashSet<Layout> = HashSet::new();
    let mut enough_without = None;
    for (done, bounded) in layouts.iter().enumerate() {
        let Bounded { layout, seconds, bytes } = bounded;
        progress(done, total);
        let slowest = match plan.best.get(most - 1) {
            Some(last) => last.prediction.seconds(),
            None => f64::INFINITY,
        };
        if in_host_memory(bounded) && *enough_without.get_or_insert(plan.best.len() >= most) {
            plan.not_compared += total - done; // those with host memory come last
            break;
        }
        if *seconds > slowest {
            continue;
        }
        let others = Layout { micro_batch: 0, ..*layout };
        let smallest = too_large.get(&others).is_some_and(|size| *size <= layout.micro_batch);
        if smallest || *bytes > limit as f64 {
            unfit.insert(*layout);
            continue;
        }
        let less: &[Offload] = if is_exhaustive { &[] } else { layout.offload.less() };
        if less.iter().any(|less| !unfit.contains(&Layout { offload: *less, ..*layout })) {
            plan.not_compared += 1;
            continue;
        }
        let recorded = match search.recorded(layout, limit) {
            Ok(recorded) => recorded,
            Err(error) => {
                failed.insert(*layout);
                plan.failed += 1;
                plan.failure = plan.failure.or(Some((*layout, error)));
                continue;
            }
        };
        let Some(recorded) = recorded else {
            unfit.insert(*layout);
            let size = too_large.entry(others).or_insert(layout.micro_batch);
            *size = layout.micro_batch.min(*size);
            continue;
        };
        if recorded.least_seconds(cluster)? > slowest {
            continue;
        }
        let prediction = recorded.predict(cluster, false)?;
        plan.simulated += 1;
        let seconds = |found: &Planned| (found.prediction.seconds(), found.layout);
        let found = Planned { layout: *layout, prediction };
        let place = plan.best.partition_point(|known| seconds(known) < seconds(&found));
        plan.best.insert(place, found);
        plan.best.truncate(most);
    }
    progress(total, total);
    plan.too_large = unfit.len();
    if plan.best.is_empty() {
        layouts.retain(|bounded| !failed.contains(&bounded.layout));
        plan.smallest = search.smallest(layouts)?;
        if plan.smallest.is_none() {
            let failure = plan.failure.map(|(_, error)| error);
            let none = || Error::config("plan", "there is no layout");
            return Err(failure.or(refused).unwrap_or_else(none));
        }
    }
    Ok(plan)
}

/// A layout on as few GPUs as were found, of whole nodes and more than `space` has, whose ranks take at most `limit` bytes,
/// and these bytes. The other arguments are those of [`search`].
///
/// None if there is none among those that are tried, where a dry step that fails counts as one that does not fit.
pub fn enough<M: Model>(
    space: &Space,
    cluster: &Cluster,
    limit: u64,
    run: impl Fn(&Layout) -> Result<MemoryEstimator<M>>,
) -> Option<(Layout, u64)> {
    Search { space, cluster, run, blocks: HashMap::new() }.enough(limit)
}

/// A layout with its first bounds.
struct Bounded {
    layout: Layout,
    seconds: f64,
    bytes: f64,
}

/// The most layouts whose dry steps tell the fewest bytes where none fits.
const SMALLEST: usize = 64;
/// Times as many GPUs, at most, among which a layout is looked for that fits; dry steps for each number of GPUs, and for all.
const MORE: usize = 64;
const TRIED: usize = 12;
const TRIED_IN_ALL: usize = 192;

struct Search<'a, R> {
    space: &'a Space,
    cluster: &'a Cluster,
    run: R,
    /// Costs of blocks, by their layouts; none if the model has too few blocks.
    blocks: HashMap<Layout, Option<BlockCost>>,
}

impl<M: Model, R: Fn(&Layout) -> Result<MemoryEstimator<M>>> Search<'_, R> {
    fn device(&self) -> PlannedDevice {
        self.cluster.gpu.device
    }

    /// A layout with the bounds of its `run`.
    fn bounded(&mut self, layout: Layout, run: &MemoryEstimator<M>) -> Bounded {
        let alone = self.alone(&layout);
        let cost = match self.blocks.get(&alone) {
            Some(known) => *known,
            None => {
                let found = self.block(&alone);
                self.blocks.insert(alone, found);
                found
            }
        };
        let layers = self.space.layers;
        let keeps_activations = run.trainer.parallel.saved_activations.offloaded_layers == 0;
        let bound = |of: &dyn Fn(&BlockCost) -> f64| cost.as_ref().map_or(0.0, of);
        Bounded {
            layout,
            seconds: bound(&|cost| cost.seconds(&layout, layers)),
            bytes: bound(&|cost| cost.bytes(&layout, layers, keeps_activations)),
        }
    }

    /// The layout in which a block is alone on its stage, with all states.
    fn alone(&self, layout: &Layout) -> Layout {
        let Layout { tensor, context, micro_batch, .. } = *layout;
        let pipeline = self.space.layers;
        Layout {
            gpus: tensor * context * pipeline,
            pipeline,
            schedule: match layout.schedule.splits_backward() {
                true => layout.schedule,
                false => ScheduleKind::OneFOneB,
            },
            chunks: 1,
            global_batch: micro_batch,
            zero_stage: 0,
            // Bounds leave states in host memory out.
            offload: match layout.offload.has_activations() {
                true => Offload::Activations,
                false => Offload::None,
            },
            ..*layout
        }
    }

    /// The cost of one block: without one, bounds are 0 and nothing is left out by them.
    fn block(&self, alone: &Layout) -> Option<BlockCost> {
        let mut run = (alone.pipeline > 2).then(|| (self.run)(alone).ok()).flatten()?;
        if !alone.offload.has_activations() {
            // Stated for some blocks of a stage: others take no time for transfers.
            run.trainer.parallel.saved_activations.offloaded_layers = 0;
        }
        let mut recorded = RecordedRun::empty(&run);
        let found = recorded.add(&run, self.device(), 1, false).ok()?;
        recorded.add(&run, self.device(), alone.pipeline - 1, false).ok()?;
        let programs = recorded.programs(self.cluster).ok()?;
        Some(BlockCost::new(&programs[0], &programs[1], found.memory))
    }

    /// Records the stages of a layout, those that differ; none if a rank of one takes more than `limit`.
    fn recorded(&self, layout: &Layout, limit: u64) -> Result<Option<RecordedRun>> {
        let run = (self.run)(layout)?;
        let mut recorded = RecordedRun::empty(&run);
        let (stages, of_stage) = differing_stages(&run.layout, self.cluster.gpus_per_node);
        for stage in stages {
            let RankMemory { total_bytes, .. } =
                recorded.add(&run, self.device(), stage, false)?.memory;
            if total_bytes as u64 > limit {
                return Ok(None);
            }
        }
        recorded.represent(of_stage);
        Ok(Some(recorded))
    }

    /// The layout with the fewest bytes among those with the least bounds.
    fn smallest(&self, mut layouts: Vec<Bounded>) -> Result<Option<(Layout, u64)>> {
        sort_by_bytes(&mut layouts);
        let mut least: Option<(Layout, u64)> = None;
        for Bounded { layout, bytes, .. } in layouts.into_iter().take(SMALLEST) {
            if least.is_some_and(|(_, known)| bytes > known as f64) {
                break;
            }
            let bytes = self.bytes_of(&layout)?;
            if least.is_none_or(|(_, known)| bytes < known) {
                least = Some((layout, bytes));
            }
        }
        Ok(least)
    }

    /// The most bytes of the ranks of the first, the second and the last stage.
    fn bytes_of(&self, layout: &Layout) -> Result<u64> {
        let run = (self.run)(layout)?;
        let mut recorded = RecordedRun::empty(&run);
        for stage in [0, layout.pipeline - 1, 1].into_iter().take(layout.pipeline) {
            recorded.add(&run, self.device(), stage, false)?;
        }
        Ok(recorded.peak_bytes())
    }

    fn enough(&mut self, limit: u64) -> Option<(Layout, u64)> {
        let Space { gpus, gpus_per_node, .. } = *self.space;
        let (mut nodes, mut tried) = (gpus.div_ceil(gpus_per_node), 0);
        let most = MORE * nodes;
        while nodes < most && tried < TRIED_IN_ALL {
            nodes += (nodes / 8).max(1);
            let larger = Space { gpus: nodes * gpus_per_node, ..self.space.clone() };
            let Ok(layouts) = larger.layouts() else { continue };
            let mut small = Vec::new();
            for layout in layouts.into_iter().filter(is_frugal) {
                if let Ok(run) = (self.run)(&layout) {
                    small.push(self.bounded(layout, &run));
                }
            }
            small.retain(|bounded| bounded.bytes <= limit as f64);
            sort_by_bytes(&mut small);
            for Bounded { layout, .. } in small.into_iter().take(TRIED) {
                tried += 1;
                if let Ok(Some(recorded)) = self.recorded(&layout, limit) {
                    return Some((layout, recorded.peak_bytes()));
                }
            }
        }
        None
    }
}

/// Whether no layout of the same sizes that differs in its micro-batch, its schedule or its recomputation takes less memory.
fn is_frugal(layout: &Layout) -> bool {
    let Layout { micro_batch, schedule, recompute, .. } = *layout;
    (micro_batch, schedule, recompute) == (1, ScheduleKind::OneFOneB, Recomputation::Full)
}

/// Those with the least bounds first, and of these those that need the fewest samples and compute most again.
fn sort_by_bytes(layouts: &mut [Bounded]) {
    let frugal = |layout: &Layout| (layout.micro_batch, Reverse(layout.recompute), *layout);
    layouts.sort_by(|a, b| {
        a.bytes.total_cmp(&b.bytes).then_with(|| frugal(&a.layout).cmp(&frugal(&b.layout)))
    });
}
