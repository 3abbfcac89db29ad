//! Sizes of a model from a file or a command line may be anything. Each is refused in one line or works out, without
//! taking time or memory.

use ferrotron_models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron_models::bench::peak_rss_bytes;
use ferrotron_models::gpt::{Gpt, GptConfig};
use ferrotron_models::memory::{DocumentResets, MemoryEstimator, PlannedDevice};
use ferrotron_models::trainer::TrainerConfig;
use ferrotron_nn::Scope;
use ferrotron_nn::schedule::LrSchedule;
use ferrotron_parallel::mesh::ParallelDims;
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{DType, Device, Error};
use std::time::{Duration, Instant};

/// Fields that are counts, by their names in `config.json`.
const COUNTS: [&str; 8] = [
    "vocab_size",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "max_position_embeddings",
];

const VALUES: [u64; 14] = [
    0,
    1,
    3,
    10_000,
    65_536,
    100_000,
    1_000_000_000,
    (1 << 31) - 1,
    1 << 32,
    1 << 48,
    1_000_000_000_000_000,
    1 << 62,
    u64::MAX / 2 + 1,
    u64::MAX,
];

/// Plans, as a run is planned, a model of `config`.
fn plan(config: &GptConfig) -> Result<(), Error> {
    config.validate()?;
    assert!(config.flops(1, 64).is_finite() && config.num_parameters() <= 1_000_000_000_000_000);
    Gpt::new(&Scope::new(&Device::cpu(1)?, DType::F32, 1), config)?;
    let plan = MemoryEstimator::<Gpt> {
        model: config.clone(),
        layout: ParallelDims::single(),
        sequence_parallel: SequenceParallel::Off,
        trainer: TrainerConfig::new(
            1,
            LrSchedule::constant(1e-3)?,
            BatchSize::new(BatchSizeConfig { micro_batch_size: 1, ..BatchSizeConfig::default() })?,
        ),
        dtype: DType::F32,
        seq_length: 1,
        documents: DocumentResets::default(),
        device: PlannedDevice::Cpu { threads: 1 },
    };
    plan.stages().map(drop)
}

fn check(config: &GptConfig) {
    let start = Instant::now();
    if let Err(error) = plan(config) {
        let line = error.to_string();
        assert!(!line.contains('\n') && line.len() < 400, "{line}");
    }
    let (took, resident) = (start.elapsed(), peak_rss_bytes());
    assert!(took < Duration::from_secs(60), "{took:?}: {config:?}");
    assert!(resident < 1_000_000_000, "{resident} bytes: {config:?}");
}

/// `base` with other values of some fields.
fn with(base: &GptConfig, fields: &[(&str, u64)]) -> GptConfig {
    let mut value = serde_json::to_value(base).unwrap();
    fields.iter().for_each(|(name, count)| value[*name] = (*count).into());
    serde_json::from_value(value).unwrap()
}

#[test]
fn any_size_is_refused_or_works_out() {
    let gpt2 = GptConfig::gpt2(13, 2, 8, 2, 8);
    let llama = GptConfig::llama(13, 2, 8, 2, 1, 8);
    for base in [gpt2, llama] {
        for name in COUNTS {
            VALUES.into_iter().for_each(|value| check(&with(&base, &[(name, value)])));
        }
        for (i, first) in COUNTS.iter().enumerate() {
            for second in &COUNTS[..i] {
                for value in [1_u64 << 20, 1 << 32, 1 << 62, u64::MAX] {
                    check(&with(&base, &[(first, value), (second, value)]));
                }
            }
        }
        check(&with(&base, &COUNTS.map(|name| (name, u64::MAX))));
        GptConfig::llama(usize::MAX, usize::MAX, usize::MAX, usize::MAX, usize::MAX, usize::MAX)
            .validate()
            .unwrap_err();
    }
}

#[test]
fn what_is_too_large_is_named() {
    let error = |config: GptConfig| config.validate().unwrap_err().to_string();
    let layers = error(GptConfig::gpt2(65, 1_000_000_000, 128, 4, 64));
    assert!(layers.contains("num-layers 1000000000 is more than 10000"), "{layers}");
    let width = error(GptConfig::gpt2(65, 4, 1 << 40, 4, 64));
    assert!(width.contains("hidden-size 1099511627776") && width.contains("10^15"), "{width}");
}
