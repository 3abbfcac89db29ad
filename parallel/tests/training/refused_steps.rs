//! User hooks leave the reductions alone, and a step over ranks with numbers that are not finite is refused.

use ferrotron_autograd::Var;
use ferrotron_nn::{
    Axis, Bias, Init, Linear, Module, MuonConfig, Optimizer, OptimizerConfig, Param, ParamOptions,
    ParamPatterns, Scope, Sharding, StepConfig, WeightDecay, clip_coefficient,
};
use ferrotron_parallel::collective::{World, WorldConfig, run_threads};
use ferrotron_parallel::data_parallel::{DataParallel, DataParallelConfig};
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::ops::step::DeviceStepParams;
use ferrotron_tensor::{DType, Device, Result, ShardSpec, Tensor};
use std::sync::{Arc, Mutex};

fn two_ranks(world: &World) -> Result<Mesh> {
    Mesh::new(world, ParallelDims::new(2, 1, 1, 1)?, SequenceParallel::Off)
}

fn layer() -> Result<Linear> {
    let scope = Scope::new(&Device::cpu(1)?, DType::F64, 1);
    Linear::new(&scope.child("layer"), 2, 1, Bias::No, Init::Ones)
}

/// The gradient of the layer's weight is (x, x).
fn backward(layer: &Linear, x: f64) -> Result<()> {
    let device = layer.weight().leaf().device();
    let x = Var::constant(Tensor::full(device, DType::F64, &[1, 2], x)?);
    layer.forward(&x)?.sum_all()?.backward()
}

#[test]
fn hooks_see_a_ranks_own_gradient_and_leave_the_reduction_alone() -> Result<()> {
    for sharding in [Sharding::None, Sharding::Gradients] {
        let results = run_threads(2, &WorldConfig::default(), |world| {
            let (mesh, layer) = (two_ranks(&world)?, layer()?);
            let leaf = layer.weight().leaf();
            let seen = Arc::new(Mutex::new(Vec::new()));
            let watch = || {
                let seen = seen.clone();
                leaf.add_hook(move |_, gradient| {
                    seen.lock().unwrap().push(gradient.to_f64()?);
                    Ok(())
                })
            };
            let before = watch();
            let config = DataParallelConfig { sharding, ..DataParallelConfig::default() };
            let parallel = DataParallel::new(&[&layer], &mesh, &config)?;
            let mut optimizer = Optimizer::new(OptimizerConfig::SGD, parallel.buffers())?;
            assert!(DataParallel::new(&[&layer], &mesh, &config).is_err(), "it has an owner");
            watch();
            for hooks in [2, 1] {
                parallel.begin_step(1);
                backward(&layer, mesh.rank() as f64 + 1.0)?;
                parallel.end_backward()?;
                parallel.finish_step()?;
                let own = vec![mesh.rank() as f64 + 1.0; 2];
                assert_eq!(std::mem::take(&mut *seen.lock().unwrap()), vec![own; hooks]);
                // [1, 1] + [2, 2]
                assert_eq!(parallel.grad_norm()?, 18.0_f64.sqrt());
                leaf.remove_hook(before);
            }
            parallel.update(&mut optimizer, &StepConfig { lr: 0.25, grad_scale: 1.0 })?;
            leaf.value()?.to_f64()
        });
        for result in results {
            assert_eq!(result?, [0.25; 2], "{sharding:?}");
        }
    }
    Ok(())
}

/// One step of `layer` with the gradient of rank `bad` NaN in its last element: the refusal of this rank, and its
/// weights after it.
fn refusal(
    mesh: &Mesh,
    layer: &Linear,
    sharding: Sharding,
    clip: Clip,
) -> Result<(String, Vec<f64>)> {
    let config = DataParallelConfig { sharding, ..DataParallelConfig::default() };
    let parallel = DataParallel::new(&[layer], mesh, &config)?;
    let mut optimizer = Optimizer::new(OptimizerConfig::ADAMW, parallel.buffers())?;
    parallel.begin_step(1);
    layer.weight().leaf().accumulate_with(|gradient, _| {
        let gradient = gradient.as_mut_slice::<f64>()?;
        gradient.fill(1.0);
        *gradient.last_mut().expect("an element") = [1.0, f64::NAN][usize::from(mesh.rank() == 1)];
        Ok(())
    })?;
    parallel.end_backward()?;
    parallel.finish_step()?;
    let grad_scale = match clip {
        Clip::Yes => clip_coefficient(parallel.grad_norm()?, 1.0),
        Clip::No => 1.0,
    };
    let step = StepConfig { lr: 0.1, grad_scale };
    let error = parallel.update(&mut optimizer, &step).unwrap_err().to_string();
    assert_eq!(optimizer.steps(), 0);
    Ok((error, layer.weight().leaf().value()?.to_f64()?))
}

