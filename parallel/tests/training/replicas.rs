//! Parameters with wrong facts: refused when they are placed, or found by comparing replicas over ranks.

use ferrotron_nn::{
    Axis, Dropout, Init, Module, Param, ParamOptions, RmsNorm, Scope, Sharding, WeightDecay,
};
use ferrotron_parallel::collective::{WorldConfig, run_threads};
use ferrotron_parallel::data_parallel::{DataParallel, DataParallelConfig, ReplicaCheck};
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{DType, Device, Result, Tensor};

/// Ranks along tensor and pipeline; the rest is data parallel.
type Sizes = (usize, usize);

/// Runs `f` on ranks with sequence parallelism, if there is more than one along the tensor axis.
fn on_ranks<T: Send>(
    ranks: usize,
    (tensor, pipeline): Sizes,
    f: impl Fn(&Mesh) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let sequence = if tensor > 1 { SequenceParallel::On } else { SequenceParallel::Off };
    run_threads(ranks, &WorldConfig::default(), |world| {
        f(&Mesh::new(&world, ParallelDims::new(ranks, tensor, 1, pipeline)?, sequence)?)
    })
}

struct One(Param);

impl Module for One {
    fn visit(&self, f: &mut dyn FnMut(&Param)) {
        f(&self.0);
    }
}

/// A step in which every element has the gradient `gradient`, up to the comparison of replicas.
fn step(mesh: &Mesh, module: &dyn Module, gradient: f64, sharding: Sharding) -> Result<()> {
    let config = DataParallelConfig {
        sharding,
        replica_check: ReplicaCheck::EveryStep,
        ..DataParallelConfig::default()
    };
    let parallel = DataParallel::new(&[module], mesh, &config)?;
    parallel.begin_step(1);
    fill(module, gradient)?;
    parallel.end_backward()?;
    parallel.finish_step()
}

/// Contributes `gradient` to every element of a module.
fn fill(module: &dyn Module, gradient: f64) -> Result<()> {
    module.params().iter().try_for_each(|param| {
        param.leaf().accumulate_with(|tensor, _| {
            tensor.as_mut_slice::<f64>()?.fill(gradient);
            Ok(())
        })
    })
}

fn vector(scope: &Scope) -> One {
    One(scope.param("weight", &[6], Init::Normal { std: 1.0 }, WeightDecay::On))
}

/// The gradient of rank r is r + 1, as if each saw other positions.
fn own_gradient(mesh: &Mesh) -> f64 {
    mesh.rank() as f64 + 1.0
}

#[test]
fn a_norm_that_says_nothing_of_its_gradients_is_refused_with_sequence_parallelism() -> Result<()> {
    let device = Device::cpu(1)?;
    let place = |mesh: &Mesh, scope: Scope| {
        let norm = RmsNorm::new(&scope.child("norm"), 6, 1e-5);
        DataParallel::new(&[&norm], mesh, &DataParallelConfig::default()).map(drop)
    };
    for result in on_ranks(2, (2, 1), |mesh| place(mesh, Scope::new(&device, DType::F64, 1))) {
        let error = result.unwrap_err().to_string();
        assert!(
            error.contains("data_parallel: 'norm.weight' is replicated along Tensor"),
            "{error}"
        );
        assert!(error.contains("`mesh.scope(..)`"), "{error}");
    }
    for result in on_ranks(2, (2, 1), |mesh| place(mesh, mesh.scope(&device, DType::F64, 1))) {
        result?;
    }
    // Nothing to say on ranks that see all positions.
    place(&Mesh::single(), Scope::new(&device, DType::F64, 1))
}

#[test]
fn a_shard_that_is_said_to_be_replicated_is_refused() -> Result<()> {
    let device = Device::cpu(1)?;
    let results = on_ranks(2, (2, 1), |mesh| {
        let (scope, tp) = (mesh.scope(&device, DType::F64, 1), mesh.tensor_parallel());
        let place = tp.shard(&[4, 3], 0, &[4])?;
        let weight = One(scope.param_at("weight", place, Init::Ones, WeightDecay::On));
        DataParallel::new(&[&weight], mesh, &DataParallelConfig::default()).map(drop)
    });
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("'weight' is a shard [2, 3] of [4, 3]"), "{error}");
        assert!(error.contains("`scope.sharded_along(Axis::Tensor)`"), "{error}");
    }
    Ok(())
}

