//! Frozen parameters: no gradient, no optimizer state, no buffer; and what thaws them.

use ferrotron_autograd::{Var, checkpoint};
use ferrotron_nn::{
    Bias, Init, Linear, Module, Optimizer, OptimizerConfig, ParamAndGradBuffer, Scope, StepConfig,
};
use ferrotron_tensor::{Category, DType, Device, Result, Tensor};

fn layers(device: &Device) -> Result<Vec<Linear>> {
    let scope = Scope::new(device, DType::F32, 7);
    let layer =
        |i: usize| Linear::new(&scope.child(&i.to_string()), 8, 8, Bias::Yes, Init::XavierNormal);
    (0..3).map(layer).collect()
}

fn loss(layers: &[Linear], device: &Device) -> Result<Var> {
    let mut x = Var::constant(Tensor::full(device, DType::F32, &[4, 8], 0.5)?);
    for layer in layers {
        x = layer.forward(&x)?.tanh()?;
    }
    x.square()?.sum_all()
}

fn step(layers: &[Linear], device: &Device) -> Result<()> {
    let params = layers.iter().flat_map(Module::params).collect::<Vec<_>>();
    let buffers = ParamAndGradBuffer::new(&params)?;
    let mut optimizer = Optimizer::new(OptimizerConfig::ADAMW, &buffers)?;
    buffers.zero_gradients();
    loss(layers, device)?.backward()?;
    buffers.check_gradients()?;
    optimizer.step(&buffers, &StepConfig { lr: 0.1, grad_scale: 1.0 })
}

#[test]
fn frozen_parameters_stay_and_the_others_learn() -> Result<()> {
    let device = Device::cpu(1)?;
    for middle in ["0.", "1.", "2."] {
        let layers = layers(&device)?;
        assert_eq!(layers.freeze(|name| name.starts_with(middle))?, 2);
        let before: Vec<Vec<f64>> = layers
            .params()
            .iter()
            .map(|param| param.leaf().value()?.to_f64())
            .collect::<Result<_>>()?;
        step(&layers, &device)?;
        for (param, before) in layers.params().iter().zip(before) {
            let (name, now) = (param.name(), param.leaf().value()?.to_f64()?);
            assert_eq!(now == before, name.starts_with(middle), "{name}");
            assert_eq!(param.leaf().contributions(), usize::from(param.is_trainable()), "{name}");
        }
    }
    Ok(())
}

/// Three layers of 72 parameters: without two of them there is a third of the gradients and of the moments, and weights
/// stay whole.
#[test]
fn frozen_parameters_have_no_gradient_and_no_moments_to_the_byte() -> Result<()> {
    let kept = |frozen: Option<fn(&str) -> bool>| {
        let device = Device::cpu(1)?;
        let layers = layers(&device)?;
        frozen.map(|frozen| layers.freeze(frozen)).transpose()?;
        let params = layers.iter().flat_map(Module::params).collect::<Vec<_>>();
        let buffers = ParamAndGradBuffer::new(&params)?;
        let _optimizer = Optimizer::new(OptimizerConfig::ADAMW, &buffers)?;
        buffers.zero_gradients();
        loss(&layers, &device)?.backward()?;
        let bytes = |category| device.memory().bytes(category);
        Ok([Category::Weights, Category::Gradients, Category::Optimizer].map(bytes))
    };
    let layer = 72 * 4;
    let same: Result<_> = kept(None);
    assert_eq!(same?, [3 * layer, 3 * layer, 6 * layer]);
    let third: Result<_> = kept(Some(|name| !name.starts_with("2.")));
    assert_eq!(third?, [3 * layer, layer, 2 * layer]);
    Ok(())
}

