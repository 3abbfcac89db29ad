//! Steps that would train wrongly without a word: they are errors, and change nothing.

use ferrotron_autograd::Var;
use ferrotron_nn::shard_exchange::NoExchange;
use ferrotron_nn::{
    AdafactorConfig, Bias, BufferConfig, Init, Linear, Module, Optimizer, OptimizerConfig, Param,
    ParamAndGradBuffer, Scope, Sharding, StepConfig, clip_coefficient,
};
use ferrotron_tensor::ops::step::DeviceStepParams;
use ferrotron_tensor::{DType, Device, Result, Tensor};

use crate::gradients::values;

/// Two layers, one after the other; `visit` may forget the second.
struct Pair {
    first: Linear,
    second: Linear,
    forgets: bool,
}

impl Pair {
    fn new(scope: &Scope, forgets: bool) -> Result<Pair> {
        let layer = |name| Linear::new(&scope.child(name), 2, 2, Bias::Yes, Init::Ones);
        Ok(Pair { first: layer("first")?, second: layer("second")?, forgets })
    }

    fn forward(&self, x: &Var) -> Result<Var> {
        self.second.forward(&self.first.forward(x)?)
    }
}

impl Module for Pair {
    fn visit(&self, f: &mut dyn FnMut(&Param)) {
        self.first.visit(f);
        if !self.forgets {
            self.second.visit(f);
        }
    }
}

fn input(device: &Device, value: f64) -> Result<Var> {
    Ok(Var::constant(Tensor::full(device, DType::F64, &[1, 2], value)?))
}

const STEP: StepConfig = StepConfig { lr: 0.1, grad_scale: 1.0 };

#[test]
fn gradients_on_top_of_those_of_the_last_step_are_refused() -> Result<()> {
    let device = Device::cpu(1)?;
    let pair = Pair::new(&Scope::new(&device, DType::F64, 1), false)?;
    let buffers = ParamAndGradBuffer::new(&pair.params())?;
    let mut optimizer = Optimizer::new(OptimizerConfig::SGD, &buffers)?;
    let backward = || pair.forward(&input(&device, 1.0)?)?.sum_all()?.backward();
    for microbatches in [1, 2, 3] {
        buffers.zero_gradients();
        (0..microbatches).try_for_each(|_| backward())?;
        optimizer.step(&buffers, &STEP)?;
        optimizer.step(&buffers, &STEP)?; // another step with the same gradients
        backward()?;
        let before = values(&pair.params())?;
        let error = optimizer.step(&buffers, &STEP).unwrap_err().to_string();
        let want = "optimizer: the gradient of the last step is still in that of this one for '";
        assert!(error.starts_with(want) && error.contains("call `zero_gradients`"), "{error}");
        assert_eq!(values(&pair.params())?, before);
    }
    Ok(())
}

#[test]
fn leaves_zeroed_one_by_one_may_get_more_microbatches() -> Result<()> {
    let device = Device::cpu(1)?;
    let pair = Pair::new(&Scope::new(&device, DType::F64, 1), false)?;
    let buffers = ParamAndGradBuffer::new(&pair.params())?;
    let mut optimizer = Optimizer::new(OptimizerConfig::SGD, &buffers)?;
    let backward = || pair.forward(&input(&device, 1.0)?)?.sum_all()?.backward();
    for microbatches in [1, 3] {
        pair.params().iter().for_each(|param| param.leaf().zero_gradient());
        (0..microbatches).try_for_each(|_| backward())?;
        optimizer.step(&buffers, &STEP)?;
    }
    Ok(())
}

/// The sum of the contributions to all parameters is smaller than in the last step.
#[test]
fn the_one_parameter_that_keeps_its_gradient_is_named() -> Result<()> {
    let device = Device::cpu(1)?;
    let pair = Pair::new(&Scope::new(&device, DType::F64, 1), false)?;
    let buffers = ParamAndGradBuffer::new(&pair.params())?;
    let mut optimizer = Optimizer::new(OptimizerConfig::SGD, &buffers)?;
    let backward = || pair.forward(&input(&device, 1.0)?)?.sum_all()?.backward();
    (0..3).try_for_each(|_| backward())?;
    optimizer.step(&buffers, &STEP)?;
    let zeroed = |param: &&Param| param.name() != "second.weight";
    pair.params().iter().filter(zeroed).for_each(|param| param.leaf().zero_gradient());
    backward()?;
    let error = optimizer.step(&buffers, &STEP).unwrap_err().to_string();
    assert!(error.contains("is still in that of this one for 'second.weight': call"), "{error}");
    Ok(())
}

