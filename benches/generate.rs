//! Tokens per second that GPT-2 124M generates greedily, one sequence at a time, in f32 and in bf16, and the bytes of
//! weights that are read for them. `benches/peers/transformers_generate.py` prints the same of Hugging Face's
//! transformers; neither needs trained weights.
//!
//! `cargo bench --bench generate [-- TOKENS]`. A token after the prompt costs a forward over one position, which reads
//! every weight once but for the embeddings.

use ferrotron::models::bench::median;
use ferrotron::models::generate::{Sampling, generate};
use ferrotron::models::gpt::Gpt;
use ferrotron::models::presets::Preset;
use ferrotron::nn::Scope;
use ferrotron::{DType, Device, Result};
use std::ops::ControlFlow;
use std::time::Instant;

const ROUNDS: usize = 3;
const PROMPT: u32 = 16;

fn main() -> Result<()> {
    let tokens = std::env::args().filter_map(|arg| arg.parse().ok()).next().unwrap_or(64);
    let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let device = Device::cpu(threads)?;
    let config = Preset::find("gpt2-124m").expect("the preset exists").config();
    // Learned positions are not read but for one.
    let weights =
        config.num_parameters() as usize - config.max_position_embeddings * config.hidden_size;
    for dtype in [DType::F32, DType::BF16] {
        let gpt = Gpt::new(&Scope::new(&device, dtype, 1), &config)?;
        let prompt: Vec<u32> = (0..PROMPT).map(|i| i * 997 + 1).collect();
        let mut seconds = Vec::new();
        for _ in 0..=ROUNDS {
            let mut moments = Vec::new();
            generate(&gpt, &prompt, tokens + 1, &Sampling::GREEDY, |_| {
                moments.push(Instant::now());
                ControlFlow::Continue(())
            })?;
            // From the first token on, which took the whole prompt.
            let whole = moments[tokens].duration_since(moments[0]).as_secs_f64();
            seconds.push(whole / tokens as f64);
        }
        let one = median(seconds[1..].to_vec());
        let speed = (weights * dtype.size()) as f64 / one / 1e9;
        println!(
            "gpt2-124m {dtype}: {:.1} tokens/s, {speed:.1} GB/s, {threads} threads",
            1.0 / one
        );
    }
    Ok(())
}
