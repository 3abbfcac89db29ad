//! The profile of a step on a GPU.

use ferrotron_models::bench::{BenchConfig, bench};
use ferrotron_models::gpt::GptConfig;
use ferrotron_tensor::{Device, Result};

#[test]
fn rows_are_the_kernels_and_products_of_a_step() -> Result<()> {
    let Some(gpu) = ferrotron_cuda_sim::gpu("rows_are_the_kernels_and_products_of_a_step") else {
        return Ok(());
    };
    let config = BenchConfig {
        micro_batch_size: 2,
        steps: 2,
        warmup: 1,
        profile: true,
        ..BenchConfig::new(GptConfig::gpt2(64, 2, 32, 2, 16))
    };
    let report = bench(&config, &Device::cuda(&gpu)?)?;
    let profile = report.profile.expect("it was asked for");
    let sum = profile.operations.iter().map(|row| row.ms).sum::<f64>() + profile.other_ms;
    assert!((sum - 1e3 * profile.s_per_step).abs() <= 1e-6 * sum, "{sum} ms");
    assert_eq!(profile.steps, 2);

    // The first product of a block: queries, keys and values of 32 tokens.
    let rows = || profile.operations.iter();
    let qkv = rows().find(|row| row.operation == "32 x 32 x 96" && row.pass == "forward");
    let qkv = qkv.expect("a row for these sizes");
    assert_eq!(qkv.calls, 2.0);
    assert!(qkv.gflops.is_some() && qkv.gb_per_s.is_some() && qkv.of_ceiling.is_some());
    for (pass, kernel) in
        [("forward", "layer_norm"), ("backward", "cross_entropy_backward"), ("update", "adamw")]
    {
        let found = rows().any(|row| row.pass == pass && row.operation.starts_with(kernel));
        assert!(
            found,
            "{pass} {kernel}: {:?}",
            rows().map(|row| (row.pass, &row.operation)).collect::<Vec<_>>()
        );
    }
    // Copies to the host are launches too, which `launches_per_step` does not count.
    let calls: f64 = rows().map(|row| row.calls).sum();
    assert!(calls >= report.launches_per_step.expect("of a GPU"), "{calls}");
    Ok(())
}
