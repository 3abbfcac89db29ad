//! Compares predictions with published runs: `cargo bench -p ferrotron-planner`.
//!
//! Words after `--` choose what follows PTD-P's first table: `plans`, `figures`, `recomputation`, `megatron`, `zero`; all
//! without one.
//! No number is fitted to a row that it predicts: a row's scale of the products' efficiency is fitted to other rows of its
//! table, and that of figures and of ZeRO-3 to PTD-P's first table.

#[path = "../../tests/korthikanti/mod.rs"]
mod korthikanti;

mod figures;
mod ptd_p;
mod recomputation;
mod run;
mod scaling;

use ferrotron_tensor::Result;
use std::time::Instant;

fn main() -> Result<()> {
    // `cargo test` runs benches too, without this argument.
    if !std::env::args().any(|argument| argument == "--bench") {
        return Ok(());
    }
    let words: Vec<String> =
        std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let wanted = |name: &str| words.is_empty() || words.iter().any(|word| word == name);
    let started = Instant::now();
    let scale = ptd_p::table()?;
    if wanted("figures") {
        figures::table(scale)?;
    }
    if wanted("plans") {
        ptd_p::plans(scale)?;
    }
    if wanted("recomputation") {
        recomputation::tables(scale)?;
    }
    if wanted("megatron") {
        scaling::megatron()?;
    }
    if wanted("zero") {
        scaling::zero(scale)?;
    }
    println!("{:.1} s in all", started.elapsed().as_secs_f64());
    Ok(())
}