#[derive(Debug, Clone, Copy)]
enum Clip {
    Yes,
    No,
}

/// All ranks stop, too, where only one sees the NaN: a stage of a pipeline, or the owner of a shard.
#[test]
fn a_gradient_that_is_not_finite_on_one_rank_stops_all() -> Result<()> {
    let along_data = Sharding::ALL.map(|sharding| (ParallelDims::new(2, 1, 1, 1), sharding));
    let of_model = [(1, 2), (2, 1)]
        .map(|(tensor, pipeline)| (ParallelDims::new(2, tensor, 1, pipeline), Sharding::None));
    for (dims, sharding) in along_data.into_iter().chain(of_model) {
        let dims = dims?;
        for clip in [Clip::Yes, Clip::No] {
            let results = run_threads(2, &WorldConfig::default(), |world| {
                let mesh = Mesh::new(&world, dims, SequenceParallel::Off)?;
                let mut scope = mesh.scope(&Device::cpu(1)?, DType::F64, 1);
                if dims.size(Axis::Tensor) == 2 {
                    scope = scope.sharded_along(Axis::Tensor);
                }
                let name = format!("layers.{}", mesh.axis(Axis::Pipeline).rank());
                let layer = Linear::new(&scope.child(&name), 2, 1, Bias::No, Init::Ones)?;
                refusal(&mesh, &layer, sharding, clip)
            });
            let what = format!("{dims:?} {sharding:?} {clip:?}");
            for (rank, result) in results.into_iter().enumerate() {
                let (error, weights) = result?;
                assert_eq!(weights, [1.0; 2], "{what}");
                let peer = "optimizer: step 1: rank 1 refuses it, and says why";
                let own = "optimizer: step 1: the gradients or their norm are not finite";
                let sees_it =
                    rank == 1 || matches!(sharding, Sharding::None) && dims.size(Axis::Data) == 2;
                let named = error.starts_with(own) && error.contains("'layers.");
                let told = error.starts_with(peer);
                let clipped = error.starts_with(own) && matches!(clip, Clip::Yes);
                assert!(
                    if sees_it { named } else { told || clipped },
                    "{what} rank {rank}: {error}"
                );
            }
        }
    }
    Ok(())
}

/// Nothing else compares them in a loop of one's own.
#[test]
fn ranks_with_other_numbers_of_a_step_are_refused() -> Result<()> {
    let adamw = |beta1| match OptimizerConfig::ADAMW {
        OptimizerConfig::AdamW { beta2, eps, weight_decay, .. } => {
            OptimizerConfig::AdamW { beta1, beta2, eps, weight_decay }
        }
        other => other,
    };
    for (tensor, pipeline) in [(1, 1), (2, 1), (1, 2)] {
        let results = run_threads(2, &WorldConfig::default(), |world| {
            let layout = ParallelDims::new(2, tensor, 1, pipeline)?;
            let mesh = Mesh::new(&world, layout, SequenceParallel::Off)?;
            let number = mesh.rank() as f64;
            let stage = mesh.axis(Axis::Pipeline).rank();
            let scope = mesh.scope(&Device::cpu(1)?, DType::F64, 1).child(&stage.to_string());
            let layer = Linear::new(&scope, 2, 1, Bias::No, Init::Ones)?;
            let parallel = DataParallel::new(&[&layer], &mesh, &DataParallelConfig::default())?;
            parallel.begin_step(1);
            backward(&layer, 1.0)?;
            parallel.end_backward()?;
            parallel.finish_step()?;
            let step = StepConfig { lr: 0.5, grad_scale: 1.0 };
            let other_lr = StepConfig { lr: 0.5 + number, ..step };
            let local_norm = StepConfig { grad_scale: 1.0 / (1.0 + number), ..step };
            let rounded = StepConfig { grad_scale: 1.0 + number * f64::EPSILON, ..step };
            let refusal = |config, steps: u64, step: &StepConfig| -> Result<String> {
                let mut optimizer = Optimizer::new(config, parallel.buffers())?;
                optimizer.set_steps(steps);
                let refusal = parallel.update(&mut optimizer, step).err();
                assert_eq!(optimizer.steps(), steps + u64::from(refusal.is_none()));
                Ok(refusal.map_or(String::new(), |error| error.to_string()))
            };
            let sgd = OptimizerConfig::SGD;
            Ok([
                refusal(sgd, 0, &other_lr)?,
                refusal(sgd, 0, &local_norm)?,
                refusal(sgd, mesh.rank() as u64, &step)?,
                refusal(adamw(0.5 + number / 4.0), 0, &step)?,
                refusal(sgd, 0, &rounded)?,
            ])
        });
        for (rank, result) in results.into_iter().enumerate() {
            let [lr, scale, steps, config, rounded] = result?;
            let want = format!(
                "step 1: the learning rate is {rank}.5 on rank {rank}, and from 0.5 to 1.5"
            );
            assert!(lr.contains(&want) && lr.contains("give all ranks the same"), "{lr}");
            assert!(scale.contains("from 0.5 to 1 on all: compute it from"), "{scale}");
            assert!(steps.contains("from 0 to 1 on all: load the same checkpoint"), "{steps}");
            let (beta1, other) = (0.5 + rank as f64 / 4.0, "and another on other ranks: give all");
            let want = format!("configuration is {:?} on rank {rank}, {other}", adamw(beta1));
            assert!(config.contains(&want), "{config}");
            assert_eq!(rounded, "");
        }
    }
    Ok(())
}

