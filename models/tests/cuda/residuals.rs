//! Residual connections: which additions are kernels, and that losses are those of the CPU either way.

use ferrotron_models::bench::{BenchConfig, BenchReport, bench};
use ferrotron_models::gpt::{
    GptConfig, Recompute, RecomputeModules, RecomputedAttention, RecomputedMlp,
};
use ferrotron_models::trainer::ParallelConfig;
use ferrotron_tensor::{DType, Device, Result};

const LAYERS: usize = 2;

/// Launches of `add` in the forward pass of a step.
fn additions(report: &BenchReport) -> f64 {
    let profile = report.profile.as_ref().expect("it was asked for");
    let adds = profile.operations.iter().filter(|row| {
        let operation = row.operation.split(' ').next();
        row.pass == "forward" && operation == Some("add")
    });
    adds.map(|row| row.calls).sum()
}

/// Each layer has two residual additions. A GPU has kernels for them in f32, and where a norm or dropout comes between the
/// product and the addition, or the end of a recomputed region.
#[test]
fn a_product_adds_the_residual() -> Result<()> {
    let Some(gpu) = ferrotron_cuda_sim::stand_in("a_product_adds_the_residual") else {
        return Ok(());
    };
    let gpt = || GptConfig::gpt2(64, LAYERS, 32, 4, 16);
    let llama = || GptConfig::llama(64, LAYERS, 32, 4, 2, 16);
    let layers =
        RecomputeModules { attention: RecomputedAttention::Layer, mlp: RecomputedMlp::Layer };
    let apart = 2 * LAYERS;
    // Positions are added to the embeddings of tokens by a kernel of their own.
    for (name, model, dtype, recompute, kernels) in [
        ("GPT-2", gpt(), DType::BF16, Recompute::None, 1),
        ("f16", gpt(), DType::F16, Recompute::None, 1),
        ("f32", gpt(), DType::F32, Recompute::None, 1 + apart),
        ("Llama", llama(), DType::BF16, Recompute::None, 0),
        (
            "parallel residual",
            GptConfig { use_parallel_residual: true, ..gpt() },
            DType::BF16,
            Recompute::None,
            1,
        ),
        (
            "sandwich norm",
            GptConfig { sandwich_norm: true, ..gpt() },
            DType::BF16,
            Recompute::None,
            1 + apart,
        ),
        (
            "dropout",
            GptConfig { hidden_dropout: 0.1, ..gpt() },
            DType::BF16,
            Recompute::None,
            1 + apart,
        ),
        ("attention recomputed", gpt(), DType::BF16, Recompute::SELECTIVE, 1),
        ("layers recomputed", gpt(), DType::BF16, Recompute::Selective(layers), 1 + apart),
        ("blocks recomputed", gpt(), DType::BF16, Recompute::FULL, 1),
    ] {
        let config = BenchConfig {
            micro_batch_size: 2,
            steps: 1,
            warmup: 1,
            dtype,
            profile: true,
            parallel: ParallelConfig { recompute, ..ParallelConfig::default() },
            ..BenchConfig::new(model)
        };
        let found = bench(&config, &Device::cuda(&gpu)?)?;
        assert_eq!(additions(&found), kernels as f64, "{name}");
        let want = bench(&BenchConfig { profile: false, ..config }, &Device::cpu(1)?)?.last_loss;
        let (off, limit) = ((found.last_loss / want - 1.0).abs(), dtype.epsilon());
        assert!(off <= limit, "{name}: {}, want {want}: {off:e} > {limit:e}", found.last_loss);
    }
    Ok(())
}
