//! Optimizer states in host memory.

use ferrotron_models::checkpoint::Checkpoint;
use ferrotron_models::trainer::ParallelConfig;
use ferrotron_parallel::mesh::Mesh;
use ferrotron_tensor::{Category, DType, MemoryKind, Result};

use super::training::{Case, Noise, STEPS, cases, state};

#[test]
fn optimizer_states_wait_in_host_memory() {
    for case in cases() {
        let (plain, host) = (case.parallel(), MemoryKind::Host);
        let want = case.train(plain);
        let found = case.train(ParallelConfig { optimizer_states: host, ..plain });
        for (found, want) in found.iter().zip(&want) {
            assert!(found.bits == want.bits, "other bits: {case:?}");
            let ([device, host], [all, none]) = (found.memory, want.memory);
            let offloaded = host.bytes(Category::Optimizer);
            assert!(offloaded > 0 && none.peak == 0, "{case:?}");
            assert_eq!(offloaded, all.bytes(Category::Optimizer), "{case:?}");
            assert_eq!(device.peak_bytes(Category::Optimizer), 0, "{case:?}");
            let fell = all.peak - device.peak;
            assert!(fell * 100 >= 95 * offloaded, "{fell} of {offloaded} bytes: {case:?}");
        }
    }
}

#[test]
fn a_run_goes_on_wherever_its_states_wait() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    for case in [Case::new(DType::F32), Case::new(DType::BF16)] {
        let trainer = |kind| {
            let parallel = ParallelConfig { optimizer_states: kind, ..case.parallel() };
            case.trainer(&Mesh::single(), parallel)
        };
        let mut want = trainer(MemoryKind::Device)?;
        for _ in 0..2 * STEPS {
            want.step(&Noise)?;
        }
        for (before, after) in
            [(MemoryKind::Device, MemoryKind::Host), (MemoryKind::Host, MemoryKind::Device)]
        {
            let (mut first, mut second) = (trainer(before)?, trainer(after)?);
            for _ in 0..STEPS {
                first.step(&Noise)?;
            }
            let saved = first.save(folder.path(), None, serde_json::Value::Null)?;
            second.load(&Checkpoint::open(&saved)?)?;
            for _ in 0..STEPS {
                second.step(&Noise)?;
            }
            assert!(state(&second)? == state(&want)?, "{before:?}, then {after:?}");
        }
    }
    Ok(())
}
