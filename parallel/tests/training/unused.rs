//! Experts that only some ranks use in a step, or none: refused, or as on one rank.

use ferrotron_autograd::Var;
use ferrotron_nn::{
    AdafactorConfig, Axis, Bias, Init, Linear, Module, Optimizer, OptimizerConfig, Param, Scope,
    Sharding, StepConfig, Unused,
};
use ferrotron_parallel::collective::{WorldConfig, run_threads};
use ferrotron_parallel::data_parallel::{DataParallel, DataParallelConfig, ReplicaCheck};
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{DType, Device, Result, Tensor};

/// Three experts behind a layer that everybody uses.
struct Mixture {
    first: Linear,
    experts: Vec<Linear>,
}

impl Mixture {
    fn new(device: &Device) -> Result<Mixture> {
        let scope = Scope::new(device, DType::F64, 3);
        let layer = |name: &str| {
            Linear::new(&scope.child(name), 3, 3, Bias::Yes, Init::Normal { std: 0.5 })
        };
        let experts = ["a", "b", "c"].map(|name| layer(&format!("experts.{name}")));
        Ok(Mixture { first: layer("first")?, experts: experts.into_iter().collect::<Result<_>>()? })
    }

    fn loss(&self, sample: f64, used: &[usize]) -> Result<Var> {
        let x = Tensor::full(self.first.weight().leaf().device(), DType::F64, &[1, 3], sample)?;
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

/// The weights after each step.
type Found = Vec<Vec<Vec<f64>>>;

fn train(mesh: &Mesh, sharding: Sharding, optimizer: OptimizerConfig) -> Result<Found> {
    let device = Device::cpu(1)?;
    let mixture = Mixture::new(&device)?;
    let config = DataParallelConfig {
        sharding,
        bucket_numel: Some(10),
        shard_unit: optimizer.shard_unit(),
        unused: Unused::Skip,
        replica_check: ReplicaCheck::EveryStep,
        ..DataParallelConfig::default()
    };
    let parallel = DataParallel::new(&[&mixture], mesh, &config)?;
    let mut optimizer = Optimizer::new(optimizer, parallel.buffers())?;
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
        let params = mixture.params();
        found.push(params.iter().map(|p| p.leaf().value()?.to_f64()).collect::<Result<_>>()?);
    }
    Ok(found)
}

#[test]
fn experts_are_trained_as_on_one_rank_and_left_alone_where_nobody_uses_them() -> Result<()> {
    let adafactor = AdafactorConfig { weight_decay: 0.1, ..AdafactorConfig::default() };
    for optimizer in [
        OptimizerConfig::ADAMW,
        OptimizerConfig::Sgd { momentum: 0.9, weight_decay: 0.1 },
        OptimizerConfig::Adafactor(adafactor),
    ] {
        let one = train(&Mesh::single(), Sharding::None, optimizer)?;
        for (step, used) in USED.iter().enumerate().skip(1) {
            for (i, (now, before)) in one[step].iter().zip(&one[step - 1]).enumerate() {
                // Weight and bias of the first layer, then of each expert.
                let is_used = i < 2 || used.iter().any(|used| used.contains(&(i / 2 - 1)));
                assert_eq!(now != before, is_used, "{optimizer:?}: step {step}, parameter {i}");
            }
        }
        for ranks in [2, 4] {
            for sharding in Sharding::ALL {
                let results = run_threads(ranks, &WorldConfig::default(), |world| {
                    let layout = ParallelDims::new(ranks, 1, 1, 1)?;
                    let mesh = Mesh::new(&world, layout, SequenceParallel::Off)?;
                    train(&mesh, sharding, optimizer)
                });
                for result in results {
                    for (step, (got, want)) in result?.iter().zip(&one).enumerate() {
                        for (i, (got, want)) in got.iter().zip(want).enumerate() {
                            let far = got.iter().zip(want).any(|(a, b)| (a - b).abs() > 1e-12);
                            let what = format!("{optimizer:?} {sharding:?} of {ranks}");
                            assert!(!far, "{what}: step {step}, parameter {i}: {got:?} {want:?}");
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn experts_that_a_rank_does_not_use_are_refused_by_name() -> Result<()> {
    for sharding in Sharding::ALL {
        let results = run_threads(2, &WorldConfig::default(), |world| {
            let mesh = Mesh::new(&world, ParallelDims::new(2, 1, 1, 1)?, SequenceParallel::Off)?;
            let mixture = Mixture::new(&Device::cpu(1)?)?;
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
