//! Long runs, by hand: `cargo bench --bench soak -- TEXT_FILE`.
//!
//! Constant memory: pool bytes in use after step 10 and after step 1000 of the char model are equal.
//! With a text file (tinyshakespeare): nanoGPT's CPU recipe on three seeds, each to a validation loss of
//! at most 1.91 over the whole validation split. Results are recorded in `docs/results/soak-results.md`.

use ferrotron::models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron::models::data::{DataConfig, Dataset, Sampler, TokenSource, Validation};
use ferrotron::models::gpt::{Gpt, GptConfig};
use ferrotron::models::stop::StopFlag;
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::models::trainer::{Trainer, TrainerConfig};
use ferrotron::nn::schedule::{DecayStyle, LrSchedule, LrScheduleConfig};
use ferrotron::nn::{OptimizerConfig, Scope};
use ferrotron::{DType, Device, Result};
use std::path::Path;
use std::time::Instant;

const STEPS: u64 = 2000;

fn trainer(vocab: usize, seed: u64) -> Result<Trainer<Gpt>> {
    let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let schedule = LrScheduleConfig {
        style: DecayStyle::Cosine,
        max_lr: 1e-3,
        min_lr: 1e-4,
        warmup_steps: 100,
        decay_steps: STEPS,
        ..LrScheduleConfig::default()
    };
    let batch_size = BatchSizeConfig { micro_batch_size: 12, ..BatchSizeConfig::default() };
    let config = TrainerConfig {
        optimizer: OptimizerConfig::AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 },
        ..TrainerConfig::new(seed, LrSchedule::new(schedule)?, BatchSize::new(batch_size)?)
    };
    let scope = Scope::new(&Device::cpu(threads)?, DType::F32, seed);
    Trainer::<Gpt>::new(&scope, &GptConfig::gpt2(vocab, 4, 128, 4, 64), config)
}

fn constant_memory() -> Result<()> {
    let mut trainer = trainer(65, 1)?;
    let tokens = (0..100_000_u32).map(|i| i.wrapping_mul(2_654_435_761) % 65).collect();
    let sampler = Sampler::new(TokenSource::from_tokens(tokens, 65)?, 64, 1)?;
    let mut in_use = Vec::new();
    for step in 1..=1000 {
        trainer.step(&sampler)?;
        if step == 10 || step == 1000 {
            in_use.push(trainer.scope().device().memory().current);
        }
    }
    println!("pool bytes in use after step 10 and step 1000: {in_use:?}");
    assert_eq!(in_use[0], in_use[1]);
    Ok(())
}

fn recipe(path: &Path) -> Result<()> {
    let config = DataConfig::new(path);
    let tokenizer = Tokenizer::char(&config.text()?)?;
    let dataset = Dataset::open(&config, &tokenizer)?;
    let validation = Validation::new(dataset.validation.expect("a tenth is kept"), 64)?;
    for seed in [1, 2, 3] {
        let mut trainer = trainer(tokenizer.vocab_size(), seed)?;
        let sampler = Sampler::new(dataset.train.clone(), 64, seed)?;
        let started = Instant::now();
        for _ in 0..STEPS {
            trainer.step(&sampler)?;
        }
        let seconds = started.elapsed().as_secs_f64();
        let found = trainer.evaluate(&validation, &StopFlag::default())?;
        let loss = found.expect("nobody asks to stop").loss;
        println!("seed {seed}: validation loss {loss:.4} after {STEPS} steps in {seconds:.1} s");
        assert!(loss <= 1.91, "seed {seed} missed 1.91");
    }
    Ok(())
}

fn main() -> Result<()> {
    constant_memory()?;
    match std::env::args().skip(1).find(|argument| !argument.starts_with("--")) {
        Some(path) => recipe(Path::new(&path)),
        None => {
            println!("give a text file to run the recipe on three seeds");
            Ok(())
        }
    }
}