#[test]
fn a_parameter_that_visit_forgets_is_named_by_the_first_step() -> Result<()> {
    let device = Device::cpu(1)?;
    let scope = Scope::new(&device, DType::F64, 1);
    let pair = Pair::new(&scope.child("model"), true)?;
    assert_eq!(scope.unvisited(&pair), ["model.second.weight", "model.second.bias"]);
    assert!(scope.child("mode").unvisited(&pair).is_empty(), "another scope");

    let buffers = ParamAndGradBuffer::new(&pair.params())?;
    let mut optimizer = Optimizer::new(OptimizerConfig::SGD, &buffers)?;
    let before = values(&pair.params())?;
    for _ in 0..2 {
        buffers.zero_gradients();
        pair.forward(&input(&device, 1.0)?)?.sum_all()?.backward()?;
        let error = optimizer.step(&buffers, &STEP).unwrap_err().to_string();
        let start = "parameters: the model's scope made 'model.second.weight', 'model.second.bias', but no buffer";
        assert!(error.starts_with(start), "{error}");
        assert!(error.contains("`Module::visit`"), "{error}");
        // Ranks ask this before any of them updates.
        assert_eq!(optimizer.check_finite(&buffers, &STEP).unwrap_err().to_string(), error);
    }
    assert_eq!((values(&pair.params())?, optimizer.steps()), (before, 0));

    // A second optimizer may own the rest.
    let others = ParamAndGradBuffer::new(&pair.second.params())?;
    let mut other = Optimizer::new(OptimizerConfig::SGD, &others)?;
    buffers.zero_gradients();
    pair.forward(&input(&device, 1.0)?)?.sum_all()?.backward()?;
    optimizer.step(&buffers, &STEP)?;
    other.step(&others, &STEP)
}

/// An adapter, say, that is put into a model in training.
#[test]
fn a_layer_made_after_the_first_step_is_named() -> Result<()> {
    let device = Device::cpu(1)?;
    let scope = Scope::new(&device, DType::F64, 1);
    let pair = Pair::new(&scope.child("model"), false)?;
    let buffers = ParamAndGradBuffer::new(&pair.params())?;
    let mut optimizer = Optimizer::new(OptimizerConfig::SGD, &buffers)?;
    let mut step = || -> Result<()> {
        buffers.zero_gradients();
        pair.forward(&input(&device, 1.0)?)?.sum_all()?.backward()?;
        optimizer.step(&buffers, &STEP)
    };
    step()?;
    let layer = |scope: &Scope| Linear::new(&scope.child("late"), 2, 2, Bias::No, Init::Ones);
    let late = layer(&scope)?;
    for _ in 0..2 {
        let error = step().unwrap_err().to_string();
        let want = "parameters: the model's scope made 'late.weight', but no buffer holds it, so that it would never be \
                    trained: make it before the buffers and meet it in `Module::visit`, or make what is not trained in a \
                    scope of its own";
        assert_eq!(error, want);
    }
    drop(late);
    step()?;
    // What is not trained, and what other buffers hold.
    let _teacher = layer(&Scope::new(&device, DType::F64, 2))?;
    let other = layer(&scope)?;
    let _others = ParamAndGradBuffer::new(&other.params())?;
    step()
}

#[test]
fn a_step_that_trains_nothing_is_refused() -> Result<()> {
    let device = Device::cpu(1)?;
    let scope = Scope::new(&device, DType::F64, 1);
    let error = ParamAndGradBuffer::new(&[]).err().expect("a refusal").to_string();
    assert_eq!(error, "parameters: there is no parameter to train: `Module::visit` meets none");

    let pair = Pair::new(&scope, false)?;
    pair.freeze(|_| true)?;
    let buffers = ParamAndGradBuffer::new(&pair.params())?;
    let mut optimizer = Optimizer::new(OptimizerConfig::SGD, &buffers)?;
    let error = optimizer.step(&buffers, &STEP).unwrap_err().to_string();
    assert_eq!(error, "optimizer: all 4 parameters are frozen: nothing is left to train");
    assert_eq!(optimizer.steps(), 0);
    Ok(())
}

