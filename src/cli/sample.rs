//! The sample of text that a run prints at its end, and those that it writes on its way.

use ferrotron::models::evaluate::LocalModel;
use ferrotron::models::generate::{Sampling, generate as continue_tokens};
use ferrotron::models::gpt::Gpt;
use ferrotron::models::run::{EvaluationTask, TaskResult};
use ferrotron::models::stop::StopFlag;
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::nn::{Axis, Sharding};
use ferrotron::parallel::mesh::ParallelDims;
use ferrotron::{Error, Result};
use std::ops::ControlFlow;

use super::args::train::TrainArgs;

/// A short sample; `None` if the program is asked to stop.
pub fn sample(
    gpt: &Gpt,
    tokenizer: &Tokenizer,
    length: usize,
    stop: &StopFlag,
) -> Result<Option<String>> {
    let end_of_text = tokenizer.end_of_text();
    let sampling = Sampling { temperature: 0.8, top_k: None, top_p: None, seed: 1234, end_of_text };
    let until_stopped = |_| match stop.is_set() {
        true => ControlFlow::Break(()),
        false => ControlFlow::Continue(()),
    };
    let tokens = continue_tokens(gpt, &line_break(tokenizer), length, &sampling, until_stopped)?;
    Ok((!stop.is_set()).then(|| tokenizer.decode(&tokens)))
}

/// A sample of text during a run, from the first rank.
pub struct SampleTask {
    tokenizer: Tokenizer,
    length: usize,
}

/// Whether each rank of a `layout` can run the model without others.
pub fn one_rank_has_all(layout: &ParallelDims, sharding: Sharding) -> bool {
    let ranks = layout.world();
    layout.size(Axis::Data) == ranks && (ranks == 1 || sharding != Sharding::Weights)
}

impl SampleTask {
    /// Samples of `--sample-length` tokens, from a run in `layout`.
    ///
    /// # Errors
    /// A layout in which no rank has the whole model; no token.
    pub fn new(
        args: &TrainArgs,
        tokenizer: &Tokenizer,
        layout: &ParallelDims,
    ) -> Result<SampleTask> {
        let refuse = |why| Err(Error::config("--log-samples-to-tensorboard", why));
        if !one_rank_has_all(layout, Sharding::ALL[usize::from(args.parallel.zero_stage)]) {
            return refuse("no rank has the whole model in this layout: leave it out");
        }
        match args.run.sample_length() {
            0 => refuse("needs a --sample-length above 0"),
            length => Ok(SampleTask { tokenizer: tokenizer.clone(), length }),
        }
    }
}

impl EvaluationTask<Gpt> for SampleTask {
    fn name(&self) -> &str {
        "sample"
    }

    fn data_crc32(&self) -> u32 {
        0
    }

    fn evaluate(&self, model: &LocalModel<Gpt>, stop: &StopFlag) -> Result<Option<TaskResult>> {
        let text = match model.mesh.rank() {
            0 => sample(&model.parts[0], &self.tokenizer, self.length, stop)?,
            _ => None,
        };
        // The others wait here for the first one. A text that a request to stop has cut off is left out.
        let stopped = stop.is_set_on_any(model.mesh.world())?;
        let text = text.unwrap_or_default();
        Ok((!stopped).then_some(TaskResult { numbers: Vec::new(), text }))
    }
}

/// The tokens of a line break, or the first of a vocabulary that has none.
pub fn line_break(tokenizer: &Tokenizer) -> Vec<u32> {
    let found = tokenizer.encode("\n").ok().filter(|tokens| !tokens.is_empty());
    found.unwrap_or_else(|| vec![0])
}
