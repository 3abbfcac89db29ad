//! The sample of text that a run prints at its end, and those that it writes on its way.

use ferrotron::models::evaluate::LocalModel;
use ferrotron::models::generate::{Sampling, generate as continue_tokens};
use ferrotron::models::gpt::Gpt;
use ferrotron::models::run::{EvaluationTask, TaskResult};
use ferrotron::models::stop::StopFlag;
use ferrotron::models::tokenizer::Tokenizer;
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

impl SampleTask {
    /// Samples of `--sample-length` tokens.
    ///
    /// # Errors
    /// A layout in which no rank has the whole model; no token.
    pub fn new(args: &TrainArgs, tokenizer: &Tokenizer) -> Result<SampleTask> {
        let parallel = &args.parallel;
        let ranks = &parallel.ranks;
        let shared = [
            ranks.tensor_model_parallel_size,
            ranks.pipeline_model_parallel_size,
            parallel.context_parallel_size,
        ];
        let refuse = |why| Err(Error::config("--log-samples-to-tensorboard", why));
        if shared != [1; 3] || parallel.zero_stage > 2 {
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
        // Other ranks wait where they meet the first one next, whatever it was asked.
        let text = match model.mesh.rank() {
            0 => sample(&model.parts[0], &self.tokenizer, self.length, stop)?,
            _ => None,
        };
        Ok(Some(TaskResult { numbers: Vec::new(), text: text.unwrap_or_default() }))
    }
}

/// The tokens of a line break, or the first of a vocabulary that has none.
pub fn line_break(tokenizer: &Tokenizer) -> Vec<u32> {
    let found = tokenizer.encode("\n").ok().filter(|tokens| !tokens.is_empty());
    found.unwrap_or_else(|| vec![0])
}