/// The same where one rank forgets it, and sums along other axes are still to be made.
#[test]
fn gradients_that_are_not_reduced_are_refused() -> Result<()> {
    for forgetful in [&[0, 1][..], &[0]] {
        let results = run_threads(2, &WorldConfig::default(), |world| {
            let (mesh, layer) = (two_ranks(&world)?, layer()?);
            let parallel = DataParallel::new(&[&layer], &mesh, &DataParallelConfig::default())?;
            let mut optimizer = Optimizer::new(OptimizerConfig::SGD, parallel.buffers())?;
            let step = StepConfig { lr: 0.25, grad_scale: 1.0 };
            for finishes in [true, !forgetful.contains(&world.rank())] {
                parallel.begin_step(1);
                backward(&layer, 1.0)?;
                parallel.end_backward()?;
                if !finishes {
                    let error = parallel.grad_norm().unwrap_err().to_string();
                    assert!(
                        error.contains("call `finish_step` after the last backward"),
                        "{error}"
                    );
                } else {
                    parallel.finish_step()?;
                }
                let error = optimizer.step(parallel.buffers(), &step).unwrap_err().to_string();
                assert!(
                    error.contains("2 ranks train these parameters: use `DataParallel::update`")
                );
                if let Err(error) = parallel.update(&mut optimizer, &step) {
                    let weights = layer.weight().leaf().value()?.to_f64()?;
                    return Ok((error.to_string(), weights));
                }
            }
            Ok(("nothing was refused".to_string(), Vec::new()))
        });
        for (rank, result) in results.into_iter().enumerate() {
            let (error, weights) = result?;
            let want = match forgetful.contains(&rank) {
                true => {
                    "data_parallel: the gradients are not summed over ranks yet: call `finish_step`"
                }
                false => "optimizer: step 2: rank 0 refuses it",
            };
            assert!(error.starts_with(want), "{error}");
            assert_eq!(weights, [0.5; 2]);
        }
    }
    Ok(())
}

#[test]
fn a_parameter_that_a_stage_forgets_is_named() -> Result<()> {
    struct Forgets(Linear, #[expect(dead_code, reason = "forgotten")] Linear);
    impl Module for Forgets {
        fn visit(&self, f: &mut dyn FnMut(&Param)) {
            self.0.visit(f);
        }
    }
    let results = run_threads(2, &WorldConfig::default(), |world| {
        let mesh = two_ranks(&world)?;
        let scope = mesh.scope(&Device::cpu(1)?, DType::F64, 1);
        let layer = |name| Linear::new(&scope.child(name), 2, 1, Bias::No, Init::Ones);
        let model = Forgets(layer("first")?, layer("second")?);
        let parallel = DataParallel::new(&[&model], &mesh, &DataParallelConfig::default())?;
        let mut optimizer = Optimizer::new(OptimizerConfig::ADAMW, parallel.buffers())?;
        parallel.begin_step(1);
        backward(&model.0, 1.0)?;
        parallel.end_backward()?;
        parallel.finish_step()?;
        parallel.update(&mut optimizer, &StepConfig { lr: 0.1, grad_scale: 1.0 })
    });
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("the model's scope made 'second.weight', but no buffer"), "{error}");
    }
    Ok(())
}

