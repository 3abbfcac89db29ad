use ferrotron_models::bench::*;
use ferrotron_models::gpt::GptConfig;
fn main() {
    let big = std::env::args().nth(1).as_deref() == Some("big");
    let mut c = if big {
        BenchConfig { model: GptConfig::gpt2(50304, 12, 768, 12, 256), micro_batch_size: 4, seq_length: 256, steps: 5, warmup: 2, dtype: ferrotron_tensor::DType::F32, threads: 2 }
    } else {
        BenchConfig { model: GptConfig::gpt2(65, 4, 128, 4, 64), micro_batch_size: 12, seq_length: 64, steps: 200, warmup: 5, dtype: ferrotron_tensor::DType::F32, threads: 2 }
    };
    if let Some(n) = std::env::args().nth(2) { c.steps = n.parse().unwrap(); }
    println!("{:?}", bench(&c).unwrap());
}