#[test]
fn gradients_that_differ_between_replicas_are_named() -> Result<()> {
    let device = Device::cpu(1)?;
    for sharding in [Sharding::None, Sharding::Optimizer, Sharding::Gradients, Sharding::Weights] {
        let run = |whole: bool| {
            let device = device.clone();
            move |mesh: &Mesh| {
                let scope = mesh.scope(&device, DType::F64, 1);
                let wrong = scope.clone().with_whole_gradients(Axis::Tensor);
                let one = vector(if whole { &wrong } else { &scope });
                step(mesh, &one, own_gradient(mesh), sharding)
            }
        };
        for result in on_ranks(4, (2, 1), run(true)) {
            let error = result.unwrap_err().to_string();
            let line = "check_replicas: 'weight' on ranks 0 and 1 along Tensor: the gradients";
            assert!(error.contains(line), "{sharding:?}: {error}");
        }
        on_ranks(4, (2, 1), run(false)).into_iter().collect::<Result<Vec<()>>>()?;
    }
    Ok(())
}

/// Sums over the tensor axis are right only if each rank has the gradients of its own positions.
#[test]
fn a_model_that_cuts_no_positions_is_refused_with_sequence_parallelism() -> Result<()> {
    let device = Device::cpu(1)?;
    let first_step = |sharding: Sharding, is_whole: bool, replica_check: ReplicaCheck| {
        let device = device.clone();
        on_ranks(4, (2, 1), move |mesh| {
            let scope = mesh.scope(&device, DType::F64, 1);
            let (cut, whole) = (vector(&scope.child("cut")), vector(&scope.child("whole")));
            let config = DataParallelConfig { sharding, replica_check, ..Default::default() };
            let parallel = DataParallel::new(&[&cut, &whole], mesh, &config)?;
            let step = |scale: f64| {
                parallel.begin_step(1);
                for (module, is_whole) in [(&cut, is_whole), (&whole, true)] {
                    let own = mesh.axis(Axis::Tensor).rank() as f64;
                    let gradient = scale * if is_whole { 1.0 } else { 1.0 + own };
                    fill(module, gradient)?;
                }
                parallel.end_backward()?;
                parallel.finish_step()
            };
            // Zeros and overflows say nothing.
            step(0.0)?;
            step(f64::INFINITY)?;
            Ok(step(1.0).map_err(|error| error.to_string()))
        })
    };
    for sharding in [Sharding::None, Sharding::Optimizer, Sharding::Gradients, Sharding::Weights] {
        for rank in first_step(sharding, true, ReplicaCheck::Off) {
            let error = rank?.unwrap_err();
            let line = "data_parallel: with sequence parallelism, all 2 ranks along the tensor axis have the same gradients \
                        of ";
            assert!(error.starts_with(line), "{sharding:?}: {error}");
            assert!(
                error.contains("would be 2 times too large: the model does not cut"),
                "{error}"
            );
        }
        // One parameter may have such gradients by chance.
        for rank in first_step(sharding, false, ReplicaCheck::Off) {
            assert_eq!(rank?, Ok(()), "{sharding:?}");
        }
        let ranks = first_step(sharding, false, ReplicaCheck::EveryStep);
        let ranks = ranks.into_iter().collect::<Result<Vec<_>>>()?;
        let errors: Vec<String> = ranks.into_iter().filter_map(std::result::Result::err).collect();
        // With shards, those of the ranks that update it.
        assert!(errors.len() >= 2, "{sharding:?}: {errors:?}");
        for error in errors {
            let want = "check_replicas: all 2 ranks along the tensor axis have the same gradient of 'whole.weight'";
            assert!(error.starts_with(want), "{sharding:?}: {error}");
            assert!(error.contains("`scope.with_whole_gradients(Axis::Tensor)`"), "{error}");
        }
    }
    Ok(())
}

