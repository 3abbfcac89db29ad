//! Experts that only some ranks use in a step, or none: refused, or as on one rank.

use ferrotron_autograd::Var;
use ferrotron_nn::{
    AdafactorConfig, Axis, Bias, EMA, Init, Linear, MlpConfig, Module, MuonConfig, Optimizer,
    OptimizerConfig, Param, Sharding, StateSpec, StepConfig, Unused, UpdateConfig, UpdateRule,
    UpdateStep,
};
use ferrotron_parallel::collective::{Reduction, WorldConfig, run_threads};
use ferrotron_parallel::data_parallel::{DataParallel, DataParallelConfig, ReplicaCheck};
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::tensor_parallel::{ParallelMlp, SequenceParallel};
use ferrotron_tensor::{DType, Device, Result, ShardSpec, Tensor};
use std::collections::HashMap;

/// Three experts behind a layer that everybody uses.
struct Mixture {
    first: Linear,
    experts: Vec<ParallelMlp>,
}

impl Mixture {
    fn new(device: &Device, mesh: &Mesh) -> Result<Mixture> {
        let (scope, tp) = (mesh.scope(device, DType::F64, 3), mesh.tensor_parallel());
        let init = Init::Normal { std: 0.5 };
        let config = MlpConfig { init, residual_init: init, ..MlpConfig::new(4, 6) };
        let expert =
            |name| ParallelMlp::new(&scope.child(&format!("experts.{name}")), &tp, &config);
        Ok(Mixture {
            first: Linear::new(&scope.child("first"), 4, 4, Bias::Yes, init)?,
            experts: ["a", "b", "c"].into_iter().map(expert).collect::<Result<_>>()?,
        })
    }

    fn loss(&self, sample: f64, used: &[usize]) -> Result<Var> {
        let x: Vec<f64> = (0..4).map(|i| sample + 0.3 * i as f64).collect();
        let x = Tensor::from_slice(self.first.weight().leaf().device(), &x, &[1, 1, 4])?;
        let x = self.first.forward(&Var::constant(x))?.tanh()?;
        let add = |sum: Var, &i: &usize| sum.add(&self.experts[i].forward(&x)?.square()?);
        used.iter().try_fold(x.clone(), add)?.sum_all()
    }
}

impl Module for Mixture {
    fn visit(&self, f: &mut dyn FnMut(&Param)) {
        self.first.visit(f);
        self.experts.iter().for_each(|expert| expert.visit(f));
    }
}

/// The experts of each of four samples in each step: those of two ranks with two micro-batches each.
const USED: [[&[usize]; 4]; 4] = [
    [&[0, 1, 2], &[0, 1, 2], &[0, 1, 2], &[0, 1, 2]],
    [&[0], &[1], &[0], &[0]],
    [&[], &[2], &[], &[]],
    [&[1, 2], &[], &[2], &[0]],
];

/// The tensors of a rank after a step: a name, a shard, and its values.
type Held = Vec<(String, ShardSpec, Vec<f64>)>;

/// Trains, and returns the weights and their moving averages after each step.
fn train(mesh: &Mesh, sharding: Sharding, optimizer: OptimizerConfig) -> Result<Vec<Held>> {
    let device = Device::cpu(1)?;
    let mixture = Mixture::new(&device, mesh)?;
    let config = DataParallelConfig {
        sharding,
        bucket_numel: Some(10),
        optimizer,
        unused: Unused::Skip,
        replica_check: ReplicaCheck::EveryStep,
        ..DataParallelConfig::default()
    };
    let parallel = DataParallel::new(&[&mixture], mesh, &config)?;
    let averaged = UpdateConfig { ema_decay: Some(0.75), ..UpdateConfig::default() };
    let mut optimizer = Optimizer::with_update(optimizer, parallel.buffers(), &averaged)?;
    let data = mesh.axis(Axis::Data);
    let mut found = Vec::new();
    for (step, used) in USED.iter().enumerate() {
        let own = data.local_range(used.len());
        parallel.begin_step(own.len());
        for sample in own {
            let value = 0.1 + 0.3 * step as f64 + 0.2 * sample as f64;
            mixture.loss(value, used[sample])?.backward_scaled(0.25)?;
            parallel.end_backward()?;
        }
        parallel.finish_step()?;
        let norm = parallel.grad_norm()?;
        parallel
            .update(&mut optimizer, &StepConfig { lr: 0.05, grad_scale: 1.0 / (1.0 + norm) })?;
        let mut held = Held::new();
        for param in mixture.params() {
            let values = param.leaf().value()?.to_f64()?;
            held.push((param.name().to_string(), param.shard_spec().clone(), values));
        }
        optimizer.visit(|name, state, place, tensor| {
            if state == EMA {
                held.push((format!("the average of {name}"), place.clone(), tensor.to_f64()?));
            }
            Ok(())
        })?;
        found.push(held);
    }
    Ok(found)
}

/// The global indices of a shard's elements, in local order.
fn indices(place: &ShardSpec) -> impl Iterator<Item = usize> + '_ {
    let width = place.dims().last().copied().unwrap_or(1);
    let numel: usize = place.dims().iter().product();
    let runs = (0..numel.checked_div(width).unwrap_or(0)).flat_map(|row| place.runs(row));
    runs.flat_map(|(start, len)| start as usize..start as usize + len)
}

/// Panics unless each rank holds, after each step, the elements that one rank holds.
fn assert_alike(what: &str, got: &[Held], want: &[Held]) {
    for (step, (got, want)) in got.iter().zip(want).enumerate() {
        let want: HashMap<&str, &[f64]> =
            want.iter().map(|(name, _, values)| (name.as_str(), values.as_slice())).collect();
        for (name, place, values) in got {
            for (index, &got) in indices(place).zip(values) {
                let want = want[name.as_str()][index];
                let near = (got - want).abs() <= 1e-12;
                assert!(near, "{what}: step {step}, element {index} of {name}: {got} {want}");
            }
        }
    }
}

