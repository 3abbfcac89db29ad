//! Tokens per second that GPT-2 124M generates greedily, in f32 and in bf16, 1, 4 and 8 texts together, and the bytes of
//! weights that are read for them beside what the memory gives one thread and all, in each state of the core.
//! `benches/peers/transformers_generate.py` prints the same of Hugging Face's transformers; neither needs trained weights.
//!
//! `cargo bench --bench generate [-- TOKENS]`. A token after the prompt costs a forward over one position of each text,
//! which reads every weight once but for the embeddings.

#[path = "common/states.rs"]
mod states;

use ferrotron::models::bench::median;
use ferrotron::models::generate::{GenerationRequest, Sampling, generate_batch};
use ferrotron::models::gpt::Gpt;
use ferrotron::models::presets::Preset;
use ferrotron::nn::Scope;
use ferrotron::tensor::ceilings::Ceilings;
use ferrotron::{DType, Device, Result};
use states::{STATES, Sample, Watch, by_state, fast, probe};
use std::ops::ControlFlow;

const ROUNDS: usize = 3;
const PROMPT: u32 = 16;
const BATCHES: [usize; 3] = [1, 4, 8];

fn main() -> Result<()> {
    let tokens = std::env::args().filter_map(|arg| arg.parse().ok()).next().unwrap_or(64);
    let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    for threads in [1, threads] {
        let read = Ceilings::measure(&Device::cpu(threads)?)?.read / 1e9;
        println!("memory: {read:.1} GB/s read by {threads} threads");
    }
    let device = Device::cpu(threads)?;
    let config = Preset::find("gpt2-124m").expect("the preset exists").config();
    // Learned positions are not read but for one.
    let weights =
        config.num_parameters() as usize - config.max_position_embeddings * config.hidden_size;
    let mut found = Vec::new();
    for dtype in [DType::F32, DType::BF16] {
        let gpt = Gpt::new(&Scope::new(&device, dtype, 1), &config)?;
        for batch in BATCHES {
            steps(&gpt, batch, tokens)?;
            let rounds = (0..ROUNDS).map(|_| steps(&gpt, batch, tokens));
            found.push((dtype, batch, rounds.collect::<Result<Vec<_>>>()?.concat()));
        }
    }
    let fast = fast(found.iter().flat_map(|(.., samples)| samples));
    for (dtype, batch, samples) in found {
        for (state, taken) in STATES.iter().zip(by_state(&samples, fast)) {
            let (count, one) = (taken.len(), median(taken));
            let (rate, speed) = (batch as f64 / one, (weights * dtype.size()) as f64 / one / 1e9);
            if count > 0 {
                println!(
                    "gpt2-124m {dtype}, {batch} together: {rate:.1} tokens/s, {speed:.1} GB/s, {threads} threads, {state} ({count})"
                );
            }
        }
    }
    Ok(())
}

/// The steps from one token of each text to the next, behind the first, which takes the whole prompt.
fn steps(gpt: &Gpt, batch: usize, tokens: usize) -> Result<Vec<Sample>> {
    let request = |text: usize| GenerationRequest {
        prompt: (0..PROMPT).map(|i| i * 997 + 1 + text as u32).collect(),
        max_new_tokens: tokens + 1,
        sampling: Sampling::GREEDY,
    };
    let requests: Vec<GenerationRequest> = (0..batch).map(request).collect();
    let (mut samples, mut watch): (Vec<Sample>, Option<Watch>) = (Vec::new(), None);
    generate_batch(gpt, &requests, |text, _| {
        if text + 1 == batch {
            samples.extend(watch.take().map(Watch::stop));
            watch = Some(Watch::start(probe));
        }
        ControlFlow::Continue(())
    })?;
    Ok(samples)
}
