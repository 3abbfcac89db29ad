//! The unit by which a data set is divided into parts for training, validation and testing.

use crate::indexed_dataset::IndexedDataset;
use crate::token_fingerprint::holds_pairs;
use ferrotron_tensor::{Error, Result};
use std::ops::Range;
use std::path::Path;

/// A sequence, the two sequences of a document, or all of them.
#[derive(Debug, Clone, Copy)]
pub(super) enum Unit {
    Sequence,
    /// A prompt and a completion, as `ferrotron tokenize --prompt-completion` writes them.
    Pair,
    /// A document of sentences.
    Document,
}

impl Unit {
    /// Divides the sequences of `dataset`.
    ///
    /// # Errors
    /// A document that is no pair of sequences, or a fingerprint that says so.
    pub fn ranges(
        self,
        dataset: &IndexedDataset,
        divide: impl Fn(u64) -> [Range<u64>; 3],
    ) -> Result<[Range<u64>; 3]> {
        match self {
            Unit::Sequence => Ok(divide(dataset.num_sequences())),
            Unit::Pair => {
                check_pairs(dataset)?;
                let pairs = divide(dataset.num_documents());
                Ok(pairs.map(|pairs| 2 * pairs.start..2 * pairs.end))
            }
            Unit::Document => {
                let end = |documents: u64| match documents {
                    0 => Ok(0),
                    _ => Ok(dataset.document(documents - 1)?.end),
                };
                let [training, validation, test] = divide(dataset.num_documents());
                let range = |documents: Range<u64>| Ok(end(documents.start)?..end(documents.end)?);
                Ok([range(training)?, range(validation)?, range(test)?])
            }
        }
    }
}

fn check_pairs(dataset: &IndexedDataset) -> Result<()> {
    let name = dataset.name();
    let why =
        match (holds_pairs(Path::new(name)), dataset.find_document(|sequences| sequences != 2)?) {
            (Some(false), _) => "its fingerprint says that it was made without".to_string(),
            (_, Some((document, sequences))) => {
                format!("document {document} has {sequences} sequences, not two")
            }
            _ => return Ok(()),
        };
    let message = format!(
        "'{name}' has no prompts and completions: {why}; make such a data set by `ferrotron tokenize --prompt-completion`"
    );
    Err(Error::config("--packing", message))
}
