//! Cases that other systems test, or were found to get wrong. They cover gradient accumulation in a pipeline, buckets
//! and their owners, and gradients that are missing, too many, zero on some ranks, or whole numbers.

use ferrotron_autograd::{Accum, Var};
use ferrotron_nn::{
    Bias, BufferConfig, Init, Linear, Module, Optimizer, OptimizerConfig, Param,
    ParamAndGradBuffer, Scope, Sharding, StepConfig,
};
use ferrotron_parallel::data_parallel::{DataParallel, DataParallelConfig, unsupported_reason};
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::pipeline::{
    PipelineConfig, PipelineModel, PipelineSchedule, ScheduleKind, execute,
};
use ferrotron_tensor::{DType, Device, Result, Tensor};
use std::collections::BTreeMap;

use crate::harness::{Plan, on_mesh, ranks};

/// One of two layers of one weight, for `DeepSpeed`'s accumulation test: y = w x, and the loss y^2.
struct OneWeight {
    layer: Linear,
    last: bool,
}

impl PipelineModel for OneWeight {
    fn activation(&self, _microbatch: usize) -> (Vec<usize>, DType, Device) {
        (vec![1, 1], DType::F64, self.layer.weight().leaf().device().clone())
    }

    fn forward(&mut self, _microbatch: usize, _chunk: usize, input: Option<Var>) -> Result<Var> {
        let one = || {
            let device = self.layer.weight().leaf().device();
            Ok(Var::constant(Tensor::full(device, DType::F64, &[1, 1], 1.0)?))
        };
        let y = self.layer.forward(&input.map_or_else(one, Ok)?)?;
        if self.last { y.mul(&y)?.sum_all() } else { Ok(y) }
    }

    fn end_backward(&mut self, _microbatch: usize, _chunk: usize) -> Result<()> {
        Ok(())
    }
}

/// Two stages of weight 1, two micro-batches of input 1, squared error to 0, learning rate 0.1. The mean gradient of
/// each weight is 2, so both become 0.8 with any accumulation.
#[test]
fn micro_batches_are_averaged_not_added() {
    for kind in
        [ScheduleKind::Naive, ScheduleKind::GPipe, ScheduleKind::OneFOneB, ScheduleKind::ZbH1]
    {
        let weights = on_mesh(2, 2, |mesh| {
            let scope = Scope::new(&Device::cpu(1)?, DType::F64, 1).child(&mesh.rank().to_string());
            let layer = Linear::new(&scope, 1, 1, Bias::No, Init::Ones)?;
            let parallel = DataParallel::new(&[&layer], &mesh, &DataParallelConfig::default())?;
            let mut optimizer = Optimizer::new(OptimizerConfig::SGD, parallel.buffers())?;
            let config = PipelineConfig { kind, stages: 2, microbatches: 2, chunks: 1 };
            let mut model = OneWeight { layer, last: mesh.rank() == 1 };
            parallel.begin_step(2);
            execute(&PipelineSchedule::new(&config)?, &mut model, &mesh, 0.5)?;
            parallel.finish_step()?;
            assert!((parallel.grad_norm()? - 8.0_f64.sqrt()).abs() < 1e-15);
            parallel.update(&mut optimizer, &StepConfig { lr: 0.1, grad_scale: 1.0 })?;
            model.layer.weight().leaf().value()?.item()
        });
        assert_eq!(weights, [0.8, 0.8], "{kind}");
    }
}

/// Layers of equal sizes, one after another.
#[derive(Module)]
struct Layers(Vec<Linear>);

impl Layers {
    fn new(device: &Device, count: usize, width: usize) -> Result<Layers> {
        let scope = Scope::new(device, DType::F64, 3);
        let layer = |i: usize| {
            Linear::new(&scope.child(&i.to_string()), width, width, Bias::No, Init::XavierUniform)
        };
        Ok(Layers((0..count).map(layer).collect::<Result<_>>()?))
    }
}

