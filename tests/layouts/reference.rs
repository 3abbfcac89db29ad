//! The reference of every layout: the training loop written out once more, with nothing of the trainer.
//!
//! One graph over the global batch, and every scale in the open: a scale that is missing in the trainer is missing in
//! all layouts, and these would agree with each other.

use ferrotron::nn::{
    BufferConfig, Context, Mode, Module, Optimizer, OptimizerConfig, Param, ParamAndGradBuffer,
    Scope, StepConfig,
};
use ferrotron::tensor::{DType, Device, Result, Tensor};

use super::grid_model::GridConfig;
use super::layout::{GLOBAL_BATCH, SEQ_LENGTH};
use super::tensors::Tensors;
use super::train::{Found, Numbers, SEED, STEPS, schedule};

/// The run in f64, whatever the type of `numbers` is.
pub fn reference<C: GridConfig>(model: &C, numbers: &Numbers) -> Result<Found> {
    let Numbers { optimizer: config, weights, clip_grad, frozen, .. } = *numbers;
    let device = Device::cpu(1)?;
    let whole = model.whole(&Scope::new(&device, DType::F64, weights))?;
    for param in whole.params() {
        param.set_trainable(!frozen.iter().any(|part| param.name().contains(part)))?;
    }
    let layout = BufferConfig { optimizer: config, ..BufferConfig::default() };
    let buffers = ParamAndGradBuffer::with_config(&whole.params(), &layout)?;
    let mut optimizer = Optimizer::new(config, &buffers)?;
    let (mut steps, mut first) = (Vec::new(), Tensors::new());
    for step in 0..STEPS as u64 {
        let batch = model.batch(step * GLOBAL_BATCH as u64, GLOBAL_BATCH)?;
        let ctx = Context::new(SEED, step, Mode::Train, GLOBAL_BATCH, SEQ_LENGTH);

        buffers.zero_gradients();
        let mean = C::loss(&whole, &device, &ctx, &batch)?;
        let loss = mean.value().item()?;
        mean.backward()?;
        drop(mean);

        let gradients = named(&buffers, |param| Ok(param.leaf().gradient()?.expect("a gradient")))?;
        let norm = gradients.values().flatten().map(|g| g * g).sum::<f64>().sqrt();
        let grad_scale = (clip_grad / (norm + 1e-6)).min(1.0);
        optimizer.step(&buffers, &StepConfig { lr: schedule()?.lr(step + 1), grad_scale })?;
        steps.push((loss, norm));
        if step == 0 && config == OptimizerConfig::ADAMW {
            first = gradients;
        }
    }
    let mut weights = named(&buffers, |param| param.leaf().value())?;
    for param in buffers.frozen() {
        weights.insert(param.name().to_string(), param.leaf().value()?.to_vec()?);
    }
    Ok(Found { steps, gradients: first, weights })
}

fn named(
    buffers: &ParamAndGradBuffer,
    tensor: impl Fn(&Param) -> Result<Tensor>,
) -> Result<Tensors> {
    let entry = |param: &Param| Ok((param.name().to_string(), tensor(param)?.to_vec()?));
    buffers.params().map(entry).collect()
}
