//! Samples for validation and testing in the order of Megatron-LM.
//!
//! Megatron builds one order for all evaluations of a run: `eval_iters x (train_iters / eval_interval + 1)` global batches,
//! by the rules of training samples. Each evaluation takes those behind the evaluation before it. An evaluation therefore
//! has other samples than the one before, and a run that resumes goes on behind those of its last one.
//!
//! Source: `get_train_valid_test_num_samples` and `evaluate` in `megatron/training/training.py`.

use super::MegatronSampler;
use crate::blend::Blend;
use crate::{Batch, FiniteSamples, Samples, TokenBatch};
use ferrotron_tensor::{Error, Result};

/// The evaluations of a run, which decide Megatron's order.
#[derive(Debug, Clone, PartialEq)]
pub struct MegatronValidationConfig {
    /// Tokens of a sample.
    pub seq_length: usize,
    /// Samples of an evaluation, evaluation batches times their size; `None` for all samples of one epoch each time.
    pub samples: Option<u64>,
    /// Evaluations of the whole run: `train_iters / eval_interval + 1`, of a test part 1.
    pub evaluations: u64,
    /// The seed, of 32 bits as in NumPy.
    pub seed: u32,
}

/// The samples of a run's evaluations in Megatron-LM's order; as they are, those of the first one.
///
/// ```
/// use ferrotron_data::{
///     BlendConfig, BlendPaths, BlendedDataset, FiniteSamples, IndexedDatasetBuilder, MegatronValidation,
///     MegatronValidationConfig, Samples, Split, TokenType,
/// };
/// # let folder = tempfile::tempdir().unwrap();
/// let prefix = folder.path().join("my_text_document");
/// let mut builder = IndexedDatasetBuilder::new(&prefix, TokenType::U16)?;
/// for document in 0..10 {
///     builder.add_sequence(&[document; 6])?;
///     builder.end_document()?;
/// }
/// builder.finish()?;
///
/// let paths = BlendPaths::parse("--data-path", &[prefix.display().to_string()])?;
/// let split = Split::proportions([5.0, 5.0, 0.0])?; // the last five documents for validation
/// let dataset = BlendedDataset::open(&BlendConfig::Shared(paths, split), 10)?;
/// let config = MegatronValidationConfig { seq_length: 4, samples: Some(3), evaluations: 2, seed: 1234 };
/// let validation = MegatronValidation::new(&dataset.validation.unwrap(), &config)?;
/// let second = validation.of_evaluation(1).unwrap();
/// assert_eq!(second.len(), 3);
/// assert!(second.batch(0, 3)?.get::<u32>("inputs")?.iter().all(|&token| token >= 5));
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Clone)]
pub struct MegatronValidation {
    sampler: MegatronSampler,
    /// The first sample of this evaluation in the order of all.
    first: u64,
    samples: u64,
    /// Whether each evaluation has samples of its own.
    moves: bool,
}

impl MegatronValidation {
    /// Computes the order.
    ///
    /// # Errors
    /// The errors of [`MegatronSampler::new`], but not parts shorter than a sample, which Megatron reads again and again;
    /// also all samples of sets with weights, which have no end.
    pub fn new(blend: &Blend, config: &MegatronValidationConfig) -> Result<MegatronValidation> {
        let MegatronValidationConfig { seq_length, samples, evaluations, seed } = *config;
        let remedy = "a smaller --eval-iters, or 'all'";
        let total = samples.map(|samples| samples.saturating_mul(evaluations.max(1)));
        if total == Some(0) {
            return Err(Error::value("data", "an evaluation needs at least one sample"));
        }
        let sampler = MegatronSampler::order(blend, seq_length, total, seed, remedy)?;
        let samples = samples.unwrap_or(sampler.samples);
        Ok(MegatronValidation { sampler, first: 0, samples, moves: total.is_some() })
    }
}

impl Samples for MegatronValidation {
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        let here = self.samples.saturating_sub(first_sample).min(micro_batch as u64) as usize;
        let mut batch = TokenBatch::blank(first_sample, micro_batch, self.seq_length());
        let found = self.sampler.tokens(self.first + first_sample.min(self.samples), here)?;
        let filled = here * self.seq_length();
        batch.inputs[..filled].copy_from_slice(&found.inputs);
        batch.targets[..filled].copy_from_slice(&found.targets);
        batch.try_into()
    }

    fn seq_length(&self) -> usize {
        self.sampler.seq_length()
    }
}

impl FiniteSamples for MegatronValidation {
    fn len(&self) -> u64 {
        self.samples
    }

    fn of_evaluation(&self, number: u64) -> Option<Box<dyn FiniteSamples + '_>> {
        let first = number * self.samples;
        self.moves.then(|| Box::new(MegatronValidation { first, ..self.clone() }) as Box<_>)
    }
}
