//! Token data: from files on disk to batches, in an order that needs no state.
//!
//! ```text
//! files ---------> Shard (open file) ----+
//! (text, .bin)                           +--> TokenSource --split--> train      --> Sampler    --> Batch
//! text + tokenizer ----------------------+                          validation --> Validation --> Batch
//! ```
//!
//! A GPT takes its samples of one stream of tokens. A BERT takes pairs of segments of [`Documents`]: text alone, as
//! [`SentencePairs`] and [`HeldOutPairs`].
//!
//! **Files.** The format is recognised by the header, then by the extension:
//!
//! | file | recognised by | layout (little-endian) |
//! |---|---|---|
//! | llm.c shard, GPT-2 | i32 20240520, version 1 | 256 x i32 header, header\[2\] tokens of u16 |
//! | llm.c shard, Llama 3 | i32 20240801, version 7 | the same with u32 tokens |
//! | Megatron | an `.idx` beside it, or `PREFIX.idx` for `PREFIX` | [`IndexedDataset`] |
//! | nanoGPT | extension `.bin` | u16 tokens, no header |
//! | text | anything else | UTF-8 (any bytes with the byte tokenizer), a leading byte-order mark left out |
//!
//! Of token files, and of text under the byte tokenizer, only what a batch needs is read, at the time; several
//! files count as one stream, laid end to end. Other text is tokenized when it is opened. A file must not change
//! while a run reads it: one that becomes shorter is an error, one that is overwritten is read as it is then.
//!
//! **Order.** [`Sampler`] numbers the samples of a run from 0 and gives each a place in the data as a
//! function of the seed alone, so that micro batch, accumulation and ranks cut the same sequence of
//! samples, and a run resumes by its count of consumed samples. [`MegatronSampler`] draws them as Megatron-LM does, and a
//! [`Blend`] takes them from several data sets by weight. [`PackedSampler`] packs prompts and completions for fine-tuning.

#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod batch;
mod blend;
mod choice_batch;
mod dataset;
mod document_samples;
mod documents;
pub mod entropy;
mod fingerprint;
mod generated;
mod indexed_dataset;
mod megatron_order;
mod packing;
mod pair_batch;
mod permutation;
mod prefetch;
#[cfg(feature = "preprocess")]
pub mod preprocess;
mod sampler;
mod sentence_pairs;
mod shard;
mod source;
mod split;
pub mod tasks;
#[cfg(test)]
mod thread_use;
mod token_array;
mod token_file;
mod token_fingerprint;
mod token_type;
pub mod tokenizer;
mod validation;

pub use batch::{ArrayElement, ArrayValues, Batch, BatchArray, IGNORE, TokenBatch, num_valid};
pub use blend::{Blend, BlendConfig, BlendPaths, BlendedDataset, distinct_names};
pub use choice_batch::ChoiceBatch;
pub use dataset::{DataConfig, Dataset};
pub use document_samples::{DocumentConfig, DocumentSamples};
pub use documents::Documents;
pub use fingerprint::{DataChange, DataFingerprint, DataOrigin, tokens_in_words};
pub use generated::GeneratedSamples;
pub use indexed_dataset::{BuilderState, IndexedDataset, IndexedDatasetBuilder};
pub use megatron_order::{
    MegatronOrderConfig, MegatronSampler, MegatronValidation, MegatronValidationConfig,
};
pub use packing::{
    LongSamples, PackedSampler, PackedSamples, PackingAlgorithm, PackingConfig, PackingReport,
};
pub use pair_batch::PairBatch;
pub use permutation::Permutation;
pub use prefetch::Prefetch;
pub use sampler::{FiniteSamples, Sampler, Samples};
pub use sentence_pairs::{HeldOutPairs, SentencePairs};
pub use source::TokenSource;
pub use split::Split;
pub use token_fingerprint::holds_pairs;
pub use token_type::TokenType;
pub use validation::Validation;