#[test]
fn a_parameter_of_two_stages_must_be_declared() -> Result<()> {
    let device = Device::cpu(1)?;
    let place = |mesh: &Mesh, scope: &Scope, frozen: bool| {
        let one = vector(scope);
        one.0.set_trainable(!frozen)?;
        DataParallel::new(&[&one], mesh, &DataParallelConfig::default()).map(drop)
    };
    let plain = |mesh: &Mesh| mesh.scope(&device, DType::F64, 1);
    for frozen in [false, true] {
        for result in on_ranks(4, (1, 2), |mesh| place(mesh, &plain(mesh), frozen)) {
            let error = result.unwrap_err().to_string();
            let want = "data_parallel: 'weight' is held by pipeline stages 0 and 1: each stage would train a copy";
            assert!(error.contains(want) && error.contains("`mesh.tied_scope(..)`"), "{error}");
        }
    }
    // Replicated, and yet no sum.
    let half = |mesh: &Mesh| plain(mesh).replicated_along(Axis::Pipeline);
    for result in on_ranks(2, (1, 2), |mesh| place(mesh, &half(mesh), false)) {
        assert!(result.unwrap_err().to_string().contains("`mesh.tied_scope(..)`"));
    }
    // Only the ends of the pipeline sum their gradients.
    let ends = |mesh: &Mesh| mesh.tied_scope(&plain(mesh));
    for result in on_ranks(3, (1, 3), |mesh| place(mesh, &ends(mesh), false)) {
        let error = result.unwrap_err().to_string();
        assert!(
            error.contains("stages 0 and 1: only the first and the last stage can share"),
            "{error}"
        );
    }
    for sharding in [Sharding::None, Sharding::Optimizer] {
        let results = on_ranks(4, (1, 2), |mesh| {
            step(mesh, &vector(&ends(mesh)), own_gradient(mesh), sharding)
        });
        results.into_iter().collect::<Result<Vec<()>>>()?;
    }
    Ok(())
}

/// The scope refuses the second layer on one stage.
#[test]
fn random_layers_on_one_path_of_two_stages_are_refused() -> Result<()> {
    let device = Device::cpu(1)?;
    let place = |mesh: &Mesh, shared: bool| {
        let stage = mesh.axis(Axis::Pipeline).rank();
        let scope = mesh.scope(&device, DType::F64, 1);
        let norm = RmsNorm::new(&scope.child(&format!("norm_{stage}")), 6, 1e-5);
        let path = if shared { "dropout".to_string() } else { format!("dropout_{stage}") };
        let _dropout = Dropout::new(&scope.child(&path), 0.1)?;
        DataParallel::new(&[&norm], mesh, &DataParallelConfig::default()).map(drop)
    };
    for result in on_ranks(2, (1, 2), |mesh| place(mesh, true)) {
        let error = result.unwrap_err().to_string();
        let want = "data_parallel: layers on pipeline stages 0 and 1 draw random numbers at the path 'dropout'";
        assert!(error.contains(want), "{error}");
    }
    on_ranks(2, (1, 2), |mesh| place(mesh, false)).into_iter().collect()
}

#[test]
fn replicas_with_other_values_are_named() -> Result<()> {
    let device = Device::cpu(1)?;
    let results = on_ranks(2, (1, 1), |mesh| {
        let one = vector(&mesh.scope(&device, DType::F64, 1));
        let own = Tensor::full(&device, DType::F64, &[6], mesh.rank() as f64)?;
        one.0.leaf().set_value(&own)?;
        step(mesh, &one, 1.0, Sharding::None)
    });
    for result in results {
        let error = result.unwrap_err().to_string();
        let want = "'weight' on ranks 0 and 1 along Data: the values of the same elements differ";
        assert!(error.contains(want), "{error}");
    }
    Ok(())
}

/// Ranks are compared along any axis: those along the tensor axis may hold shards only, and stages other parameters.
#[test]
fn ranks_with_other_seeds_or_configurations_are_refused() -> Result<()> {
    let device = Device::cpu(1)?;
    for sizes in [(1, 1), (2, 1), (1, 2)] {
        let results = on_ranks(2, sizes, |mesh| {
            let scope = mesh.scope(&device, DType::F64, 7 + mesh.rank() as u64);
            let one = vector(&scope.child(&mesh.rank().to_string()));
            DataParallel::new(&[&one], mesh, &DataParallelConfig::default()).map(drop)
        });
        for result in results {
            let error = result.unwrap_err().to_string();
            let want = "the seed of the model's scope (use one seed and `Scope::child` on all pipeline stages) is 7 on rank 0 and 8 \
                        on rank 1: give all ranks the same";
            assert_eq!(error, want, "{sizes:?}");
        }
    }
    let results = on_ranks(2, (1, 1), |mesh| {
        let sharding = Sharding::ALL[mesh.rank()];
        let config = DataParallelConfig { sharding, ..DataParallelConfig::default() };
        DataParallel::new(&[&vector(&mesh.scope(&device, DType::F64, 1))], mesh, &config).map(drop)
    });
    for result in results {
        let error = result.unwrap_err().to_string();
        assert_eq!(
            error,
            "sharding is None on rank 0 and Optimizer on rank 1: give all ranks the same"
        );
    }
    Ok(())
}

