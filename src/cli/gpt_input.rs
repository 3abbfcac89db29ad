//! The data of a GPT: files or Megatron's data sets, in the order of training and of evaluations.

use ferrotron::models::data::{
    Blend, BlendedDataset, FiniteSamples, MegatronOrderConfig, MegatronSampler, MegatronValidation,
    MegatronValidationConfig, PackedSampler, PackedSamples, PackingAlgorithm, PackingConfig,
    Samples, TokenSource, Validation,
};
use ferrotron::models::run::RunConfig;
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::tensor::At;
use ferrotron::{Error, Result};
use std::path::PathBuf;
use std::sync::Arc;

use super::args::data::{DataOrder, DataSource};
use super::args::train::TrainArgs;
use super::corpus;
use super::run_samples::{
    BlendedInput, NamedSamples, OrderLength, RunInput, RunSamples, SampleScope,
};
use super::validation_sets::{
    blends_of_losses, check_without_weights, names_of_files, warn_of_missing,
};

/// Opens the data that `source` names; `warn` is told of files that are left out.
pub fn open(
    args: &TrainArgs,
    source: &DataSource,
    order: &OrderLength,
    tokenizer: &Tokenizer,
    warn: impl Fn(&str),
) -> Result<RunInput> {
    let documents = args.data.documents(tokenizer)?;
    let seq_length = args.model.seq_length()?;
    let packing = args.data.packing.config(seq_length);
    let resets = documents.is_some_and(|documents| documents.reset_attention);
    let option = if packing.is_some() { "--packing" } else { "--reset-attention-mask" };
    if (resets || packing.is_some()) && args.execution.captures_steps() {
        let message =
            "a CUDA graph would repeat the documents of one batch: leave out --enable-cuda-graph";
        return Err(Error::config(option, message));
    }
    let several = args.evaluation.multiple_validation_sets;
    let config = match source {
        DataSource::Files(config) => {
            corpus::warn_of_pairs(config.data.iter().map(PathBuf::as_path), &warn);
            let (dataset, validation_streams) = match several {
                true => {
                    let names = names_of_files(config)?;
                    let (dataset, streams) = corpus::open_with_sets(config, tokenizer, warn)?;
                    (dataset, names.into_iter().zip(streams).collect())
                }
                false => (corpus::open(config, tokenizer, warn)?, Vec::new()),
            };
            return Ok(RunInput {
                dataset,
                bert: None,
                blended: None,
                validation_streams,
                documents,
            });
        }
        DataSource::Sets(config) => config,
    };
    if several {
        check_without_weights(config)?;
    }
    config.check_tokenizer(tokenizer)?;
    let sets = match packing {
        Some(_) => BlendedDataset::open_pairs(config, tokenizer.vocab_size())?,
        None => {
            corpus::warn_of_pairs(config.prefixes(), &warn);
            BlendedDataset::open(config, tokenizer.vocab_size())?
        }
    };
    let dataset = sets.streams();
    let BlendedDataset { training, validation, test } = sets;
    let validation = blends_of_losses(config, validation, several, &warn)?;
    test.iter().for_each(|blend| warn_of_missing(config, blend, "testing", &warn));
    let (mut packed, mut megatron_seed) = (None, None);
    let (train, order_crc32): (Arc<dyn Samples>, _) =
        match (packing, args.data.data_order, order.samples) {
            (Some(config), ..) => {
                let sampler = PackedSampler::new(&training, &config, order.seed)?;
                packed = Some((config, sampler.report()));
                let crc32 = sampler.crc32();
                (Arc::new(sampler), Some(crc32))
            }
            (None, DataOrder::Megatron, Some(samples)) => {
                let seed = u32::try_from(order.seed).map_err(|_| {
                    let message = format!(
                        "{} is beyond the 32 bits of --data-order megatron: at most {}",
                        order.seed,
                        u32::MAX
                    );
                    Error::config("--seed", message)
                })?;
                megatron_seed = Some(seed);
                let config = MegatronOrderConfig { seq_length, samples, seed };
                let sampler = MegatronSampler::new(&training, &config)?;
                let crc32 = sampler.crc32();
                (Arc::new(sampler), Some(crc32))
            }
            _ => (training.sampler(seq_length, order.seed)?.into(), training.weights_crc32()),
        };
    order.state.iter().for_each(|state| train.resume_order(state));
    let packing = packed;
    let blended =
        Some(BlendedInput { train, validation, test, packing, megatron_seed, order_crc32 });
    Ok(RunInput { dataset, bert: None, blended, validation_streams: Vec::new(), documents })
}

