//! The layout of the published rules, and the choices in which a plan departs from it.
//!
//! The rules are those of arXiv:2104.04473, section 5.4: tensor parallelism up to a node, then pipeline parallelism until the
//! model fits, data parallelism for the rest. The micro-batch b is that with the least time by its equation (1),
//!
//!   T(b) = (b'/b + p - 1) (tf(b) + tb(b))
//!
//! where b' are the samples of a data-parallel rank, and tf and tb the times of forward and backward of a micro-batch, here
//! those of the predicted step. What the rules do not say is as in the fastest step with their sizes: recomputation, sequence
//! parallelism, and whether the optimizer's states are sharded.

use ferrotron::models::memory::MemoryEstimator;
use ferrotron::models::trainer::Model;
use ferrotron::parallel::pipeline::ScheduleKind;
use ferrotron::planner::{
    Cluster, Layout, Offload, Plan, Planned, Prediction, RecordedRun, Space, search,
};
use ferrotron::{Error, Result};

use super::report::{flags, lost};
use crate::cli::bytes::display;

/// The most samples of a micro-batch that are tried.
const MOST: usize = 64;

/// The search whose result is explained.
pub struct Searched<'a, R> {
    pub space: &'a Space,
    pub cluster: &'a Cluster,
    /// The most bytes of a rank.
    pub limit: u64,
    /// Makes the run of a layout.
    pub run: R,
}

/// The layout of the rules.
struct Rules {
    chosen: Planned,
    /// The micro-batches that fit, with their times by the equation.
    tried: Vec<(usize, f64)>,
}

/// A choice of a layout: its name, how it is written, and the first layout with the choice of the second.
struct Choice {
    name: &'static str,
    written: fn(&Layout) -> String,
    put_back: fn(&Layout, &Layout) -> Layout,
}

const CHOICES: [Choice; 9] = [
    Choice {
        name: "tensor",
        written: |layout| layout.tensor.to_string(),
        put_back: |layout, rules| Layout { tensor: rules.tensor, ..*layout },
    },
    Choice {
        name: "context",
        written: |layout| layout.context.to_string(),
        put_back: |layout, rules| Layout { context: rules.context, ..*layout },
    },
    Choice {
        name: "pipeline",
        written: |layout| layout.pipeline.to_string(),
        put_back: |layout, rules| Layout { pipeline: rules.pipeline, ..*layout },
    },
    Choice {
        name: "schedule",
        written: |layout| match layout.chunks {
            1 => layout.schedule.to_string(),
            chunks => format!("{} with {chunks} chunks", layout.schedule),
        },
        put_back: |layout, rules| Layout {
            schedule: rules.schedule,
            chunks: rules.chunks,
            ..*layout
        },
    },
    Choice {
        name: "sequence",
        written: |layout| match layout.sequence_parallel {
            false => "whole".to_string(),
            true => "cut".to_string(),
        },
        put_back: |layout, rules| Layout { sequence_parallel: rules.sequence_parallel, ..*layout },
    },
    Choice {
        name: "micro-batch",
        written: |layout| layout.micro_batch.to_string(),
        put_back: |layout, rules| Layout { micro_batch: rules.micro_batch, ..*layout },
    },
    Choice {
        name: "recomputation",
        written: |layout| layout.recompute.name().to_string(),
        put_back: |layout, rules| Layout { recompute: rules.recompute, ..*layout },
    },
    Choice {
        name: "ZeRO",
        written: |layout| layout.zero_stage.to_string(),
        put_back: |layout, rules| Layout { zero_stage: rules.zero_stage, ..*layout },
    },
    Choice {
        name: "in host memory",
        written: |layout| layout.offload.name().to_string(),
        put_back: |layout, rules| Layout { offload: rules.offload, ..*layout },
    },
];