/// A stage of a pipeline may have nothing but frozen parameters, and goes through the steps of the others.
#[test]
fn a_parameter_forgotten_beside_frozen_ones_is_named() -> Result<()> {
    let device = Device::cpu(1)?;
    let pair = Pair::new(&Scope::new(&device, DType::F64, 1), true)?;
    pair.first.freeze(|_| true)?;
    let buffers = ParamAndGradBuffer::new(&pair.params())?;
    let mut optimizer = Optimizer::new(OptimizerConfig::SGD, &buffers)?;
    let of_pipeline = DeviceStepParams::new(&device, &optimizer.numbers(&STEP))?;
    let errors = [
        optimizer.step(&buffers, &STEP).unwrap_err(),
        optimizer.step_with(&buffers, &of_pipeline, &NoExchange).unwrap_err(),
    ];
    for error in errors.map(|error| error.to_string()) {
        let start =
            "parameters: the model's scope made 'second.weight', 'second.bias', but no buffer";
        assert!(error.starts_with(start), "{error}");
    }
    Ok(())
}

#[test]
fn buffers_that_are_gone_hold_nothing() -> Result<()> {
    let device = Device::cpu(1)?;
    let pair = Pair::new(&Scope::new(&device, DType::F64, 1), true)?;
    drop(ParamAndGradBuffer::new(&pair.second.params())?);
    let buffers = ParamAndGradBuffer::new(&pair.params())?;
    let mut optimizer = Optimizer::new(OptimizerConfig::SGD, &buffers)?;
    buffers.zero_gradients();
    pair.forward(&input(&device, 1.0)?)?.sum_all()?.backward()?;
    let error = optimizer.step(&buffers, &STEP).unwrap_err().to_string();
    assert!(error.contains("made 'second.weight', 'second.bias', but no buffer"), "{error}");
    Ok(())
}

#[test]
fn a_parameter_has_one_optimizer_at_a_time() -> Result<()> {
    let device = Device::cpu(1)?;
    let pair = Pair::new(&Scope::new(&device, DType::F64, 1), false)?;
    let of_first = ParamAndGradBuffer::new(&pair.params()[..2])?;
    let error = ParamAndGradBuffer::new(&pair.params()).err().expect("a refusal").to_string();
    assert_eq!(
        error,
        "parameters: 'first.weight' is laid out for another optimizer, which would no longer train it: drop its \
         ParamAndGradBuffer first"
    );
    let of_second = ParamAndGradBuffer::new(&pair.params()[2..])?;
    for buffers in [&of_first, &of_second] {
        let mut optimizer = Optimizer::new(OptimizerConfig::SGD, buffers)?;
        buffers.zero_gradients();
        pair.forward(&input(&device, 1.0)?)?.sum_all()?.backward()?;
        optimizer.step(buffers, &STEP)?;
    }
    drop((of_first, of_second));
    ParamAndGradBuffer::new(&pair.params()).map(drop)
}

#[test]
fn what_is_dropped_or_made_in_another_scope_is_nobodys_duty() -> Result<()> {
    let device = Device::cpu(1)?;
    let scope = Scope::new(&device, DType::F64, 1);
    let teacher = Pair::new(&Scope::new(&device, DType::F64, 2), false)?;
    for _ in 0..40 {
        drop(Pair::new(&scope, false)?);
    }
    let pair = Pair::new(&scope, false)?;
    let buffers = ParamAndGradBuffer::new(&pair.params())?;
    let mut optimizer = Optimizer::new(OptimizerConfig::SGD, &buffers)?;
    buffers.zero_gradients();
    let x = input(&device, 1.0)?;
    pair.forward(&x)?.sub(&teacher.forward(&x)?.detach())?.square()?.sum_all()?.backward()?;
    optimizer.step(&buffers, &STEP)
}

