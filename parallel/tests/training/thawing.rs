//! A second `DataParallel` over the parameters of a first one, with other ones frozen.

use ferrotron_autograd::Var;
use ferrotron_nn::{Bias, Init, Linear, Module, Optimizer, OptimizerConfig, Sharding, StepConfig};
use ferrotron_parallel::collective::{WorldConfig, run_threads};
use ferrotron_parallel::data_parallel::{DataParallel, DataParallelConfig};
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{Category, DType, Device, Result, Tensor};

#[derive(Module)]
pub struct Layers(pub Vec<Linear>);

const NAMES: [&str; 3] = ["0", "1", "2"];

impl Layers {
    pub fn new(mesh: &Mesh, device: &Device) -> Result<Layers> {
        let scope = mesh.scope(device, DType::F64, 5);
        let init = Init::Normal { std: 0.5 };
        let layer = |name| Linear::new(&scope.child(name), 3, 3, Bias::Yes, init);
        Ok(Layers(NAMES.into_iter().map(layer).collect::<Result<_>>()?))
    }

    pub fn loss(&self, sample: usize) -> Result<Var> {
        let device = self.0[0].weight().leaf().device();
        let x: Vec<f64> = (0..3).map(|i| (sample * 3 + i) as f64 * 0.1 - 0.4).collect();
        let x = Var::constant(Tensor::from_slice(device, &x, &[1, 3])?);
        let y = self.0.iter().try_fold(x, |x, layer| layer.forward(&x)?.tanh())?;
        y.square()?.sum_all()
    }

    pub fn values(&self) -> Result<Vec<Vec<f64>>> {
        self.params().iter().map(|param| param.leaf().value()?.to_f64()).collect()
    }
}

pub fn on_two_ranks<T: Send>(f: impl Fn(&Mesh) -> Result<T> + Sync) -> Vec<Result<T>> {
    run_threads(2, &WorldConfig::default(), |world| {
        f(&Mesh::new(&world, ParallelDims::new(2, 1, 1, 1)?, SequenceParallel::Off)?) // dp 2
    })
}

pub fn place(layers: &Layers, mesh: &Mesh, sharding: Sharding) -> Result<DataParallel> {
    let config =
        DataParallelConfig { sharding, bucket_numel: Some(10), ..DataParallelConfig::default() };
    DataParallel::new(&[layers], mesh, &config)
}

fn steps(layers: &Layers, mesh: &Mesh, parallel: &DataParallel) -> Result<()> {
    let mut optimizer = Optimizer::new(OptimizerConfig::ADAMW, parallel.buffers())?;
    for _ in 0..3 {
        let own = mesh.dp_cp().local_range(4);
        parallel.begin_step(own.len());
        for sample in own {
            layers.loss(sample)?.backward_scaled(0.25)?;
            parallel.end_backward()?;
        }
        parallel.finish_step()?;
        parallel.update(&mut optimizer, &StepConfig { lr: 0.05, grad_scale: 1.0 })?;
    }
    Ok(())
}

/// The weights after phases that train two of three layers each.
fn train(mesh: &Mesh, sharding: Sharding) -> Result<Vec<Vec<f64>>> {
    let device = Device::cpu(1)?;
    let layers = Layers::new(mesh, &device)?;
    for frozen in [0, 1, 2, 1] {
        let params = layers.params();
        let is_frozen = |name: &str| name.starts_with(NAMES[frozen]);
        params.iter().try_for_each(|param| param.set_trainable(!is_frozen(param.name())))?;
        let parallel = place(&layers, mesh, sharding)?;
        if sharding < Sharding::Gradients {
            // Buffers of the phase before are gone, though a layer that was in them is frozen now.
            let bytes = device.memory().bytes(Category::Gradients);
            assert_eq!(bytes, 8 * parallel.buffers().numel(), "{sharding:?}, {frozen}");
        }
        steps(&layers, mesh, &parallel)?;
        parallel.unshard()?;
        // The model is usable by itself in between.
        layers.loss(7)?.backward()?;
        assert!(layers.0[(frozen + 1) % 3].weight().leaf().gradient()?.is_some());
        params.iter().for_each(|param| param.leaf().zero_gradient());
    }
    assert_eq!(device.memory().bytes(Category::Communication), 0);
    let held: usize = layers.params().iter().map(|param| 8 * param.leaf().numel()).sum();
    assert_eq!(device.memory().bytes(Category::Weights), held);
    layers.values()
}