/// Gradient descent of a user's own.
#[derive(Debug)]
struct Descent;

impl UpdateRule for Descent {
    fn name(&self) -> &'static str {
        "descent"
    }

    fn states(&self, _dims: &[usize]) -> Vec<StateSpec> {
        vec![StateSpec::per_element("mean")]
    }

    fn update(
        &self,
        weights: &mut Tensor,
        gradient: &Tensor,
        states: &mut [&mut Tensor],
        step: &UpdateStep,
    ) -> Result<()> {
        let mean = states[0].mul_scalar(0.9)?.add(gradient)?;
        states[0].copy_from(&mean)?;
        let decayed = weights.mul_scalar(1.0 - step.lr()? * step.weight_decay(0.1))?;
        weights.copy_from(&decayed.sub(&mean.mul_scalar(step.lr()?)?)?)
    }
}

#[test]
fn experts_are_trained_as_on_one_rank_and_left_alone_where_nobody_uses_them() -> Result<()> {
    let adafactor = AdafactorConfig { weight_decay: 0.1, ..AdafactorConfig::default() };
    for optimizer in [
        OptimizerConfig::ADAMW,
        OptimizerConfig::Sgd { momentum: 0.9, weight_decay: 0.1 },
        OptimizerConfig::Adafactor(adafactor),
        OptimizerConfig::Lion { beta1: 0.9, beta2: 0.99, weight_decay: 0.1 },
        OptimizerConfig::Muon(MuonConfig::default()),
        OptimizerConfig::custom(&Descent),
    ] {
        let one = train(&Mesh::single(), Sharding::None, optimizer)?;
        for (step, used) in USED.iter().enumerate().skip(1) {
            for (now, before) in one[step].iter().zip(&one[step - 1]) {
                let expert = ["a", "b", "c"]
                    .iter()
                    .position(|name| now.0.contains(&format!("experts.{name}.")));
                let is_used =
                    expert.is_none_or(|expert| used.iter().any(|used| used.contains(&expert)));
                assert_eq!(now != before, is_used, "{optimizer:?}: step {step}, {}", now.0);
            }
        }
        // Ranks along data and along tensor.
        for (data, tensor) in [(2, 1), (4, 1), (2, 2)] {
            for sharding in Sharding::ALL {
                let results = run_threads(data * tensor, &WorldConfig::default(), |world| {
                    let layout = ParallelDims::new(data * tensor, tensor, 1, 1)?;
                    let mesh = Mesh::new(&world, layout, SequenceParallel::Off)?;
                    train(&mesh, sharding, optimizer)
                });
                for result in results {
                    let what = format!("{optimizer:?} {sharding:?} of {data} x {tensor}");
                    assert_alike(&what, &result?, &one);
                }
            }
        }
    }
    Ok(())
}

/// A rank that lacks an expert starts its reduction behind the last backward, others earlier. What follows comes behind
/// both, also in a group of the same ranks.
#[test]
fn the_loss_is_summed_behind_reductions_that_ranks_start_at_different_times() -> Result<()> {
    for sharding in Sharding::ALL {
        let results = run_threads(2, &WorldConfig::default(), |world| {
            let mesh = Mesh::new(&world, ParallelDims::new(2, 1, 1, 1)?, SequenceParallel::Off)?;
            let mixture = Mixture::new(&Device::cpu(1)?, &mesh)?;
            let config = DataParallelConfig {
                sharding,
                bucket_numel: Some(10),
                unused: Unused::Skip,
                ..DataParallelConfig::default()
            };
            let parallel = DataParallel::new(&[&mixture], &mesh, &config)?;
            let used: [&[usize]; 2] = [&[2], &[0, 1, 2]];
            let mut sums = Vec::new();
            for _ in 0..3 {
                parallel.begin_step(1);
                let loss = mixture.loss(1.0, used[mesh.rank()])?;
                loss.backward()?;
                parallel.end_backward()?;
                parallel.reduce_unused()?;
                let sum = mesh.world().all_reduce(loss.value().copy()?, Reduction::Sum)?;
                parallel.finish_step()?;
                sums.push((sum.wait()?.item()?, parallel.grad_norm()?));
            }
            Ok(sums)
        });
        let found = results.into_iter().collect::<Result<Vec<_>>>()?;
        assert_eq!(found[0], found[1], "{sharding:?}");
        assert!(found[0].iter().all(|sums| *sums == found[0][0]), "{sharding:?}: {found:?}");
    }
    Ok(())
}

#[test]
fn experts_that_a_rank_does_not_use_are_refused_by_name() -> Result<()> {
    for sharding in Sharding::ALL {
        let results = run_threads(2, &WorldConfig::default(), |world| {
            let mesh = Mesh::new(&world, ParallelDims::new(2, 1, 1, 1)?, SequenceParallel::Off)?;
            let mixture = Mixture::new(&Device::cpu(1)?, &mesh)?;
            let config = DataParallelConfig { sharding, ..DataParallelConfig::default() };
            let parallel = DataParallel::new(&[&mixture], &mesh, &config)?;
            parallel.begin_step(1);
            mixture.loss(1.0, &[0, 2])?.backward()?;
            parallel.end_backward()?;
            parallel.finish_step()
        });
        for result in results {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("the loss does not depend on experts.b."), "{error}");
            assert!(error.contains("if that may happen, choose `Unused::Skip`"), "{error}");
        }
    }
    Ok(())
}