/// Nothing is saved in front of the first trainable parameter, also inside of recomputed regions.
#[test]
fn layers_before_the_first_trainable_one_save_nothing() -> Result<()> {
    let device = Device::cpu(1)?;
    let layers = layers(&device)?;
    layers.freeze(|name| !name.starts_with("2."))?;
    let x = Var::constant(Tensor::full(&device, DType::F32, &[4, 8], 0.5)?);
    let hidden = layers[1].forward(&layers[0].forward(&x)?.tanh()?)?;
    assert!(!hidden.needs_gradient());
    assert_eq!(layers[2].forward(&hidden)?.square()?.saved_bytes(), 2 * 4 * 8 * 4);

    let captured = layers.clone();
    let region = move |inputs: &[Var]| {
        let mut x = inputs[0].clone();
        for layer in &captured {
            x = layer.forward(&x)?.tanh()?;
        }
        Ok(vec![x])
    };
    checkpoint(&[&x], region)?[0].sum_all()?.backward()?;
    let counts: Vec<usize> =
        layers.params().iter().map(|param| param.leaf().contributions()).collect();
    assert_eq!(counts, [0, 0, 0, 0, 1, 1]);
    let first = layers[0].clone();
    let constant = checkpoint(&[&x], move |inputs| Ok(vec![first.forward(&inputs[0])?]))?;
    assert!(!constant[0].needs_gradient());
    Ok(())
}

#[test]
fn a_filter_that_accepts_no_name_is_refused() -> Result<()> {
    let layers = layers(&Device::cpu(1)?)?;
    let error = layers.freeze(|name| name.starts_with("3.")).unwrap_err().to_string();
    let want = "freeze: the filter accepts none of 6 parameters, from '0.weight' to '2.bias'";
    assert_eq!(error, want);
    Ok(())
}

#[test]
fn the_frozen_set_changes_only_between_buffers() -> Result<()> {
    let device = Device::cpu(1)?;
    let layers = layers(&device)?;
    layers.freeze(|name| name.starts_with("0."))?;
    let buffers = ParamAndGradBuffer::new(&layers.params())?;
    let error = layers[0].weight().set_trainable(true).unwrap_err().to_string();
    assert!(error.starts_with("set_trainable: '0.weight' is laid out for an optimizer"), "{error}");
    assert!(layers.freeze(|name| name.starts_with("1.")).is_err());
    layers[0].weight().set_trainable(false)?; // as it is
    drop(buffers);
    layers[0].weight().set_trainable(true)?;
    let buffers = ParamAndGradBuffer::new(&layers.params())?;
    let frozen: Vec<&str> = buffers.frozen().iter().map(|param| param.name()).collect();
    assert_eq!(frozen, ["0.bias"]);
    Ok(())
}

/// Layer 0 is a frozen backbone; layers 1 and 2 are heads with an optimizer each.
#[test]
fn two_optimizers_share_a_frozen_backbone() -> Result<()> {
    let device = Device::cpu(1)?;
    let layers = layers(&device)?;
    layers.freeze(|name| name.starts_with("0."))?;
    let with_backbone = |head: usize| [layers[0].params(), layers[head].params()].concat();
    let heads = [1, 2].map(|head| ParamAndGradBuffer::new(&with_backbone(head)));
    let [first, second] = heads;
    let (first, second) = (first?, second?);
    let values = || -> Result<Vec<Vec<f64>>> {
        layers.params().iter().map(|param| param.leaf().value()?.to_f64()).collect()
    };
    for (head, buffers) in [(1, &first), (2, &second)] {
        let mut optimizer = Optimizer::new(OptimizerConfig::ADAMW, buffers)?;
        let before = values()?;
        buffers.zero_gradients();
        loss(&[layers[0].clone(), layers[head].clone()], &device)?.backward()?;
        buffers.check_gradients()?;
        optimizer.step(buffers, &StepConfig { lr: 0.1, grad_scale: 1.0 })?;
        for (param, (before, now)) in layers.params().iter().zip(before.iter().zip(values()?)) {
            let trained = param.name().starts_with(&head.to_string());
            assert_eq!(now != *before, trained, "{} with head {head}", param.name());
        }
    }
    // Either of them keeps the backbone frozen, the first one after the second is gone too.
    drop(second);
    assert!(layers[0].weight().set_trainable(true).is_err());
    drop(first);
    layers[0].weight().set_trainable(true)
}