/// The other ranks would wait for it forever.
#[test]
fn a_rank_that_refuses_its_parameters_or_configuration_tells_the_others() -> Result<()> {
    let device = Device::cpu(1)?;
    let refusals = [
        "buckets need at least 1 element, got 0",
        "all 1 parameters are frozen: nothing is left to train",
        "rank 1 has no parameters: use fewer stages",
    ];
    for (case, want) in refusals.iter().enumerate() {
        let results = on_ranks(2, (1, 1), |mesh| {
            let one = vector(&mesh.scope(&device, DType::F64, 1));
            let is_odd = |odd: usize| mesh.rank() == 1 && case == odd;
            one.0.set_trainable(!is_odd(1))?;
            let bucket_numel = is_odd(0).then_some(0);
            let config = DataParallelConfig { bucket_numel, ..DataParallelConfig::default() };
            let modules: &[&dyn Module] = if is_odd(2) { &[] } else { &[&one] };
            let refused = DataParallel::new(modules, mesh, &config).err();
            Ok(refused.expect("a refusal").to_string())
        });
        let errors = results.into_iter().collect::<Result<Vec<String>>>()?;
        let own = format!("data_parallel: {want}");
        assert_eq!(errors, [format!("rank 1: {own}"), own]);
    }
    Ok(())
}

#[test]
fn ranks_with_other_parameters_are_refused() -> Result<()> {
    let device = Device::cpu(1)?;
    for (ranks, sizes, odd) in [(2, (1, 1), 1), (2, (2, 1), 1), (4, (1, 2), 3)] {
        for swapped in [true, false] {
            let results = on_ranks(ranks, sizes, |mesh| {
                let stage = mesh.axis(Axis::Pipeline).rank();
                let scope = mesh.scope(&device, DType::F64, 1).child(&stage.to_string());
                let [a, b] = ["a", "b"].map(|name| vector(&scope.child(name)));
                let is_odd = mesh.rank() == odd;
                b.0.set_trainable(swapped || !is_odd)?;
                let modules: [&dyn Module; 2] = if swapped && is_odd { [&b, &a] } else { [&a, &b] };
                DataParallel::new(&modules, mesh, &DataParallelConfig::default()).map(drop)
            });
            let (first, stage) = (odd - 1, sizes.1 - 1);
            let want = match swapped {
                true => format!(
                    "parameter 1 is '{stage}.a.weight' [6] f64, seed 1, trained on rank {first} and \
                     '{stage}.b.weight' [6] f64, seed 1, trained on rank {odd}: ranks"
                ),
                false => format!(
                    "parameter 2 is '{stage}.b.weight' [6] f64, seed 1, trained on rank {first} and \
                     '{stage}.b.weight' [6] f64, seed 1, frozen on rank {odd}: ranks"
                ),
            };
            for result in results {
                let error = result.unwrap_err().to_string();
                assert!(error.contains(&want), "{sizes:?}: {error}");
            }
        }
    }
    Ok(())
}

#[test]
fn ranks_with_other_options_or_seeds_of_a_parameter_are_refused() -> Result<()> {
    let device = Device::cpu(1)?;
    // The seeds of both ranks are 1 and 2.
    for other_options in [true, false] {
        let results = on_ranks(2, (1, 1), |mesh| {
            let is_odd = mesh.rank() == 1;
            let weight_decay = (is_odd && other_options).then_some(0.5);
            let scope = |name: &str, seed: u64| {
                let options = ParamOptions { weight_decay, ..ParamOptions::default() };
                let scope = mesh.scope(&device, DType::F64, seed).child(name);
                scope.with_options(move |_| options)
            };
            let (a, b) = if is_odd && !other_options { (2, 1) } else { (1, 2) };
            let (a, b) = (vector(&scope("a", a)), vector(&scope("b", b)));
            DataParallel::new(&[&a, &b], mesh, &DataParallelConfig::default()).map(drop)
        });
        let odd = match other_options {
            true => {
                "seed 1, trained, ParamOptions { dtype: None, lr_multiplier: 1.0, weight_decay: Some(0.5)"
            }
            false => "seed 2, trained on rank 1: ranks",
        };
        let shown = "'a.weight' [6] f64, ";
        let want = format!("parameter 1 is {shown}seed 1, trained on rank 0 and {shown}{odd}");
        for result in results {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(&want), "{error}");
        }
    }
    Ok(())
}
