//! Models with many tensors, and with a large vocabulary, train, and their checkpoints come back to the last bit.

use ferrotron_models::checkpoint::{
    Checkpoint, LocalShard, Moments, SavedModel, Snapshot, TrainState, save,
};
use ferrotron_models::gpt::{Gpt, GptConfig};
use ferrotron_nn::{
    Context, Mode, Module, Optimizer, OptimizerConfig, Param, ParamAndGradBuffer, Scope, StepConfig,
};
use ferrotron_parallel::collective::Group;
use ferrotron_tensor::{DType, Device, Result, Tensor};
use std::path::Path;

/// A model in training.
struct Training {
    gpt: Gpt,
    params: Vec<Param>,
    optimizer: Optimizer,
    buffers: ParamAndGradBuffer,
}

impl Training {
    fn new(config: &GptConfig, dtype: DType, seed: u64) -> Result<Training> {
        let gpt = Gpt::new(&Scope::new(&Device::cpu(1)?, dtype, seed), config)?;
        let (params, buffers) = (gpt.params(), ParamAndGradBuffer::new(&gpt.params())?);
        let optimizer = Optimizer::new(OptimizerConfig::ADAMW, &buffers)?;
        Ok(Training { gpt, params, optimizer, buffers })
    }

    /// Trains on the first and last tokens of the vocabulary; returns the bits of the loss.
    fn step(&mut self) -> Result<u64> {
        let (vocabulary, length) = (self.gpt.config().vocab_size as u32, 8);
        let device = self.params[0].leaf().device().clone();
        let token = |i: u32| if i.is_multiple_of(2) { i } else { vocabulary - i };
        let tokens: Vec<u32> = (0..length).map(token).collect();
        let targets: Vec<i64> = (1..=length).map(|i| token(i).into()).collect();
        let dims = [1, length as usize];
        let tokens = Tensor::from_slice(&device, &tokens, &dims)?;
        let targets = Tensor::from_slice(&device, &targets, &dims)?;
        self.buffers.zero_gradients();
        let ctx = Context::new(1234, 0, Mode::Train, 1, dims[1]);
        let loss = self.gpt.loss(&ctx, &tokens, &targets)?;
        let value = loss.sum.value().item()?;
        loss.sum.backward_scaled(1.0 / f64::from(length))?;
        drop(loss);
        self.optimizer.step(&self.buffers, &StepConfig { lr: 1e-2, grad_scale: 1.0 })?;
        Ok(value.to_bits())
    }

    fn bits(&self) -> Vec<Vec<u64>> {
        let bits = |param: &Param| {
            param.leaf().value().unwrap().to_f64().unwrap().iter().map(|x| x.to_bits()).collect()
        };
        self.params.iter().map(bits).collect()
    }
}

/// A step is trained, saved and loaded, and the next one is the same.
fn comes_back(config: &GptConfig, dtype: DType, dir: &Path) -> Result<()> {
    let mut saved = Training::new(config, dtype, 1)?;
    let first = saved.step()?;
    let snapshot = Snapshot {
        weights: LocalShard::params(&saved.params)?,
        moments: Some(Moments::from_optimizer(&saved.optimizer, |_, _| true)?),
        model: SavedModel::new("gpt", config)?,
        progress: &TrainState { step: 1, ..TrainState::default() },
        tokenizer: None,
        run: serde_json::Value::Null,
    };
    save(dir, &Group::single(), snapshot)?;
    let mut loaded = Training::new(config, dtype, 2)?;
    let checkpoint = Checkpoint::open(dir)?;
    checkpoint.load_params(&loaded.params)?;
    checkpoint.load_optimizer(&mut loaded.optimizer)?;
    assert!(saved.bits() == loaded.bits(), "{config:?}");
    let (second, again) = (saved.step()?, loaded.step()?);
    assert!(second == again && f64::from_bits(second) < f64::from_bits(first), "{config:?}");
    assert!(saved.bits() == loaded.bits(), "{config:?}");
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