/// Ten layers of 95 x 95 = 9025 elements.
#[test]
fn buckets_are_filled_from_the_last_layer_to_the_first() {
    for (bucket_numel, sizes) in [
        (None, vec![10]),
        (Some(9000), vec![1; 10]),
        (Some(9025), vec![1; 10]),
        (Some(9050), vec![2; 5]),
        (Some(18000), vec![2; 5]),
        (Some(18050), vec![2; 5]),
        (Some(20000), vec![3, 3, 3, 1]),
    ] {
        let layers = Layers::new(&Device::cpu(1).unwrap(), 10, 95).unwrap();
        let config = BufferConfig {
            bucket_numel: bucket_numel.unwrap_or(usize::MAX),
            ..BufferConfig::default()
        };
        let buffers = ParamAndGradBuffer::with_config(&layers.params(), &config).unwrap();
        let found: Vec<usize> = buffers.groups().iter().map(|group| group.params.len()).collect();
        assert_eq!(found, sizes, "{bucket_numel:?}");
        let mut next = 10;
        for group in buffers.groups() {
            next -= group.params.len();
            let names: Vec<&str> = group.params.iter().map(|param| param.name()).collect();
            let want: Vec<String> =
                (next..next + names.len()).map(|i| format!("{i}.weight")).collect();
            assert_eq!(names, want);
        }
    }
}

