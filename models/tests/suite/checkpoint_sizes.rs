//! Checkpoints of models with many tensors, and with a large vocabulary, come back to the last bit.

use ferrotron_models::checkpoint::{
    Checkpoint, LocalShard, Moments, SavedModel, Snapshot, TrainState, save,
};
use ferrotron_models::gpt::{Gpt, GptConfig};
use ferrotron_nn::{Module, Optimizer, OptimizerConfig, Param, ParamAndGradBuffer, Scope};
use ferrotron_parallel::collective::Group;
use ferrotron_tensor::{DType, Device, Result};
use std::path::Path;

fn bits(params: &[Param]) -> Vec<Vec<u64>> {
    let bits = |param: &Param| {
        param.leaf().value().unwrap().to_f64().unwrap().iter().map(|x| x.to_bits()).collect()
    };
    params.iter().map(bits).collect()
}

fn comes_back(config: &GptConfig, dtype: DType, dir: &Path) -> Result<()> {
    let model = |seed| {
        let gpt = Gpt::new(&Scope::new(&Device::cpu(1)?, dtype, seed), config)?;
        let buffers = ParamAndGradBuffer::new(&gpt.params())?;
        Ok::<_, ferrotron_tensor::Error>((
            gpt.params(),
            Optimizer::new(OptimizerConfig::ADAMW, &buffers)?,
            buffers,
        ))
    };
    let (saved, optimizer, _buffers) = model(1)?;
    let snapshot = Snapshot {
        weights: LocalShard::params(&saved)?,
        moments: Some(Moments::from_optimizer(&optimizer, |_, _| true)?),
        model: SavedModel::new("gpt", config)?,
        progress: &TrainState { step: 1, ..TrainState::default() },
        tokenizer: None,
        run: serde_json::Value::Null,
    };
    save(dir, &Group::single(), snapshot)?;
    let (loaded, mut optimizer, _buffers) = model(2)?;
    let checkpoint = Checkpoint::open(dir)?;
    checkpoint.load_params(&loaded)?;
    checkpoint.load_optimizer(&mut optimizer)?;
    assert!(bits(&saved) == bits(&loaded), "{config:?}");
    Ok(())
}

#[test]
fn forty_eight_layers() -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        let dir = tempfile::tempdir().unwrap();
        comes_back(&GptConfig::gpt2(13, 48, 8, 2, 8), dtype, dir.path())?;
        // The first eight bytes of the file are the length of its header.
        let file = std::fs::read(dir.path().join("iter_0000001/optimizer.safetensors")).unwrap();
        assert!(u64::from_le_bytes(file[..8].try_into().unwrap()) > u64::from(u16::MAX));
    }
    Ok(())
}

#[test]
fn a_vocabulary_of_128_thousand() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    comes_back(&GptConfig::llama(128_256, 2, 8, 2, 1, 8), DType::BF16, dir.path())
}