/// States the rules with their layout, and each choice in which `found` departs from it.
///
/// Errors if the space has no layout.
pub fn explanation<M: Model, R: Fn(&Layout) -> Result<MemoryEstimator<M>>>(
    searched: &Searched<'_, R>,
    found: &Plan,
) -> Result<String> {
    let Some(best) = found.best.first() else { return Ok(String::new()) };
    let mut text = format!(
        "\nrules of arXiv:2104.04473: tensor parallel up to a node ({} GPUs), then pipeline until the model fits, data parallel \
         for the rest, the micro-batch b with the least T = (b'/b + p - 1) (tf + tb)\n\
         plan:  {}\n",
        searched.space.gpus_per_node,
        flags(&best.layout)
    );
    let Some(Rules { chosen, tried }) = searched.rules(found.widest) else {
        return Ok(text + "rules: no such layout fits\n");
    };
    text += &format!("rules: {}\n", flags(&chosen.layout));
    let each = tried.iter().map(|(micro, seconds)| format!("b {micro}, T {seconds:.4} s"));
    text += &format!(
        "micro-batch by the rules: b {} of {}\n",
        chosen.layout.micro_batch,
        each.collect::<Vec<String>>().join("; ")
    );
    if chosen.layout == best.layout {
        return Ok(text + "the plan follows the rules\n");
    }
    text += &format!(
        "the rules' takes {:.4} s, {}\n",
        chosen.prediction.seconds(),
        lost(&best.prediction, &chosen.prediction)
    );
    let layouts = searched.space.layouts()?;
    for Choice { name, written, put_back } in &CHOICES {
        let [ours, theirs] = [&best.layout, &chosen.layout].map(written);
        if ours == theirs {
            continue;
        }
        let layout = put_back(&best.layout, &chosen.layout);
        let outcome = match layouts.contains(&layout) {
            true => searched.outcome(&layout, &best.prediction),
            false => "does not go with the other choices".to_string(),
        };
        text += &format!("{name} {ours}, by the rules {theirs}: that alone put back {outcome}\n");
    }
    Ok(text)
}

impl<M: Model, R: Fn(&Layout) -> Result<MemoryEstimator<M>>> Searched<'_, R> {
    /// The layout of the rules with `tensor` ranks, if one fits.
    fn rules(&self, tensor: usize) -> Option<Rules> {
        let layers = self.space.layers;
        let mut pipelines = (1..=layers).filter(|pipeline| layers.is_multiple_of(*pipeline));
        pipelines.find_map(|pipeline| {
            let mut best: Option<(Planned, f64)> = None;
            let mut tried = Vec::new();
            for micro in (0..).map(|power| 1 << power).take_while(|micro| *micro <= MOST) {
                // A micro-batch that is too large has none behind it that fits.
                let Some(found) = self.fastest([tensor, pipeline, micro]) else { break };
                let seconds = by_equation(&found);
                tried.push((micro, seconds));
                if best.as_ref().is_none_or(|(_, least)| seconds < *least) {
                    best = Some((found, seconds));
                }
            }
            best.map(|(chosen, _)| Rules { chosen, tried })
        })
    }

    /// The fastest layout with these sizes of the tensor and pipeline axes and of a micro-batch, among those that the rules
    /// know: no shards of gradients and weights, nothing in host memory, no more contexts than the sequence needs.
    fn fastest(&self, [tensor, pipeline, micro]: [usize; 3]) -> Option<Planned> {
        let context = self.space.contexts[0];
        let sizes = [tensor, context, pipeline, micro];
        let ruled = |layout: &Layout| match layout {
            Layout {
                schedule: ScheduleKind::OneFOneB,
                zero_stage: 0 | 1,
                offload: Offload::None,
                ..
            } if [layout.tensor, layout.context, layout.pipeline, layout.micro_batch] == sizes => {
                (self.run)(layout)
            }
            _ => Err(Error::config("plan", "is not that of the rules")),
        };
        let plan = search(self.space, self.cluster, (self.limit, 1), ruled, |_, _| ()).ok()?;
        plan.best.into_iter().next()
    }

    /// Says how long a step of `layout` takes beside the `best` one, or why there is none.
    fn outcome(&self, layout: &Layout, best: &Prediction) -> String {
        let predicted = (self.run)(layout).and_then(|run| {
            RecordedRun::of_differing_stages(&run, self.cluster)?.predict(self.cluster, false)
        });
        match predicted {
            Err(error) => format!("is refused: {error}"),
            Ok(found) if found.peak_bytes() as u64 > self.limit => {
                format!(
                    "does not fit: {} of {}",
                    display(found.peak_bytes() as u64),
                    display(self.limit)
                )
            }
            Ok(found) => {
                let more = 100.0 * (found.seconds() / best.seconds() - 1.0);
                format!("takes {:.4} s, {more:+.2} %", found.seconds())
            }
        }
    }
}

/// The time of a step by equation (1).
fn by_equation(Planned { layout, prediction }: &Planned) -> f64 {
    let microbatches = layout.microbatches();
    (microbatches + layout.pipeline - 1) as f64 * prediction.pass_seconds(microbatches)
}
