//! `ferrotron eval`.

mod args;
mod bert;

use ferrotron::models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron::models::data::{
    BlendedDataset, DocumentConfig, DocumentSamples, FiniteSamples, TokenSource, Validation,
};
use ferrotron::models::evaluate::{Evaluation, LocalModel, evaluate};
use ferrotron::models::finite::first_not_finite;
use ferrotron::models::gpt::Gpt;
use ferrotron::models::stop::StopFlag;
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::parallel::mesh::Mesh;
use ferrotron::tensor::At;
use ferrotron::{Error, Result};
use serde_json::json;
use std::process::ExitCode;

pub use args::EvalArgs;

use crate::cli::args::data::{DataArgs, DataSource};
use crate::cli::corpus;
use crate::cli::definition::Definition;
use crate::cli::loaded::{Loaded, is_bert, named_or_newest};
use crate::cli::options::remembered;
use crate::cli::output;

/// Measures the loss over every token of the validation part.
pub fn eval(args: &EvalArgs, definition: &Definition) -> Result<ExitCode> {
    let path = named_or_newest(args.load.as_ref())?;
    if is_bert(&path)? {
        return bert::eval(args, &path, definition);
    }
    let loaded = Loaded::<Gpt>::open(&path, &args.device, args.ema)?;
    // Files of tokens need none.
    let ids = || Tokenizer::Null(loaded.model.config().vocab_size);
    let tokenizer = loaded.tokenizer.clone().unwrap_or_else(ids);
    let saved = loaded
        .checkpoint
        .as_ref()
        .map(|checkpoint| remembered::of_checkpoint(checkpoint, definition))
        .transpose()?;
    let (saved, _) = saved.unwrap_or_default();
    let seq_length = args.sequence_length(loaded.model.config().max_position_embeddings)?;
    let is_run = loaded.checkpoint.as_ref().is_some_and(|checkpoint| !checkpoint.run().is_null());
    let (source, origin) = args.data_config(&saved, is_run)?;
    let dataset = match source {
        DataSource::Files(config) => corpus::open(&config, &tokenizer, output::note),
        DataSource::Sets(config) => config
            .check_tokenizer(&tokenizer)
            .and_then(|()| BlendedDataset::open(&config, tokenizer.vocab_size()))
            .map(|sets| sets.streams()),
    };
    let dataset = dataset.at(origin)?;
    let source =
        if args.valid_fraction == Some(1.0) { Some(dataset.train) } else { dataset.validation };
    let source = source.ok_or_else(|| {
        let message = "leaves no token of this data to evaluate: give a larger share, or 1 for all";
        Error::config("--valid-fraction", message)
    })?;
    let documents = DataArgs::from_options(&saved).documents(&tokenizer)?;
    let batches =
        Batches { source, seq_length, micro_batch_size: args.micro_batch_size, documents };
    let Evaluation { loss, perplexity, tokens, .. } = batches.evaluate(&loaded.model)?;
    output::line(&if args.json {
        json!({ "loss": loss, "perplexity": perplexity, "tokens": tokens }).to_string()
    } else {
        format!("loss {loss:.4} over {tokens} tokens (perplexity {perplexity:.2})")
    });
    Ok(ExitCode::SUCCESS)
}

/// The data of an evaluation, and how it is cut.
struct Batches {
    source: TokenSource,
    seq_length: usize,
    micro_batch_size: usize,
    /// What stops at the end of a document, as in the run.
    documents: Option<DocumentConfig>,
}

impl Batches {
    /// Evaluates all of it.
    ///
    /// # Errors
    /// A loss that is not finite, with the weight or else the batch that it comes from.
    fn evaluate(&self, gpt: &Gpt) -> Result<Evaluation> {
        let found = self.of(gpt, &self.source)?;
        if found.loss.is_finite() {
            return Ok(found);
        }
        let context = match first_not_finite(gpt)? {
            Some(weight) => weight,
            None => self.first_bad_batch(gpt)?,
        };
        Err(Error::value("eval", format!("the loss is {}: {context}", found.loss)))
    }

    fn of(&self, gpt: &Gpt, source: &TokenSource) -> Result<Evaluation> {
        let plain = Validation::new(source.clone(), self.seq_length)?;
        let validation: Box<dyn FiniteSamples> = match self.documents {
            Some(config) => Box::new(DocumentSamples::new(plain, config)),
            None => Box::new(plain),
        };
        let micro_batch_size = self.micro_batch_size;
        let sizes = BatchSizeConfig { micro_batch_size, ..BatchSizeConfig::default() };
        // A signal ends the process: there is nothing to save.
        let never = StopFlag::default();
        let (parts, mesh) = (std::slice::from_ref(gpt), &Mesh::single());
        let model = LocalModel { parts, config: gpt.config(), scope: gpt.scope(), mesh };
        let found = evaluate(&model, &*validation, BatchSize::new(sizes)?, &never)?;
        Ok(found.expect("an evaluation that is not asked to stop has a result"))
    }

    fn first_bad_batch(&self, gpt: &Gpt) -> Result<String> {
        let (size, length) =
            (self.seq_length as u64 * self.micro_batch_size as u64, self.source.len());
        // Each batch predicts `size` tokens; the first follows from the last one before it.
        for (batch, start) in (0..length - 1).step_by(size as usize).enumerate() {
            let end = length.min(start + size + 1);
            let loss = self.of(gpt, &self.source.slice(start..end)?)?.loss;
            if !loss.is_finite() {
                return Ok(format!(
                    "first in batch {batch}, tokens {start} to {}, though all weights are finite: {} overflows",
                    end - 1,
                    gpt.scope().dtype()
                ));
            }
        }
        Ok("the sum over all batches overflows".into())
    }
}
