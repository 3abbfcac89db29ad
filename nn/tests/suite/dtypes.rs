//! Parameters that keep f32 in a model of 16 bits: what layers compute with them, and what an optimizer keeps.

use ferrotron_autograd::Var;
use ferrotron_nn::{
    Bias, BufferConfig, Embedding, Init, LayerNorm, Linear, MASTER, Module, Optimizer,
    OptimizerConfig, Param, ParamAndGradBuffer, ParamOptions, ParamPatterns, RmsNorm, Scope,
    Sharding, StepConfig, WeightDecay,
};
use ferrotron_tensor::{DType, Device, Result, Tensor};

#[derive(Module)]
struct Model {
    wte: Embedding,
    norm: LayerNorm,
    fc: Linear,
    norm_f: RmsNorm,
}

/// A model in bf16, with f32 for the parameters of `kept`.
fn model(kept: &[&str]) -> Result<Model> {
    let scope = Scope::new(&Device::cpu(2)?, DType::BF16, 7);
    let scope = scope.with_accumulator_dtype(&ParamPatterns::new(kept.iter().copied())?);
    let init = Init::Normal { std: 0.5 };
    Ok(Model {
        wte: Embedding::new(&scope.child("wte"), 11, 8, init)?,
        norm: LayerNorm::new(&scope.child("norm"), 8, Bias::Yes, 1e-5),
        fc: Linear::new(&scope.child("fc"), 8, 6, Bias::Yes, init)?,
        norm_f: RmsNorm::new(&scope.child("norm_f"), 6, 1e-5),
    })
}

impl Model {
    fn forward(&self) -> Result<Var> {
        let device = self.fc.weight().leaf().device();
        let ids = Tensor::from_slice(device, &[3_u32, 0, 10, 3], &[4])?;
        let x = self.norm.forward(&self.wte.forward(&ids)?)?;
        self.norm_f.forward(&self.fc.forward(&x)?)
    }
}

/// The gradient of every parameter, in buffers.
fn gradients(model: &Model) -> Result<Vec<Vec<f64>>> {
    let params = model.params();
    let _buffers = ParamAndGradBuffer::new(&params)?;
    let y = model.forward()?;
    assert_eq!(y.dtype(), DType::BF16);
    y.square()?.sum_all()?.backward()?;
    params.iter().map(|param| param.leaf().gradient()?.expect("used").to_f64()).collect()
}

/// Values that 16 bits hold: then a model whose weights are f32 computes what one in 16 bits does, to the last bit, since
/// gradients add up in f32 in both.
#[test]
fn parameters_in_f32_give_the_gradients_of_parameters_in_16_bits() -> Result<()> {
    let narrow = model(&[])?;
    let wide = model(&["*"])?;
    for (wide, narrow) in wide.params().iter().zip(narrow.params()) {
        assert_eq!((wide.leaf().dtype(), wide.compute_dtype()), (DType::F32, DType::BF16));
        let values = narrow.leaf().value()?.to_device(wide.leaf().device())?;
        wide.leaf().set_value(&values.cast(DType::F32)?)?;
    }
    assert_eq!(wide.forward()?.value().to_f64()?, narrow.forward()?.value().to_f64()?);
    let names: Vec<String> = wide.params().iter().map(|param| param.name().to_string()).collect();
    for (name, (wide, narrow)) in
        names.iter().zip(gradients(&wide)?.iter().zip(gradients(&narrow)?))
    {
        assert_eq!(*wide, narrow, "{name}");
    }
    Ok(())
}

/// A layer whose activations are f32, such as a router, computes in f32 with weights that were kept in f32.
#[test]
fn the_dtype_of_activations_decides() -> Result<()> {
    let model = model(&["fc"])?;
    let device = model.fc.weight().leaf().device().clone();
    let x = Var::constant(Tensor::full(&device, DType::F32, &[2, 8], 0.1)?);
    assert_eq!(model.fc.forward(&x)?.dtype(), DType::F32);
    assert_eq!(model.fc.forward(&x.cast(DType::BF16)?)?.dtype(), DType::BF16);
    Ok(())
}

