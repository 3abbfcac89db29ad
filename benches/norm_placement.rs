//! Figure 7 of Shoeybi et al., arXiv 1909.08053, made small: deep BERTs with the norms behind the residual additions
//! beside those with the norms before attention and MLP. By hand, on one thread:
//! `cargo bench --bench norm_placement -- [STEPS [LAYERS [LEARNING_RATE]]]`.
//!
//! 48 blocks of width 64, two seeds, on a language that is learned in a hundred steps: runs of one letter out of eight,
//! so that the letters beside a masked one name it. What tells nothing of the sample is ln 8 = 2.079 nats at best. It
//! prints losses over masked tokens and draws them into the folder for temporary files. `docs/results/soak-results.md`
//! has what came out.

use ferrotron::models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron::models::bert::{Bert, BertConfig, NormPlacement};
use ferrotron::models::data::{Documents, SentencePairs};
use ferrotron::models::loss_curve::LossCurve;
use ferrotron::models::plot::plot_runs;
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::models::trainer::{Trainer, TrainerConfig};
use ferrotron::nn::schedule::{DecayStyle, LrSchedule, LrScheduleConfig};
use ferrotron::nn::{OptimizerConfig, Scope};
use ferrotron::{DType, Device, Result};
use std::time::Instant;

/// Documents of the text, each of two sentences of four runs.
const DOCUMENTS: usize = 1000;
/// Letters of the language.
const LETTERS: u64 = 8;
/// Length of a run: longer than what a sample holds of a sentence.
const RUN: usize = 64;
/// Steps of a run.
const STEPS: u64 = 100;
const LAYERS: usize = 48;
const WIDTH: usize = 64;
const HEADS: usize = 4;
const LENGTH: usize = 32;
const BATCH: usize = 8;
const LEARNING_RATE: f64 = 2e-3;
/// The width at which BERT's initial weights have standard deviation 0.02; here they are scaled to the same gain.
const PAPER_WIDTH: f64 = 1024.0;
/// Steps at the end of a run whose mean loss is its result.
const LAST: usize = 50;

/// The text, of Knuth's linear congruential generator (MMIX).
fn text() -> String {
    let mut state = 12345_u64;
    let mut draw = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % LETTERS
    };
    let mut text = String::new();
    for _ in 0..DOCUMENTS {
        for _ in 0..2 {
            let mut last = LETTERS;
            for _ in 0..4 {
                // Neighbouring runs have different letters.
                let mut letter = draw();
                while letter == last {
                    letter = draw();
                }
                last = letter;
                text.extend(std::iter::repeat_n(char::from(b'a' + letter as u8), RUN));
            }
            text.push('\n');
        }
        text.push('\n');
    }
    text
}

/// The losses over masked tokens of `steps` steps.
fn train(
    placement: NormPlacement,
    seed: u64,
    (steps, layers, learning_rate): (u64, usize, f64),
) -> Result<LossCurve> {
    let text = text();
    let tokenizer = Tokenizer::char(&text)?;
    let special = tokenizer.special_tokens()?;
    let documents = Documents::from_text(&text, &tokenizer)?;
    let samples = SentencePairs::new(documents, special, LENGTH, seed)?;
    let schedule = LrScheduleConfig {
        style: DecayStyle::Linear,
        max_lr: learning_rate,
        min_lr: 0.0,
        warmup_steps: steps / 100,
        decay_steps: steps,
        ..LrScheduleConfig::default()
    };
    let sizes = BatchSizeConfig { micro_batch_size: BATCH, ..BatchSizeConfig::default() };
    let config = TrainerConfig {
        optimizer: OptimizerConfig::AdamW {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
        },
        ..TrainerConfig::new(seed, LrSchedule::new(schedule)?, BatchSize::new(sizes)?)
    };
    let model = BertConfig {
        init_method_std: 0.02 * (PAPER_WIDTH / WIDTH as f64).sqrt(),
        binary_head: false,
        ..BertConfig::new(placement, special.vocab_size, layers, WIDTH, HEADS, LENGTH)
    };
    let scope = Scope::new(&Device::cpu(1)?, DType::F32, seed);
    let mut trainer = Trainer::<Bert>::new(&scope, &model, config)?;
    let losses = (1..=steps).map(|step| Ok((step, trainer.step(&samples)?.losses[0].1)));
    Ok(LossCurve { training: losses.collect::<Result<_>>()?, validation: Vec::new() })
}

/// The mean of the last losses.
fn last(curve: &LossCurve) -> f64 {
    let losses = &curve.training[curve.training.len().saturating_sub(LAST)..];
    losses.iter().map(|(_, loss)| loss).sum::<f64>() / losses.len() as f64
}

fn main() -> Result<()> {
    let mut numbers = std::env::args().filter_map(|word| word.parse::<f64>().ok());
    let steps = numbers.next().map_or(STEPS, |steps| steps as u64);
    let layers = numbers.next().map_or(LAYERS, |layers| layers as usize);
    let learning_rate = numbers.next().unwrap_or(LEARNING_RATE);
    let mut runs = Vec::new();
    for (placement, words) in [
        (NormPlacement::Pre, "norms before attention and MLP"),
        (NormPlacement::Post, "norms behind the additions"),
    ] {
        for seed in [1, 2] {
            let started = Instant::now();
            let curve = train(placement, seed, (steps, layers, learning_rate))?;
            let (seconds, loss) = (started.elapsed().as_secs_f64(), last(&curve));
            println!("{words}, seed {seed}: loss {loss:.4} after {steps} steps in {seconds:.0} s");
            runs.push((format!("{words}, seed {seed}"), curve));
        }
    }
    let picture = std::env::temp_dir().join("norm-placement.svg");
    plot_runs(&runs, &picture)?;
    println!("{}", picture.display());
    Ok(())
}
