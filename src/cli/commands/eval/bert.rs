//! `ferrotron eval` of a BERT: its losses over masked pairs of segments of the validation part.

use ferrotron::models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron::models::bert::Bert;
use ferrotron::models::data::HeldOutPairs;
use ferrotron::models::evaluate::{LocalModel, evaluate};
use ferrotron::models::finite::first_not_finite;
use ferrotron::models::stop::StopFlag;
use ferrotron::parallel::mesh::Mesh;
use ferrotron::tensor::At;
use ferrotron::{Error, Result};
use serde_json::{Map, json};
use std::path::Path;
use std::process::ExitCode;

use super::args::EvalArgs;
use crate::cli::args::data::DataSource;
use crate::cli::closing_report::masked_tokens_line;
use crate::cli::definition::Definition;
use crate::cli::loaded::{Loaded, check_vocab_size};
use crate::cli::options::remembered;
use crate::cli::{corpus, output};

/// Measures the losses over the validation part.
pub fn eval(args: &EvalArgs, path: &Path, definition: &Definition) -> Result<ExitCode> {
    let Loaded { model: bert, scope, tokenizer, checkpoint } =
        Loaded::<Bert>::open(path, &args.device, args.ema)?;
    let tokenizer = &tokenizer.ok_or_else(|| {
        let message = "has no tokenizer: put its tokenizer.json or vocab.txt there";
        Error::config("--load", format!("'{}' {message}", path.display()))
    })?;
    let special = tokenizer.special_tokens()?;
    check_vocab_size(bert.config().vocab_size, special.vocab_size)?;
    let saved = checkpoint.as_ref().map(|found| remembered::of_checkpoint(found, definition));
    let (saved, _) = saved.transpose()?.unwrap_or_default();
    let is_run = checkpoint.as_ref().is_some_and(|found| !found.run().is_null());
    let seq_length = args.sequence_length(bert.config().max_position_embeddings)?;
    let (source, origin) = args.data_config(&saved, is_run)?;
    let DataSource::Files(config) = source else {
        return Err(Error::config("--data", "a bert takes sentences of text files"));
    };
    let (train, validation) =
        corpus::open_documents(&config, tokenizer, output::note).at(origin)?;
    let whole = args.valid_fraction == Some(1.0);
    let documents = if whole { Some(train) } else { validation };
    let documents = documents.ok_or_else(|| {
        let message =
            "leaves no sentence of this data to evaluate: give a larger share, or 1 for all";
        Error::config("--valid-fraction", message)
    })?;
    let pairs = HeldOutPairs::new(documents, special, seq_length)?;
    let micro_batch_size = args.micro_batch_size;
    let sizes = BatchSizeConfig { micro_batch_size, ..BatchSizeConfig::default() };
    let (parts, mesh) = (std::slice::from_ref(&bert), &Mesh::single());
    let model = LocalModel { parts, config: bert.config(), scope: &scope, mesh };
    // A signal ends the process: there is nothing to save.
    let found = evaluate(&model, &pairs, BatchSize::new(sizes)?, &StopFlag::default())?;
    let found = found.expect("an evaluation that is not asked to stop has a result");
    if !found.loss.is_finite() {
        let context = match first_not_finite(&bert)? {
            Some(weight) => weight,
            None => format!("all weights are finite: {} overflows", scope.dtype()),
        };
        return Err(Error::value("eval", format!("the loss is {}: {context}", found.loss)));
    }
    let losses: Map<_, _> =
        found.losses.iter().map(|(name, mean)| (name.to_string(), json!(mean))).collect();
    output::line(&match args.json {
        true => json!({ "loss": found.loss, "losses": losses, "tokens": found.tokens }).to_string(),
        false => masked_tokens_line(&found),
    });
    Ok(ExitCode::SUCCESS)
}