/// A bucket has one dtype; master weights exist for 16 bits only; and ranks of ZeRO share both.
#[test]
fn buckets_have_one_dtype_and_f32_needs_no_master_weights() -> Result<()> {
    for sharding in Sharding::ALL {
        let (mut masters, mut updated) = (Vec::new(), Vec::new());
        for rank in 0..3 {
            let params = model(&["*norm*", "wte"])?.params();
            let shard = if sharding == Sharding::None { (0, 1) } else { (rank, 3) };
            let config = BufferConfig { sharding, shard, ..BufferConfig::default() };
            let buffers = ParamAndGradBuffer::with_config(&params, &config)?;
            for group in buffers.groups() {
                let dtype = group.weights.lock().unwrap().dtype();
                let is_kept = |param: &Param| !param.name().starts_with("fc.");
                for param in &group.params {
                    let want = if is_kept(param) { DType::F32 } else { DType::BF16 };
                    assert_eq!((dtype, param.leaf().dtype()), (want, want), "{}", param.name());
                }
                assert_eq!(group.gradients.lock().unwrap().dtype(), DType::F32);
            }
            let optimizer = Optimizer::new(OptimizerConfig::ADAMW, &buffers)?;
            optimizer.visit(|name, state, place, value| {
                assert_eq!(value.dtype(), DType::F32);
                let numel: usize = place.dims().iter().product();
                match state {
                    MASTER => masters.push((name.to_string(), numel)),
                    "exp_avg" => updated.push((name.to_string(), numel)),
                    _ => {}
                }
                Ok(())
            })?;
            if sharding == Sharding::None {
                break;
            }
        }
        assert!(masters.iter().all(|(name, _)| name.starts_with("fc.")), "{masters:?}");
        let total = |found: &[(String, usize)]| found.iter().map(|(_, numel)| numel).sum::<usize>();
        assert_eq!((total(&masters), total(&updated)), (54, 54 + 88 + 16 + 6), "{sharding:?}");
    }
    Ok(())
}

/// Updates below the spacing of bf16 are kept by f32 weights, without a master copy.
#[test]
fn weights_in_f32_move_by_less_than_16_bits_hold() -> Result<()> {
    let model = model(&["norm"])?;
    let params = model.params();
    let buffers = ParamAndGradBuffer::new(&params)?;
    let mut optimizer = Optimizer::new(OptimizerConfig::SGD, &buffers)?;
    buffers.zero_gradients();
    model.forward()?.sum_all()?.backward()?;
    optimizer.step(&buffers, &StepConfig { lr: 1e-6, grad_scale: 1.0 })?;
    let value = |name: &str| {
        let param = params.iter().find(|param| param.name() == name).expect("a parameter");
        param.leaf().value()?.to_f64()
    };
    let moved = value("norm.weight")?;
    assert!(moved.iter().any(|&w| w != 1.0 && (w - 1.0).abs() < 1e-4), "{moved:?}");
    assert_eq!(value("norm_f.weight")?, [1.0; 6]);
    Ok(())
}

#[test]
fn other_dtypes_are_refused_by_name() -> Result<()> {
    let refusal = |of_scope, own| -> Result<String> {
        let options = ParamOptions { dtype: Some(own), ..ParamOptions::default() };
        let scope = Scope::new(&Device::cpu(1)?, of_scope, 1).with_options(move |_| options);
        let param = scope.param("gate", &[2], Init::Ones, WeightDecay::Off);
        Ok(ParamAndGradBuffer::new(&[param]).err().expect("a refusal").to_string())
    };
    let error = refusal(DType::BF16, DType::F64)?;
    assert!(
        error.contains("'gate' cannot be f64 in a model of bf16: its dtype is bf16 or f32"),
        "{error}"
    );
    let error = refusal(DType::F32, DType::BF16)?;
    assert!(error.contains("'gate' cannot be bf16 in a model of f32: its dtype is f32"), "{error}");
    Ok(())
}