#[test]
fn layers_thaw_and_freeze_during_a_run_with_every_stage_of_zero() -> Result<()> {
    let one = train(&Mesh::single(), Sharding::None)?;
    for sharding in Sharding::ALL {
        for two in on_two_ranks(|mesh| train(mesh, sharding)) {
            for (got, want) in two?.iter().flatten().zip(one.iter().flatten()) {
                assert!((got - want).abs() <= 1e-12, "{sharding:?}: {got} {want}");
            }
        }
    }
    Ok(())
}

/// A parameter has one owner at a time, and the refusal leaves that one as it was.
#[test]
fn a_second_owner_is_refused_while_the_first_one_exists() -> Result<()> {
    for sharding in Sharding::ALL {
        let results = on_two_ranks(|mesh| {
            let layers = Layers::new(mesh, &Device::cpu(1)?)?;
            let first = place(&layers, mesh, sharding)?;
            let error = place(&layers, mesh, sharding).err().expect("a refusal").to_string();
            steps(&layers, mesh, &first)?;
            Ok(error)
        });
        for result in results {
            assert_eq!(
                result?,
                "leaf: '0.weight' belongs to a DataParallel or Trainer that still exists: drop that one first \
                 (`DataParallel::unshard` keeps sharded weights)",
                "{sharding:?}"
            );
        }
    }
    Ok(())
}

/// The weights of an owner that was dropped are whole and collect gradients, unless ranks kept shards of them.
#[test]
fn an_owner_with_shards_of_weights_must_give_them_back() -> Result<()> {
    for sharding in Sharding::ALL {
        let results = on_two_ranks(|mesh| {
            let layers = Layers::new(mesh, &Device::cpu(1)?)?;
            steps(&layers, mesh, &place(&layers, mesh, sharding)?)?;
            let values = layers.values();
            layers.params().iter().for_each(|param| param.leaf().zero_gradient());
            let backward = layers.loss(7).and_then(|loss| loss.backward());
            if backward.is_ok() {
                for param in layers.params() {
                    assert!(param.leaf().gradient()?.is_some(), "{sharding:?}: {}", param.name());
                }
            }
            let second = place(&layers, mesh, sharding);
            Ok([values.map(drop), backward, second.map(drop)])
        });
        for result in results {
            for (name, outcome) in ["0.weight", "0.bias", "0.weight"].into_iter().zip(result?) {
                if sharding < Sharding::Weights {
                    outcome?;
                    continue;
                }
                let error = outcome.unwrap_err();
                assert_eq!(
                    error.to_string(),
                    format!(
                        "{name}: data_parallel: ranks held shards of its value, and their DataParallel is gone: call \
                         `DataParallel::unshard` instead of dropping it, and if it failed, make the model anew and load a \
                         checkpoint"
                    )
                );
            }
        }
    }
    Ok(())
}

#[test]
fn a_sharded_weight_is_not_written_where_the_shard_would_not_change() -> Result<()> {
    let results = on_two_ranks(|mesh| {
        let layers = Layers::new(mesh, &Device::cpu(1)?)?;
        let parallel = place(&layers, mesh, Sharding::Weights)?;
        let leaf = layers.0[0].weight().leaf();
        let value = leaf.value()?;
        let refused = leaf.set_value(&value).unwrap_err().to_string();
        drop(value);
        parallel.unshard()?;
        leaf.set_value(&Tensor::zeros(leaf.device(), DType::F64, &[3, 3])?)?;
        Ok(refused)
    });
    for result in results {
        assert_eq!(
            result?,
            "leaf: '0.weight' is fetched before each use (`Leaf::set_unshard_hook`), and a change would be lost: change \
             what it is fetched from (with ZeRO 3, its shard by `ParamAndGradBucket::write_weight`), or change it before \
             its DataParallel is made or after `DataParallel::unshard`"
        );
    }
    Ok(())
}
