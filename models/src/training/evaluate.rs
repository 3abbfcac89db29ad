//! Evaluates a model over a finite set of samples and counts each once.

use ferrotron_autograd::no_grad;
use ferrotron_nn::{Axis, Context, Scope};
use ferrotron_parallel::agreement::wait_for_all;
use ferrotron_parallel::mesh::Mesh;
use ferrotron_parallel::pipeline::{PipelineSchedule, execute};
use ferrotron_tensor::{Device, Error, Result};

use crate::io::data::FiniteSamples;
use crate::training::batch_size::BatchSize;
use crate::training::loss::{LossCounts, LossReduction, LossSums};
use crate::training::microbatch::Microbatch;
use crate::training::model::Model;
use crate::training::stage::StageModel;
use crate::training::stop::StopFlag;

/// The result of an evaluation.
#[derive(Debug, Clone, PartialEq)]
pub struct Evaluation {
    /// The loss; of a language model, the mean cross-entropy in nats per token.
    pub loss: f64,
    /// e^loss.
    pub perplexity: f64,
    /// Elements of the first loss term: tokens that were predicted.
    pub tokens: u64,
    /// The mean of each loss term, by name.
    pub losses: Vec<(&'static str, f64)>,
}

/// This rank's chunks of a model.
#[derive(Debug)]
pub struct LocalModel<'a, M: Model> {
    /// The chunks.
    pub parts: &'a [M],
    /// The configuration of the whole model.
    pub config: &'a M::Config,
    /// The scope in which they were made.
    pub scope: &'a Scope,
    /// The ranks that have the other chunks and shards.
    pub mesh: &'a Mesh,
}

/// Evaluates a model on all of `samples`. All ranks of its mesh call this; `None` if one of them was asked to stop. `done` is
/// told how many samples are through the model, several times.
///
/// Samples meet in batches of `sizes` as they do in training. The micro-batches of a global batch go through a
/// pipeline one behind another; without a pipeline each is a batch of its own, so that a request to stop waits for
/// two micro-batches at most. The sum of the losses stays on the device until the last batch is done.
///
/// Which samples count does not depend on `sizes` or the layout. Losses of micro-batches are added in f64, so these
/// change the result by the rounding of sums alone.
///
/// # Errors
/// Sizes for another number of ranks along the data axis; as the model, the data and the communication do.
pub fn evaluate<M: Model>(
    model: &LocalModel<M>,
    samples: &dyn FiniteSamples,
    sizes: BatchSize,
    stop: &StopFlag,
    mut done: impl FnMut(u64),
) -> Result<Option<Evaluation>> {
    let LocalModel { parts, config, scope, mesh } = *model;
    let (data, device) = (mesh.axis(Axis::Data), scope.device());
    sizes.check_ranks(data.size())?;
    // Not the device's memory: an evaluation takes no more of it than a step.
    let host = Device::cpu(1)?;
    let (stages, micro) = (mesh.axis(Axis::Pipeline).size(), sizes.micro_batch_size());
    let unit = (micro * data.size()) as u64;
    if !samples.has_blank_samples() && !samples.len().is_multiple_of(unit) {
        let message = format!(
            "{} samples are no multiple of {unit}: micro-batch size {micro} x data-parallel size {}",
            samples.len(),
            data.size()
        );
        return Err(Error::config("evaluate", message));
    }
    let together = if stages == 1 { unit } else { sizes.full_batch_size() as u64 };
    let mut sums: Option<LossSums> = None;
    let mut counts: Option<LossCounts> = None;
    // Ranks agree on the end, but do not wait for one another: each batch asks for the next one.
    let mut stops = stop.ask_all(mesh.world(), &host)?;
    for first in (0..samples.len()).step_by(together as usize) {
        let next = stop.ask_all(mesh.world(), &host)?;
        if std::mem::replace(&mut stops, next).wait()? {
            stops.wait()?;
            return Ok(None);
        }
        let count = (samples.len() - first).min(together).div_ceil(unit) as usize;
        // Beyond the last sample, rows in which nothing counts.
        let batches = (0..count)
            .map(|index| samples.batch(sizes.first_sample(first, index, data.rank()), micro))
            .collect::<Result<Vec<_>>>()?;
        let own = LossCounts::new::<M>(config, &batches)?;
        let loss = LossReduction::evaluation(&own);
        let microbatches = batches
            .iter()
            .map(|batch| {
                let ctx = Context::eval(micro, batch.seq_length);
                Microbatch::new(device, mesh, batch, ctx)
            })
            .collect::<Result<Vec<_>>>()?;
        let schedule = PipelineSchedule::forward_only(stages, count, parts.len())?;
        let mut model = StageModel::new(parts, scope, mesh, &microbatches, &loss)?;
        if let Some(sums) = sums.take() {
            model = model.adding_to(sums);
        }
        no_grad(|| execute(&schedule, &mut model, mesh, 1.0))?;
        sums = Some(model.into_sums()?);
        counts = Some(match counts {
            Some(counts) => counts.add(&own),
            None => own,
        });
        done((first + together).min(samples.len()));
    }
    stops.wait()?;
    let (Some(sums), Some(counts)) = (sums, counts) else {
        return Err(Error::value("evaluate", "there are no samples"));
    };
    // Ranks along data have other samples; the others have the same.
    let counts = counts.over(data, &host)?;
    let loss = LossReduction::evaluation(&counts);
    loss.check_returned(&sums, &mut Vec::new(), mesh.world())?;
    let (sum, terms) = loss.reduce(sums.sums, mesh.world())?.wait()?;
    let total = sum.item()? / loss.denominator;
    let terms = terms.map(|terms| terms.to_f64()).transpose()?;
    let losses = match loss.why_empty() {
        Some(why) => Err(Error::value("evaluate", why)),
        None => loss.means(total, terms.as_deref()),
    };
    let losses = losses.inspect_err(|_| wait_for_all(mesh.world()))?;
    Ok(Some(Evaluation {
        loss: total,
        perplexity: total.exp(),
        tokens: counts.first() as u64,
        losses,
    }))
}
