//! The kernels of a predicted step: calls, bytes, operations and time of each.

use ferrotron_parallel::pipeline::PipelineSchedule;
use std::collections::BTreeMap;

use crate::cost::KernelKind;
use crate::program::Program;
use crate::record::Launch;
use crate::simulate::Replay;
use crate::stage_time::StageTime;

/// The calls of a kernel in a step of one rank.
#[derive(Debug, Clone, PartialEq)]
pub struct KernelTime {
    /// Its name; of a matrix product also the sizes.
    pub name: String,
    /// Number of launches: the mean, if the replay has several steps.
    pub calls: f64,
    /// Bytes of all.
    pub bytes: f64,
    /// Operations of the products of all.
    pub operations: f64,
    /// Time of all.
    pub seconds: f64,
}

/// Operations as papers count them: all pairs of positions also in the attention of a `causal` model, and no products
/// that a fused kernel computes again.
///
/// Launches of a causal model compute half of the pairs together, whichever of them are masked: under context parallelism
/// ranks leave out chunks and compute others whole, and a processor's kernel states the pairs that it computes.
pub(crate) fn counted_operations(launch: &Launch, causal: bool) -> f64 {
    let operations = launch.operations();
    if KernelKind::from_launch(launch) != KernelKind::Attention {
        return operations;
    }
    let counted = match launch.kernel.as_str() {
        // One kernel of a processor: four products, and that of queries and keys again.
        "attention_backward" => 4.0 / 5.0,
        // Two on a GPU, of two counted products each; a processor's launch states no number of products.
        _ => launch.count.min(2) as f64 / launch.count.max(1) as f64,
    };
    if causal { 2.0 * counted * operations } else { counted * operations }
}

/// The kernels of the stage that computes longest, in one step of `schedule`. Ranks may be `shared`ing cores.
pub(crate) fn kernels(
    replay: &Replay,
    programs: &[&Program],
    schedule: &PipelineSchedule,
    shared: bool,
) -> Vec<KernelTime> {
    let busy = |stage: &StageTime| stage.computing.iter().sum::<f64>();
    let stages = replay.stages.iter().zip(programs).enumerate();
    let busiest = stages.max_by(|(_, a), (_, b)| busy(a.0).total_cmp(&busy(b.0)));
    let Some((index, (stage, program))) = busiest else { return Vec::new() };
    // Ranks that share cores are slower than their programs, whose copies for messages are no launches. On a GPU only
    // products are, beside calls.
    let is_slowed =
        |launch: &Launch| shared || KernelKind::from_launch(launch) != KernelKind::Memory;
    let instructions = schedule.instructions(index).iter();
    let sends = instructions.flat_map(|instruction| instruction.sends());
    let copies: f64 = sends.map(|message| program.messages[message.direction as usize].copy).sum();
    let (mut alone, mut slowed) = (copies, if shared { copies } else { 0.0 });
    let counts = stage.launches.iter().zip(&program.launches).zip(&program.durations);
    for ((calls, launch), one) in counts {
        alone += *calls as f64 * one;
        slowed += if is_slowed(launch) { *calls as f64 * one } else { 0.0 };
    }
    let slower = if slowed > 0.0 { 1.0 + (busy(stage) - alone) / slowed } else { 1.0 };
    let mut sums: BTreeMap<String, KernelTime> = BTreeMap::new();
    let counts = stage.launches.iter().zip(&program.launches).zip(&program.durations);
    for ((&calls, launch), seconds) in counts.filter(|((calls, _), _)| **calls > 0) {
        let name = match KernelKind::from_launch(launch) {
            KernelKind::Product if launch.columns > 1 => {
                let Launch { batch, rows, columns, inner, .. } = launch;
                format!("matmul {batch} x {rows} x {columns} x {inner}")
            }
            _ => launch.kernel.clone(),
        };
        let empty = KernelTime {
            name: name.clone(),
            calls: 0.0,
            bytes: 0.0,
            operations: 0.0,
            seconds: 0.0,
        };
        let sum = sums.entry(name).or_insert(empty);
        // Of a step: the mean, since the launches of a schedule over several need not be a multiple of their number.
        let calls = calls as f64 / schedule.steps() as f64;
        sum.calls += calls;
        sum.bytes += calls * launch.bytes as f64;
        sum.operations += calls * launch.operations();
        sum.seconds += calls * seconds * if is_slowed(launch) { slower } else { 1.0 };
    }
    let mut kernels: Vec<KernelTime> = sums.into_values().collect();
    kernels.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    kernels
}