#[test]
fn gradients_that_are_not_finite_leave_the_weights_alone() -> Result<()> {
    let device = Device::cpu(1)?;
    for config in [
        OptimizerConfig::ADAMW,
        OptimizerConfig::SGD,
        OptimizerConfig::Adafactor(AdafactorConfig::default()),
    ] {
        for bad in [f64::NAN, f64::INFINITY, 1e200] {
            let pair = Pair::new(&Scope::new(&device, DType::F64, 1), false)?;
            let buffers = ParamAndGradBuffer::new(&pair.params())?;
            let mut optimizer = Optimizer::new(config, &buffers)?;
            let before = values(&pair.params())?;
            buffers.zero_gradients();
            pair.forward(&input(&device, bad)?)?.sum_all()?.backward()?;
            let norm = buffers.sq_norm()?.sqrt();
            assert!(!norm.is_finite());
            // With clipping, without, and without reading the norm.
            let scales = [clip_coefficient(norm, 1.0), clip_coefficient(norm, 0.0), 1.0];
            for (i, grad_scale) in scales.into_iter().enumerate() {
                if bad == 1e200 && i == 2 {
                    continue; // only the sum of the squares is too large
                }
                let step = StepConfig { lr: 0.1, grad_scale };
                let error = optimizer.step(&buffers, &step).unwrap_err().to_string();
                let named = match bad == 1e200 {
                    true => "every value and gradient of this rank is finite",
                    false => "first offender: the gradient of 'first.weight'",
                };
                assert!(error.starts_with("optimizer: step 1: "), "{error}");
                assert!(error.contains(named), "{config:?} {bad} {grad_scale}: {error}");
            }
            assert_eq!((values(&pair.params())?, optimizer.steps()), (before, 0));
        }
    }
    Ok(())
}

#[test]
fn a_learning_rate_that_is_not_finite_is_refused() -> Result<()> {
    let device = Device::cpu(1)?;
    let pair = Pair::new(&Scope::new(&device, DType::F64, 1), false)?;
    let buffers = ParamAndGradBuffer::new(&pair.params())?;
    let mut optimizer = Optimizer::new(OptimizerConfig::SGD, &buffers)?;
    pair.forward(&input(&device, 1.0)?)?.sum_all()?.backward()?;
    let error = optimizer.step(&buffers, &StepConfig { lr: f64::NAN, ..STEP }).unwrap_err();
    assert_eq!(error.to_string(), "optimizer: step 1: the learning rate is NaN");
    Ok(())
}

/// The state of other weights, or the weights that other ranks update, would stay behind.
#[test]
fn buffers_that_are_not_the_optimizers_are_refused() -> Result<()> {
    let device = Device::cpu(1)?;
    let buffers = |sharding, shard| -> Result<ParamAndGradBuffer> {
        let layer = Linear::new(&Scope::new(&device, DType::F64, 1), 2, 2, Bias::No, Init::Ones)?;
        let config = BufferConfig { sharding, shard, ..BufferConfig::default() };
        let buffers = ParamAndGradBuffer::with_config(&layer.params(), &config)?;
        layer.forward(&input(&device, 1.0)?)?.sum_all()?.backward()?;
        Ok(buffers)
    };
    let (own, other) = (buffers(Sharding::None, (0, 1))?, buffers(Sharding::None, (0, 1))?);
    let mut optimizer = Optimizer::new(OptimizerConfig::SGD, &own)?;
    let error = optimizer.step(&other, &STEP).unwrap_err().to_string();
    let want = "the buffers are not those that the optimizer was made for, whose state it has";
    assert_eq!(error, format!("optimizer: {want}"));
    optimizer.step(&own, &STEP)?;

    let shard = buffers(Sharding::Optimizer, (0, 2))?;
    let mut optimizer = Optimizer::new(OptimizerConfig::SGD, &shard)?;
    let error = optimizer.step(&shard, &STEP).unwrap_err().to_string();
    let want = "optimizer: this rank updates 2 of 4 elements of 'weight' and others: use `DataParallel::update`, which";
    assert!(error.starts_with(want), "{error}");
    assert_eq!(shard.groups()[0].params[0].leaf().value()?.to_f64()?, [1.0; 4]);
    Ok(())
}
