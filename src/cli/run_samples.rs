//! The data of a run once it is opened, and the samples that the run takes of it.

use ferrotron::Result;
use ferrotron::models::data::{
    Blend, Dataset, DocumentConfig, DocumentSamples, FiniteSamples, PackingConfig, PackingReport,
    Prefetch, Samples, TokenSource,
};
use ferrotron::models::run::{EvaluationTask, RunData, ValidationSet};
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::models::trainer::Model;
use std::sync::Arc;

use super::bert_input::BertInput;

/// The opened data of a run.
pub struct RunInput {
    /// The tokens for training and validation, one after another.
    pub dataset: Dataset,
    /// The samples of a BERT, if the model is one.
    pub bert: Option<BertInput>,
    /// The samples of Megatron's data sets, if the options name such.
    pub blended: Option<BlendedInput>,
    /// The streams of `--valid-data` by name, if each is evaluated by itself.
    pub validation_streams: Vec<(String, TokenSource)>,
    /// The treatment of the ends of documents.
    pub documents: Option<DocumentConfig>,
}

/// The samples of Megatron's data sets.
pub struct BlendedInput {
    pub train: Arc<dyn Samples>,
    /// The sets of evaluations, by name if each is evaluated by itself.
    pub validation: Vec<(Option<String>, Blend)>,
    pub test: Option<Blend>,
    /// The packing of fine-tuning samples, and its result for training.
    pub packing: Option<(PackingConfig, PackingReport)>,
    /// The seed of Megatron's order, if samples have that order.
    pub megatron_seed: Option<u32>,
    /// A checksum of what decides the order beside the tokens.
    pub order_crc32: Option<u32>,
}

/// The numbers that decide the order of training samples beside the data.
pub struct OrderLength {
    /// The number of samples of the whole run, if the order depends on it.
    pub samples: Option<u64>,
    pub seed: u64,
    /// The place in the order, from the checkpoint of a resumed run.
    pub state: Option<Vec<u64>>,
}

/// The samples that a run takes of its data, beside the validation of its configuration.
pub struct SampleScope {
    /// The seed of the order of training.
    pub seed: u64,
    /// The samples of a batch of evaluations.
    pub eval_batch: usize,
    /// Batches of the test part; `None` for all of it.
    pub test_iters: Option<u64>,
}

impl RunInput {
    /// The data of a BERT.
    pub fn of_bert(dataset: Dataset, bert: BertInput) -> RunInput {
        let (blended, documents) = (None, None);
        RunInput { dataset, bert: Some(bert), blended, validation_streams: Vec::new(), documents }
    }

    /// A checksum of what decides the order of samples beside the tokens, if anything does.
    pub fn order_crc32(&self) -> Option<u32> {
        match &self.bert {
            Some(bert) => bert.order_crc32,
            None => self.blended.as_ref()?.order_crc32,
        }
    }

    /// The packing of the training samples, if they are packed.
    pub fn packing(&self) -> Option<PackingReport> {
        Some(self.blended.as_ref()?.packing?.1)
    }

    /// The tokens that an evaluation reads one after another, if it does.
    pub fn evaluated_stream(&self) -> Option<&TokenSource> {
        let mixed = |blended: &BlendedInput| {
            let several = |(_, blend): &(Option<String>, Blend)| blend.num_sets() > 1;
            blended.packing.is_some()
                || blended.megatron_seed.is_some()
                || blended.validation.len() > 1
                || blended.validation.iter().any(several)
        };
        let mixed = self.blended.as_ref().is_some_and(mixed);
        self.dataset.validation.as_ref().filter(|_| !mixed && self.validation_streams.is_empty())
    }
}

/// Samples for evaluations, with the name of their set if the run has several.
pub type NamedSamples = (Option<String>, Box<dyn FiniteSamples>);

/// The samples of a run.
pub struct RunSamples {
    train: Prefetch,
    validation: Vec<NamedSamples>,
    /// Samples of the evaluation behind the last step, if there is one.
    test: Option<Box<dyn FiniteSamples>>,
}

impl RunSamples {
    /// Reads the training samples ahead.
    pub fn new(
        train: Arc<dyn Samples>,
        validation: Vec<NamedSamples>,
        test: Option<Box<dyn FiniteSamples>>,
        documents: Option<DocumentConfig>,
    ) -> Result<RunSamples> {
        let Some(config) = documents else {
            return Ok(RunSamples { train: Prefetch::new(train)?, validation, test });
        };
        let train = Prefetch::new(Arc::new(DocumentSamples::new(train, config)))?;
        let ended = |samples: Box<dyn FiniteSamples>| -> Box<dyn FiniteSamples> {
            Box::new(DocumentSamples::new(samples, config))
        };
        let validation = validation.into_iter().map(|(name, samples)| (name, ended(samples)));
        Ok(RunSamples { train, validation: validation.collect(), test: test.map(ended) })
    }

    /// The samples of the evaluation behind the last step, if there is one.
    pub fn test(&self) -> Option<&dyn FiniteSamples> {
        self.test.as_deref()
    }

    /// The samples and tasks as a run takes them.
    pub fn run_data<'a, M: Model>(
        &'a self,
        tasks: &'a [Box<dyn EvaluationTask<M>>],
        tokenizer: &'a Tokenizer,
    ) -> RunData<'a, M> {
        let set = |(name, samples): &'a NamedSamples| ValidationSet {
            name: name.as_deref(),
            samples: &**samples,
        };
        RunData {
            train: &self.train,
            validation: self.validation.iter().map(set).collect(),
            tasks: tasks.iter().map(|task| &**task).collect(),
            tokenizer: Some(tokenizer),
        }
    }
}