/// The samples of a run: training in the order of a seed, and those of evaluations.
pub fn samples(input: &RunInput, run: &RunConfig, scope: &SampleScope) -> Result<RunSamples> {
    let &SampleScope { seed, eval_batch, test_iters } = scope;
    let limit = |iters: Option<u64>| iters.map(|all| all.saturating_mul(eval_batch as u64));
    let (validation_limit, test_limit) = (limit(run.eval_iters), limit(test_iters));
    let samples = validation_limit.unwrap_or(u64::MAX);
    let wanted = run.intervals.eval_interval > 0 && samples > 0;
    let Some(BlendedInput { train, validation, test, packing, megatron_seed, .. }) = &input.blended
    else {
        let own = run.samples(&input.dataset, seed, eval_batch)?;
        let boxed = |samples: Validation| -> Box<dyn FiniteSamples> { Box::new(samples) };
        let stream = |(name, source): &(String, TokenSource)| -> Result<NamedSamples> {
            let windows = Validation::new(source.clone(), run.seq_length);
            let windows = windows.and_then(|windows| windows.first(samples)).at(name)?;
            Ok((Some(name.clone()), boxed(windows)))
        };
        let validation = match &input.validation_streams[..] {
            [] => own.validation.map(|samples| (None, boxed(samples))).into_iter().collect(),
            streams if wanted => streams.iter().map(stream).collect::<Result<Vec<_>>>()?,
            _ => Vec::new(),
        };
        return RunSamples::new(Arc::new(own.train), validation, None, input.documents);
    };
    let packing = packing.map(|(config, _)| config);
    let evaluations = run.intervals.train_iters / run.intervals.eval_interval.max(1) + 1;
    let set = |blend: &Blend, limit, evaluations| {
        let order = megatron_seed.map(|seed| (seed, evaluations));
        windows(blend, run.seq_length, limit, packing, order)
    };
    let validation = validation.iter().filter(|_| wanted);
    let named = |(name, blend): &(Option<String>, Blend)| -> Result<NamedSamples> {
        let samples = set(blend, validation_limit, evaluations);
        let samples = match name {
            Some(name) => samples.at(name)?,
            None => samples?,
        };
        Ok((name.clone(), samples))
    };
    let validation = validation.map(named).collect::<Result<Vec<_>>>()?;
    let tested = run.intervals.eval_interval > 0 && test_limit != Some(0);
    let test = test.as_ref().filter(|_| tested);
    let test = test.map(|blend| set(blend, test_limit, 1)).transpose()?;
    RunSamples::new(train.clone(), validation, test, input.documents)
}

/// The samples of evaluations of a blend: the first `samples` or all of them, in the order of the file, or in Megatron's for
/// a seed and a number of evaluations.
pub fn windows(
    blend: &Blend,
    seq_length: usize,
    samples: Option<u64>,
    packing: Option<PackingConfig>,
    megatron: Option<(u32, u64)>,
) -> Result<Box<dyn FiniteSamples>> {
    let limit = samples.unwrap_or(u64::MAX);
    Ok(match (packing, megatron) {
        (Some(config), _) => {
            // The first sequences from the longest sample on would be of long ones alone.
            let algorithm = PackingAlgorithm::FirstFit;
            let config = PackingConfig { algorithm, ..config };
            Box::new(PackedSamples::new(blend, &config)?.first(limit))
        }
        (None, Some((seed, evaluations))) => {
            let config = MegatronValidationConfig { seq_length, samples, evaluations, seed };
            Box::new(MegatronValidation::new(blend, &config)?)
        }
        (None, None) => blend.validation(seq_length, limit)?,
    })
}