/// Muon gathers shards within a step, when other parameters are updated already: sizes are compared at construction.
#[test]
fn uneven_shards_of_a_matrix_are_refused_at_construction() {
    let rows = |cut: [usize; 2], optimizer| {
        run_threads(2, &WorldConfig::default(), move |world| {
            let layout = ParallelDims::new(2, 2, 1, 1)?;
            let mesh = Mesh::new(&world, layout, SequenceParallel::Off)?;
            let scope = mesh.scope(&Device::cpu(1)?, DType::F64, 1).sharded_along(Axis::Tensor);
            let (rank, len) = (world.rank(), cut[world.rank()]);
            let place = ShardSpec::new(&[6, 4], &[&[(rank * cut[0], len)], &[(0, 4)]])?;
            let init = Init::Normal { std: 1.0 };
            let hidden = scope.param_at("w", place, init, WeightDecay::On);
            let config = DataParallelConfig { optimizer, ..DataParallelConfig::default() };
            // A rank that fails would stop the other one, which may be making its groups still.
            let parallel = match DataParallel::new(&[&hidden], &mesh, &config) {
                Ok(parallel) => parallel,
                Err(refusal) => return Ok(Some(refusal.to_string())),
            };
            let mut optimizer = Optimizer::new(optimizer, parallel.buffers())?;
            parallel.begin_step(1);
            hidden.var()?.sum_all()?.backward()?;
            parallel.end_backward()?;
            parallel.finish_step()?;
            parallel.update(&mut optimizer, &StepConfig { lr: 0.1, grad_scale: 1.0 })?;
            Ok(None)
        })
    };
    let muon = OptimizerConfig::Muon(MuonConfig::default());
    for (rank, result) in rows([2, 4], muon).into_iter().enumerate() {
        let want = format!(
            "data_parallel: 'w': muon gathers its shards along dim 0 of 6, of which rank {rank} of 2 along the tensor \
             axis must hold 3, not {}: cut it by `TensorParallel::shard`, or give it another `optimizer` by \
             `Scope::with_options`",
            [2, 4][rank]
        );
        assert_eq!(result.unwrap(), Some(want));
    }
    rows([3, 3], muon).into_iter().for_each(|result| assert_eq!(result.unwrap(), None));
    // AdamW updates elements, however they are cut.
    rows([2, 4], OptimizerConfig::ADAMW)
        .into_iter()
        .for_each(|result| assert_eq!(result.unwrap(), None));
}

/// A stage need not have a parameter for each pattern, but one of them must.
#[test]
fn patterns_of_options_that_match_on_no_stage_are_refused() -> Result<()> {
    let refusals = |ranks: usize, stages: usize, pattern: &'static str| -> Result<Vec<_>> {
        let results = run_threads(ranks, &WorldConfig::default(), |world| {
            let layout = ParallelDims::new(ranks, 1, 1, stages)?;
            let mesh = Mesh::new(&world, layout, SequenceParallel::Off)?;
            let patterns = ParamPatterns::new([pattern])?;
            let scope =
                mesh.scope(&Device::cpu(1)?, DType::F64, 1).with_options_for(&patterns, |of_run| {
                    ParamOptions { lr_multiplier: 0.5, ..of_run }
                });
            let stage = mesh.axis(Axis::Pipeline).rank();
            let scope = scope.child(&format!("layers.{stage}"));
            let layer = Linear::new(&scope, 2, 1, Bias::No, Init::Ones)?;
            let parallel = DataParallel::new(&[&layer], &mesh, &DataParallelConfig::default());
            Ok(parallel.err().map(|error| error.to_string()))
        });
        results.into_iter().collect()
    };
    for (ranks, stages) in [(2, 1), (2, 2), (4, 2)] {
        assert!(refusals(ranks, stages, "layers.0")?.iter().all(Option::is_none));
        let want = "options: the pattern 'layers.7' of `Scope::with_options_for`";
        for refusal in refusals(ranks, stages, "layers.7")? {
            let refusal = refusal.expect("a refusal");
            assert!(refusal.starts_with(want), "{refusal}");
        }
    }
    Ok(())
}

#[test]
fn update_with_refuses_gradients_that_are_not_summed() -> Result<()> {
    let device = Device::cpu(1)?;
    let scope = Scope::new(&device, DType::F64, 1);
    let layer = Linear::new(&scope, 2, 1, Bias::No, Init::Ones)?;
    let config = DataParallelConfig::default();
    let parallel = DataParallel::new(&[&layer], &Mesh::single(), &config)?;
    let mut optimizer = Optimizer::new(OptimizerConfig::SGD, parallel.buffers())?;
    let numbers = optimizer.numbers(&StepConfig { lr: 0.5, grad_scale: 1.0 });
    let numbers = DeviceStepParams::new(&device, &numbers)?;
    parallel.begin_step(1);
    backward(&layer, 1.0)?;
    parallel.end_backward()?;
    let error = parallel.update_with(&mut optimizer, &numbers).unwrap_err().to_string();
    assert!(error.contains("not summed over ranks yet: call `finish_step`"), "{error}");
    parallel.finish_step()?;
    parallel.update_with(&mut optimizer, &numbers)
}
