//! The options that pack fine-tuning samples.

use clap::{Args, ValueEnum};
use ferrotron::models::data::{LongSamples, PackingAlgorithm, PackingConfig};

use crate::cli::options::Options;

#[derive(Debug, Clone, Args)]
pub struct PackingArgs {
    /// Fine-tune on the pairs of `tokenize --prompt-completion`: the loss counts completions alone, and first-fit packs whole
    /// pairs into sequences, in the order of the data or from the longest pair on. Attention and positions stop at their
    /// borders
    #[arg(long, value_name = "ALGORITHM")]
    packing: Option<PackingChoice>,
    /// Cut pairs that are longer than --seq-length, which are refused otherwise, and leave those out whose prompt is
    #[arg(long, requires = "packing")]
    truncate_samples: bool,
}

/// The order in which samples are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PackingChoice {
    FirstFit,
    FirstFitDecreasing,
}

impl PackingArgs {
    /// Reads the options of a run.
    pub fn from_options(options: &Options) -> PackingArgs {
        let name = options.values("packing").pop();
        PackingArgs {
            packing: name.and_then(|name| PackingChoice::from_str(&name, false).ok()),
            truncate_samples: options.states_any(&["truncate-samples"]),
        }
    }

    /// Whether samples are packed.
    pub fn is_on(&self) -> bool {
        self.packing.is_some()
    }

    /// The packing into sequences of `seq_length`, if there is one.
    pub fn config(&self, seq_length: usize) -> Option<PackingConfig> {
        let algorithm = match self.packing? {
            PackingChoice::FirstFit => PackingAlgorithm::FirstFit,
            PackingChoice::FirstFitDecreasing => PackingAlgorithm::FirstFitDecreasing,
        };
        let long_samples =
            if self.truncate_samples { LongSamples::Truncate } else { LongSamples::Refuse };
        Some(PackingConfig { seq_length, algorithm, long_samples })
    }
}