fn fill_with_one(layers: &Layers) -> Result<()> {
    for layer in layers.0.iter().rev() {
        layer.weight().leaf().accumulate_with(|gradient, accum| {
            assert_eq!(accum, Accum::Replace);
            gradient.as_mut_slice::<f64>()?.fill(1.0);
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn the_owner_has_the_sum_and_the_rest_is_untouched() {
    for sharding in Sharding::ALL {
        for bucket_numel in [None, Some(9000), Some(9050), Some(20000)] {
            on_mesh(3, 1, |mesh| {
                let layers = Layers::new(&Device::cpu(1)?, 10, 95)?;
                let config =
                    DataParallelConfig { sharding, bucket_numel, ..DataParallelConfig::default() };
                let parallel = DataParallel::new(&[&layers], &mesh, &config)?;
                parallel.begin_step(1);
                fill_with_one(&layers)?;
                parallel.finish_step()?;
                for group in parallel.buffers().groups() {
                    let (numel, shard) = (group.numel(), group.padded_numel() / 3);
                    assert_eq!(
                        shard,
                        numel.div_ceil(3).next_multiple_of(if shard < 4096 { 1 } else { 8 })
                    );
                    let bound = |rank: usize| numel.min(rank * shard);
                    let own = bound(mesh.rank())..bound(mesh.rank() + 1);
                    let own = if sharding == Sharding::None { 0..numel } else { own };
                    assert_eq!(group.owned, own);
                    let sums = group.reduced_grads().lock().unwrap();
                    let sums = sums.slice(..)?.to_vec::<f64>()?;
                    let kept = if sums.len() == own.len() { 0..own.len() } else { own };
                    for (i, &x) in sums.iter().take(numel).enumerate() {
                        let want = if kept.contains(&i) { 3.0 } else { 1.0 };
                        assert_eq!(x, want, "{sharding:?}, {bucket_numel:?}, element {i}");
                    }
                }
                // Every element counts once.
                assert_eq!(parallel.grad_norm()?, (90250.0 * 9.0_f64).sqrt());
                Ok(())
            });
        }
    }
}

#[test]
fn one_rank_sends_nothing() {
    for sharding in Sharding::ALL {
        on_mesh(1, 1, |mesh| {
            let layers = Layers::new(&Device::cpu(1)?, 2, 4)?;
            let config = DataParallelConfig { sharding, ..DataParallelConfig::default() };
            let parallel = DataParallel::new(&[&layers], &mesh, &config)?;
            parallel.begin_step(1);
            fill_with_one(&layers)?;
            parallel.finish_step()?;
            assert_eq!(parallel.grad_norm()?, 32.0_f64.sqrt());
            assert_eq!(parallel.expected_traffic(1, 1), Default::default());
            assert_eq!(mesh.dp_cp().traffic(), Default::default());
            Ok(())
        });
    }
}

#[test]
fn a_step_that_lacks_gradients_is_an_error_that_names_them() {
    for sharding in Sharding::ALL {
        for bucket_numel in [None, Some(1)] {
            let layers = Layers::new(&Device::cpu(1).unwrap(), 3, 2).unwrap();
            let config =
                DataParallelConfig { sharding, bucket_numel, ..DataParallelConfig::default() };
            let parallel = DataParallel::new(&[&layers], &Mesh::single(), &config).unwrap();
            let finish = |microbatches: usize, uses: &[usize]| {
                parallel.begin_step(microbatches);
                for (layer, &uses) in layers.0.iter().zip(uses).rev() {
                    for _ in 0..uses {
                        let write = |_: &mut Tensor, _| Ok(());
                        if let Err(error) = layer.weight().leaf().accumulate_with(write) {
                            return error.to_string();
                        }
                    }
                }
                let done = parallel.end_backward().and_then(|()| parallel.finish_step());
                done.map_or_else(|error| error.to_string(), |()| "no error".to_string())
            };
            let error = finish(1, &[1, 0, 1]);
            assert!(error.contains("does not depend on 1.weight"), "{config:?}: {error}");
            let error = finish(1, &[0, 0, 0]);
            assert!(error.contains("does not depend on"), "{config:?}: {error}");
            let error = finish(2, &[1, 1, 1]);
            assert!(
                error.contains("1 micro-batches where `begin_step` was told 2"),
                "{config:?}: {error}"
            );
            // More uses than `visit` met.
            let error = finish(1, &[1, 2, 1]);
            assert!(error.contains("'1.weight' got"), "{config:?}: {error}");
            assert_eq!(finish(1, &[1, 1, 1]), "no error", "{config:?}");
        }
    }
}

#[test]
fn a_gradient_outside_of_a_step_is_an_error() {
    let layers = Layers::new(&Device::cpu(1).unwrap(), 1, 2).unwrap();
    let parallel =
        DataParallel::new(&[&layers], &Mesh::single(), &DataParallelConfig::default()).unwrap();
    parallel.begin_step(1);
    fill_with_one(&layers).unwrap();
    parallel.finish_step().unwrap();
    layers.0[0].weight().leaf().zero_gradient();
    let error = fill_with_one(&layers).unwrap_err().to_string();
    assert!(error.contains("begin_step"), "{error}");
}

#[test]
fn combinations_that_make_no_sense_are_refused() {
    let layout = |tp, cp, pp| ParallelDims::new(8, tp, cp, pp).unwrap();
    let config = DataParallelConfig::default();
    for (config, layout, why) in [
        (
            DataParallelConfig { bucket_numel: Some(0), ..config },
            layout(1, 1, 1),
            "at least 1 element",
        ),
        (DataParallelConfig { synchronize_every: 0, ..config }, layout(1, 1, 1), "got 0"),
        (DataParallelConfig { synchronize_every: 2, ..config }, layout(1, 2, 1), "context axis 2"),
        (
            DataParallelConfig { synchronize_every: 8, sharding: Sharding::Optimizer, ..config },
            layout(1, 1, 1),
            "use stage 0",
        ),
    ] {
        let found = unsupported_reason(&config, &layout).expect(why);
        assert!(found.contains(why) && !found.contains('\n'), "{found}");
    }
    for (config, layout) in [
        (DataParallelConfig { sharding: Sharding::Weights, ..config }, layout(2, 2, 1)),
        (DataParallelConfig { sharding: Sharding::Optimizer, ..config }, layout(1, 1, 4)),
        (DataParallelConfig { synchronize_every: 8, ..config }, layout(2, 1, 2)),
    ] {
        assert_eq!(unsupported_reason(&config, &layout), None);
    }
    let layers = Layers::new(&Device::cpu(1).unwrap(), 1, 2).unwrap();
    let never = DataParallelConfig { synchronize_every: 0, ..config };
    assert!(DataParallel::new(&[&layers], &Mesh::single(), &never).is_err());
    assert!(DataParallel::new(&[], &Mesh::single(), &config).is_err());
    // Another parameter of the same name is not the same parameter.
    let others = Layers::new(&Device::cpu(1).unwrap(), 1, 2).unwrap();
    let error = DataParallel::new(&[&layers, &others], &Mesh::single(), &config).err().unwrap();
    assert!(error.to_string().contains("two parameters are named '0.weight'"), "{error}");
}

/// y = W2 (W1 x) + g (V x): whole numbers throughout, and no part of V where g is 0.
fn whole_numbers(layers: &Layers, microbatch: usize, gate: impl Fn(usize) -> f64) -> Result<Var> {
    let device = layers.0[0].weight().leaf().device();
    let x: Vec<f64> = (0..6).map(|i| ((i * 5 + microbatch * 3) % 7) as f64 - 3.0).collect();
    let x = Var::constant(Tensor::from_slice(device, &x, &[2, 3])?);
    let y = layers.0[1].forward(&layers.0[0].forward(&x)?)?;
    let v = layers.0[2].forward(&x)?.mul_scalar(gate(microbatch))?;
    y.add(&v)?.sum_all()
}

fn set_whole_weight(param: &Param) -> Result<()> {
    let layer: usize = param.name()[..1].parse().expect("layers are named by their number");
    let values: Vec<f64> = (0..9).map(|j| ((layer * 4 + j * 5) % 9) as f64 - 4.0).collect();
    param.leaf().set_value(&Tensor::from_slice(param.leaf().device(), &values, &[3, 3])?)
}

/// Whole numbers add up to the same bits in any order. On some ranks and micro-batches, the gradients of a
/// parameter are zero.
#[test]
fn whole_numbers_are_exact_and_some_ranks_have_zeros() -> Result<()> {
    for (data, microbatches) in [(2, 1), (3, 2), (4, 3)] {
        let gate = |microbatch: usize| f64::from(u8::from(microbatch.is_multiple_of(data)));
        let layers = Layers::new(&Device::cpu(1)?, 3, 3)?;
        layers.params().iter().try_for_each(set_whole_weight)?;
        let buffers = ParamAndGradBuffer::new(&layers.params())?;
        let mut optimizer = Optimizer::new(OptimizerConfig::SGD, &buffers)?;
        for microbatch in 0..data * microbatches {
            whole_numbers(&layers, microbatch, gate)?.backward_scaled(0.25)?;
        }
        let want_norm = buffers.sq_norm()?.sqrt();
        let step = StepConfig { lr: 0.5, grad_scale: 1.0 };
        optimizer.step(&buffers, &step)?;
        let values = |layers: &Layers| -> Result<Vec<Vec<f64>>> {
            layers.0.iter().map(|layer| layer.weight().leaf().value()?.to_vec()).collect()
        };
        let want = values(&layers)?;
        for sharding in Sharding::ALL {
            for bucket_numel in [None, Some(1), Some(10)] {
                let found = on_mesh(data, 1, |mesh| {
                    let layers = Layers::new(&Device::cpu(1)?, 3, 3)?;
                    let config = DataParallelConfig {
                        sharding,
                        bucket_numel,
                        ..DataParallelConfig::default()
                    };
                    layers.params().iter().try_for_each(set_whole_weight)?;
                    let parallel = DataParallel::new(&[&layers], &mesh, &config)?;
                    let mut optimizer = Optimizer::new(OptimizerConfig::SGD, parallel.buffers())?;
                    parallel.begin_step(microbatches);
                    for i in 0..microbatches {
                        whole_numbers(&layers, i * data + mesh.rank(), gate)?
                            .backward_scaled(0.25)?;
                        parallel.end_backward()?;
                    }
                    parallel.finish_step()?;
                    let norm = parallel.grad_norm()?;
                    parallel.update(&mut optimizer, &step)?;
                    Ok((norm, values(&layers)?))
                });
                for (rank, (norm, found)) in found.into_iter().enumerate() {
                    let at =
                        format!("dp {data}, {sharding:?}, buckets {bucket_numel:?}, rank {rank}");
                    assert_eq!(norm, want_norm, "{at}");
                    assert_eq!(found, want, "{at}");
                }
            }
        }
    }
    Ok(())
}

/// The moments of all ranks together are those of a rank that has all.
#[test]
fn moments_are_sharded_exactly() {
    let moments = |sharding: Sharding| {
        let config = DataParallelConfig {
            sharding,
            bucket_numel: Some(50),
            ..DataParallelConfig::default()
        };
        let plan = Plan { data: 3, config, max_norm: 0.0, ..Plan::default() };
        let found = ranks(&plan, |mut rank| {
            for step in 0..2 {
                rank.step(step)?;
            }
            let mut found = Vec::new();
            rank.optimizer.visit(|name, moment, _, value| {
                found.push(((name.to_string(), moment), value.to_vec::<f64>()?));
                Ok(())
            })?;
            Ok(found)
        });
        let ranks = if sharding == Sharding::None { 1 } else { 3 };
        let mut merged: BTreeMap<(String, &str), Vec<f64>> = BTreeMap::new();
        for (key, values) in found.into_iter().take(ranks).flatten() {
            merged.entry(key).or_default().extend(values);
        }
        merged
    };
    let want = moments(Sharding::None);
    for sharding in Sharding::ALL {
        assert_eq!(moments(sharding), want, "{sharding:?}");
    }
}
