//! The tokenizer of a run, and the size of its model's vocabulary.

use ferrotron::models::checkpoint::Checkpoint;
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::{Error, Result};

use super::architecture::TrainedModel;
use super::args::train::TrainArgs;
use super::corpus;
use super::options::imported::Imported;

/// The tokenizer of the checkpoint or folder that a run begins with, or that which its options name.
pub fn open_tokenizer(
    args: &TrainArgs,
    resumed: Option<&Checkpoint>,
    imported: Option<&Imported>,
) -> Result<Tokenizer> {
    let known = match resumed {
        Some(checkpoint) => checkpoint.tokenizer().cloned(),
        None => imported.map(Imported::tokenizer).transpose()?.flatten(),
    };
    match known {
        Some(tokenizer) => match args.data.vocab_size {
            Some(size) if size != tokenizer.vocab_size() => {
                let message =
                    format!("{size}, but the run has {} token ids", tokenizer.vocab_size());
                Err(Error::config("--vocab-size", message))
            }
            _ => Ok(tokenizer),
        },
        None if args.model.task.is_some() && args.data.tokenizer == "char" => {
            let message = "a task has no text for a char vocabulary: give --pretrained-checkpoint, or byte, or the path of a \
                           vocab.txt or tokenizer.json";
            Err(Error::config("--tokenizer", message))
        }
        None => args.data.tokenizer(corpus::text),
    }
}

/// Number of token ids of the model that a run goes on from, which may have more than the tokenizer.
pub fn known_vocab_size<M: TrainedModel>(
    resumed: Option<&Checkpoint>,
    imported: Option<&Imported>,
) -> Result<Option<usize>> {
    let config = match (resumed, imported) {
        (_, Some(imported)) => Some(imported.model_config::<M>()?),
        // Another architecture is refused with the rest of the shape.
        (Some(checkpoint), None) => M::config_from(checkpoint).ok(),
        (None, None) => None,
    };
    Ok(config.map(|config| M::sizes(&config).vocab_size))
}
